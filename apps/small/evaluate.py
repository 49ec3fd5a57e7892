"""Evaluates the model of sparse_logistic.py while it is trained, from a process of its own.

    windlass run --servers 2 --workers 2 apps/small/sparse_logistic.py --epochs 1000 &
    python apps/small/evaluate.py --times 5

A reader is no worker: it has no rank and no clock, it waits for nobody, and nobody waits for it. It sees the weights as
they are, changes nothing, and may come and go. It opens the table by its name alone.
"""

import argparse
import sys
import time
from pathlib import Path

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import positive, whole
from data import load_digits
from sparse_logistic import predict

MADE_SECONDS = 60.0  # for the training to make its table


def trained(cluster: wl.Cluster) -> wl.Table:
    """The model, as soon as the training has made it."""
    deadline = time.monotonic() + MADE_SECONDS
    while True:
        try:
            return cluster.table("odd")
        except wl.NotFound:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluates the model of sparse_logistic.py while it is trained.")
    parser.add_argument("--run", default="sparse_logistic", metavar="NAME", help="as it says itself (%(default)s)")
    parser.add_argument("--times", type=whole(1), default=1, metavar="N", help="evaluations (%(default)s)")
    parser.add_argument("--every", type=positive, default=1.0, metavar="S", help="seconds between them (%(default)s)")
    args = parser.parse_args()
    data = load_digits(fallback=True)
    odd = data.y_test % 2 == 1
    with wl.connect(run=args.run, reader=True) as cluster:  # this user's, on this machine; the token comes with it
        table = trained(cluster)
        for time_left in reversed(range(args.times)):
            right = (predict(table, data.x_test) > 0.5) == odd
            print(f"{right.mean():.1%} right, with {len(table)} features", flush=True)
            if time_left:
                time.sleep(args.every)


if __name__ == "__main__":
    main()
