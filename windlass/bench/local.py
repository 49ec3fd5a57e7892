"""``windlass bench local``: a server process on the same host, which uses the worker's arrays where they lie.

The limits are those of ``bench core``: loops in this process that do the same to arrays of their own. They take turns
with ours.
"""

import itertools
import statistics
import time
from typing import Any

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench._figures import Suite, interleave, seconds_of
from windlass.bench.core import BATCH, MB, STREAM_BYTES, _fill, _keys
from windlass.testing import Servers

DIM = 64


def run(console: Console, rows: int, quick: bool = False) -> Suite:
    """All figures; `rows` in the table (the bars are for 5 million). quick: to see that it works, not how fast."""
    suite = Suite(f"windlass bench local ({_core.isa()}, {_core.cores()} cores, {rows / 1e6:g} M rows)", console)
    rounds = 2 if quick else 7
    with Servers(1, kind="unix") as servers, servers.connect(transport="arena") as cluster:
        for label, rule in (("SGD", wl.SGD(lr=1e-6)), ("Adam", wl.Adam(lr=1e-6))):
            for megabytes in (1, 16, 100):
                dense(suite, cluster, label, rule, megabytes, rounds)
        smallest_pull(suite, cluster)
    with Servers(1, kind="unix") as servers, servers.connect(transport="arena") as cluster:
        table(suite, cluster, rows, rounds)
    return suite


def dense(suite: Suite, cluster: wl.Cluster, label: str, rule: wl.Rule, megabytes: int, rounds: int) -> None:
    """push_pull of registered arrays against the fused loop w = rule(w, g); out = w."""
    n = megabytes * MB // 4
    threads = 1 if megabytes == 1 else _core.cores()
    stream = n * 4 >= STREAM_BYTES
    repeats = max(3, 200 // megabytes)
    w = cluster.tensor(f"{label} {megabytes}", n, rule=rule)
    grad, out = cluster.empty(n), cluster.empty(n)
    grad[:] = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    with wl.connect() as own:  # the limits' arrays
        arrays = [own.empty(n) for _ in range(5)]
        for a in arrays:
            a[:] = 0.5

        def limit() -> float:
            if label == "SGD":
                return _core.limit_fused_sgd(arrays[0], arrays[4], arrays[1], stream, threads, repeats)
            return _core.limit_fused_adam(
                arrays[0], arrays[1], arrays[2], arrays[4], arrays[3], stream, threads, repeats
            )

        def ours() -> float:
            return seconds_of(lambda: w.push_pull(grad, out=out), repeats)

        ours()
        mine, best = interleave(ours, limit, rounds)
    suite.rate(
        f"push_pull {label} {megabytes} MB",
        n * 4 / mine / 1e9,
        n * 4 / best / 1e9,
        "GB/s",
        bar=0.4 if megabytes == 1 else 0.7,
        against=f"fused loop, {threads} thread{'s' if threads > 1 else ''}",
    )


def smallest_pull(suite: Suite, cluster: wl.Cluster) -> None:
    """A pull of 4 floats, call upon call."""
    w = cluster.tensor("smallest", 4, rule=wl.SGD(lr=0.1))
    out = cluster.empty(4)
    medians = []
    for _ in range(5):
        took = []
        for _ in range(5000):
            start = time.perf_counter()
            w.pull(out=out)
            took.append(time.perf_counter() - start)
        medians.append(statistics.median(took))
    suite.absolute("pull of 4 floats, hot, p50", min(medians) * 1e6, "us", bar="<= 15")


def table(suite: Suite, cluster: wl.Cluster, rows: int, rounds: int) -> None:
    """Pull and push of random rows against a gather and an update of known row numbers, one thread."""
    rng = np.random.default_rng(1)
    t = cluster.table("t", DIM, rule=wl.RowAdagrad(lr=1e-6), init=wl.Normal(std=0.01))
    keys = _keys(rows)
    _fill(t, keys, cluster)
    out, grads = cluster.empty((BATCH, DIM)), cluster.empty((BATCH, DIM))
    grads[:] = rng.standard_normal((BATCH, DIM), dtype=np.float32)
    with wl.connect() as own:  # the limits' arrays
        flat, gathered, given = own.empty((rows, DIM)), own.empty((BATCH, DIM)), own.empty((BATCH, DIM))
        flat[:] = 0.5
        given[:] = grads
        heads = own.empty((rows, 3)).view(np.uint8).reshape(rows, 12)
        heads[:] = 0
        numbers = [rng.choice(rows, BATCH, replace=False, shuffle=True).astype(np.uint32) for _ in range(20)]
        batches = itertools.cycle([(n, keys[n]) for n in numbers])

        def pull() -> float:
            return min(seconds_of(lambda: t.pull(next(batches)[1], out=out)) for _ in range(5))

        def push() -> float:
            return min(seconds_of(lambda: t.push(next(batches)[1], grads).wait()) for _ in range(5))

        def gather() -> float:
            return min(_core.limit_gather(flat, _next(batches), gathered, True, 1) for _ in range(5))

        def update() -> float:
            return min(_core.limit_row_adagrad(flat, heads, _next(batches), given, 1) for _ in range(5))

        for name, ours, limit, bar, against in (
            ("pull", pull, gather, 0.55, "bare gather, 1 thread"),
            ("push RowAdagrad", push, update, 0.45, "bare row update, 1 thread"),
        ):
            ours()
            mine, best = interleave(ours, limit, rounds)
            suite.rate(
                f"table {name}, dim {DIM}", BATCH / mine / 1e6, BATCH / best / 1e6, "M rows/s", bar=bar, against=against
            )


def _next(batches: Any) -> Any:
    return next(batches)[0]
