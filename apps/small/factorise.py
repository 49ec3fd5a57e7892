"""Matrix factorisation: predicts ratings from one row of numbers per user and one per item.

    python apps/small/factorise.py
    windlass run --servers 2 --workers 2 apps/small/factorise.py

A row is a bias and some factors; a rating is the mean, plus both biases, plus the product of the factors. A step pulls
the rows of a batch of ratings and pushes their gradients: no worker ever has all users or all items. The ratings are
MovieLens-100K, from a package; if that cannot be had, pictures of digits "rate" pixels.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import whole
from data import DataError, Ratings, load_ratings

FACTORS = 16
BATCH = 1000
DECAY = 0.1  # of the factors: what keeps rare users and items near the mean


def open_rows(cluster: wl.Cluster) -> tuple[wl.Table, wl.Table]:
    """The rows of users and of items: a bias, then FACTORS numbers."""
    rule, init = wl.Adagrad(lr=0.1), wl.Normal(std=0.1)
    users, items = (cluster.table(name, 1 + FACTORS, rule=rule, init=init) for name in ("user", "item"))
    return users, items


def estimate(user: NDArray[np.float32], item: NDArray[np.float32]) -> NDArray[np.float32]:
    """How far ratings are from the mean, from the rows of their users and items."""
    product: NDArray[np.float32] = np.einsum("ij,ij->i", user[:, 1:], item[:, 1:])
    return user[:, 0] + item[:, 0] + product


def gradient(error: NDArray[np.float32], row: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of half the squared error, and of the decay."""
    of_row: NDArray[np.float32] = error[:, None] * np.column_stack([np.ones_like(error), other[:, 1:]])
    return of_row + DECAY * row


def train(cluster: wl.Cluster, data: Ratings, epochs: int) -> float:
    """Returns the root mean square error on ratings that were held out."""
    users, items = open_rows(cluster)
    mean = data.train[2].mean()
    lease = cluster.lease(len(data.train[2]), batch_size=BATCH, epochs=epochs)
    for _ in range(epochs):
        for batch in lease:
            user, item, rating = (column[batch] for column in data.train)
            p, q = users.pull(user), items.pull(item)
            error = estimate(p, q) + mean - rating
            with cluster.step() as step:  # both pushes in one request per server; closes the iteration
                step.push(users, user, gradient(error, p, q))
                step.push(items, item, gradient(error, q, p))
    cluster.barrier()
    user, item, rating = data.test
    found = estimate(users.pull(user, create=False), items.pull(item, create=False)) + mean
    return float(np.sqrt(np.mean((found - rating) ** 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Matrix factorisation.")
    parser.add_argument("--epochs", type=whole(1), default=20, metavar="N", help="passes over the data (%(default)s)")
    args = parser.parse_args()
    data = load_ratings()
    with wl.connect() as cluster:
        error = train(cluster, data, args.epochs)
        if cluster.rank == 0:
            print(f"{data.name}: root mean square error {error:.4f}, on ratings of {data.test[2].std():.4f} around")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"factorise.py: {error}")
