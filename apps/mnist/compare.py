"""The same training under each policy of consistency, beside plain torch and torch's DistributedDataParallel.

    .venv/bin/python apps/mnist/compare.py --plot losses.png --json figures.json

Each way trains the same samples. The accuracy is that of the test set; idle is the share of the time that a worker
waits for others at the servers' gates; staleness is how many iterations of the slowest worker a pull misses.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pictures import CHOICES, DataError, load

from windlass._errors import WindlassError
from windlass._net.address import Address
from windlass.launch import rundir
from windlass.observe.status import fetch

HERE = Path(__file__).resolve().parent
WAYS = ["bsp", "ssp:3", "asp", "plain", "ddp"]
LOOK_SECONDS = 0.5
SMOOTHED = 20  # losses that a point of the plot is the mean of, at most


@dataclasses.dataclass
class Row:
    """How one way came out."""

    way: str
    accuracy: float
    samples_per_second: float
    idle: float | None  #: None: nobody counts it
    staleness: float | None
    seconds: float
    losses: list[tuple[float, float]]  #: seconds since the first step, and the loss there


def train(args: argparse.Namespace, way: str) -> Row:
    """One way, as processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        history = Path(folder) / "history.json"
        what = [f"--data={args.data}", f"--epochs={args.epochs}", f"--batch={args.batch}", f"--seed={args.seed}"]
        what += [f"--history={history}"] + ([] if args.samples is None else [f"--samples={args.samples}"])
        status: dict[str, Any] = {}
        if way in ("plain", "ddp"):
            run = [sys.executable, str(HERE / "baseline.py"), *what, f"--workers={args.workers}"]
            run_all([run] if way == "plain" else [[*run, f"--store={folder}/store"]] * args.workers, way)
        else:
            windlass = [sys.executable, "-m", "windlass", "run"]
            windlass += [f"--servers={args.servers}", f"--workers={args.workers}"]
            run_all([[*windlass, str(HERE / "train.py"), *what, f"--sync={way}"]], way, look=status.update)
        seen = json.loads(history.read_text())
    waited = idle_of(status, seen["seconds"])
    rate = args.epochs * seen["samples"] / seen["seconds"]
    return Row(way, seen["accuracy"], rate, *waited, seen["seconds"], seen["losses"])


def idle_of(status: dict[str, Any], seconds: float) -> tuple[float | None, float | None]:
    """The idle share as workers counted it, and the mean staleness as servers did. What a pull waits is what a step
    does."""
    sync = next((app["sync"] for app in status.get("apps", []) if app["sync"]), None)
    if sync is None or not sync["pulls"]:
        return None, None
    members = [x["clock"] for x in status["members"] if x["role"] == "worker"]
    clocks = [*members, *(x["clock"] for app in status["apps"] for x in app["left"])]
    idle = sync["waited_seconds"] / sync["pulls"] * sum(clocks) / len(clocks) / seconds
    return min(1.0, idle), sync["staleness_mean"]


def run_all(commands: list[list[str]], way: str, look: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Runs them at once, as ranks of one world if they are several, and ends them with us."""
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
                    with contextlib.suppress(OSError, WindlassError, ValueError):  # it is not up yet, or gone
                        look(status_of(processes[0].pid))
                if any(process.poll() for process in processes):
                    break
        finally:
            for process in processes:
                end(process)
        if any(process.returncode for process in processes):
            output.seek(0)
            sys.exit(f"compare.py: the training under {way} has failed:\n{output.read().decode(errors='replace')}")


def status_of(pid: int) -> dict[str, Any]:
    """What the scheduler of the `windlass run` that has this process number says."""
    folder = rundir.of(pid)
    address, token = ((folder / name).read_text().strip() for name in ("address", "token"))
    return dict(json.loads(fetch(Address.parse(address), token.encode(), timeout=LOOK_SECONDS)))


def end(process: "subprocess.Popen[bytes]") -> None:
    """Politely first."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def table(rows: list[Row]) -> str:
    """In Markdown."""
    head = ["way", "accuracy", "samples/s", "idle", "staleness"]
    body = [
        [
            row.way,
            f"{100 * row.accuracy:.2f} %",
            f"{row.samples_per_second:,.0f}",
            "" if row.idle is None else f"{100 * row.idle:.1f} %",
            "" if row.staleness is None else f"{row.staleness:.2f}",
        ]
        for row in rows
    ]
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    lines = (head, ["-" * width for width in widths], *body)
    return "\n".join(f"| {' | '.join(cell.ljust(widths[i]) for i, cell in enumerate(line))} |" for line in lines)


def plot(rows: list[Row], title: str, path: Path) -> None:
    """Losses over time, a line per way, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for row in rows:
        parts = [row.losses[max(0, i - SMOOTHED) : i] for i in range(1, len(row.losses) + 1)]
        means = [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
        seconds, losses = zip(*means, strict=True)
        axes.plot(seconds, losses, label=f"{row.way}: {100 * row.accuracy:.1f} %")
    axes.set(title=title, xlabel="seconds", ylabel=f"loss, mean of the last {SMOOTHED} steps", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    args = arguments()
    if args.plot is not None:
        try:
            import matplotlib  # noqa: F401 (before minutes are spent)
        except ImportError:
            print("compare.py: no plot without matplotlib: pip install 'windlass[plot]'", file=sys.stderr)
            args.plot = None
    pictures = load(args.data, args.samples)
    args.epochs = args.epochs or pictures.epochs
    epochs = "1 epoch" if args.epochs == 1 else f"{args.epochs} epochs"
    print(f"{pictures}; {epochs}, {args.workers} workers, {args.servers} servers, batch {args.batch}", flush=True)
    rows = []
    for way in args.ways:
        rows.append(row := train(args, way))
        print(f"{way}: accuracy {row.accuracy:.4f} in {row.seconds:.1f} s", flush=True)
    print(f"\n{table(rows)}\n")
    if args.json is not None:
        about = {"data": pictures.name, "samples": len(pictures.train), "epochs": args.epochs, "workers": args.workers}
        figures = [{k: v for k, v in dataclasses.asdict(row).items() if k != "losses"} for row in rows]
        args.json.write_text(json.dumps({**about, "batch": args.batch, "ways": figures}, indent=1) + "\n")
    if args.plot is not None:
        plot(rows, f"{pictures.name}, {len(pictures.train):,} samples, {args.workers} workers", args.plot)
        print(f"loss over time: {args.plot}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The MNIST training under each policy, beside plain torch and DDP.")
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, metavar="WAY", help=f"policies, plain, ddp ({' '.join(WAYS)})"
    )
    parser.add_argument("--data", choices=list(CHOICES), default="mnist", help="(%(default)s)")
    parser.add_argument("--samples", type=int, metavar="N", help="train on the first N (all)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--servers", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the data (1 of MNIST, more of less)")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="of each worker (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the losses over time into this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures into this file")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the trainings end with us
    try:
        main()
    except DataError as error:
        sys.exit(f"compare.py: {error}")
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has gone; spare the interpreter its own flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
