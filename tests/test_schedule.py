"""Schedules: the step size of an update follows from how many there were."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import SHARD, Connect, numbers

import windlass as wl

SCHEDULES = {
    "warmup": wl.Schedule(warmup=7),
    "linear": wl.Schedule(warmup=5, decay="linear", updates=20, end=0.1),
    "cosine": wl.Schedule(warmup=3, decay="cosine", updates=25),
    "inverse_root": wl.Schedule(warmup=4, decay="inverse_root"),
    "inverse_root updates": wl.Schedule(decay="inverse_root", updates=10, end=0.6),
    "steps": wl.Schedule(warmup=2, decay="steps", updates=6, factor=0.5),
}


def factor(s: wl.Schedule, count: int) -> float:
    """The formulas of docs/guide/rules.md."""
    if count <= s.warmup:
        return count / s.warmup
    t = count - 1 - s.warmup
    share = min(t / s.updates, 1.0) if s.updates else 1.0
    if s.decay == "linear":
        return 1 + (s.end - 1) * share
    if s.decay == "cosine":
        return s.end + (1 - s.end) * (1 + math.cos(math.pi * share)) / 2
    if s.decay == "inverse_root":
        over = s.updates or max(s.warmup, 1)
        return max(s.end, 1 / math.sqrt(1 + t / over))
    if s.decay == "steps":
        return float(s.factor ** (t // s.updates))
    return 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_update_has_the_step_size_of_its_number(cluster: wl.Cluster, name: str):
    schedule = SCHEDULES[name]
    w = cluster.tensor("w", (3,), rule=wl.SGD(lr=0.5, schedule=schedule))
    before, got = w.pull(), []
    for _ in range(40):
        after = w.push_pull(np.ones(3, np.float32))
        got.append(float(before[0] - after[0]))
        before = after
    np.testing.assert_allclose(got, [0.5 * factor(schedule, n) for n in range(1, 41)], atol=2e-6)


@pytest.mark.parametrize("rule", [wl.Adam, wl.NAdam, wl.RMSProp, wl.Lion, wl.Adadelta, wl.RowAdagrad])
def test_a_schedule_is_the_same_as_a_worker_that_says_lr(cluster: wl.Cluster, rule: Any):
    schedule = SCHEDULES["cosine"]
    ours = cluster.tensor("ours", (40, 3), rule=rule(lr=0.01, schedule=schedule), init=wl.Constant(1))
    theirs = cluster.tensor("theirs", (40, 3), rule=rule(lr=0.01), init=wl.Constant(1))
    for step in range(1, 35):
        grad = numbers(40, 3, seed=step)
        ours.push(grad)
        theirs.push(grad, lr=0.01 * factor(schedule, step))
    np.testing.assert_allclose(ours.pull(), theirs.pull(), rtol=1e-6)
    assert np.abs(ours.pull() - 1).min() > 0


def test_the_lr_of_a_push_is_multiplied_too(cluster: wl.Cluster):
    w = cluster.tensor("w", (1,), rule=wl.SGD(lr=100.0, schedule=wl.Schedule(warmup=4)))
    assert w.push_pull(np.ones(1, np.float32), lr=1.0)[0] == -0.25
    assert w.push_pull(np.ones(1, np.float32), lr=2.0)[0] == -1.25


def test_shards_of_a_tensor_count_for_themselves(cluster: wl.Cluster):
    w = cluster.tensor("w", (2, SHARD), rule=wl.SGD(lr=1.0, schedule=wl.Schedule(warmup=4)))
    assert w.shards == 2
    for _ in range(3):
        w[0:1].push(np.ones((1, SHARD), np.float32))
    w.push(np.ones((2, SHARD), np.float32))
    np.testing.assert_array_equal(w.pull()[:, 0], [-(0.25 + 0.5 + 0.75 + 1), -0.25])


def test_rows_of_a_table_have_the_number_of_their_shards_update(cluster: wl.Cluster):
    """A row that comes late is not warmed up anew."""
    table = cluster.table("t", 2, rule=wl.SGD(lr=1.0, schedule=wl.Schedule(warmup=4)))
    for _ in range(3):
        table.push([1], np.ones((1, 2), np.float32))
    assert table.push_pull([1], np.ones((1, 2), np.float32))[0, 0] == -2.5
    every = np.arange(5000)  # some of them with key 1
    table.push(every, np.ones((5000, 2), np.float32))
    rows = table.pull(every)
    assert rows[1, 0] == -3.5
    assert set(rows[:, 0].tolist()) == {-3.5, -1.0, -0.25}


def test_a_schedule_goes_on_where_a_snapshot_was_taken(connect: Connect):
    rule = wl.Adam(lr=0.01, schedule=SCHEDULES["linear"])
    with connect() as cluster, connect() as other:
        w, copy = cluster.tensor("w", (40, 3), rule=rule), other.tensor("w", (40, 3), rule=rule)
        for step in range(8):
            w.push(numbers(40, 3, seed=step))
        s = w.snapshot()
        copy.put(s.weights, state=s.state, updates=s.updates)
        for step in range(8, 12):
            w.push(numbers(40, 3, seed=step))
            copy.push(numbers(40, 3, seed=step))
        assert copy.fingerprint() == w.fingerprint()
        np.testing.assert_array_equal(copy.pull(), w.pull())


def test_the_count_of_a_schedule_is_part_of_the_fingerprint(connect: Connect):
    rule = wl.SGD(lr=0.0, schedule=wl.Schedule(warmup=5))
    with connect() as one, connect() as other:
        for cluster, pushes in ((one, 1), (other, 2)):
            w, t = cluster.tensor("w", (3,), rule=rule), cluster.table("t", 3, rule=rule)
            for _ in range(pushes):
                w.push(np.ones(3, np.float32))
                t.push([1], np.ones((1, 3), np.float32))
        assert one.tensor("w", (3,), rule=rule).fingerprint() != other.tensor("w", (3,), rule=rule).fingerprint()
        assert one.table("t", 3, rule=rule).fingerprint() != other.table("t", 3, rule=rule).fingerprint()


@pytest.mark.parametrize("kind", [wl.Sum, wl.Assign, wl.Max, wl.Min, wl.Average, wl.FTRL])
def test_rules_without_a_step_size_have_no_schedule(kind: Any):
    with pytest.raises(wl.InvalidArgument, match=f"{kind.__name__}: expected no schedule, .*; saw Schedule"):
        kind(schedule=wl.Schedule(warmup=5))


@pytest.mark.parametrize("value", ["cosine", 5, ("linear", 3)])
def test_a_schedule_is_a_schedule(value: Any):
    with pytest.raises(wl.InvalidArgument, match=r"SGD: schedule must be a windlass\.Schedule or None, not "):
        wl.SGD(lr=0.1, schedule=value)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "expected a warmup, a decay or both"),
        ({"decay": "exponential"}, "decay must be one of 'linear', 'cosine', 'inverse_root', 'steps' or None, not"),
        ({"decay": "linear"}, "decay='linear' needs updates of at least 1, not 0"),
        ({"decay": "steps", "updates": 0}, "decay='steps' needs updates"),
        ({"warmup": 5, "updates": 3}, "updates are those of a decay, and there is none; saw 3"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0, not -1"),
        ({"warmup": 1.5}, "warmup must be a whole number of at least 0, not 1.5"),
        ({"warmup": True}, "warmup must be a whole number of at least 0, not True"),
        ({"decay": "linear", "updates": "9"}, "updates must be a whole number of at least 0, not '9'"),
        ({"decay": "linear", "updates": 9, "end": -0.1}, "end must be a number from 0 to 1e\\+30, not -0.1"),
        ({"decay": "linear", "updates": 9, "end": float("nan")}, "end must be a number from 0 to 1e\\+30, not nan"),
        ({"decay": "steps", "updates": 9, "factor": 1.1}, "factor must be a number from 0 to 1, not 1.1"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(options: Any, what: str):
    with pytest.raises(wl.InvalidArgument, match=f"Schedule: {what}"):
        wl.Schedule(**options)
