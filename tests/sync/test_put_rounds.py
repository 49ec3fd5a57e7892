"""Put and snapshot beside consistency: no contribution, no close, no gate."""

import numpy as np
import pytest
from crew import ONE, Crew, together, waits
from helpers import SHARD, Connect, numbers

import windlass as wl

RULES = [wl.SGD(lr=0.1, momentum=0.9), wl.Adam(lr=0.01), wl.RowAdagrad(lr=0.1)]


def steps(cluster: wl.Cluster, rule: wl.Rule, begin: int, start: wl.types.Snapshot | None = None) -> wl.types.Snapshot:
    """Five iterations of two workers, from weights and state that rank 0 has put."""
    shape = (SHARD // 8, 16)

    def work(worker: wl.Cluster) -> wl.types.Snapshot:
        w = worker.tensor("w", shape, rule=rule, init=wl.Normal(std=0.1), sync="bsp")
        if start is not None and worker.rank == 0:
            w.put(start.weights, state=start.state, updates=start.updates)
        for step in range(begin, begin + 5):
            w.push_pull(numbers(*shape, seed=100 * worker.rank + step))
        return w.snapshot()

    return together(cluster, 2, work)[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_two_workers_go_on_elsewhere_bit_by_bit(connect: Connect, rule: wl.Rule) -> None:
    with connect() as cluster, connect() as other:
        half = steps(cluster, rule, 0)
        whole = steps(cluster, rule, 5)
        copy = steps(other, rule, 5, half)
    np.testing.assert_array_equal(copy.weights, whole.weights)
    np.testing.assert_array_equal(copy.updates, whole.updates)
    for name, array in whole.state.items():
        np.testing.assert_array_equal(copy.state[name], array)


def test_what_waits_for_its_update_is_applied_to_the_new_weights(crew: Crew) -> None:
    first, second = crew.tensor("bsp", wl.SGD(lr=1.0))
    pushed = first.push_pull_async(2 * ONE)
    assert waits(pushed)
    second.put(100 * ONE)  # rank 1 has closed nothing, and waits for nobody
    assert waits(pushed)
    assert second.snapshot().weights.tolist() == [100] * 4
    np.testing.assert_array_equal(second.push_pull(4 * ONE), 97 * ONE)
    np.testing.assert_array_equal(pushed.wait(), 97 * ONE)
    assert first.snapshot().updates.tolist() == [1]


@pytest.mark.parametrize("sync", ["bsp", wl.SSP(0), wl.MaxDelay(0.0)], ids=str)
def test_a_put_closes_nothing_and_waits_for_nobody(crew: Crew, sync: object) -> None:
    first, second = crew.tensor(sync)
    first.put(3 * ONE)
    first.put(4 * ONE)
    assert [worker.clock for worker in crew.workers] == [0, 0]
    waiting = second.push_pull_async(ONE)
    assert waits(waiting)  # for rank 0, which has only put
    first.put(10 * ONE)
    assert waits(waiting)
    crew.workers[0].tick()
    np.testing.assert_array_equal(waiting.wait(), (11 if sync == "bsp" else 10) * ONE)
    assert first.snapshot().weights[0] == second.snapshot().weights[0]


def test_the_weight_of_a_put_is_none(crew: Crew) -> None:
    first, second = crew.tensor("bsp", wl.SGD(lr=1.0))
    first.put(10 * ONE)
    crew.workers[0].tick()
    np.testing.assert_array_equal(second.push_pull(ONE), 9 * ONE)
