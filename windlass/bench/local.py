"""``windlass bench local``: servers on the same host, which use the worker's arrays where they lie.

First against bare servers, without a scheduler; then in clusters that ``windlass run`` makes, which is what users have
(in_run.py). The limits are those of ``bench core``: loops in the process that measures, on arrays of their own.
"""

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench import _native, in_run
from windlass.bench._crew import push_pull_crew, push_pulls_together
from windlass.bench._figures import MEASURED, Suite
from windlass.bench._turns import in_turns, timed
from windlass.bench._work import (
    KB,
    MB,
    Empty,
    bar_of,
    filled,
    fused_loop,
    own_arrays,
    push_pull,
    size_of,
    table_rows,
    threads_of,
)
from windlass.bench.local_peers import peers
from windlass.bench.wire import PAUSE_S, Bare
from windlass.testing import Servers

DIM = 64
SMALL, SMALL_FLOATS = 200, 5_000  # tensors of 20 KB in a step
SGD_SIZES = (64 * KB, 256 * KB, 1 * MB, 4 * MB, 16 * MB, 100 * MB)
SIZES = (1 * MB, 16 * MB, 100 * MB)
WHERE = "bare server"


def run(console: Console, rows: int, short: bool = False) -> Suite:
    """All figures; `rows` in the table (the bars are for 5 million). short: to see that it works, not how fast."""
    suite = Suite("local", console, MEASURED, short=short, detail=f"{rows / 1e6:g} M rows")
    in_run.alone(suite, rows)
    in_run.together(suite)
    with Servers(1, kind="unix") as servers, servers.connect(transport="arena") as cluster, own_arrays() as own:
        for label, rule, sizes in (("SGD", wl.SGD(lr=1e-6), SGD_SIZES), ("Adam", wl.Adam(lr=1e-6), SIZES)):
            for size_bytes in suite.sizes(sizes):
                push_pull(suite, cluster, own, label, rule, size_bytes, where=WHERE, bar=bar_of(size_bytes))
        for size_bytes in suite.sizes(SIZES):
            one_way(suite, cluster, own, size_bytes)
        step(suite, cluster)
        smallest_pull(suite, cluster)
    several(suite)
    if not short:
        against_peers(suite)
    with Servers(1, kind="unix") as servers, servers.connect(transport="arena") as cluster, own_arrays() as own:
        table_rows(suite, cluster, own, rows, DIM, kinds=[(WHERE, cluster.empty, 0.55, 0.45)])
    return suite


def against_peers(suite: Suite) -> None:
    """The same push_pull by what else is installed."""
    for peer in peers():
        with Servers(1, kind="unix") as servers, servers.connect(transport="arena") as cluster, peer:
            for size_bytes in SIZES:
                n = size_bytes // 4
                w = cluster.tensor(f"peer {size_bytes}", n, rule=wl.SGD(lr=1e-6))
                grad, out = filled(cluster.empty, n), filled(cluster.empty, n)
                ours, theirs = in_turns(
                    timed(lambda: w.push_pull(grad, out=out)),  # noqa: B023 (called here)
                    peer.push_pull(size_bytes),
                    length=suite.length,
                )
                name = f"push_pull SGD {size_of(size_bytes)}, {WHERE}"
                suite.rate(name, size_bytes / 1e9, "GB/s", ours, theirs, bar=2.5, against=peer.name)
        if peer.why:
            suite.note(f"{peer.name}: not measured, {peer.why}")


def one_way(suite: Suite, cluster: wl.Cluster, own: Empty, size_bytes: int) -> None:
    """Pull alone against memcpy, push alone against the update in place, both with as many threads as cores."""
    n, threads = size_bytes // 4, _core.cores()
    w = cluster.tensor(f"one way {size_bytes}", n, rule=wl.SGD(lr=1e-6))
    grad, out = filled(cluster.empty, n), filled(cluster.empty, n)
    w.push(grad).wait()  # weights that nobody has touched are one page of zeros
    source, to = filled(own, n), filled(own, n)
    for name, call, limit, against in (
        ("pull", lambda: w.pull(out=out), lambda calls: _native.limit_copy(source, to, threads, calls), "memcpy"),
        (
            "push SGD",
            lambda: w.push(grad).wait(),
            lambda calls: _native.limit_update_sgd(source, to, threads, calls),
            "update in place",
        ),
    ):
        ours, best = in_turns(timed(call), limit, length=suite.length)
        suite.rate(
            f"{name} {size_of(size_bytes)}, {WHERE}",
            size_bytes / 1e9,
            "GB/s",
            ours,
            best,
            bar=0.7,
            against=f"{against}, {threads_of(threads)}",
        )


def step(suite: Suite, cluster: wl.Cluster) -> None:
    """Many small tensors in one step against one tensor of the same size."""
    n = SMALL * SMALL_FLOATS
    one = cluster.tensor("one", n, rule=wl.SGD(lr=1e-6))
    many = [cluster.tensor(f"small {i}", SMALL_FLOATS, rule=wl.SGD(lr=1e-6)) for i in range(SMALL)]
    grad, out = filled(cluster.empty, n), filled(cluster.empty, n)
    grads, outs = np.split(grad, SMALL), np.split(out, SMALL)

    def together() -> None:
        with cluster.step() as s:
            s.push_pull(many, grads, out=outs)

    ours, limit = in_turns(timed(together), timed(lambda: one.push_pull(grad, out=out)), length=suite.length)
    suite.latency(
        f"{SMALL} tensors of {SMALL_FLOATS * 4 // 1000} KB in one step, {WHERE}",
        "us",
        ours,
        limit,
        bar=1.5,
        against=f"push_pull of one of {n * 4 // MB} MB",
    )


def several(suite: Suite) -> None:
    """Two workers and two bare servers, each worker at its own pace: the sum over workers."""
    size_bytes = 16 * MB
    with (
        Servers(2, kind="unix") as servers,
        push_pull_crew(servers.addresses, 2, size_bytes // 4, "asp") as crew,
        own_arrays() as own,
    ):
        loop = fused_loop(own, "SGD", size_bytes, 2)
        ours, limit = in_turns(push_pulls_together(crew), loop, length=suite.length)
    suite.rate(
        f"push_pull SGD {size_of(size_bytes)}, 2 workers, 2 bare servers",
        size_bytes / 1e9,
        "GB/s",
        ours.shared_by(2),
        limit,
        bar=0.7,
        against="fused loop, 2 threads",
    )


def smallest_pull(suite: Suite, cluster: wl.Cluster) -> None:
    """A pull of 4 floats, call upon call, and of a client that mostly sleeps."""
    w = cluster.tensor("smallest", 4, rule=wl.SGD(lr=0.1))
    out = cluster.empty(4)

    def pull() -> None:
        w.pull(out=out)

    with Bare("unix") as bare:
        ours, limit = in_turns(timed(pull), bare.round_trips(spinning=True), length=suite.length)
        name = f"pull of 4 floats, hot, {WHERE}"
        suite.latency(name, "us", ours, limit, value_bar=15, against="bare round trip, spinning")
        ours, limit = in_turns(timed(pull, PAUSE_S), bare.round_trips(pause=PAUSE_S), length=suite.length)
        name = f"pull of 4 floats, idle, {WHERE}"
        suite.latency(name, "us", ours, limit, bar=1.3, against="bare round trip, blocking")
