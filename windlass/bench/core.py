"""``windlass bench core``: tensors, tables and rules inside one process."""

import subprocess
import sys

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench import peers
from windlass.bench._figures import MEASURED, Suite
from windlass.bench._turns import in_turns, timed
from windlass.bench._work import BATCH, MB, fill, keys_of, push_pull, table_rows, threads_of

SIZES = (1 * MB, 16 * MB, 64 * MB)


def run(console: Console, rows: int, short: bool = False) -> Suite:
    """All figures; `rows` in the tables (the bars are for 5 million)."""
    suite = Suite("core", console, MEASURED, short=short, detail=f"{rows / 1e6:g} M rows")
    dense(suite)
    smallest_pull(suite)
    for dim, pull_bar, push_bar in ((16, 0.4, 0.35), (64, 0.6, 0.5), (128, 0.7, 0.6)):
        with wl.connect(threads=1) as cluster:
            kinds = [("1 thread", cluster.empty, pull_bar, push_bar)]
            table_rows(suite, cluster, cluster.empty, rows, dim, kinds=kinds)
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
            for size_bytes in suite.sizes(SIZES if threads == 1 else SIZES[1:]):  # one thread does the small ones alone
                with wl.connect(threads=threads) as cluster:
                    where = threads_of(threads)
                    push_pull(
                        suite,
                        cluster,
                        cluster.empty,
                        label,
                        rule,
                        size_bytes,
                        where=where,
                        bar=0.85,
                        threads=threads,
                    )


def smallest_pull(suite: Suite) -> None:
    """A pull of 4 floats, called from Python."""
    with wl.connect(threads=1) as cluster:
        w = cluster.tensor("w", 4, rule=wl.SGD(lr=0.1))
        out = np.empty(4, np.float32)
        (ours,) = in_turns(timed(lambda: w.pull(out=out)), length=suite.length)
    suite.latency("pull of 4 floats", "us", ours, value_bar=3)


def create_rows(suite: Suite, rows: int) -> None:
    """New rows, normal init, dim 16, one thread: a call fills a whole table, which grows meanwhile."""
    keys = keys_of(rows)

    def tables(calls: int) -> list[float]:
        took = []
        for _ in range(calls):
            with wl.connect(threads=1) as cluster:
                t = cluster.table("t", 16, rule=wl.SGD(lr=0.1), init=wl.Normal(std=0.01))
                took += timed(lambda: fill(t, keys, cluster))(1)  # noqa: B023 (called here)
        return took

    (ours,) = in_turns(tables, length=suite.runs)
    suite.rate("creating rows, dim 16, 1 thread", rows / 1e6, "M rows/s", ours, value_bar=5)


def memory(suite: Suite, rows: int) -> None:
    """Bytes per row beyond weights and state, and the peak while growing; in a process of its own."""
    code = f"from windlass.bench import core; core._grow({rows})"
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    over, peak = (float(x) for x in text.split())
    suite.value("memory over weights and state, dim 16", over, "bytes/row", value_bar=32)
    suite.value("peak while growing", peak, "of the final size", value_bar=1.3)


def resident(field: str) -> int:
    """A field of this process's status, in bytes."""
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
    before = resident("RssAnon")
    peak = before
    for at in range(0, rows, BATCH):
        batch[:] = np.arange(at + 1, at + 1 + BATCH, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        t.pull(batch, out=out)
        peak = max(peak, resident("RssAnon"))
    final = resident("RssAnon") - before
    print(final / rows - 64 - 4, (peak - before) / final)
