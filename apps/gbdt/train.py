"""Gradient-boosted trees: a sum of small decision trees, each grown on what those before it got wrong.

    python apps/gbdt/train.py
    windlass run --servers 2 --workers 2 apps/gbdt/train.py

Features are cut into at most 256 bins. To split all nodes of a level, one needs for each node, feature and bin the sums
of gradients and of their derivatives over all samples: a histogram. Each worker makes that of its samples, and a tensor
of float64 under BSP with the rule Sum adds them up. Every worker then finds the same splits from the same bits, so
trees are never sent. What the tensor had before the level is taken off what it has after it, for nobody sets it back.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import add_outcome, positive, whole
from census import Binned, load_binned
from data import DataError
from outcome import Clock, Outcome, Report, progress
from scores import auc
from side_by_side import run

BINS = 256
Bins = NDArray[np.uint8]
Floats = NDArray[np.float64]


class Tree(NamedTuple):
    """Nodes of a heap: the children of node i are 2 i + 1 (bin at most `cut`) and 2 i + 2."""

    feature: NDArray[np.int64]  #: what a node asks for; -1: it is a leaf, or not there
    cut: NDArray[np.int64]
    value: Floats  #: of each node, if it is a leaf

    def leaves(self, x: Bins) -> NDArray[np.int64]:
        """Where each sample ends."""
        at = np.zeros(len(x), np.int64)
        rows = np.arange(len(x))
        for _ in range(int(np.log2(len(self.feature) + 1)) - 1):
            inner = self.feature[at] >= 0
            right = x[rows, np.maximum(self.feature[at], 0)] > self.cut[at]
            at = np.where(inner, 2 * at + 1 + right, at)
        return at

    def predict(self, x: Bins) -> Floats:
        """What it adds to each sample's score."""
        found: Floats = self.value[self.leaves(x)]
        return found


class Sums:
    """Histograms of all workers: gradients, their derivatives and numbers of samples by node, feature and bin."""

    def __init__(self, cluster: wl.Cluster, nodes: int, features: int) -> None:
        shape = (nodes, features, BINS, 3)
        self._tensor = cluster.tensor("histogram", shape, rule=wl.Sum(), dtype="float64", sync="bsp")
        self._before: Floats = np.zeros(shape)

    def of_all(self, mine: Floats) -> Floats:
        """The sum of what each worker gives; the same bits for all."""
        whole = np.zeros_like(self._before)
        whole[: len(mine)] = mine
        after: Floats = self._tensor.push_pull(whole)
        found: Floats = after - self._before
        self._before = after
        return found[: len(mine)]


def histogram(x: Bins, node: NDArray[np.int64], nodes: int, gradient: Floats, hessian: Floats) -> Floats:
    """Of these samples, (nodes, features, BINS, 3). node: of each sample, -1: of none that is to be split."""
    rows = np.flatnonzero(node >= 0)
    found = np.zeros((nodes, x.shape[1], BINS, 3))
    g, h, base = gradient[rows], hessian[rows], node[rows] * BINS
    for feature in range(x.shape[1]):
        at = base + x[rows, feature]
        for i, weights in enumerate((g, h, None)):
            found[:, feature, :, i] = np.bincount(at, weights, nodes * BINS).reshape(nodes, BINS)
    return found


def best_splits(sums: Floats, args: argparse.Namespace) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Of each node: the feature (-1: none is worth it), the last bin that goes left, and the node's own sums."""
    left = sums.cumsum(axis=2)
    total = left[:, :1, -1:, :]
    right = total - left

    def score(part: Floats) -> Floats:
        found: Floats = part[..., 0] ** 2 / (part[..., 1] + args.l2)
        return found

    gain = score(left) + score(right) - score(total)
    gain[(left[..., 2] < args.least) | (right[..., 2] < args.least)] = -np.inf
    flat = gain.reshape(len(gain), -1)
    best = flat.argmax(axis=1)
    feature, cut = np.divmod(best, BINS)
    worth = flat[np.arange(len(flat)), best] > 1e-9
    return np.where(worth, feature, -1), cut, total[:, 0, 0, :]


