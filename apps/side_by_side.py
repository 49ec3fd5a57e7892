"""Trainings beside each other: as processes, on their share of the cores, in a table and in a plot."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

LOOK_SECONDS = 0.5
SMOOTHED = 20  # losses that a point of the plot is the mean of, at most


def run_all(commands: list[list[str]], way: str, look: Callable[[int], None] | None = None) -> None:
    """Runs them at once, as ranks of one world if they are several, and ends them with us. `look` is called now and
    then with the number of the first process."""
    with tempfile.TemporaryFile() as output:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, command in enumerate(commands):
                world = {"RANK": str(rank), "WORLD_SIZE": str(len(commands)), "GLOO_SOCKET_IFNAME": "lo"}
                env = {**os.environ, **(world if len(commands) > 1 else {})}
                processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env))
            while any(process.poll() is None for process in processes):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    next(process for process in processes if process.poll() is None).wait(LOOK_SECONDS)
                if look is not None:
                    look(processes[0].pid)
                if any(process.poll() for process in processes):
                    break
        finally:
            for process in processes:
                end(process)
        if any(process.returncode for process in processes):
            output.seek(0)
            sys.exit(f"compare.py: the training under {way} has failed:\n{output.read().decode(errors='replace')}")


def end(process: "subprocess.Popen[bytes]") -> None:
    """Politely first."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    rows = list(body)
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = (head, ["-" * width for width in widths], *rows)
    return "\n".join(f"| {' | '.join(cell.ljust(widths[i]) for i, cell in enumerate(line))} |" for line in lines)


def can_plot(path: Path | None) -> Path | None:
    """The path again if a plot can be drawn; says so if not, before minutes are spent."""
    if path is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            print("compare.py: no plot without matplotlib: pip install 'windlass[plot]'", file=sys.stderr)
            return None
    return path


def plot(losses: Mapping[str, Sequence[tuple[float, float]]], title: str, path: Path, xlabel: str = "seconds") -> None:
    """A line for each of these, (x, loss) by (x, loss), as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, line in losses.items():
        parts = [line[max(0, i - SMOOTHED) : i] for i in range(1, len(line) + 1)]
        means = [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
        axes.plot(*zip(*means, strict=True), label=label)
    axes.set(title=title, xlabel=xlabel, ylabel=f"loss, mean of the last {SMOOTHED} steps", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def use_cores(workers: int) -> None:
    """This process's threads: as many as there are cores for each of the workers here, unless OMP_NUM_THREADS says."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def run(main: Callable[[], None], *refused: type[Exception]) -> None:
    """A program: `refused` errors are said in a line, Ctrl-C ends it, and so does a reader of its output who leaves."""
    try:
        main()
    except refused as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has gone; spare the interpreter its own flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
