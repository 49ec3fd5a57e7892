"""Slots: a worker fills one array while requests use another."""

import numpy as np
import pytest
from helpers import Connect

import windlass as wl

N = 300_000


def test_a_loop_that_does_not_wait_has_two_of_everything(cluster: wl.Cluster):
    w = cluster.tensor("w", N, rule=wl.Sum())
    grads, landing = cluster.slots(N), cluster.slots(N)
    params, future = np.zeros(N, np.float32), None
    for step in range(1, 8):
        grad = grads.next()
        grad[:] = step
        if future is not None:
            params[:] = future.wait()
            assert (params == sum(range(step))).all()
        future = w.push_pull_async(grad, out=landing.next())
    assert (future.wait() == sum(range(8))).all()
    assert {id(grads.next()) for _ in range(5)} == {id(a) for a in grads.arrays}


def test_shapes_dtypes_and_counts(cluster: wl.Cluster):
    slots = cluster.slots((3, 4), np.int64, count=5)
    assert len(slots) == 5
    assert all(a.shape == (3, 4) and a.dtype == np.int64 for a in slots.arrays)
    assert repr(slots) == "<Slots, 5 of int64(3, 4)>"
    for wrong in (0, -1, 1.5, True, "two"):
        with pytest.raises(wl.InvalidArgument, match="count"):
            cluster.slots(3, count=wrong)


@pytest.mark.embedded("holds a shard's turn")
def test_an_array_that_is_under_way_is_waited_for_and_named_when_time_is_up(connect: Connect):
    with connect() as cluster:
        w = cluster.tensor("w", N, rule=wl.Sum())
        slots = cluster.slots(N)
        hold = wl._core.hold_tensor(w._core, 0)
        futures = []
        for _ in range(2):
            slots.next()[:] = 1
            futures.append(w.push(slots.arrays[slots._at]))
        with pytest.raises(wl.Timeout, match="all 2 arrays are used by requests"):
            slots.next(timeout=0.05)
        hold.release()
        assert slots.next() is slots.arrays[0]
        for future in futures:
            future.wait()
        assert (w.pull() == 2).all()


def test_a_closed_cluster_has_no_slots_to_give(connect: Connect):
    cluster = connect()
    slots = cluster.slots(5)
    cluster.close()
    with pytest.raises(wl.Closed):
        slots.next()
