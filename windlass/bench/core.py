"""``windlass bench core``: tensors, tables and rules inside one process."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench import peers
from windlass.bench._figures import Suite, interleave, seconds_of

MB = 1_000_000
BATCH = 100_000  # keys per request
STREAM_BYTES = 1 << 20  # from here on the core's outputs bypass the cache, and the limit's do


def run(console: Console, rows: int) -> Suite:
    """All figures; `rows` in the tables (the bars are for 5 million)."""
    suite = Suite(f"windlass bench core ({_core.isa()}, {_core.cores()} cores, {rows / 1e6:g} M rows)", console)
    dense(suite)
    smallest_pull(suite)
    for dim, pull_bar, push_bar in ((16, 0.4, 0.35), (64, 0.6, 0.5), (128, 0.7, 0.6)):
        table(suite, rows, dim, pull_bar, push_bar)
    create_rows(suite, rows)
    memory(suite, rows)
    peers.unique(suite)
    peers.embedding(suite, rows)
    peers.fbgemm(suite, rows)
    return suite


def dense(suite: Suite) -> None:
    """push_pull of registered arrays against the fused loop w = rule(w, g); out = w."""
    for threads in sorted({1, _core.cores()}):
        for label, rule in (("SGD", wl.SGD(lr=1e-6)), ("Adam", wl.Adam(lr=1e-6))):
            for megabytes in (1, 16, 64) if threads == 1 else (16, 64):  # one thread does the small ones alone
                _dense_one(suite, threads, label, rule, megabytes)


def _dense_one(suite: Suite, threads: int, label: str, rule: wl.Rule, megabytes: int) -> None:
    n = megabytes * MB // 4
    with wl.connect(threads=threads) as cluster:
        w = cluster.tensor("w", n, rule=rule)
        grad, out = cluster.empty(n), cluster.empty(n)
        grad[:] = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
        arrays = [cluster.empty(n) for _ in range(4)]
        for a in arrays:
            a[:] = 0.5
        stream = n * 4 >= STREAM_BYTES
        repeats = max(3, 200 // megabytes)

        def limit() -> float:
            if label == "SGD":
                return _core.limit_fused_sgd(arrays[0], grad, arrays[1], stream, threads, repeats)
            return _core.limit_fused_adam(arrays[0], arrays[1], arrays[2], grad, arrays[3], stream, threads, repeats)

        def ours() -> float:
            return seconds_of(lambda: w.push_pull(grad, out=out), repeats)

        ours()
        mine, best = interleave(ours, limit, 7)
        plural = "thread" if threads == 1 else "threads"
        suite.rate(
            f"push_pull {label} {megabytes} MB, {threads} {plural}",
            n * 4 / mine / 1e9,
            n * 4 / best / 1e9,
            "GB/s",
            bar=0.85,
            against="fused loop",
        )


def smallest_pull(suite: Suite) -> None:
    """A pull of 4 floats, called from Python."""
    with wl.connect(threads=1) as cluster:
        w = cluster.tensor("w", 4, rule=wl.SGD(lr=0.1))
        out = np.empty(4, np.float32)
        calls = 20_000

        def loop() -> None:
            for _ in range(calls):
                w.pull(out=out)

        suite.absolute("pull of 4 floats", seconds_of(loop, 5) / calls * 1e6, "us", bar="<= 3")


def _keys(rows: int, seed: int = 7) -> Any:
    """Distinct 64-bit keys without a pattern: multiples of an odd number."""
    return np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * seed)


def _fill(table: wl.Table, keys: Any, cluster: wl.Cluster) -> None:
    out = cluster.empty((BATCH, table.dim))
    for at in range(0, len(keys), BATCH):
        batch = keys[at : at + BATCH]
        table.pull(batch, out=out[: len(batch)])


def table(suite: Suite, rows: int, dim: int, pull_bar: float, push_bar: float) -> None:
    """Pull and push of random rows against a gather and an update of known row numbers."""
    rng = np.random.default_rng(1)
    with wl.connect(threads=1) as cluster:
        t = cluster.table("t", dim, rule=wl.RowAdagrad(lr=1e-6), init=wl.Normal(std=0.01))
        keys = _keys(rows)
        _fill(t, keys, cluster)
        flat = cluster.empty((rows, dim))
        flat[:] = 0.5
        heads = cluster.empty((rows, 3)).view(np.uint8).reshape(rows, 12)
        heads[:] = 0
        out, grads = cluster.empty((BATCH, dim)), cluster.empty((BATCH, dim))
        grads[:] = rng.standard_normal((BATCH, dim), dtype=np.float32)
        stream = out.nbytes >= STREAM_BYTES

        # Batches are drawn before the clock runs, and a few are worked on in a row, as in training.
        numbers = [rng.choice(rows, BATCH, replace=False, shuffle=True).astype(np.uint32) for _ in range(20)]
        batches = itertools.cycle([(n, keys[n]) for n in numbers])

        def some(one: Callable[[Any, Any], float]) -> Callable[[], float]:
            return lambda: min(one(*next(batches)) for _ in range(5))

        def pull(_: Any, batch: Any) -> float:
            return seconds_of(lambda: t.pull(batch, out=out))

        def push(_: Any, batch: Any) -> float:
            return seconds_of(lambda: t.push(batch, grads).wait())

        mine, best = interleave(some(pull), some(lambda n, _: _core.limit_gather(flat, n, out, stream, 1)), 8)
        suite.rate(
            f"table pull, dim {dim}, 1 thread",
            BATCH / mine / 1e6,
            BATCH / best / 1e6,
            "M rows/s",
            bar=pull_bar,
            against="bare gather",
        )
        mine, best = interleave(some(push), some(lambda n, _: _core.limit_row_adagrad(flat, heads, n, grads, 1)), 8)
        suite.rate(
            f"table push RowAdagrad, dim {dim}, 1 thread",
            BATCH / mine / 1e6,
            BATCH / best / 1e6,
            "M rows/s",
            bar=push_bar,
            against="bare row update",
        )


def create_rows(suite: Suite, rows: int) -> None:
    """New rows, normal init, dim 16, one thread."""
    keys = _keys(rows)
    best = float("inf")
    for _ in range(2):
        with wl.connect(threads=1) as cluster:
            t = cluster.table("t", 16, rule=wl.SGD(lr=0.1), init=wl.Normal(std=0.01))
            best = min(best, seconds_of(lambda t=t, cluster=cluster: _fill(t, keys, cluster)))  # type: ignore[misc]
    suite.absolute("creating rows, dim 16, 1 thread", rows / best / 1e6, "M rows/s", bar=">= 5")


def memory(suite: Suite, rows: int) -> None:
    """Bytes per row beyond weights and state, and the peak while growing; in a process of its own."""
    code = f"from windlass.bench import core; core._grow({rows})"
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    over, peak = (float(x) for x in text.split())
    suite.absolute("memory over weights and state, dim 16", over, "bytes/row", bar="<= 32")
    suite.absolute("peak while growing to final", peak, "x", bar="<= 1.3")


def _resident(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _grow(rows: int) -> None:
    cluster = wl.connect(threads=1)
    t = cluster.table("t", 16, rule=wl.RowAdagrad(lr=0.1), init=wl.Normal(std=0.01))
    out = cluster.empty((BATCH, 16))
    out[:] = 0
    batch = np.empty(BATCH, np.uint64)
    batch[:] = 0
    t.pull(batch, out=out)
    before = _resident("RssAnon")
    peak = before
    for at in range(0, rows, BATCH):
        batch[:] = np.arange(at + 1, at + 1 + BATCH, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        t.pull(batch, out=out)
        peak = max(peak, _resident("RssAnon"))
    final = _resident("RssAnon") - before
    print(final / rows - 64 - 4, (peak - before) / final)
