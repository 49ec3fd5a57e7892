"""The bench of rules runs, and its limits are the rules themselves."""

import numpy as np
import pytest
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass._cli import RulesPart
from windlass.bench import _native
from windlass.bench import rules as bench

OURS = ("windlass._rules.rule", "windlass._rules.optimizers")


def test_the_short_form_has_every_rule():
    figures = {figure.name: figure for figure in bench.run(Console(quiet=True), 0, short=True).figures}
    for label in bench.RULES:
        for form, bar in (
            (f"push {label} 1 MB, {_core.cores()} threads", 0.8),
            (f"push {label} 2,000 x 64, 1 thread", 0.5),
        ):
            figure = figures[form]
            assert figure.value > 0
            assert figure.limit is not None
            assert figure.bar == f">= {bar:g}"


def test_a_part_of_the_suite_can_be_measured_alone():
    assert [measure.__name__ for measure in bench.PARTS] == list(RulesPart)
    names = [figure.name for figure in bench.run(Console(quiet=True), 0, short=True, part="checked").figures]
    assert "second look, SGD 1 MB, 1 thread" in names
    assert all("second look" in name or "reject_nonfinite" in name for name in names)


def test_every_rule_is_measured_in_its_class():
    measured = {type(rule) for rule in bench.RULES.values()}
    assert {getattr(wl, name) for name in wl.__all__ if _is_rule(getattr(wl, name))} - {wl.Rule} <= measured


def _is_rule(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, wl.Rule) and thing.__module__ in OURS


@pytest.mark.parametrize("label", bench.RULES)
def test_the_limit_on_plain_arrays_is_the_rule(label: str):
    rule, dim, rows = bench.RULES[label], 64, 32
    random = np.random.default_rng(0)
    start, grad = (random.standard_normal((rows, dim), dtype=np.float32) for _ in range(2))
    per_row = isinstance(rule, wl.RowAdagrad)
    state = [np.full(rows if per_row else rows * dim, 0.5, np.float32) for _ in rule._state]
    w = start.reshape(-1).copy()
    _native.limit_rule(rule._kind.value, rule._numbers(), w, state, grad.reshape(-1), dim, 2, 1)
    with wl.connect(threads=1) as cluster:
        tensor = cluster.tensor("w", (rows, dim), rule=rule)
        shape = (rows,) if per_row else (rows, dim)
        given = {name: np.full(shape, 0.5, np.float32) for name in rule._state}
        tensor.put(start, state=given, updates=999)
        np.testing.assert_array_equal(tensor.push_pull(grad).reshape(-1), w)


@pytest.mark.parametrize("label", bench.RULES)
def test_the_limit_on_rows_of_plain_arrays_is_the_rule(label: str):
    rule, dim, rows = bench.RULES[label], 64, 32
    random = np.random.default_rng(0)
    numbers = random.permutation(rows).astype(np.uint32)[:20]
    grad = random.standard_normal((20, dim), dtype=np.float32)
    per_row = isinstance(rule, wl.RowAdagrad)
    vectors = 0 if per_row else len(rule._state)
    w, state = np.zeros((rows, dim), np.float32), np.zeros((rows, max(vectors, 1) * dim), np.float32)
    heads = np.zeros((rows, 12 if per_row else 8), np.uint8)
    _native.limit_rule_rows(rule._kind.value, rule._numbers(), w, state, heads, numbers, grad, 1)
    with wl.connect(threads=1) as cluster:
        table = cluster.table("t", dim, rule=rule)
        table.push(numbers.astype(np.int64), grad)
        np.testing.assert_array_equal(table.pull(np.arange(rows)), w)
