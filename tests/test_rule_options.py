"""Options of any rule: gradients and weights that are kept within bounds."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers import numbers

import windlass as wl

BOUNDS = {"clip_value": 0.5, "clip_weights": (-0.75, 0.6)}
RULES: dict[str, wl.Rule] = {
    "SGD": wl.SGD(lr=0.1),
    "momentum": wl.SGD(lr=0.1, momentum=0.9),
    "Adagrad": wl.Adagrad(lr=0.1),
    "RowAdagrad": wl.RowAdagrad(lr=0.1),
    "Adam": wl.Adam(lr=0.01),
    "centered RMSProp": wl.RMSProp(lr=0.01, momentum=0.9, centered=True),
    "NAdam": wl.NAdam(lr=0.01),
    "Lion": wl.Lion(lr=0.01),
    "FTRL": wl.FTRL(),
    "Sum": wl.Sum(),
    "Assign": wl.Assign(),
    "Max": wl.Max(),
    "Min": wl.Min(),
    "Average": wl.Average(),
}


def bounded(rule: wl.Rule, **bounds: Any) -> wl.Rule:
    return dataclasses.replace(rule, **(bounds or BOUNDS))


def within(weights: np.ndarray) -> np.ndarray:
    return np.clip(weights, np.float32(-0.75), np.float32(0.6))


# -- the oracle: the same rule without bounds, given clipped gradients, its weights clipped by put() ------------------


@pytest.mark.parametrize("name", RULES)
def test_a_tensor_clips_gradients_before_and_weights_after_the_rule(cluster: wl.Cluster, name: str):
    shape = (300, 67)  # two shards, and pieces that do not come out even
    ours = cluster.tensor("ours", shape, rule=bounded(RULES[name]))
    plain = cluster.tensor("plain", shape, rule=RULES[name])
    for step in range(5):
        grad = numbers(*shape, seed=step)
        out = ours.push_pull(grad) if step % 2 else (ours.push(grad), ours.pull())[1]
        plain.push(np.clip(grad, -0.5, 0.5))
        plain.put(within(plain.pull()))
        np.testing.assert_array_equal(out, plain.pull())
        np.testing.assert_array_equal(ours.pull(), out)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dim", [5, 64])
def test_rows_of_a_table_are_those_of_a_tensor(cluster: wl.Cluster, name: str, dim: int):
    if name in (
        "momentum",
        "Adagrad",
        "Adam",
        "NAdam",
    ):  # a row counts its own updates, so all rows are touched at once
        touched = [list(range(200))] * 4
    else:
        touched = [list(range(step, 200, step + 1)) for step in range(4)]
    table = cluster.table("rows", dim, rule=bounded(RULES[name]))
    tensor = cluster.tensor("w", (200, dim), rule=bounded(RULES[name]))
    for step, rows in enumerate(touched):
        grad = numbers(len(rows), dim, seed=step)
        table.push(rows, grad)
        tensor[rows].push(grad)
    np.testing.assert_array_equal(table.pull(range(200)), tensor.pull())
    assert table.pull(range(200)).max() <= np.float32(0.6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_is_clipped_is_the_sum_over_repeated_keys(cluster: wl.Cluster, dtype: type):
    table = cluster.table("rows", 2, rule=wl.SGD(lr=1.0, clip_value=1.0))
    table.push([7, 8, 7], np.array([[3, 0.5], [3, -9], [-2.5, 0.25]], dtype))
    np.testing.assert_array_equal(table.pull([7, 8]), [[-0.5, -0.75], [-1, 1]])
    tensor = cluster.tensor("w", (9, 2), rule=wl.SGD(lr=1.0, clip_value=1.0))
    tensor[[7, 8, 7]].push(np.array([[3, 0.5], [3, -9], [-2.5, 0.25]], dtype))
    np.testing.assert_array_equal(tensor[[7, 8]].pull(), [[-0.5, -0.75], [-1, 1]])


@pytest.mark.parametrize("where", ["tensor", "table"])
def test_nan_stays_nan_and_infinity_becomes_the_bound(cluster: wl.Cluster, where: str):
    grad, rule = np.array([[np.nan, np.inf, -np.inf, 0.1]], np.float32), wl.SGD(lr=1.0, clip_value=1.0)
    if where == "tensor":
        got = cluster.tensor("w", (1, 4), rule=rule).push_pull(grad)
    else:
        got = cluster.table("t", 4, rule=rule).push_pull([1], grad)
    np.testing.assert_array_equal(got, np.array([[np.nan, -1, 1, -0.1]], np.float32))


def test_a_weight_that_is_nan_stays_nan(cluster: wl.Cluster):
    w = cluster.tensor("w", (2,), rule=wl.Sum(clip_weights=(-1, 1)))
    np.testing.assert_array_equal(w.push_pull(np.array([np.nan, 5], np.float32)), [np.nan, 1])


def test_weights_start_and_are_put_as_they_are(cluster: wl.Cluster):
    w = cluster.tensor("w", (2,), rule=wl.Sum(clip_weights=(-1, 1)), init=wl.Constant(3))
    np.testing.assert_array_equal(w.pull(), [3, 3])
    w.put(np.array([5, 0.5], np.float32))
    np.testing.assert_array_equal(w.pull(), [5, 0.5])
    np.testing.assert_array_equal(w.push_pull(np.zeros(2, np.float32)), [1, 0.5])


# -- they are structure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ({"clip_value": 0.1}, "rule=SGD(clip_value=0.1)"),
        ({"clip_weights": (-0.01, 0.01)}, "rule=SGD(clip_weights=(-0.01, 0.01))"),
        (
            {"schedule": wl.Schedule(warmup=5, decay="linear", updates=10, end=0.5)},
            "rule=SGD(schedule=Schedule(warmup=5, decay='linear', updates=10, end=0.5))",
        ),
        (
            {"schedule": wl.Schedule(decay="steps", updates=10, factor=0.5)},
            "rule=SGD(schedule=Schedule(warmup=0, decay='steps', updates=10, factor=0.5))",
        ),
        ({"schedule": wl.Schedule(warmup=5)}, "rule=SGD(schedule=Schedule(warmup=5))"),
    ],
)
@pytest.mark.parametrize("where", ["tensor", "table"])
def test_options_are_part_of_the_spec(cluster: wl.Cluster, where: str, option: Any, shown: str):
    def make(rule: wl.Rule) -> object:
        return cluster.tensor("x", (3,), rule=rule) if where == "tensor" else cluster.table("x", 3, rule=rule)

    make(wl.SGD(lr=0.1, **option))
    make(wl.SGD(lr=0.2, **option))
    with pytest.raises(wl.SpecMismatch) as caught:
        make(wl.SGD(lr=0.1))
    assert shown in str(caught.value).splitlines()[1]


@pytest.mark.parametrize("option", ["clip_value", "clip_weights", "schedule"])
def test_an_option_does_not_travel_with_a_push(cluster: wl.Cluster, option: str):
    w = cluster.tensor("w", (3,), rule=wl.SGD(lr=0.1))
    with pytest.raises(wl.InvalidArgument, match=f"{option} is fixed at creation.*; these can: dampening, lr, "):
        w.push(np.ones(3, np.float32), **{option: None})


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
@pytest.mark.parametrize("option", [{"clip_value": 1}, {"clip_weights": (0, 1)}])
def test_bounds_are_for_float32(cluster: wl.Cluster, dtype: type, option: Any):
    with pytest.raises(wl.InvalidArgument, match=r"'w': clip_value and clip_weights are for float32, not "):
        cluster.tensor("w", (3,), rule=wl.Sum(**option), dtype=dtype)


@pytest.mark.parametrize("value", [0, -1, 1e-50, float("nan"), float("inf"), True, "1", (1, 2)])
def test_a_clip_value_is_a_number_above_zero(value: Any):
    with pytest.raises(wl.InvalidArgument, match="SGD: clip_value must be a finite float32 above 0, or None, not "):
        wl.SGD(lr=0.1, clip_value=value)


@pytest.mark.parametrize("value", [1.0, (1,), (1, -1), (0, float("nan")), ("a", "b"), (0, 1, 2), (True, False)])
def test_clip_weights_are_two_numbers_in_order(value: Any):
    with pytest.raises(wl.InvalidArgument, match=r"Max: clip_weights must be \(lowest, highest\), .*, not "):
        wl.Max(clip_weights=value)


def test_a_rule_shows_the_options_it_has_behind_its_numbers():
    assert repr(wl.FTRL(l1=0.5)) == "FTRL(lr=0.1, beta=1.0, l1=0.5, l2=0.0)"
    assert repr(wl.Sum(clip_value=1, clip_weights=[0, 2])) == "Sum(clip_value=1.0, clip_weights=(0.0, 2.0))"
    assert wl.Sum(clip_value=1) == wl.Sum(clip_value=1.0) != wl.Sum()
    assert hash(wl.Sum(clip_weights=(0, 1))) == hash(wl.Sum(clip_weights=[0, 1]))
    with pytest.raises(TypeError):
        wl.Sum(1.0)  # type: ignore[misc]
