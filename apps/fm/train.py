"""A factorisation machine: predicts ratings from everything that is known of who rates what, and from all pairs of it.

    python apps/fm/train.py
    windlass run --servers 2 --workers 2 apps/fm/train.py

Every feature (a user, a film, an age, a genre, ...) has a row in one table: a weight and some factors. A rating is the
mean, plus the weights of its features, plus the products of the factors of each pair of them (Rendle 2010), which takes
no more time than the features themselves. Features are keys of 64 bits, so a new one needs no change of anything.
`--reference` trains the same in plain torch.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import add_outcome, positive, whole
from data import DataError, Described, load_described
from outcome import Clock, Outcome, Report, progress
from side_by_side import run

Floats = NDArray[np.float32]
STD = 0.05  # of the first factors
ROWS = 10_000  # predicted at a time


def estimate(rows: Floats) -> tuple[Floats, Floats]:
    """How far ratings are from the mean, and the sum of each one's factors. rows: (ratings, fields, 1 + factors)."""
    factors = rows[:, :, 1:]
    whole_ = factors.sum(axis=1)
    pairs: Floats = (whole_**2 - (factors**2).sum(axis=1)).sum(axis=1) / 2
    return rows[:, :, 0].sum(axis=1) + pairs, whole_


def rows_of(table: wl.Table, keys: NDArray[np.int64], *, create: bool = True) -> Floats:
    """The rows of each rating's features; zeros where a field is empty."""
    distinct, places = wl.unique(keys.ravel())
    found = table.pull(distinct, create=create)[places].reshape(*keys.shape, -1)
    rows: Floats = found * (keys != 0)[:, :, None]
    return rows


def train(cluster: wl.Cluster, data: Described, args: argparse.Namespace, report: Report) -> float:
    """The root mean square error on ratings that were held out."""
    table = cluster.table("features", 1 + args.factors, rule=wl.Adagrad(lr=args.lr), init=wl.Normal(std=STD))
    keys, ratings = data.train
    mean = ratings.mean()
    lease = cluster.lease(len(ratings), batch_size=args.batch, epochs=args.epochs, seed=args.seed)
    for epoch in range(1, args.epochs + 1):
        errors = []
        for batch in lease:
            rows = rows_of(table, keys[batch])
            found, whole_ = estimate(rows)
            error = found + mean - ratings[batch]
            errors.append(error)
            gradient = args.decay * rows
            gradient[:, :, 0] += error[:, None]
            gradient[:, :, 1:] += error[:, None, None] * (whole_[:, None] - rows[:, :, 1:])
            there = keys[batch] != 0
            table.push(keys[batch][there], gradient[there])  # those of the same feature are summed
            cluster.tick()
        if errors:
            loss = rmse(np.concatenate(errors))
            cluster.report(rmse=loss)
            report(epoch, loss)
    cluster.barrier()  # all have pushed what they will
    keys, ratings = data.test
    parts = [slice(begin, begin + ROWS) for begin in range(0, len(keys), ROWS)]
    found = np.concatenate([estimate(rows_of(table, keys[part], create=False))[0] for part in parts])
    return rmse(found + mean - ratings)


def rmse(error: Floats) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(error.astype(np.float64) ** 2)))


def reference(data: Described, args: argparse.Namespace) -> float:
    """The same in plain torch: an Embedding, autograd and torch.optim.Adagrad."""
    import torch

    torch.manual_seed(args.seed)
    known = np.unique(np.concatenate([data.train[0].ravel(), data.test[0].ravel(), [0]]))  # 0 is the first
    table = torch.nn.Embedding(len(known), 1 + args.factors, padding_idx=0)
    torch.nn.init.normal_(table.weight, std=STD)
    with torch.no_grad():
        table.weight[0] = 0
    opt = torch.optim.Adagrad(table.parameters(), lr=args.lr)
    (keys, ratings), (test_keys, test_ratings) = (
        (torch.from_numpy(np.searchsorted(known, some)), torch.from_numpy(of)) for some, of in (data.train, data.test)
    )
    mean = ratings.mean()

    def predict(rows: torch.Tensor) -> torch.Tensor:
        factors = rows[:, :, 1:]
        pairs = (factors.sum(dim=1) ** 2 - (factors**2).sum(dim=1)).sum(dim=1) / 2
        return mean + rows[:, :, 0].sum(dim=1) + pairs

    for _ in range(args.epochs):
        for batch in torch.randperm(len(ratings)).split(args.batch):
            opt.zero_grad()
            rows = table(keys[batch])
            ((predict(rows) - ratings[batch]) ** 2).sum().add(args.decay * (rows**2).sum()).div(2).backward()
            opt.step()
    with torch.no_grad():
        return rmse((predict(table(test_keys)) - test_ratings).numpy())


def main() -> None:
    args = arguments()
    data = load_described(fallback=args.fallback)
    with wl.connect(sync=args.sync) as cluster:
        speaks = cluster.rank == 0
        clock = Clock()
        with progress(args.epochs, "epoch", "RMSE", quiet=not speaks) as report:
            found = train(cluster, data, args, report)
        seconds = clock.seconds
    if speaks:
        outcome = Outcome("fm", f"{data.name}, {data.train[0].shape[1]} fields", "RMSE", found, seconds)
        if args.reference:
            outcome = outcome.beside(lambda: reference(data, args), "plain torch", most=1.01)
        outcome.end(args.outcome)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A factorisation machine on MovieLens-100K.")
    parser.add_argument("--epochs", type=whole(1), default=20, metavar="N", help="passes over the data (%(default)s)")
    parser.add_argument("--batch", type=whole(1), default=1000, metavar="N", help="ratings per step (%(default)s)")
    parser.add_argument("--factors", type=whole(1), default=16, metavar="K", help="of a feature (%(default)s)")
    parser.add_argument("--lr", type=positive, default=0.05, metavar="X", help="of Adagrad (%(default)s)")
    parser.add_argument("--decay", type=positive, default=0.1, metavar="X", help="of rows (%(default)s)")
    add_outcome(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main, DataError, wl.WindlassError)
