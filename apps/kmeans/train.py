"""k-means (Lloyd's algorithm): each worker assigns its samples, and what all have found is added up.

    python apps/kmeans/train.py
    windlass run --servers 2 --workers 2 apps/kmeans/train.py

An iteration needs, for each centre, the sum of its samples and their number, over all workers: an all-reduce, so that
all have the same bits and stop at the same iteration. `--reference` has scikit-learn begin with the same centres.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import add_outcome, whole
from data import DataError, load_digits
from outcome import Clock, Outcome, Report, progress
from side_by_side import run

Floats = NDArray[np.float32]
ROWS = 4096  # samples whose distances are in memory at a time


def nearest(x: Floats, centres: Floats) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Each sample's nearest centre, and its squared distance from it."""
    chosen, distances = np.empty(len(x), np.int64), np.empty(len(x))
    for begin in range(0, len(x), ROWS):
        some, exact = x[begin : begin + ROWS].astype(np.float64), centres.astype(np.float64)
        square = (exact**2).sum(axis=1) - 2 * some @ exact.T  # and the sample's own, which all centres share
        chosen[begin : begin + ROWS] = which = square.argmin(axis=1)
        distances[begin : begin + ROWS] = square[np.arange(len(some)), which] + (some**2).sum(axis=1)
    return chosen, distances


def cluster_samples(
    cluster: wl.Cluster, mine: Floats, centres: Floats, iterations: int, report: Report
) -> tuple[Floats, float]:
    """The centres after at most so many iterations from these, and the inertia: the sum of squared distances.

    mine: the samples of this worker.
    """
    k, features = centres.shape
    inertia = np.inf
    for iteration in range(1, iterations + 1):
        chosen, distances = nearest(mine, centres)
        part = np.zeros((k, features + 2))  # sums of samples, their number, and of their distances
        np.add.at(part, chosen, np.column_stack([mine, np.ones(len(mine)), distances]))
        total = cluster.all_reduce(part)
        before, inertia = inertia, float(total[:, -1].sum())
        cluster.report(inertia=inertia)
        report(iteration, inertia)
        if inertia == before:
            break  # all workers have the same bits, so all stop here
        counts = total[:, -2:-1]
        centres = np.where(counts > 0, total[:, :-2] / np.maximum(counts, 1), centres).astype(np.float32)
    return centres, inertia


def reference(x: Floats, centres: Floats, iterations: int) -> float:
    """scikit-learn's inertia."""
    from sklearn.cluster import KMeans

    found = KMeans(len(centres), init=centres, n_init=1, max_iter=iterations, tol=0).fit(x)
    return float(found.inertia_)


def main() -> None:
    args = arguments()
    data = load_digits(fallback=args.fallback)
    x = data.x_train
    if args.clusters > len(x):
        raise DataError(f"{args.clusters} centres of {len(x)} samples: expected fewer")
    first = x[np.random.default_rng(args.seed).choice(len(x), args.clusters, replace=False)]  # the same for all workers
    with wl.connect(sync=args.sync) as cluster:
        speaks = cluster.rank == 0
        mine = x[cluster.rank :: cluster.world_size]
        clock = Clock()
        with progress(args.iterations, "iteration", "inertia", quiet=not speaks) as report:
            _, inertia = cluster_samples(cluster, mine, first, args.iterations, report)
        seconds = clock.seconds
    if speaks:
        outcome = Outcome("kmeans", data.name, "inertia", inertia, seconds)
        if args.reference:
            outcome = outcome.beside(lambda: reference(x, first, args.iterations), "scikit-learn", most=1.0001)
        outcome.end(args.outcome)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="k-means on handwritten digits.")
    parser.add_argument("--clusters", type=whole(1), default=10, metavar="K", help="(%(default)s)")
    parser.add_argument("--iterations", type=whole(1), default=300, metavar="N", help="at most (%(default)s)")
    add_outcome(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main, DataError, wl.WindlassError)
