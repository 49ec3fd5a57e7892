"""``windlass bench rules``: every rule of ours beside its own kernel on plain arrays; one's own beside ours; top_k."""

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench import _native
from windlass.bench._figures import MEASURED, Suite
from windlass.bench._turns import in_turns, loop_over, timed, timed_over
from windlass.bench._work import MB, filled, own_arrays, threads_of

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
CHECKED = ("SGD", "Adam", "RowAdagrad")


def run(console: Console, rows: int, short: bool = False, part: str = "") -> Suite:
    """All figures, or those of one part. `rows` has no meaning here; short: to see that it works, not how fast."""
    del rows
    suite = Suite("rules", console, MEASURED, short=short)
    for measure in PARTS:
        if part in ("", measure.__name__):
            measure(suite)
    return suite


def dense(suite: Suite) -> None:
    """A push of a registered array of 64 MB, with as many threads as there are cores."""
    megabytes, threads = 1 if suite.short else 64, _core.cores()
    n = megabytes * MB // 4 // 1024 * 1024
    for label, rule in RULES.items():
        with wl.connect(threads=threads) as cluster:
            w = cluster.tensor("w", (n // DIM, DIM), rule=rule)
            grad = cluster.empty((n // DIM, DIM))
            grad[:] = np.random.default_rng(0).standard_normal(grad.shape, dtype=np.float32)
            flat, given = filled(cluster.empty, n), grad.reshape(-1)
            per_row = isinstance(rule, wl.RowAdagrad)
            state = [filled(cluster.empty, n // DIM if per_row else n) for _ in rule._state]
            kernel = functools.partial(
                _native.limit_rule, rule._kind.value, rule._numbers(), flat, state, given, DIM, threads
            )
            ours, limit = in_turns(timed(lambda: w.push(grad).wait()), kernel, length=suite.length)  # noqa: B023
        name = f"push {label} {megabytes} MB, {threads_of(threads)}"
        suite.rate(name, n * 4 / 1e9, "GB/s", ours, limit, bar=0.8, against="bare kernel")


def per_row(suite: Suite) -> None:
    """A push of 100,000 rows of a table that is larger than any cache, with one thread; every row has its turn."""
    batch, batches = (2_000, 2) if suite.short else (100_000, 20)
    rows = batch * batches
    random = np.random.default_rng(1)
    numbers = list(random.permutation(rows).astype(np.uint32).reshape(batches, batch))
    keys = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for label, rule in RULES.items():
        with wl.connect(threads=1) as cluster:
            table = cluster.table("t", DIM, rule=rule)
            grads = cluster.empty((batch, DIM))
            grads[:] = random.standard_normal(grads.shape, dtype=np.float32)
            for at in range(0, rows, batch):
                table.pull(keys[at : at + batch])
            row_adagrad = isinstance(rule, wl.RowAdagrad)
            vectors = 0 if row_adagrad else len(rule._state)
            flat = filled(cluster.empty, (rows, DIM))
            state = filled(cluster.empty, (rows, max(vectors, 1) * DIM))
            heads = np.zeros((rows, 12 if row_adagrad else 8), np.uint8)
            kernel = functools.partial(_native.limit_rule_rows, rule._kind.value, rule._numbers(), flat, state, heads)
            ours, limit = in_turns(
                timed_over(itertools.cycle([keys[some] for some in numbers]), _push(table, grads)),
                loop_over(itertools.cycle(numbers), lambda some: kernel(some, grads, 1)),  # noqa: B023 (called here)
                length=suite.length,
            )
        name = f"push {label} {batch:,} x {DIM}, 1 thread"
        suite.rate(name, batch / 1e6, "M rows/s", ours, limit, bar=0.5, against="bare kernel")


def checked(suite: Suite) -> None:
    """What reject_nonfinite costs: two looks at every number. The first is one more read of all of it, before anything
    is applied, so that a push that is refused has changed nothing. The second is part of the pass, since lent memory
    may have changed; it should cost next to nothing."""
    megabytes, batch = (1, 2_000) if suite.short else (64, 100_000)
    second_look(suite, megabytes, batch)
    both_looks(suite, megabytes, batch)


def second_look(suite: Suite, megabytes: int, batch: int) -> None:
    """The kernels that look, beside those that do not, on the same plain arrays; one thread."""
    n, rows = megabytes * MB // 4 // 1024 * 1024, batch
    numbers = np.random.default_rng(2).permutation(rows).astype(np.uint32)
    for label in CHECKED:
        rule = RULES[label]
        row_adagrad = isinstance(rule, wl.RowAdagrad)
        with own_arrays() as own:
            w, g = filled(own, n), filled(own, n)
            state = [filled(own, n // DIM if row_adagrad else n) for _ in rule._state]
            given = rule._kind.value, rule._numbers()
            ours, limit = in_turns(
                *(
                    functools.partial(_native.limit_rule, *given, w, state, g, DIM, 1, looks=looks)
                    for looks in (True, False)
                ),
                length=suite.length,
            )
            name = f"second look, {label} {megabytes} MB, {threads_of(1)}"
            suite.rate(name, n * 4 / 1e9, "GB/s", ours, limit, bar=0.95, against="kernel that does not look")
            vectors = 0 if row_adagrad else len(rule._state)
            flat, grads = filled(own, (rows, DIM)), filled(own, (batch, DIM))
            of_rows = filled(own, (rows, max(vectors, 1) * DIM))
            heads = np.zeros((rows, 12 if row_adagrad else 8), np.uint8)
            ours, limit = in_turns(
                *(
                    functools.partial(
                        _native.limit_rule_rows, *given, flat, of_rows, heads, numbers, grads, looks=looks
                    )
                    for looks in (True, False)
                ),
                length=suite.length,
            )
        name = f"second look, {label} {batch:,} x {DIM}, 1 thread"
        suite.rate(name, batch / 1e6, "M rows/s", ours, limit, bar=0.95, against="kernel that does not look")


def both_looks(suite: Suite, megabytes: int, batch: int) -> None:
    """The same push with reject_nonfinite and without, of a tensor and of rows."""
    shape = (megabytes * MB // 4 // DIM, DIM)
    keys = np.random.default_rng(2).permutation(20 * batch)[:batch].astype(np.uint64)
    for label, threads in itertools.product(CHECKED, sorted({1, _core.cores()})):
        with wl.connect(threads=threads) as cluster:
            grad, grads = (filled(cluster.empty, size) for size in (shape, (batch, DIM)))
            tensors = [cluster.tensor(f"w{on}", shape, rule=RULES[label], reject_nonfinite=on) for on in (True, False)]
            tables = [cluster.table(f"t{on}", DIM, rule=RULES[label], reject_nonfinite=on) for on in (True, False)]
            ours, plain = in_turns(
                *(timed(lambda w=w: w.push(grad).wait()) for w in tensors),  # type: ignore[misc]  # noqa: B023
                length=suite.length,
            )
            of_rows, plain_rows = in_turns(
                *(timed(lambda t=t: t.push(keys, grads).wait()) for t in tables),  # type: ignore[misc]  # noqa: B023
                length=suite.length,
            )
        name = f"push {label} {megabytes} MB, reject_nonfinite, {threads_of(threads)}"
        suite.rate(name, shape[0] * DIM * 4 / 1e9, "GB/s", ours, plain, against="without it")
        name = f"push {label} {batch:,} x {DIM}, reject_nonfinite, {threads_of(threads)}"
        suite.rate(name, batch / 1e6, "M rows/s", of_rows, plain_rows, against="without it")


def _push(table: wl.Table, grads: Any) -> Callable[[Any], object]:
    return lambda keys: table.push(keys, grads).wait()


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


def in_python(suite: Suite) -> None:
    """Rules of the user's beside ours of the same name, which have all threads; they have one."""
    megabytes = 1 if suite.short else 64
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
            own = cluster.tensor("theirs", shape, rule=theirs)
            built_in = cluster.tensor("native", shape, rule=native)
            ours, limit = in_turns(
                timed(lambda: own.push(grad).wait()),  # noqa: B023 (called here)
                timed(lambda: built_in.push(grad).wait()),  # noqa: B023
                length=suite.length,
            )
        size = shape[0] * DIM * 4
        suite.rate(f"push {label} {megabytes} MB", size / 1e9, "GB/s", ours, limit, against="our rule")


def top_k(suite: Suite) -> None:
    """The 100 rows with the largest norms, of a table and of the same rows in one array."""
    rows, dim, k = (10_000, 16, 100) if suite.short else (5_000_000, 16, 100)
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
        ours, limit = in_turns(timed(lambda: table.top_k(k)), timed(in_numpy), length=suite.length)
    name = f"top {k} of {rows:,} rows x {dim}, {threads_of(_core.cores())}"
    suite.rate(name, rows / 1e6, "M rows/s", ours, limit, bar=1.0, against="numpy, einsum and argpartition")


#: What the suite measures, in order.
PARTS: list[Callable[[Suite], None]] = [dense, per_row, checked, in_python, top_k]
