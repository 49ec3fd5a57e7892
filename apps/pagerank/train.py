"""PageRank: how much of a long walk along a graph's edges is spent at each node.

    python apps/pagerank/train.py
    windlass run --servers 2 --workers 2 apps/pagerank/train.py
    windlass run --servers 2 --workers 2 apps/pagerank/train.py --edges 's3://bucket/edges/*.txt'

Each worker has a part of the edges, of any nodes. The ranks are a tensor of float64 under BSP with the rule Sum: an
iteration adds up what all workers push, and each of them pushes what its edges carry, less its share of the ranks of
before. So the sum is the new ranks, whatever the number of workers, and every worker pulls the same bits.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import add_outcome, positive, whole
from data import DataError, Graph, load_graph
from outcome import Clock, Outcome, Report, progress
from side_by_side import run

Ranks = NDArray[np.float64]
Nodes = NDArray[np.int64]


def ranks_of(
    cluster: wl.Cluster, nodes: int, source: Nodes, target: Nodes, args: argparse.Namespace, report: Report
) -> tuple[Ranks, int]:
    """The ranks, and how many iterations it took until they changed by less than `args.tol`, in L1.

    source, target: the edges of this worker.
    """

    def summed(name: str, begin: float) -> wl.Tensor:
        return cluster.tensor(name, nodes, rule=wl.Sum(), init=wl.Constant(begin), dtype="float64", sync="bsp")

    degree = summed("degree", 0.0).push_pull(np.bincount(source, minlength=nodes).astype(np.float64))
    ranks = summed("ranks", 1 / nodes)
    now: Ranks = ranks.pull()
    carried = args.damping / np.maximum(degree, 1)[source]
    without = degree == 0  # from there a walk goes anywhere
    workers = cluster.world_size
    for iteration in range(1, args.iterations + 1):
        anywhere = (1 - args.damping + args.damping * now[without].sum()) / nodes
        arrived = np.bincount(target, now[source] * carried, nodes)
        new: Ranks = ranks.push_pull(arrived + (anywhere - now) / workers)
        change = float(np.abs(new - now).sum())
        now = new
        cluster.report(change=change)
        report(iteration, change)
        if change < args.tol:
            break  # all workers have the same bits, so all stop here
    return now, iteration


def reference(graph: Graph, args: argparse.Namespace) -> tuple[Ranks, int]:
    """The same by a sparse matrix of scipy's."""
    from scipy.sparse import csr_matrix

    n = graph.nodes
    degree = np.bincount(graph.source, minlength=n)
    walk = csr_matrix((1 / degree[graph.source], (graph.target, graph.source)), shape=(n, n))
    now = np.full(n, 1 / n)
    for iteration in range(1, args.iterations + 1):  # noqa: B007 (it is returned)
        anywhere = (1 - args.damping + args.damping * now[degree == 0].sum()) / n
        new = args.damping * (walk @ now) + anywhere
        change = np.abs(new - now).sum()
        now = new
        if change < args.tol:
            break
    return now, iteration


def part_of(cluster: wl.Cluster, args: argparse.Namespace) -> tuple[str, int, Nodes, Nodes]:
    """What the graph is called, how many nodes it has, and this worker's edges."""
    part = (cluster.rank, cluster.world_size)
    if not args.edges:
        graph = load_graph(fallback=args.fallback)
        return graph.name, graph.nodes, graph.source[part[0] :: part[1]], graph.target[part[0] :: part[1]]
    edges = wl.data.edges(args.edges, part=part)
    largest = max(edges.source.max(initial=-1), edges.target.max(initial=-1))
    least = min(edges.source.min(initial=0), edges.target.min(initial=0))
    if cluster.all_reduce(least, "min") < 0:
        raise DataError("edges: expected nodes 0, 1, ..., not negative ones")
    nodes = 1 + int(cluster.all_reduce(largest, "max"))
    return Path(args.edges[0]).name, nodes, edges.source, edges.target


def main() -> None:
    args = arguments()
    with wl.connect(sync=args.sync) as cluster:
        speaks = cluster.rank == 0
        name, nodes, source, target = part_of(cluster, args)
        total = int(cluster.all_reduce(len(source)))
        if nodes == 0:
            raise DataError(f"{name}: a graph without edges")
        clock = Clock()
        with progress(args.iterations, "iteration", "change", quiet=not speaks) as report:
            found, iterations = ranks_of(cluster, nodes, source, target, args, report)
        seconds = clock.seconds
    if not speaks:
        return
    best = np.argsort(-found)[:3]
    print(f"highest ranks: {', '.join(f'node {node} {found[node]:.3g}' for node in best)}")
    data = f"{name}, {nodes:,} nodes, {total:,} edges"
    if not args.reference or args.edges:
        Outcome("pagerank", data, "iterations", iterations, seconds).end(args.outcome)
        return
    clock = Clock()
    theirs, needed = reference(load_graph(fallback=args.fallback), args)
    error = float(np.abs(found - theirs).sum())
    print(f"L1 distance from scipy's ranks {error:.3g}; {iterations} iterations, and {needed} by scipy")
    Outcome(
        "pagerank",
        data,
        "L1 error",
        error,
        seconds,
        1e-12,
        "to scipy's ranks, at most",
        clock.seconds,
        most=1.0,
        also=iterations <= needed + 2,
    ).end(args.outcome)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PageRank of WordNet, or of a graph in files.")
    parser.add_argument("--edges", nargs="+", metavar="FILE", help="lines of two nodes, 0, 1, ...: paths, globs, URLs")
    parser.add_argument("--damping", type=positive, default=0.85, metavar="X", help="how often to go on (%(default)s)")
    parser.add_argument("--tol", type=positive, default=1e-10, metavar="X", help="change to stop at, L1 (%(default)s)")
    parser.add_argument("--iterations", type=whole(1), default=200, metavar="N", help="at most (%(default)s)")
    add_outcome(parser)
    args = parser.parse_args()
    if args.damping >= 1:
        parser.error(f"argument --damping: expected less than 1, not {args.damping:g}")
    return args


if __name__ == "__main__":
    run(main, DataError, wl.WindlassError)
