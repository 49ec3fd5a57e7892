"""Tensors and tables do what a few lines of numpy do, whatever the order of calls.

The oracle keeps a float64 (or int64) array per tensor and a dictionary of rows per table. Gradients are small whole
numbers, so that Sum, Max, Min and Assign are exact in every dtype; optimizers are compared within a tolerance.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import SHARD, Connect, new_app
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import windlass as wl
from windlass.testing import Servers

START = 0.5  # what every weight starts with; int64 starts with 0
Apply = Callable[[np.ndarray, np.ndarray, np.ndarray], None]  # weights, state, gradient: rows of each, in place


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A rule, and what it does in numpy to a row."""

    rule: wl.Rule
    apply: Apply
    combine: Callable[[list[np.ndarray]], np.ndarray]  # the gradients of one place, in order of occurrence
    exact: bool


def sgd(lr: float, decay: float) -> Apply:
    def apply(w: np.ndarray, state: np.ndarray, g: np.ndarray) -> None:
        w -= lr * (g + decay * w)

    return apply


def momentum(lr: float, factor: float) -> Apply:
    def apply(w: np.ndarray, state: np.ndarray, g: np.ndarray) -> None:
        state[...] = factor * state + g
        w -= lr * state

    return apply


def adagrad(lr: float, eps: float) -> Apply:
    def apply(w: np.ndarray, state: np.ndarray, g: np.ndarray) -> None:
        state += g * g
        w -= lr * g / (np.sqrt(state) + eps)

    return apply


def row_adagrad(lr: float, eps: float) -> Apply:
    def apply(w: np.ndarray, state: np.ndarray, g: np.ndarray) -> None:
        state += np.mean(g * g)
        w -= lr * g / (np.sqrt(state) + eps)

    return apply


