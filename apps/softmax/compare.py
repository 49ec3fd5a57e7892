"""The same training under each policy of consistency, with workers that are uneven on purpose: loss over time.

    .venv/bin/python apps/softmax/compare.py --plot losses.png

Every step of a worker takes 5 ms, one in eight four times as long. Each policy does the same epochs; what differs is
who waits for whom, and so how long they take.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).with_name("train.py")
POLICIES = ["bsp", "bsp:1", "ssp:4", "maxdelay:0.01", "asp"]


def train(args: argparse.Namespace, policy: str) -> dict[str, Any]:
    """A run of train.py with several workers: its accuracy, its seconds, and (seconds, loss) by epoch."""
    with tempfile.TemporaryDirectory() as folder:
        history = Path(folder) / "history.json"
        command = [sys.executable, "-m", "windlass", "run", f"--servers={args.servers}", f"--workers={args.workers}"]
        what = [f"--data={args.data}", f"--epochs={args.epochs}", f"--seed={args.seed}", f"--uneven={args.uneven}"]
        done = subprocess.run(
            [*command, f"--sync={policy}", str(TRAIN), *what, f"--history={history}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            sys.exit(f"compare.py: the training under {policy} has failed:\n{done.stdout}")
        return dict(json.loads(history.read_text()))


def plot(runs: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Losses over time, a line per policy, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for policy, run in runs.items():
        seconds, losses = zip(*run["losses"], strict=True)
        axes.plot(seconds, losses, label=f"{policy}: accuracy {run['accuracy']:.3f}")
    axes.set(title=title, xlabel="seconds", ylabel="loss", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    args = arguments()
    if args.plot is not None:
        try:
            import matplotlib  # noqa: F401 (before minutes are spent)
        except ImportError:
            sys.exit("compare.py: --plot needs matplotlib: pip install 'windlass[plot]'")
    runs = {}
    for policy in args.policies:
        run = runs[policy] = train(args, policy)
        loss = run["losses"][-1][1]
        print(f"{policy:14} accuracy {run['accuracy']:.4f}  loss {loss:.4f}  {run['seconds']:6.2f} s", flush=True)
    accuracies = [run["accuracy"] for run in runs.values()]
    print(f"accuracies differ by {100 * (max(accuracies) - min(accuracies)):.2f} points")
    if args.plot is not None:
        plot(runs, f"{args.data}, {args.workers} uneven workers", args.plot)
        print(f"written: {args.plot}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The same training under each policy of consistency.")
    parser.add_argument("--data", choices=["mnist", "digits", "classification"], default="digits", help="(%(default)s)")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="P", help=f"({' '.join(POLICIES)})")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="(%(default)s)")
    parser.add_argument("--servers", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=40, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--uneven", type=float, default=0.005, metavar="S", help="seconds of a usual step (%(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the losses over time into this file")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
