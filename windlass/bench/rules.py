"""``windlass bench rules``: every rule of ours beside its own kernel on plain arrays; one's own beside ours; top_k."""

import importlib.util
from collections.abc import Callable
from statistics import median
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
    """A push of 100,000 rows of a table that is larger than any cache, with one thread; every row has its turn."""
    batch, turns, rounds = (2_000, 2, 2) if quick else (100_000, 20, 3)
    rows = batch * turns
    random = np.random.default_rng(1)
    numbers = list(random.permutation(rows).astype(np.uint32).reshape(turns, batch))
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

            numbers_of = rule._numbers()
            mine, best = [], []
            # Batch by batch: what one leaves in the caches, the other finds. The first turn is not counted.
            for turn in range(1 + rounds):
                for some in numbers:
                    batch_keys = keys[some]
                    took = seconds_of(lambda: table.push(batch_keys, grads).wait())  # noqa: B023
                    bare = _core.limit_rule_rows(rule._kind, numbers_of, flat, state, heads, some, grads, 1)
                    if turn:
                        mine.append(took)
                        best.append(bare)
        name = f"push {label} {batch:,} x {DIM}, 1 thread"
        suite.rate(
            name,
            batch / median(mine) / 1e6,
            batch / median(best) / 1e6,
            "M rows/s",
            bar=0.5,
            against="bare kernel",
        )


@wl.rule(state=("momentum",))
def sgd_in_numpy(w: Any, g: Any, momentum: Any, lr: float, beta: float = 0.9) -> None:
    """As wl.SGD with momentum."""
    momentum *= np.float32(beta)
    momentum += g
    w -= np.float32(lr) * momentum


@wl.rule(state=("m", "v"))
def adam_in_numpy(
    w: Any, g: Any, m: Any, v: Any, count: Any, lr: float, beta1: float = 0.9, beta2: float = 0.999
) -> None:
    """As wl.Adam."""
    m += np.float32(1 - beta1) * (g - m)
    v *= np.float32(beta2)
    v += np.float32(1 - beta2) * (g * g)
    root = np.sqrt(v) * np.float32(1 / np.sqrt(1 - beta2**count)) + np.float32(1e-8)
    w -= np.float32(lr / (1 - beta1**count)) * m / root


def _loop(w: Any, g: Any, momentum: Any, lr: float, beta: float = 0.9) -> None:
    lr32, beta32 = np.float32(lr), np.float32(beta)
    for i in range(w.size):
        momentum[i] = beta32 * momentum[i] + g[i]
        w[i] -= lr32 * momentum[i]


def in_python(suite: Suite, quick: bool) -> None:
    """Rules of the user's beside ours of the same name, which have all threads; they have one."""
    megabytes, rounds = (1, 2) if quick else (64, 5)
    shape = (megabytes * MB // 4 // DIM, DIM)
    ways: list[tuple[str, wl.Rule, wl.Rule]] = [
        ("SGD, momentum, numpy", sgd_in_numpy(lr=1e-6), wl.SGD(lr=1e-6, momentum=0.9)),
        ("Adam, numpy", adam_in_numpy(lr=1e-6), wl.Adam(lr=1e-6)),
    ]
    if importlib.util.find_spec("numba") is not None:
        import numba

        compiled = wl.rule(state=("momentum",))(numba.njit(_loop))
        ways.append(("SGD, momentum, numba", compiled(lr=1e-6), wl.SGD(lr=1e-6, momentum=0.9)))
    if importlib.util.find_spec("torch") is not None:
        ways.append(("Adam, torch.optim", wl.TorchRule("Adam", lr=1e-6), wl.Adam(lr=1e-6)))
    for label, theirs, native in ways:
        with wl.connect() as cluster:
            grad = cluster.empty(shape)
            grad[:] = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
            pair = [cluster.tensor(name, shape, rule=rule) for name, rule in (("theirs", theirs), ("native", native))]

            def push(tensor: wl.Tensor, grad: Any = grad) -> float:
                return seconds_of(lambda: tensor.push(grad).wait(), 2)

            for tensor in pair:
                push(tensor)
            mine, best = interleave(lambda: push(pair[0]), lambda: push(pair[1]), rounds)  # noqa: B023
        size = shape[0] * DIM * 4
        rate, limit = size / mine / 1e9, size / best / 1e9
        suite.absolute(f"push {label} {megabytes} MB", rate, "GB/s", bar="", limit=limit, against="our rule")


def top_k(suite: Suite, quick: bool) -> None:
    """The 100 rows with the largest norms, of a table and of the same rows in one array."""
    rows, dim, k, rounds = (10_000, 16, 100, 2) if quick else (5_000_000, 16, 100, 3)
    with wl.connect() as cluster:
        table = cluster.table("t", dim, rule=wl.Assign(), init=wl.Normal())
        keys = np.arange(rows, dtype=np.uint64)
        array = np.concatenate([table.pull(some) for some in np.array_split(keys, max(1, rows // 100_000))])

        def in_numpy() -> Any:
            norms = np.sqrt(np.einsum("ij,ij->i", array, array))
            best = np.argpartition(norms, rows - k)[rows - k :]
            return best[np.argsort(-norms[best])]

        if set(table.top_k(k).keys.tolist()) != set(in_numpy().tolist()):
            raise RuntimeError("top_k: not the rows that numpy finds")
        mine, best = interleave(lambda: seconds_of(lambda: table.top_k(k)), lambda: seconds_of(in_numpy), rounds)
    name = f"top {k} of {rows:,} rows x {dim}, {_core.cores()} threads"
    suite.rate(
        name, rows / mine / 1e6, rows / best / 1e6, "M rows/s", bar=1.0, against="numpy, einsum and argpartition"
    )


#: What the suite measures, in order; a part gets the suite, and whether it is only to show that it works.
PARTS: list[Callable[[Suite, bool], None]] = [dense, per_row, in_python, top_k]


def _filled(cluster: wl.Cluster, shape: Any) -> Any:
    array = cluster.empty(shape)
    array[:] = 0.5
    return array
