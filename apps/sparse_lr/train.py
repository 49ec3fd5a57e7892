"""Sparse logistic regression with FTRL: a weight for each feature that has been seen, and many of them exactly zero.

    python apps/sparse_lr/train.py
    windlass run --servers 2 --workers 2 apps/sparse_lr/train.py

A sample is a list of keys, one for each feature that it has: any 64-bit numbers, here hashes of words and of pairs of
words. The table makes a row when it first sees a key, so nobody collects a vocabulary. The servers apply FTRL-proximal
(McMahan and others 2013), so its state never leaves them. Samples come once or a few times, in leases.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import add_outcome, positive, whole
from census import Rows, load_rows
from data import DataError
from outcome import Clock, Outcome, Report, progress
from scores import auc
from side_by_side import run

ROWS = 20_000  # predicted at a time


def probability(margin: NDArray[np.floating]) -> NDArray[np.floating]:
    """The logistic function, without overflow."""
    return (1 + np.tanh(margin / 2)) / 2


def train(cluster: wl.Cluster, data: Rows, args: argparse.Namespace, report: Report) -> wl.Table:
    """The weights, after this worker's part of all epochs."""
    rule = wl.FTRL(lr=args.lr, beta=1.0, l1=args.l1, l2=args.l2)
    table = cluster.table("weights", dim=1, rule=rule)  # a number per feature
    width = data.train.shape[1]
    lease = cluster.lease(len(data.train), batch_size=args.batch, epochs=args.epochs, seed=args.seed)
    for epoch in range(1, args.epochs + 1):
        losses = []
        for batch in lease:
            keys, places = wl.unique(data.train[batch].ravel())  # each feature of the batch once
            margin = table.pull(keys)[places, 0].reshape(-1, width).sum(axis=1)
            labels = data.train_labels[batch]
            losses.append(np.logaddexp(0, np.where(labels > 0, -margin, margin)).mean())  # before it is learned from
            error = probability(margin) - labels
            table.push(keys, np.bincount(places, np.repeat(error, width)).astype(np.float32))  # the sum over samples
            cluster.tick()
        if losses:
            loss = float(np.mean(losses))
            cluster.report(loss=loss)
            report(epoch, loss)
    cluster.settle()
    return table


def predict(table: wl.Table, keys: NDArray[np.int64]) -> NDArray[np.floating]:
    """The probability of each sample. Makes no rows for features that training has not seen."""
    found = []
    for begin in range(0, len(keys), ROWS):
        some = keys[begin : begin + ROWS]
        which, places = wl.unique(some.ravel())
        found.append(table.pull(which, create=False)[places, 0].reshape(some.shape).sum(axis=1))
    return probability(np.concatenate(found))


def reference(data: Rows, args: argparse.Namespace) -> float:
    """scikit-learn's LogisticRegression on the same features, with a column for each."""
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    known = np.unique(data.train)

    def columns(keys: NDArray[np.int64]) -> csr_matrix:
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        there = known[at] == keys
        starts = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
        return csr_matrix((np.ones(starts[-1]), at[there], starts), shape=(len(keys), len(known)))

    model = LogisticRegression(C=args.c, max_iter=args.iterations).fit(columns(data.train), data.train_labels)
    return auc(data.test_labels, model.decision_function(columns(data.test)))


def main() -> None:
    args = arguments()
    data = load_rows(fallback=args.fallback)
    with wl.connect(sync=args.sync) as cluster:
        speaks = cluster.rank == 0
        clock = Clock()
        with progress(args.epochs, "epoch", "loss", quiet=not speaks) as report:
            table = train(cluster, data, args, report)
        cluster.barrier()  # all have pushed what they will
        seconds = clock.seconds
        if not speaks:
            return
        found = auc(data.test_labels, predict(table, data.test))
        print(f"{table.nnz():,} of {len(table):,} weights are not zero")
    outcome = Outcome("sparse_lr", f"{data.name}, {len(data.train):,} samples", "AUC", found, seconds)
    if args.reference:
        outcome = outcome.beside(lambda: reference(data, args), "scikit-learn", least=1 - 0.0025)
    outcome.end(args.outcome)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sparse logistic regression with FTRL on the census.")
    parser.add_argument("--epochs", type=whole(1), default=3, metavar="N", help="passes over the data (%(default)s)")
    parser.add_argument("--batch", type=whole(1), default=250, metavar="N", help="samples per step (%(default)s)")
    parser.add_argument("--lr", type=positive, default=0.1, metavar="X", help="FTRL's alpha (%(default)s)")
    parser.add_argument("--l1", type=positive, default=0.5, metavar="X", help="what makes weights zero (%(default)s)")
    parser.add_argument("--l2", type=positive, default=1.0, metavar="X", help="(%(default)s)")
    parser.add_argument("--c", type=positive, default=0.1, metavar="X", help="the reference's C (%(default)s)")
    parser.add_argument("--iterations", type=whole(1), default=200, metavar="N", help="its most (%(default)s)")
    add_outcome(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main, DataError, wl.WindlassError)
