"""``windlass bench rules``: every rule of ours beside its own kernel on plain arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench._figures import Suite, interleave, seconds_of

MB = 1_000_000
DIM = 64

#: Small steps: the numbers must stay numbers, however often a rule is applied.
RULES: dict[str, wl.Rule] = {
    "SGD": wl.SGD(lr=1e-6),
    "SGD, momentum": wl.SGD(lr=1e-6, momentum=0.9),
    "Adagrad": wl.Adagrad(lr=1e-6),
    "RowAdagrad": wl.RowAdagrad(lr=1e-6),
    "Adam": wl.Adam(lr=1e-6),
    "AdamW": wl.AdamW(lr=1e-6),
    "RMSProp": wl.RMSProp(lr=1e-6),
    "RMSProp, centered, momentum": wl.RMSProp(lr=1e-6, centered=True, momentum=0.9),
    "Adadelta": wl.Adadelta(lr=1e-3),
    "Adamax": wl.Adamax(lr=1e-6),
    "NAdam": wl.NAdam(lr=1e-6),
    "Lion": wl.Lion(lr=1e-6),
    "FTRL": wl.FTRL(lr=0.1, l1=0.1),
    "Sum": wl.Sum(),
    "Assign": wl.Assign(),
    "Max": wl.Max(),
    "Min": wl.Min(),
    "Average": wl.Average(),
}


def run(console: Console, rows: int, quick: bool = False) -> Suite:
    """All figures; `quick` to see that they work."""
    suite = Suite(f"windlass bench rules ({_core.isa()}, {_core.cores()} cores)", console)
    for part in PARTS:
        part(suite, quick)
    return suite


def dense(suite: Suite, quick: bool) -> None:
    """A push of a registered array of 64 MB, with as many threads as there are cores."""
    megabytes, rounds = (1, 2) if quick else (64, 5)
    n, threads = megabytes * MB // 4 // 1024 * 1024, _core.cores()
    for label, rule in RULES.items():
        with wl.connect(threads=threads) as cluster:
            w = cluster.tensor("w", (n // DIM, DIM), rule=rule)
            grad = cluster.empty((n // DIM, DIM))
            grad[:] = np.random.default_rng(0).standard_normal(grad.shape, dtype=np.float32)
            flat = _filled(cluster, n)
            per_row = isinstance(rule, wl.RowAdagrad)
            state = [_filled(cluster, n // DIM if per_row else n) for _ in rule._state]

            def limit(rule: wl.Rule = rule, flat: Any = flat, state: Any = state, grad: Any = grad) -> float:
                return _core.limit_rule(rule._kind, rule._numbers(), flat, state, grad.reshape(-1), DIM, threads, 3)

            def ours(w: wl.Tensor = w, grad: Any = grad) -> float:
                return seconds_of(lambda: w.push(grad).wait(), 3)

            ours()
            mine, best = interleave(ours, limit, rounds)
        name = f"push {label} {megabytes} MB, {threads} threads"
        suite.rate(name, n * 4 / mine / 1e9, n * 4 / best / 1e9, "GB/s", bar=0.8, against="bare kernel")


def per_row(suite: Suite, quick: bool) -> None:
    """A push of 100,000 rows of a table that has ten times as many, with one thread."""
    batch, rounds = (2_000, 2) if quick else (100_000, 5)
    rows = batch * (1 if quick else 10)
    random = np.random.default_rng(1)
    numbers = [random.choice(rows, batch, replace=False, shuffle=True).astype(np.uint32) for _ in range(4)]
    keys = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for label, rule in RULES.items():
        with wl.connect(threads=1) as cluster:
            table = cluster.table("t", DIM, rule=rule)
            grads = cluster.empty((batch, DIM))
            grads[:] = random.standard_normal(grads.shape, dtype=np.float32)
            for at in range(0, rows, batch):
                table.pull(keys[at : at + batch])
            vectors = 0 if isinstance(rule, wl.RowAdagrad) else len(rule._state)
            flat, state = _filled(cluster, (rows, DIM)), _filled(cluster, (rows, max(vectors, 1) * DIM))
            head_bytes = 12 if isinstance(rule, wl.RowAdagrad) else 8
            heads = np.zeros((rows, head_bytes), np.uint8)

            def limit(
                rule: wl.Rule = rule, flat: Any = flat, state: Any = state, heads: Any = heads, grads: Any = grads
            ) -> float:
                return min(
                    _core.limit_rule_rows(rule._kind, rule._numbers(), flat, state, heads, some, grads, 1)
                    for some in numbers
                )

            batches = [keys[some] for some in numbers]

            def ours(table: wl.Table = table, grads: Any = grads, batches: Any = batches) -> float:
                return min(seconds_of(lambda some=some: table.push(some, grads).wait()) for some in batches)  # type: ignore[misc]

            ours()
            mine, best = interleave(ours, limit, rounds)
        name = f"push {label} {batch:,} x {DIM}, 1 thread"
        suite.rate(name, batch / mine / 1e6, batch / best / 1e6, "M rows/s", bar=0.5, against="bare kernel")


#: What the suite measures, in order; a part gets the suite, and whether it is only to show that it works.
PARTS: list[Callable[[Suite, bool], None]] = [dense, per_row]


def _filled(cluster: wl.Cluster, shape: Any) -> Any:
    array = cluster.empty(shape)
    array[:] = 0.5
    return array
