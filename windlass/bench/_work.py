"""Work that several suites measure: push_pulls of tensors and rows of tables, beside plain loops.

The loops work on arrays of their own, made as the embedded server makes its arrays, in the process that measures.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import windlass as wl
from windlass import _core
from windlass._objects.arrays import as_numpy, core_dtype
from windlass.bench import _native
from windlass.bench._figures import Suite
from windlass.bench._turns import Side, in_turns, loop_over, timed, timed_over

KB, MB = 1_000, 1_000_000
BATCH = 100_000  # keys per request
BATCHES = 20  # that are drawn before the clock starts
STREAM_BYTES = 1 << 20  # from here on the core's outputs bypass the cache, and the limit's do
ONE_THREAD_BYTES = MB  # up to here one thread does the work, ours and the limit's

Empty = Callable[[Any], Any]  # an array of this shape, float32


def ordinary(shape: Any) -> Any:
    """An array as users have it, which is copied on its way to a server."""
    return np.empty(shape, np.float32)


@contextlib.contextmanager
def own_arrays() -> Iterator[Empty]:
    """Arrays for the limits; connect() in a worker of a run would make those of the run."""
    engine = _core.Engine(1, 2**64 - 1)
    try:
        yield lambda shape: as_numpy(
            engine.empty([shape] if isinstance(shape, int) else list(shape), core_dtype(np.float32, "own_arrays"))
        )
    finally:
        engine.close(10.0)


def filled(empty: Empty, shape: Any, value: float = 0.5) -> Any:
    """An array whose pages are there."""
    array = empty(shape)
    array[:] = value
    return array


def size_of(size_bytes: int) -> str:
    """As names say it: 64 KB, 4 MB."""
    return f"{size_bytes // MB} MB" if size_bytes >= MB else f"{size_bytes // KB} KB"


def threads_of(count: int) -> str:
    """As names say it."""
    return f"{count} thread{'' if count == 1 else 's'}"


def bar_of(size_bytes: int) -> float | None:
    """Of a server's push_pull against the fused loop; below 1 MB the way there and back alone takes longer."""
    return None if size_bytes < MB else 0.4 if size_bytes == MB else 0.7


def fused_loop(own: Empty, label: str, size_bytes: int, threads: int) -> Side:
    """w = rule(w, g); out = w, for SGD and Adam."""
    stream, n = size_bytes >= STREAM_BYTES, size_bytes // 4
    w, g, out = (filled(own, n) for _ in range(3))
    if label == "SGD":
        return lambda calls: _native.limit_fused_sgd(w, g, out, stream, threads, calls)
    m, v = filled(own, n), filled(own, n)
    return lambda calls: _native.limit_fused_adam(w, m, v, g, out, stream, threads, calls)


def push_pull(
    suite: Suite,
    cluster: wl.Cluster,
    own: Empty,
    label: str,
    rule: wl.Rule,
    size_bytes: int,
    *,
    where: str,
    bar: float | None,
    empty: Empty | None = None,
    threads: int | None = None,
) -> None:
    """push_pull against the fused loop. empty: what makes our arrays, registered ones by default."""
    n = size_bytes // 4
    threads = (1 if size_bytes <= ONE_THREAD_BYTES else _core.cores()) if threads is None else threads
    w = cluster.tensor(f"{label} {size_bytes} {where}", n, rule=rule)
    grad, out = filled(empty or cluster.empty, n), filled(empty or cluster.empty, n)
    grad[:] = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    ours, limit = in_turns(
        timed(lambda: w.push_pull(grad, out=out)), fused_loop(own, label, size_bytes, threads), length=suite.length
    )
    suite.rate(
        f"push_pull {label} {size_of(size_bytes)}, {where}",
        size_bytes / 1e9,
        "GB/s",
        ours,
        limit,
        bar=bar,
        against=f"fused loop, {threads_of(threads)}",
    )


def keys_of(rows: int, seed: int = 7) -> Any:
    """Distinct 64-bit keys without a pattern: multiples of an odd number."""
    return np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * seed)


def fill(table: wl.Table, keys: Any, cluster: wl.Cluster) -> None:
    """Pulls every key once, which makes its row."""
    out = cluster.empty((BATCH, table.dim))
    for at in range(0, len(keys), BATCH):
        batch = keys[at : at + BATCH]
        table.pull(batch, out=out[: len(batch)])


def table_rows(
    suite: Suite,
    cluster: wl.Cluster,
    own: Empty,
    rows: int,
    dim: int,
    *,
    kinds: Sequence[tuple[str, Empty, float | None, float | None]],
) -> None:
    """Pull and push of random rows against a gather and an update of known row numbers, one thread.

    kinds: where it is, what makes our arrays, and the bars of pull and push.
    """
    rng = np.random.default_rng(1)
    t = cluster.table("t", dim, rule=wl.RowAdagrad(lr=1e-6), init=wl.Normal(std=0.01))
    keys = keys_of(rows)
    fill(t, keys, cluster)
    flat, gathered, given = filled(own, (rows, dim)), filled(own, (BATCH, dim)), own((BATCH, dim))
    given[:] = rng.standard_normal((BATCH, dim), dtype=np.float32)
    heads = own((rows, 3)).view(np.uint8).reshape(rows, 12)
    heads[:] = 0
    numbers = [rng.choice(rows, BATCH, replace=False, shuffle=True).astype(np.uint32) for _ in range(BATCHES)]
    batches, of_limit = itertools.cycle([keys[n] for n in numbers]), itertools.cycle(numbers)
    stream = gathered.nbytes >= STREAM_BYTES
    for where, empty, pull_bar, push_bar in kinds:
        out, grads = filled(empty, (BATCH, dim)), filled(empty, (BATCH, dim))
        grads[:] = given
        for name, call, loop, bar, against in (
            (
                "pull",
                lambda batch, out=out: t.pull(batch, out=out),
                lambda some: _native.limit_gather(flat, some, gathered, stream, 1),
                pull_bar,
                "bare gather",
            ),
            (
                "push RowAdagrad",
                lambda batch, grads=grads: t.push(batch, grads).wait(),
                lambda some: _native.limit_row_adagrad(flat, heads, some, given, 1),
                push_bar,
                "bare row update",
            ),
        ):
            ours, limit = in_turns(timed_over(batches, call), loop_over(of_limit, loop), length=suite.length)
            suite.rate(
                f"table {name}, dim {dim}, {where}",
                BATCH / 1e6,
                "M rows/s",
                ours,
                limit,
                bar=bar,
                against=f"{against}, 1 thread",
            )