def plain(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Apply:
    def apply(w: np.ndarray, state: np.ndarray, g: np.ndarray) -> None:
        w[...] = function(w, g)

    return apply


def last(_: np.ndarray, g: np.ndarray) -> np.ndarray:
    return g


def added(grads: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, grads)


def largest(grads: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.maximum, grads)


def smallest(grads: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.minimum, grads)


def mean(grads: list[np.ndarray]) -> np.ndarray:
    return added(grads) / len(grads)


ORACLES = {
    "SGD": Oracle(wl.SGD(lr=0.125, weight_decay=0.01), sgd(0.125, 0.01), added, False),
    "momentum": Oracle(wl.SGD(lr=0.01, momentum=0.5), momentum(0.01, 0.5), added, False),
    "Adagrad": Oracle(wl.Adagrad(lr=0.1, eps=1e-6), adagrad(0.1, 1e-6), added, False),
    "RowAdagrad": Oracle(wl.RowAdagrad(lr=0.1, eps=1e-6), row_adagrad(0.1, 1e-6), added, False),
    "Sum": Oracle(wl.Sum(), plain(np.add), added, True),
    "Max": Oracle(wl.Max(), plain(np.maximum), largest, True),
    "Min": Oracle(wl.Min(), plain(np.minimum), smallest, True),
    "Assign": Oracle(wl.Assign(), plain(last), operator.itemgetter(-1), True),
    "Average": Oracle(wl.Average(), plain(last), mean, False),
}
SPECS = [(name, "float32") for name in ORACLES] + [
    (name, d) for name in ("Sum", "Max", "Min") for d in ("float64", "int64")
]
SHAPES = [(6,), (5, 3), (2, 2, 3), (4, SHARD // 2 + 700)]  # the last has a shard per row
DIMS = [1, 5, 16]
KEYS = [0, 1, 2, 3, 7, 255, 256, -1, -2, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63), 10**18]


def combined(oracle: Oracle, places: list[int], grads: np.ndarray) -> dict[int, np.ndarray]:
    """One gradient per place, in order of occurrence."""
    found: dict[int, list[np.ndarray]] = {}
    for place, grad in zip(places, grads, strict=True):
        found.setdefault(place, []).append(grad)
    return {place: oracle.combine(together) for place, together in found.items()}


def same(oracle: Oracle, got: Any, expected: np.ndarray) -> None:
    if oracle.exact:
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


class TensorModel:
    def __init__(self, tensor: wl.Tensor, oracle: Oracle) -> None:
        self.tensor, self.oracle = tensor, oracle
        kept = np.int64 if tensor.dtype == "int64" else np.float64
        self.weights = np.full(tensor.shape, 0 if tensor.dtype == "int64" else START, kept)
        self.state = np.zeros(tensor.shape, kept)
        self.pushes = 0
        # A reader that follows by version.
        self.mirror = np.zeros(tensor.shape, tensor.dtype)
        self.version: Any = None
        self.seen = -1

    def push(self, places: list[int], grads: np.ndarray) -> None:
        for place, grad in combined(self.oracle, places, grads).items():
            row = slice(place, place + 1)
            self.oracle.apply(self.weights[row], self.state[row], grad[None])
        self.pushes += bool(places)


class TableModel:
    def __init__(self, table: wl.Table, oracle: Oracle) -> None:
        self.table, self.oracle = table, oracle
        self.rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def row(self, key: int, create: bool) -> np.ndarray:
        if key not in self.rows:
            made = np.full(self.table.dim, START), np.zeros(self.table.dim)
            if not create:
                return made[0]
            self.rows[key] = made
        return self.rows[key][0]

    def push(self, keys: list[int], grads: np.ndarray) -> None:
        for key, grad in combined(self.oracle, keys, grads).items():
            self.row(key, True)
            self.oracle.apply(*self.rows[key], grad)

    def pull(self, keys: list[int], create: bool) -> np.ndarray:
        return np.array([self.row(key, create) for key in keys]).reshape(len(keys), self.table.dim)


seeds = st.integers(0, 2**16)
choices = st.integers(0, 2**16)  # which of the objects
hows = st.sampled_from(["push", "push and wait", "push_pull", "push_pull_async"])
dtypes = st.sampled_from(["float32", "float32", "bfloat16", "float16"])
key_lists = st.lists(st.sampled_from(KEYS) | st.integers(0, 60) | st.integers(-(2**63), 2**63 - 1), max_size=40)


@st.composite
def selections(draw: st.DrawFn) -> Callable[[int], Any]:
    """Some of n rows: all, a slice, or a list."""
    kind = draw(st.sampled_from(["all", "slice", "list"]))
    numbers = draw(st.lists(st.integers(-1000, 1000), max_size=8))
    if kind == "all":
        return lambda n: None
    if kind == "slice":
        begin, end = draw(st.integers(-12, 12) | st.none()), draw(st.integers(-12, 12) | st.none())
        return lambda n: slice(begin, end)
    return lambda n: [i % (2 * n) - n for i in numbers]


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape)


def as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


class Machine(RuleBasedStateMachine):
    def __init__(self, connect: Connect = lambda: wl.connect(threads=2)) -> None:
        super().__init__()
        self.cluster = connect()
        self.tensors: list[TensorModel] = []
        self.tables: list[TableModel] = []

    def teardown(self) -> None:
        self.cluster.close()

    @initialize()
    def first_objects(self) -> None:
        self.make_tensor(("SGD", "float32"), (5, 3))
        self.make_table("Sum", 5)

    @rule(spec=st.sampled_from(SPECS), shape=st.sampled_from(SHAPES))
    def make_tensor(self, spec: tuple[str, str], shape: tuple[int, ...]) -> None:
        name, dtype = spec
        init = wl.Zeros() if dtype == "int64" else wl.Constant(START)
        tensor = self.cluster.tensor(
            f"tensor {len(self.tensors)}", shape, rule=ORACLES[name].rule, dtype=dtype, init=init
        )
        self.tensors.append(TensorModel(tensor, ORACLES[name]))

    @rule(name=st.sampled_from(sorted(ORACLES)), dim=st.sampled_from(DIMS))
    def make_table(self, name: str, dim: int) -> None:
        table = self.cluster.table(f"table {len(self.tables)}", dim, rule=ORACLES[name].rule, init=wl.Constant(START))
        self.tables.append(TableModel(table, ORACLES[name]))

    @rule(which=choices, select=selections(), seed=seeds, how=hows, dtype=dtypes, registered=st.booleans())
    def push_tensor(self, which: int, select: Any, seed: int, how: str, dtype: str, registered: bool) -> None:
        model = self.tensors[which % len(self.tensors)]
        tensor, n = model.tensor, len(model.tensor)
        rows = select(n)
        view = tensor if rows is None else tensor[rows]
        places = np.arange(n)[slice(None) if rows is None else np.array(rows, int) if isinstance(rows, list) else rows]
        grads = whole_numbers(seed, *view.shape)
        sent = as_dtype(grads, dtype if tensor.dtype == "float32" else tensor.dtype)
        if registered:
            array = self.cluster.empty(sent.shape, sent.dtype)
            array[...] = sent
            sent = array
        model.push(places.tolist(), grads)
        expected = model.weights[places]
        if how == "push":
            view.push(sent)
        elif how == "push and wait":
            view.push(sent).wait()
        elif how == "push_pull":
            same(model.oracle, view.push_pull(sent), expected)
        else:
            same(model.oracle, view.push_pull_async(sent).wait(), expected)

    @rule(which=choices, select=selections(), asynchronous=st.booleans())
    def pull_tensor(self, which: int, select: Any, asynchronous: bool) -> None:
        model = self.tensors[which % len(self.tensors)]
        rows = select(len(model.tensor))
        view = model.tensor if rows is None else model.tensor[rows]
        expected = model.weights[slice(None) if rows is None else np.array(rows, int) if rows == [] else rows]
        same(model.oracle, view.pull_async().wait() if asynchronous else view.pull(), expected)

    @rule(which=choices)
    def follow_tensor(self, which: int) -> None:
        model = self.tensors[which % len(self.tensors)]
        got = model.tensor.pull_newer(model.version, out=model.mirror)
        assert got.value is model.mirror
        assert got.changed == (model.pushes > model.seen)
        model.version, model.seen = got.version, model.pushes
        same(model.oracle, model.mirror, model.weights)

    @rule(which=choices, keys=key_lists, seed=seeds, how=hows, dtype=dtypes, unsigned=st.booleans())
    def push_table(self, which: int, keys: list[int], seed: int, how: str, dtype: str, unsigned: bool) -> None:
        model = self.tables[which % len(self.tables)]
        grads = whole_numbers(seed, len(keys), model.table.dim)
        sent, array = as_dtype(grads, dtype), np.array(keys, np.int64)
        array = array.view(np.uint64) if unsigned else array
        model.push(keys, grads)
        expected = model.pull(keys, True)
        if how == "push":
            model.table.push(array, sent)
        elif how == "push and wait":
            model.table.push(array, sent).wait()
        elif how == "push_pull":
            same(model.oracle, model.table.push_pull(array, sent), expected)
        else:
            same(model.oracle, model.table.push_pull_async(array, sent).wait(), expected)

    @rule(which=choices, keys=key_lists, create=st.booleans(), asynchronous=st.booleans())
    def pull_table(self, which: int, keys: list[int], create: bool, asynchronous: bool) -> None:
        model = self.tables[which % len(self.tables)]
        array = np.array(keys, np.int64)
        if asynchronous:
            got = model.table.pull_async(array, create=create).wait()
        else:
            got = model.table.pull(array, create=create)
        same(model.oracle, got, model.pull(keys, create))

    @rule(which=choices, first=st.integers(0, 10**6), n=st.integers(100, 3000), seed=seeds)
    def grow_table(self, which: int, first: int, n: int, seed: int) -> None:
        model = self.tables[which % len(self.tables)]
        keys = list(range(first, first + n))
        grads = whole_numbers(seed, n, model.table.dim)
        model.push(keys, grads)
        model.table.push(np.array(keys), grads.astype(np.float32))

    @rule(which=choices, keys=key_lists, share=st.integers(0, 3))
    def delete_rows(self, which: int, keys: list[int], share: int) -> None:
        model = self.tables[which % len(self.tables)]
        gone = list(dict.fromkeys(keys + [k for k in model.rows if share and k % 4 < share]))
        assert model.table.delete(np.array(gone, np.int64)) == sum(k in model.rows for k in gone)
        for key in gone:
            model.rows.pop(key, None)

    @rule(which=choices, chunk_rows=st.integers(50, 2000))
    def export_table(self, which: int, chunk_rows: int) -> None:
        model = self.tables[which % len(self.tables)]
        exported: list[int] = []
        for chunk in model.table.export(chunk_rows=chunk_rows):
            assert 0 < len(chunk.keys) <= chunk_rows
            keys = chunk.keys.view(np.int64).tolist()
            same(model.oracle, chunk.weights, np.array([model.rows[k][0] for k in keys]))
            exported += keys
        assert len(exported) == len(model.rows)
        assert set(exported) == set(model.rows)

    @rule(which=choices)
    def fingerprint_sees_pushes_and_nothing_else(self, which: int) -> None:
        model = self.tables[which % len(self.tables)]
        before = model.table.fingerprint()
        model.table.pull(np.array(KEYS), create=False)
        assert model.table.fingerprint() == before

    @invariant()
    def tables_have_as_many_rows_as_the_oracle(self) -> None:
        for model in self.tables:
            assert len(model.table) == len(model.rows)


@pytest.mark.timeout(3600)
class TestOracle(Machine.TestCase):  # type: ignore[misc, name-defined]
    """Runs the machine; --accurate gives it longer."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_the_oracle_holds_on_servers(pair_of: Callable[[str], Servers], kind: str):
    pair = pair_of(kind)
    fewer = settings(max_examples=settings.default.max_examples // 8)
    run_state_machine_as_test(lambda: Machine(lambda: pair.connect(app=new_app())), settings=fewer)
