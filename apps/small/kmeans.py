"""k-means (Lloyd's algorithm): each worker assigns its samples, and what all have found is added up.

    python apps/small/kmeans.py
    windlass run --servers 2 --workers 2 apps/small/kmeans.py

An iteration needs, for each centre, the sum of its samples and their number, over all workers: an all-reduce.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import whole
from data import load_digits


def nearest(x: NDArray[np.float32], centres: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Each sample's nearest centre, and its squared distance from it."""
    distances = ((x[:, None] - centres) ** 2).sum(axis=2)
    chosen = distances.argmin(axis=1)
    return chosen, distances[np.arange(len(x)), chosen]


def cluster_samples(
    cluster: wl.Cluster, x: NDArray[np.float32], centres: NDArray[np.float32], iterations: int
) -> tuple[NDArray[np.float32], float]:
    """The centres after at most so many iterations from these, and the inertia: the sum of squared distances.

    All workers have the same samples at hand, and each works on its share of them.
    """
    mine = x[cluster.rank :: cluster.world_size]
    k, features = centres.shape
    inertia = np.inf
    for _ in range(iterations):
        chosen, distances = nearest(mine, centres)
        part = np.zeros((k, features + 2))  # sums of samples, their number, and of their distances
        np.add.at(part, chosen, np.column_stack([mine, np.ones(len(mine)), distances]))
        total = cluster.all_reduce(part)
        before, inertia = inertia, float(total[:, -1].sum())
        if inertia == before:
            break  # all workers have the same bits, so all stop here
        counts = total[:, -2:-1]
        centres = np.where(counts > 0, total[:, :-2] / np.maximum(counts, 1), centres).astype(np.float32)
    return centres, inertia


def main() -> None:
    parser = argparse.ArgumentParser(description="k-means on scikit-learn's digits.")
    parser.add_argument("--clusters", type=whole(1), default=10, metavar="K", help="(%(default)s)")
    parser.add_argument("--iterations", type=whole(1), default=100, metavar="N", help="at most (%(default)s)")
    args = parser.parse_args()
    x = load_digits(fallback=True).x_train
    first = x[np.random.default_rng(0).choice(len(x), args.clusters, replace=False)]  # the same for all workers
    with wl.connect() as cluster:
        _, inertia = cluster_samples(cluster, x, first, args.iterations)
        if cluster.rank == 0:
            print(f"{len(x)} samples around {args.clusters} centres: inertia {inertia:.2f}")


if __name__ == "__main__":
    main()
