"""A training that is killed in the middle and goes on from its last checkpoint, beside one that nobody disturbed.

    .venv/bin/python apps/mnist/resume.py                      # the last part of `make demo`

All processes of the run, scheduler and servers included, get SIGKILL once half of the iterations are in a checkpoint.
The same command with --resume goes on, on another number of servers. Both trainings should end with about the same
accuracy: not with the same bits, since dropout and who leases what are decided anew.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pictures import CHOICES, DataError, load, whole

from windlass._checkpoint.folder import Folder
from windlass._checkpoint.reader import newest
from windlass.testing.processes import kill_session

TRAIN = Path(__file__).resolve().parent / "train.py"
LOOK_SECONDS = 0.05
SAVES = 8  # of a training


class Failed(Exception):
    """A training came to nothing, or to something else."""


def started(options: list[str], what: list[str], output: "int | None") -> "subprocess.Popen[bytes]":
    """A run in a session of its own, so that all of it can be killed."""
    command = [sys.executable, "-m", "windlass", "run", *options, str(TRAIN), *what]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def finished(options: list[str], what: list[str], folder: Path) -> float:
    """Runs a training to its end; its accuracy."""
    history = folder / "history.json"
    with (folder / "output").open("w+b") as output:
        process = started(options, [*what, f"--history={history}"], output.fileno())
        try:
            code = process.wait()
        finally:
            kill_session(process.pid)
        if code != 0:
            output.seek(0)
            raise Failed(f"the training failed:\n{output.read().decode(errors='replace')}")
    return float(json.loads(history.read_text())["accuracy"])


def killed(options: list[str], what: list[str], saved: Path, clock: int) -> int:
    """Runs a training until a checkpoint has so many iterations, and kills it; the clock of the newest checkpoint."""
    with tempfile.TemporaryFile() as output:
        process = started(options, what, output.fileno())
        try:
            while (at := last_clock(saved)) < clock:
                if process.poll() is not None:
                    output.seek(0)
                    said = output.read().decode(errors="replace")
                    raise Failed(f"the training ended before it could be killed:\n{said}")
                time.sleep(LOOK_SECONDS)
        finally:
            kill_session(process.pid)
            process.wait()
    return max(at, last_clock(saved))


def last_clock(saved: Path) -> int:
    """Of the newest checkpoint; 0: there is none."""
    checkpoint = newest(Folder(saved), "default").checkpoint
    return 0 if checkpoint is None else checkpoint.manifest.clock


def main() -> None:
    args = arguments()
    pictures = load(args.data, args.samples)
    epochs = args.epochs or pictures.epochs
    iterations = epochs * len(pictures.train) // (args.batch * args.workers)  # of each worker, about
    every = max(1, iterations // SAVES)
    what = [f"--data={args.data}", f"--epochs={epochs}", f"--batch={args.batch}", f"--seed={args.seed}"]
    what += [] if args.samples is None else [f"--samples={args.samples}"]
    with tempfile.TemporaryDirectory(prefix="windlass-resume-") as name:
        folder = Path(name)
        saved = folder / "saved"
        workers = [f"--workers={args.workers}"]
        keeping = [*workers, f"--checkpoint-dir={saved}", f"--checkpoint-every={every}"]
        print(f"{pictures}\nundisturbed, {args.workers} workers ...", flush=True)
        expected = finished([*workers, "--servers=2"], what, folder)
        print(f"  test accuracy {expected:.4f}\nwith a checkpoint every {every} iterations ...", flush=True)
        at = killed([*keeping, "--servers=2"], what, saved, max(1, iterations // 2))
        print(f"  all processes killed; the last checkpoint is of iteration {at} of about {iterations}", flush=True)
        print("the same with --resume, on 1 server ...", flush=True)
        seen = finished([*keeping, "--servers=1", "--resume"], what, folder)
    print(f"  test accuracy {seen:.4f}")
    if abs(seen - expected) > args.tolerance:
        raise Failed(f"the accuracy differs from the undisturbed run's by more than {args.tolerance}")
    print(f"undisturbed {expected:.2%}, killed and resumed {seen:.2%}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training that is killed in the middle, and goes on.")
    parser.add_argument("--data", choices=list(CHOICES), default="mnist", help="as for train.py (%(default)s)")
    parser.add_argument("--samples", type=whole(1), metavar="N", help="train on the first N (all)")
    parser.add_argument("--epochs", type=whole(1), metavar="N", help="passes over the data (1 of MNIST, more of less)")
    parser.add_argument("--batch", type=whole(1), default=128, metavar="N", help="samples per step (%(default)s)")
    parser.add_argument("--workers", type=whole(1), default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, metavar="X", help="how far accuracies may differ (%(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (DataError, Failed) as error:
        sys.exit(f"resume.py: {error}")
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has gone; spare the interpreter its own flush
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
