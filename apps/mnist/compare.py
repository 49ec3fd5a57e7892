"""The same training under each policy of consistency, beside plain torch and torch's DistributedDataParallel.

    .venv/bin/python apps/mnist/compare.py --plot losses.png --json figures.json

Each way trains the same samples. The accuracy is that of the test set; idle is the share of the time that a worker
waits for others at the servers' gates; staleness is how many iterations of the slowest worker a pull misses.
"""

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from pictures import CHOICES, DataError, load
from side_by_side import LOOK_SECONDS, can_plot, plot, run, run_all, table

from windlass._errors import WindlassError
from windlass._net.address import Address
from windlass.launch import rundir
from windlass.observe.status import fetch

HERE = Path(__file__).resolve().parent

WAYS = ["bsp", "ssp:3", "asp", "plain", "ddp"]
HEAD = ["way", "accuracy", "samples/s", "idle", "staleness"]


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
            run_all(
                [[*windlass, str(HERE / "train.py"), *what, f"--sync={way}"]],
                way,
                look=lambda pid: status.update(status_of(pid)),
            )
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


def status_of(pid: int) -> dict[str, Any]:
    """What the scheduler of the `windlass run` that has this process number says; nothing if it is not up, or gone."""
    try:
        folder = rundir.of(pid)
        address, token = ((folder / name).read_text().strip() for name in ("address", "token"))
        return dict(json.loads(fetch(Address.parse(address), token.encode(), timeout=LOOK_SECONDS)))
    except (OSError, WindlassError, ValueError):
        return {}


def cells(row: Row) -> list[str]:
    """Of the table."""
    return [
        row.way,
        f"{100 * row.accuracy:.2f} %",
        f"{row.samples_per_second:,.0f}",
        "" if row.idle is None else f"{100 * row.idle:.1f} %",
        "" if row.staleness is None else f"{row.staleness:.2f}",
    ]


def main() -> None:
    args = arguments()
    args.plot = can_plot(args.plot)
    pictures = load(args.data, args.samples)
    args.epochs = args.epochs or pictures.epochs
    epochs = "1 epoch" if args.epochs == 1 else f"{args.epochs} epochs"
    print(f"{pictures}; {epochs}, {args.workers} workers, {args.servers} servers, batch {args.batch}", flush=True)
    rows = []
    for way in args.ways:
        rows.append(row := train(args, way))
        print(f"{way}: accuracy {row.accuracy:.4f} in {row.seconds:.1f} s", flush=True)
    print(f"\n{table(HEAD, map(cells, rows))}\n")
    if args.json is not None:
        about = {"data": pictures.name, "samples": len(pictures.train), "epochs": args.epochs, "workers": args.workers}
        figures = [{k: v for k, v in dataclasses.asdict(row).items() if k != "losses"} for row in rows]
        args.json.write_text(json.dumps({**about, "batch": args.batch, "ways": figures}, indent=1) + "\n")
    if args.plot is not None:
        lines = {f"{row.way}: {100 * row.accuracy:.1f} %": row.losses for row in rows}
        plot(lines, f"{pictures.name}, {len(pictures.train):,} samples, {args.workers} workers", args.plot)
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
    run(main, DataError)
