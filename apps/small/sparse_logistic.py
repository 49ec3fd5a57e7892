"""Sparse logistic regression with FTRL: a weight for each feature that has been seen, and most of them zero.

    python apps/small/sparse_logistic.py
    windlass run --servers 2 --workers 2 apps/small/sparse_logistic.py

A sample is a list of keys, one for each feature that it has. A key is any 64-bit number, such as a hash of "city=Oslo":
the table makes a row when it first sees a key, so nobody collects a vocabulary. Here a feature is "this pixel has this
brightness", of scikit-learn's digits, and the label says whether the digit is odd.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import whole
from data import Samples, load_digits

BATCH = 32


def features(pixels: NDArray[np.float32]) -> NDArray[np.int64]:
    """The keys of samples, (samples, 64): a pixel's number, and its brightness of 0 to 16."""
    return np.arange(pixels.shape[1]) * 17 + (pixels * 16).astype(np.int64)


def probability(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """That samples are odd, from the weights of their features, (samples, features)."""
    found: NDArray[np.float32] = (1 + np.tanh(weights.sum(axis=1) / 2)) / 2  # the logistic function, no overflow
    return found


def train(cluster: wl.Cluster, data: Samples, epochs: int) -> wl.Table:
    """One pass over this worker's part of the samples for each epoch."""
    table = cluster.table("odd", dim=1, rule=wl.FTRL(lr=0.1, beta=1.0, l1=0.3, l2=0.1))  # a number per feature
    samples, labels = features(data.x_train), data.y_train % 2
    lease = cluster.lease(len(samples), batch_size=BATCH, epochs=epochs)
    for _ in range(epochs):
        for batch in lease:
            keys, places = wl.unique(samples[batch].ravel())  # each feature of the batch once
            weights = table.pull(keys)[:, 0]
            error = probability(weights[places].reshape(len(batch), -1)) - labels[batch]
            table.push(keys, np.bincount(places, np.repeat(error, samples.shape[1])))  # the sum over samples
            cluster.tick()
    cluster.settle()
    return table


def predict(table: wl.Table, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """The probability that each sample is odd. Makes no rows for features that training has not seen."""
    keys = features(pixels)
    return probability(table.pull(keys.ravel(), create=False).reshape(keys.shape))


def main() -> None:
    parser = argparse.ArgumentParser(description="Sparse logistic regression with FTRL.")
    parser.add_argument("--epochs", type=whole(1), default=10, metavar="N", help="passes over the data (%(default)s)")
    args = parser.parse_args()
    data = load_digits(fallback=True)
    with wl.connect() as cluster:
        table = train(cluster, data, args.epochs)
        cluster.barrier()
        if cluster.rank == 0:
            right = (predict(table, data.x_test) > 0.5) == (data.y_test % 2 == 1)
            print(f"{right.mean():.1%} right, with {table.nnz()} of {len(table)} weights that are not zero")


if __name__ == "__main__":
    main()