def grow(sums: Sums, x: Bins, gradient: Floats, hessian: Floats, args: argparse.Namespace) -> Tree:
    """One tree. x: the samples of this worker."""
    size = 2 ** (args.depth + 1) - 1
    tree = Tree(np.full(size, -1), np.zeros(size, np.int64), np.zeros(size))
    at = np.zeros(len(x), np.int64)  # the node of each sample
    rows = np.arange(len(x))
    for depth in range(args.depth + 1):
        first, nodes = 2**depth - 1, 2**depth
        here = np.where(at >= first, at - first, -1)
        if depth < args.depth:
            feature, cut, own = best_splits(sums.of_all(histogram(x, here, nodes, gradient, hessian)), args)
            tree.feature[first : first + nodes], tree.cut[first : first + nodes] = feature, cut
            inner = tree.feature[at] >= 0
            right = x[rows, np.maximum(tree.feature[at], 0)] > tree.cut[at]
            at = np.where(inner & (here >= 0), 2 * at + 1 + right, at)
        else:  # leaves: one feature has all that is needed
            own = sums.of_all(histogram(x[:, :1], here, nodes, gradient, hessian)).sum(axis=2)[:, 0]
        tree.value[first : first + nodes] = -args.lr * own[:, 0] / (own[:, 1] + args.l2)
    return tree


def train(cluster: wl.Cluster, data: Binned, args: argparse.Namespace, report: Report) -> tuple[float, list[Tree]]:
    """What every score begins with, and the trees."""
    mine = slice(cluster.rank, None, cluster.world_size)
    x, y = data.train[mine], data.train_labels[mine]
    count = cluster.all_reduce(np.array([y.sum(), len(y)], np.float64))
    begin = float(np.log(count[0] / (count[1] - count[0])))
    sums = Sums(cluster, 2**args.depth, x.shape[1])
    score = np.full(len(x), begin)
    trees = []
    for number in range(1, args.trees + 1):
        p = 1 / (1 + np.exp(-score))
        trees.append(grow(sums, x, p - y, p * (1 - p), args))
        score += trees[-1].predict(x)
        loss = float(np.mean(np.logaddexp(0, np.where(y > 0, -score, score))))
        cluster.report(loss=loss)
        report(number, loss)
    return begin, trees


def reference(data: Binned, args: argparse.Namespace) -> float:
    """scikit-learn's trees on the same bins."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    model = HistGradientBoostingClassifier(
        max_iter=args.trees,
        max_depth=args.depth,
        max_leaf_nodes=None,
        learning_rate=args.lr,
        min_samples_leaf=args.least,
        l2_regularization=args.l2,
        max_bins=255,
        early_stopping=False,
    ).fit(data.train.astype(np.float32), data.train_labels)
    return auc(data.test_labels, model.decision_function(data.test.astype(np.float32)))


def main() -> None:
    args = arguments()
    data = load_binned(fallback=args.fallback)
    with wl.connect(sync=args.sync) as cluster:
        speaks = cluster.rank == 0
        clock = Clock()
        with progress(args.trees, "tree", "loss", quiet=not speaks) as report:
            begin, trees = train(cluster, data, args, report)
        seconds = clock.seconds
    if not speaks:
        return
    found = auc(data.test_labels, begin + np.sum([tree.predict(data.test) for tree in trees], axis=0))
    outcome = Outcome("gbdt", f"{data.name}, {len(data.train):,} samples", "AUC", found, seconds)
    if args.reference:
        outcome = outcome.beside(lambda: reference(data, args), "scikit-learn", least=1 - 0.001)
    outcome.end(args.outcome)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Gradient-boosted trees on the census.")
    parser.add_argument("--trees", type=whole(1), default=60, metavar="N", help="(%(default)s)")
    parser.add_argument("--depth", type=whole(1), default=5, metavar="N", help="of a tree (%(default)s)")
    parser.add_argument("--lr", type=positive, default=0.1, metavar="X", help="of a tree's values (%(default)s)")
    parser.add_argument("--l2", type=positive, default=1.0, metavar="X", help="what keeps them small (%(default)s)")
    parser.add_argument("--least", type=whole(1), default=20, metavar="N", help="samples of a leaf (%(default)s)")
    add_outcome(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main, DataError, wl.WindlassError)
