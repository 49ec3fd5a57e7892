"""Matrix factorisation: predicts ratings from one row of numbers per user and one per item.

    python apps/mf/train.py
    windlass run --servers 2 --workers 2 apps/mf/train.py

A row is a bias and some factors; a rating is the mean, plus both biases, plus the product of the factors. A step pulls
the rows of a batch of ratings and pushes their gradients: no worker ever has all users or all items. `--reference`
trains the same in plain numpy, on arrays, and compares.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import add_outcome, positive, whole
from data import DataError, Ratings, load_ratings
from outcome import Clock, Outcome, Report, progress
from side_by_side import run

Floats = NDArray[np.float32]


def estimate(user: Floats, item: Floats) -> Floats:
    """How far ratings are from the mean, from the rows of their users and items."""
    product: Floats = np.einsum("ij,ij->i", user[:, 1:], item[:, 1:])
    return user[:, 0] + item[:, 0] + product


def gradient(error: Floats, row: Floats, other: Floats, decay: float) -> Floats:
    """Of half the squared error, and of the decay."""
    of_row: Floats = error[:, None] * np.column_stack([np.ones_like(error), other[:, 1:]])
    return of_row + decay * row


def rmse(error: Floats) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(error.astype(np.float64) ** 2)))


def open_rows(cluster: wl.Cluster, args: argparse.Namespace) -> tuple[wl.Table, wl.Table]:
    """The rows of users and of items: a bias, then factors."""
    rule, init = wl.Adagrad(lr=args.lr), wl.Normal(std=0.1)
    users, items = (cluster.table(name, 1 + args.factors, rule=rule, init=init) for name in ("user", "item"))
    return users, items


def train(cluster: wl.Cluster, data: Ratings, args: argparse.Namespace, report: Report) -> float:
    """The root mean square error on ratings that were held out."""
    users, items = open_rows(cluster, args)
    mean = data.train[2].mean()
    lease = cluster.lease(len(data.train[2]), batch_size=args.batch, epochs=args.epochs, seed=args.seed)
    for epoch in range(1, args.epochs + 1):
        errors = []
        for batch in lease:
            user, item, rating = (column[batch] for column in data.train)
            p, q = users.pull(user), items.pull(item)
            error = estimate(p, q) + mean - rating
            errors.append(error)
            with cluster.step() as step:  # both pushes in one request per server; closes the iteration
                step.push(users, user, gradient(error, p, q, args.decay))
                step.push(items, item, gradient(error, q, p, args.decay))
        if errors:
            loss = rmse(np.concatenate(errors))
            cluster.report(rmse=loss)
            report(epoch, loss)
    cluster.barrier()  # all have pushed what they will
    user, item, rating = data.test
    return rmse(estimate(users.pull(user, create=False), items.pull(item, create=False)) + mean - rating)


# -- the reference ---------------------------------------------------------------------------------------------------


class Rows:
    """What a table with Adagrad is, as arrays."""

    def __init__(self, ids: NDArray[np.int64], args: argparse.Namespace, seed: int) -> None:
        shape = (int(ids.max()) + 1, 1 + args.factors)
        self.rows = np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32)
        self._sums = np.zeros(shape, np.float32)
        self._lr = args.lr

    def update(self, ids: NDArray[np.int64], gradients: Floats) -> None:
        """Gradients of the same row are summed, then applied."""
        which, places = np.unique(ids, return_inverse=True)
        sums = np.zeros((len(which), gradients.shape[1]), np.float32)
        np.add.at(sums, places, gradients)
        self._sums[which] += sums**2
        self.rows[which] -= self._lr * sums / (np.sqrt(self._sums[which]) + 1e-10)


def batches(samples: int, args: argparse.Namespace) -> Iterator[NDArray[np.int64]]:
    """In another order in each epoch."""
    rng = np.random.default_rng(args.seed)
    for _ in range(args.epochs):
        order = rng.permutation(samples)
        yield from (order[i : i + args.batch] for i in range(0, samples, args.batch))


def reference(data: Ratings, args: argparse.Namespace) -> float:
    """The same in plain numpy."""
    users, items = (Rows(np.concatenate([data.train[i], data.test[i]]), args, i) for i in (0, 1))
    mean = data.train[2].mean()
    for batch in batches(len(data.train[2]), args):
        user, item, rating = data.train[0][batch], data.train[1][batch], data.train[2][batch]
        p, q = users.rows[user], items.rows[item]
        error = estimate(p, q) + mean - rating
        users.update(user, gradient(error, p, q, args.decay))
        items.update(item, gradient(error, q, p, args.decay))
    user, item, rating = data.test
    return rmse(estimate(users.rows[user], items.rows[item]) + mean - rating)


def main() -> None:
    args = arguments()
    data = load_ratings(fallback=args.fallback)
    with wl.connect(sync=args.sync) as cluster:
        first = cluster.rank == 0
        clock = Clock()
        with progress(args.epochs, "epoch", "RMSE", quiet=not first) as report:
            found = train(cluster, data, args, report)
        seconds = clock.seconds
    if not first:
        return
    outcome = Outcome("mf", data.name, "RMSE", found, seconds)
    if args.reference:
        outcome = outcome.beside(lambda: reference(data, args), "plain numpy", most=1.003)
    outcome.end(args.outcome)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Matrix factorisation on MovieLens-100K.")
    parser.add_argument("--epochs", type=whole(1), default=20, metavar="N", help="passes over the data (%(default)s)")
    parser.add_argument("--batch", type=whole(1), default=1000, metavar="N", help="ratings per step (%(default)s)")
    parser.add_argument("--factors", type=whole(1), default=16, metavar="K", help="of a row (%(default)s)")
    parser.add_argument("--lr", type=positive, default=0.1, metavar="X", help="of Adagrad (%(default)s)")
    parser.add_argument("--decay", type=positive, default=0.1, metavar="X", help="of rows (%(default)s)")
    add_outcome(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main, DataError, wl.WindlassError)
