"""Delays: a worker goes on while its requests travel, but never further than it may."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SHARD, held, numbers, rng

import windlass as wl

SIZES = [5, 1 << 19]  # one that small requests take, and one whose registered arrays are used in place
SHORT_S = 0.2


def ones(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rule", [wl.SGD(lr=0.1, momentum=0.9), wl.Adam()], ids=["momentum", "Adam"])
def test_without_a_delay_it_is_the_plain_loop(cluster: wl.Cluster, rule: wl.Rule, n: int):
    a = cluster.tensor("a", n, rule=rule, init=wl.Constant(0.5))
    b = cluster.tensor("b", n, rule=rule, init=wl.Constant(0.5))
    with b.delayed(0) as d:
        plain, weights = a.pull(), d.weights
        for step in range(6):
            noise = numbers(n, seed=step)
            plain, weights = a.push_pull(plain + noise), d.push_pull(weights + noise, lr=rule.lr)
            np.testing.assert_array_equal(weights, plain)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_weights_are_at_most_so_many_steps_old_and_all_there_at_the_end(cluster: wl.Cluster, n: int, delay: int):
    w = cluster.tensor("w", n, rule=wl.Sum())
    grads = cluster.slots(n, count=delay + 1)
    d, seen = w.delayed(delay), []
    for step in range(1, 20):
        grad = grads.next()
        grad[:] = 1
        weights = d.push_pull(grad)
        assert step - delay <= weights[0] <= step
        assert (weights == weights[0]).all()
        seen.append(weights[0])
    assert seen == sorted(seen)
    assert (d.finish() == 19).all()
    assert (d.weights == 19).all()
    assert (w.pull() == 19).all()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_worker_stops_exactly_when_the_push_pull_so_many_steps_back_is_not_done(
    cluster: wl.Cluster, n: int, delay: int
):
    w = cluster.tensor("w", n, rule=wl.Sum(), init=wl.Constant(7))
    d = w.delayed(delay)
    with held(w, *range(w.shards)) as release:
        for _ in range(delay):
            assert (d.push_pull(ones(n)) == 7).all()
        with pytest.raises(wl.Timeout):
            d.push_pull(ones(n), timeout=SHORT_S)
        with pytest.raises(wl.Timeout):  # and sends nothing as long as that is so
            d.push_pull(ones(n), timeout=SHORT_S)
        assert (d.weights == 7).all()
        release()
    assert (d.push_pull(ones(n)) >= 8 + 1).all()
    assert (d.finish() == 7 + delay + 2).all()
    assert (w.pull() == 7 + delay + 2).all()


@pytest.mark.parametrize("delay", [1, 2])
def test_an_array_that_was_returned_is_not_written_before_the_next_call(cluster: wl.Cluster, delay: int):
    n = SIZES[1]
    w = cluster.tensor("w", n, rule=wl.Sum())
    d, arrays = w.delayed(delay), set()
    for step in range(8):
        weights = d.push_pull(ones(n))
        arrays.add(weights.ctypes.data)
        first = weights[0]
        d_next = w.push_pull(np.zeros(n, np.float32))  # whatever was under way has landed by now
        assert (d_next == step + 1).all()
        assert (weights == first).all()
    d.finish()
    assert 2 <= len(arrays) <= delay + 2


@pytest.mark.parametrize("delay", [0, 2])
def test_an_error_is_raised_by_a_later_call_and_the_loop_can_go_on(cluster: wl.Cluster, delay: int):
    w = cluster.tensor("w", 4, rule=wl.Sum(), reject_nonfinite=True)
    d, raised = w.delayed(delay), 0
    for step in range(6):
        try:
            d.push_pull(np.full(4, np.nan, np.float32) if step == 1 else ones(4))
        except wl.NonFinite:
            raised += 1
            assert step <= 1 + delay
    weights = d.finish()
    assert raised == 1
    sent = weights[0]
    assert sent in (4, 5)  # the call that raised may have sent its own, or not
    assert (w.pull() == sent).all()


def test_many_errors_leave_the_weights_that_the_caller_has(cluster: wl.Cluster):
    n = SIZES[1]
    w = cluster.tensor("w", n, rule=wl.Sum(), init=wl.Constant(3), reject_nonfinite=True)
    d = w.delayed(1)
    weights = d.weights
    for _ in range(10):
        with pytest.raises(wl.NonFinite), d:
            d.push_pull(np.full(n, np.inf, np.float32))
    assert d.weights is weights
    assert (weights == 3).all()
    assert (d.push_pull(ones(n)) >= 3).all()
    assert (d.finish() == 4).all()


def test_a_gradient_of_another_shape_is_refused_and_nothing_lost(cluster: wl.Cluster):
    w = cluster.tensor("w", 4, rule=wl.Sum())
    d = w.delayed(1)
    for _ in range(5):  # more often than there are arrays
        with pytest.raises(wl.ShapeMismatch, match="'w'"):
            d.push_pull(ones(5))
    d.push_pull(ones(4))
    assert d.finish().tolist() == [1, 1, 1, 1]


def test_rows_hyperparameters_and_torch(cluster: wl.Cluster):
    w = cluster.tensor("w", (4, SHARD), rule=wl.SGD(lr=1.0))
    with w[1:3].delayed(1) as d:
        for _ in range(3):
            weights = d.push_pull(torch.ones(2, SHARD), lr=0.5)
            assert isinstance(weights, torch.Tensor)
    assert w.pull()[:, 0].tolist() == [0, -1.5, -1.5, 0]
    assert isinstance(d.weights, torch.Tensor)  # as the gradients were
    assert d.weights.shape == (2, SHARD)
    assert repr(d).startswith("<Delayed by 1, 0 under way, <Tensor 'w'")


def test_a_block_that_raises_does_not_wait(cluster: wl.Cluster):
    w = cluster.tensor("w", SIZES[1], rule=wl.Sum())
    d = w.delayed(1)

    def block() -> None:
        with d:
            d.push_pull(ones(SIZES[1]))
            raise KeyError("mine")

    with held(w, *range(w.shards)):
        with pytest.raises(KeyError, match="mine"):
            block()
        assert (d.weights == 0).all()
    assert (w.pull() == 1).all()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None, "2"])
def test_a_delay_is_a_whole_number(cluster: wl.Cluster, wrong: Any):
    w, t = cluster.tensor("w", 4, rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match=r"tensor 'w': delay must be a whole number of at least 0, not"):
        w.delayed(wrong)
    with pytest.raises(wl.InvalidArgument, match=r"table 't': delay must be a whole number of at least 0, not"):
        t.ahead([[1]], delay=wrong)
    assert w.delayed(np.int64(2)).delay == 2


# -- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_rows_lack_at_most_the_last_so_many_steps(cluster: wl.Cluster, delay: int):
    table, step = cluster.table("t", 3, rule=wl.Sum()), 0
    for keys, rows in table.ahead([[7, 8, 7]] * 12, delay=delay):
        assert rows.shape == (3, 3)
        assert step - delay <= rows[1, 0] <= step
        table.push(keys, np.ones((3, 3), np.float32))
        step += 1
    assert step == 12
    assert table.pull([7, 8])[:, 0].tolist() == [24, 12]


@pytest.mark.parametrize("delay", [0, 1, 5, 100])
def test_batches_come_in_order_with_the_rows_of_their_keys(cluster: wl.Cluster, delay: int):
    table = cluster.table("t", 4, rule=wl.Sum(), init=wl.Normal())
    random = rng(delay)
    batches = [random.integers(0, 1000, random.integers(0, 3000)) for _ in range(20)]
    got = list(table.ahead(batches, delay=delay))
    assert len(got) == len(batches)
    for batch, (keys, rows) in zip(batches, got, strict=True):
        assert keys is batch
        np.testing.assert_array_equal(rows, table.pull(batch))


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_batch_is_asked_for_so_many_steps_early(cluster: wl.Cluster, delay: int):
    table, asked = cluster.table("t", 1, rule=wl.Sum()), 0

    def batches() -> Iterator[list[int]]:
        nonlocal asked
        for i in range(8):
            asked += 1
            yield [i]

    for used, _ in enumerate(table.ahead(batches(), delay=delay), 1):
        assert asked == min(used + delay, 8)


def test_rows_that_have_come_are_not_waited_for_and_others_are(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Sum())
    ahead = table.ahead([[1], [2], [3], [4]], delay=1, timeout=2.0)
    assert next(ahead)[0] == [1]
    table.pull([2])  # its rows have come by now
    with held(table, *range(256)):
        assert next(ahead)[0] == [2]
        with pytest.raises(wl.Timeout):
            next(ahead)
    table.pull([3])


def test_rows_ahead_need_not_be_made_and_may_be_of_another_dtype(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Sum(), init=wl.Constant(3))
    ((keys, rows),) = table.ahead([torch.tensor([1, 2])], dtype="float16", create=False)
    assert isinstance(keys, torch.Tensor)
    assert rows.dtype == torch.float16
    assert (rows == 3).all()
    assert len(table) == 0


def test_wrong_keys_are_named_when_they_are_asked_for(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Sum())
    ahead = table.ahead([[1], [0.5], [2]], delay=1)
    with pytest.raises(wl.InvalidArgument, match="table 't', keys"):
        next(ahead)
