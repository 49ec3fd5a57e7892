"""What servers compute is what numpy computes, whatever the numbers and the expression."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import windlass as wl

DIM = 4
Both = tuple[
    Any, Callable[[np.ndarray, np.ndarray], np.ndarray]
]  # an expression, and what numpy does with keys and rows

numbers: Any = st.one_of(
    st.integers(-3, 3).map(float), st.floats(width=32), st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])
)
keys: Any = st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1), st.sampled_from([2**53, 2**53 + 1, 2**64 - 1]))


@st.composite
def tables(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    found = draw(st.lists(keys, unique=True, max_size=12))
    row = st.lists(numbers, min_size=DIM, max_size=DIM)
    rows = draw(st.lists(row, min_size=len(found), max_size=len(found)))
    return np.array(found, np.uint64), np.array(rows, np.float32).reshape(-1, DIM)


def norm(_: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.sqrt(in_order(x * x))


def in_order(x: np.ndarray) -> np.ndarray:
    """Short rows are added from left to right."""
    total = np.zeros(len(x))
    for column in x.T:
        total = total + column
    return total


leaves: Any = st.one_of(
    st.integers(-DIM, DIM - 1).map(lambda c: (wl.row[c], lambda k, x: x[:, c])),
    st.floats().map(lambda v: (v, lambda k, x: np.full(len(x), v))),
    st.sampled_from(
        [
            (wl.row.norm(), norm),
            (wl.row.sum(), lambda k, x: in_order(x)),
            (wl.row.mean(), lambda k, x: in_order(x) / DIM),
            (wl.row.min() + 0.0, lambda k, x: x.min(1) + 0.0),  # of two zeros nobody says which is the smaller
            (wl.row.max() + 0.0, lambda k, x: x.max(1) + 0.0),
            (wl.row.absmax(), lambda k, x: abs(x).max(1)),
            (wl.row.updates, lambda k, x: np.ones(len(x))),
            (wl.key, lambda k, x: k.astype(np.float64)),
        ]
    ),
)


def calculated(children: Any) -> Any:
    def join(parts: tuple[str, Both, Both]) -> Both:
        sign, (a, f), (b, g) = parts
        if sign == "abs":
            return abs(a), lambda k, x: abs(f(k, x))
        if sign == "neg":
            return -a, lambda k, x: -f(k, x)
        how: Any = {
            "+": lambda p, q: p + q,
            "-": lambda p, q: p - q,
            "*": lambda p, q: p * q,
            "/": lambda p, q: p / q,
        }[sign]
        if isinstance(a, float) and isinstance(b, float):
            a = wl.row[0] - wl.row[0] + a  # or Python would do it
            return how(a, b), lambda k, x: how(x[:, 0] - x[:, 0] + f(k, x), g(k, x))
        return how(a, b), lambda k, x: how(f(k, x), g(k, x))

    return st.tuples(st.sampled_from(["+", "-", "*", "/", "abs", "neg"]), children, children).map(join)


values: Any = st.recursive(leaves, calculated, max_leaves=6)
COMPARISONS: dict[str, Any] = {
    "<": lambda p, q: p < q,
    "<=": lambda p, q: p <= q,
    ">": lambda p, q: p > q,
    ">=": lambda p, q: p >= q,
    "==": lambda p, q: p == q,
    "!=": lambda p, q: p != q,
}


def compared(parts: tuple[str, Both, Both]) -> Both:
    sign, (a, f), (b, g) = parts
    how = COMPARISONS[sign]
    if not isinstance(a, wl.types.Expression) or repr(a) == "wl.key":  # a key beside a number has rules of its own
        a, f = wl.row[1] * 1, lambda k, x: x[:, 1]
    return how(a, b), lambda k, x: how(f(k, x), g(k, x))


def beside_key(parts: tuple[str, int, int]) -> Both:
    sign, by, constant = parts
    how = COMPARISONS[sign]
    if by:
        return how(wl.key % by, constant), lambda k, x: how(k % np.uint64(by), np.uint64(constant))
    return how(wl.key, constant), lambda k, x: how(k, np.uint64(constant))


def combined(children: Any) -> Any:
    def join(parts: tuple[str, Both, Both]) -> Both:
        sign, (a, f), (b, g) = parts
        if sign == "~":
            return ~a, lambda k, x: ~f(k, x)
        if sign == "&":
            return a & b, lambda k, x: f(k, x) & g(k, x)
        return a | b, lambda k, x: f(k, x) | g(k, x)

    return st.tuples(st.sampled_from("&|~"), children, children).map(join)


conditions: Any = st.recursive(
    st.one_of(
        st.tuples(st.sampled_from(sorted(COMPARISONS)), values, values).map(compared),
        st.tuples(st.sampled_from(sorted(COMPARISONS)), st.sampled_from([0, 2, 7]), keys).map(beside_key),
    ),
    combined,
    max_leaves=4,
)


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.fixture
def table(cluster: wl.Cluster) -> wl.Table:
    return cluster.table("t", DIM, rule=wl.Assign())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_everything_that_can_be_asked_of_a_table(table: wl.Table):
    @settings(max_examples=settings().max_examples // 4)
    @given(tables(), conditions, values)
    def check(content: tuple[np.ndarray, np.ndarray], condition: Both, score: Both) -> None:
        held, rows = content
        table.delete(where=wl.key >= 0)
        table.push(held, rows).wait()
        x = rows.astype(np.float64)
        where, holds = condition
        with np.errstate(all="ignore"):
            some = np.broadcast_to(holds(held, x), len(held))
            by, scores = score
            ranked = np.broadcast_to(scores(held, x), len(held))[some]
        kept, numbers = held[some], x[some]
        assert table.count(where) == some.sum()
        assert sorted(k for chunk in table.keys(where, chunk_rows=3) for k in chunk.tolist()) == sorted(kept.tolist())
        finite = np.isfinite(numbers).all()
        if finite:  # rounded once for a shard, and once for the table
            total = abs(numbers).sum()
            assert abs(table.sum(where) - math.fsum(in_order(numbers))) <= 1e-15 * total
        else:
            assert same(table.sum(where), numbers.sum())
        assert table.nnz(where) == np.count_nonzero(numbers)
        if len(kept):
            assert same(table.min(where), numbers.min())
            assert same(table.max(where), numbers.max())
            assert same(table.norm(where, ord=math.inf), abs(numbers).max())
        counted = table.histogram(bins=[-2, -1, 0, 0.5, 3], where=where).counts
        assert counted.tolist() == np.histogram(numbers[~np.isnan(numbers)], [-2, -1, 0, 0.5, 3])[0].tolist()
        if isinstance(by, wl.types.Expression):
            top = table.top_k(5, by=by, where=where)
            order = np.lexsort((kept, np.where(np.isnan(ranked), np.inf, -ranked), np.isnan(ranked)))[:5]
            assert top.keys.tolist() == kept[order].tolist()
            assert all(same(a, b) for a, b in zip(top.scores.tolist(), ranked[order].tolist(), strict=True))
        assert table.delete(where=where) == some.sum()
        left = np.concatenate([*table.keys(), np.zeros(0, np.uint64)])
        assert sorted(left.tolist()) == sorted(held[~some].tolist())

    check()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_everything_that_can_be_asked_of_a_tensor(cluster: wl.Cluster, dtype: str):
    number: Any = (
        st.integers(-(2**63), 2**63 - 1) if dtype == "int64" else st.floats(width=32 if dtype == "float32" else 64)
    )
    tensors = {n: cluster.tensor(f"w{n}", (n, 3), rule=wl.Assign(), dtype=dtype) for n in (1, 5, 40)}

    @settings(max_examples=settings().max_examples // 8)
    @given(st.sampled_from(sorted(tensors)).flatmap(lambda n: st.lists(number, min_size=3 * n, max_size=3 * n)))
    def check(flat: list[Any]) -> None:
        x = np.array(flat, dtype).reshape(-1, 3)
        tensor = tensors[len(x)]
        tensor.push(x).wait()
        with np.errstate(all="ignore"):
            y = x.astype(np.float64)
            first = x[:, 0].astype(np.float64) > 0
        for where, some in ((None, np.ones(len(x), bool)), (wl.row[0] > 0, first)):
            z = x[some]
            assert tensor.count(where) == len(z)
            assert tensor.nnz(where) == np.count_nonzero(z)
            if len(z):
                assert same(tensor.min(where), z.min())
                assert same(tensor.max(where), z.max())
            if dtype == "int64":
                assert tensor.sum(where) == z.sum()
        top = tensor.top_k(3, by=1, largest=False)
        rows, score = np.arange(len(x)), y[:, 1]
        order = np.lexsort((rows, np.where(np.isnan(score), np.inf, score), np.isnan(score)))[:3]
        assert top.keys.tolist() == order.tolist()

    check()
