"""The training with tables on servers beside the same with plain torch: do they rank alike, and how fast are they?

    .venv/bin/python apps/dlrm/compare.py --data census --plot losses.png

Every way trains from the same rows and the same weights on the same batches in the same order, once for each seed; so
what they differ by is rounding, not luck. AUC is that of the test set. The ways are

    plain      torch: an nn.EmbeddingBag(sparse=True) for each feature, torch.optim.Adagrad
    servers    EmbeddingBags and ServerOptimizer, the server inside the process
    hybrid     tables on servers, the network in DistributedDataParallel; the workers share each batch
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from clicks import CHOICES, DataError, positive, whole
from side_by_side import can_plot, plot, run, run_all, table

HERE = Path(__file__).resolve().parent
WAYS = ["plain", "servers", "hybrid"]
HEAD = ["way", "AUC", "to plain, mean", "to plain, most", "samples/s", "to plain"]


class Setting(NamedTuple):
    """What suits a data set, unless told otherwise."""

    epochs: int
    batch: int
    seeds: int


SETTINGS = {"census": Setting(2, 512, 5), "movielens": Setting(3, 512, 5), "zipf": Setting(1, 8192, 1)}


def train(args: argparse.Namespace, way: str, seed: int) -> dict[str, Any]:
    """One way with one seed, as processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        history = Path(folder) / "history.json"
        names = ("data", "epochs", "batch", "dim", "lr", "samples", "rows")
        what = [f"--{name}={value}" for name in names if (value := getattr(args, name)) is not None]
        what += [f"--seed={seed}", f"--history={history}"]
        if way == "plain":
            command = [sys.executable, str(HERE / "baseline.py"), *what]
        elif way == "servers":
            command = [sys.executable, str(HERE / "train.py"), *what]
        else:
            windlass = [sys.executable, "-m", "windlass", "run"]
            windlass += [f"--servers={args.servers}", f"--workers={args.workers}"]
            command = [*windlass, str(HERE / "train.py"), *what, "--hybrid"]
        run_all([command], way)
        return dict(json.loads(history.read_text()))


def row(way: str, runs: list[dict[str, Any]], plain: list[dict[str, Any]] | None) -> list[str]:
    """Of the table: means over the seeds, and how far single seeds are from plain torch."""
    auc = statistics.fmean(run["auc"] for run in runs)
    rate = rate_of(runs)
    if plain is None:
        return [way, f"{auc:.4f}", "", "", f"{rate:,.0f}", ""]
    apart = apart_of(runs, plain)
    most = max(apart, key=abs)
    return [
        way,
        f"{auc:.4f}",
        f"{statistics.fmean(apart):+.5f}",
        f"{most:+.5f}",
        f"{rate:,.0f}",
        f"{rate / rate_of(plain):.2f}",
    ]


def apart_of(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[float]:
    """How far each seed's AUC is from plain torch's with that seed."""
    return [one["auc"] - other["auc"] for one, other in zip(runs, plain, strict=True)]


def rate_of(runs: list[dict[str, Any]]) -> float:
    """Samples per second: the median over the seeds."""
    return statistics.median(float(run["samples"] / run["seconds"]) for run in runs)


def main() -> None:
    args = arguments()
    args.plot = can_plot(args.plot)
    setting = SETTINGS[args.data]._asdict()
    for name, value in setting.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    epochs = "1 epoch" if args.epochs == 1 else f"{args.epochs} epochs"
    print(
        f"{args.data}: {epochs}, batch {args.batch:,}, dim {args.dim}, lr {args.lr:g}, {args.seeds} seeds", flush=True
    )
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    for seed in range(args.seeds):
        for way in args.ways:  # in turns, so that all see the same of the machine
            runs[way].append(run := train(args, way, seed))
            rate = run["samples"] / run["seconds"]
            print(f"seed {seed}, {way}: AUC {run['auc']:.5f}, {rate:,.0f} samples/s", flush=True)
    plain = runs.get("plain")
    body = [row(way, found, None if way == "plain" else plain) for way, found in runs.items()]
    print(f"\n{table(HEAD, body)}\n")
    if args.json is not None:
        about = {name: getattr(args, name) for name in ("data", "epochs", "batch", "dim", "lr", "workers", "servers")}
        kept = {way: [{k: v for k, v in run.items() if k != "losses"} for run in found] for way, found in runs.items()}
        args.json.write_text(json.dumps({**about, "ways": kept}, indent=1) + "\n")
    if args.plot is not None:
        lines = {f"{way}: AUC {found[0]['auc']:.4f}": found[0]["losses"] for way, found in runs.items()}
        plot(lines, f"{args.data}, seed 0", args.plot)
        print(f"loss over time: {args.plot}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DLRM with tables on servers, beside plain torch.")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)} (all)"
    )
    parser.add_argument("--data", choices=list(CHOICES), default="census", help="(%(default)s)")
    parser.add_argument("--seeds", type=whole(1), metavar="N", help="trainings of each way (5; 1 of zipf)")
    parser.add_argument("--workers", type=whole(1), default=2, metavar="N", help="of hybrid (%(default)s)")
    parser.add_argument("--servers", type=whole(1), default=2, metavar="N", help="of hybrid (%(default)s)")
    parser.add_argument("--epochs", type=whole(1), metavar="N", help="passes over the data (2, 3 of films, 1 of zipf)")
    parser.add_argument(
        "--batch", type=whole(1), metavar="N", help="samples per step, of all workers (512; 8192 of zipf)"
    )
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="of a row (%(default)s)")
    parser.add_argument("--lr", type=positive, default=0.02, metavar="X", help="learning rate (%(default)s)")
    parser.add_argument("--samples", type=whole(1), metavar="N", help="train on the first N (all); of zipf, draw N")
    parser.add_argument("--rows", type=whole(26), metavar="N", help="of zipf: of all features together")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the losses of the first seed into this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures into this file")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the trainings end with us
    run(main, DataError)
