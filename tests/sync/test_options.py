"""Options of rules under BSP: they are about the update that all workers make together."""

import numpy as np
import pytest
from crew import Crew

import windlass as wl


@pytest.mark.parametrize("n", [5, 1 << 19])  # one that is added up, and one whose registered arrays are used in place
def test_under_bsp_the_mean_of_the_workers_is_clipped(crew: Crew, n: int):
    rule = wl.SGD(lr=1.0, clip_value=1.0, clip_weights=(-0.9, 1.0))
    workers = [worker.tensor("w", n, rule=rule, sync="bsp") for worker in crew.workers]
    grads, outs = ([worker.empty(n) for worker in crew.workers] for _ in range(2))
    for grad, value in zip(grads, (3.0, -2.0), strict=True):
        grad[:] = value  # each would be clipped alone; the mean is 0.5
    grads[0][::2], grads[1][::2] = 7.0, -1.0  # whose mean is 3
    later = workers[0].push_pull_async(grads[0], out=outs[0])
    workers[1].push_pull(grads[1], out=outs[1])
    later.wait(10)
    expected = np.where(np.arange(n) % 2 == 0, np.float32(-0.9), np.float32(-0.5))
    for out in outs:
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("n", [5, 1 << 19])
def test_under_bsp_a_step_is_as_long_as_the_clipped_mean(crew: Crew, n: int):
    workers = [worker.tensor("w", n, rule=wl.SGD(lr=0.5, clip_value=1.0), sync="bsp") for worker in crew.workers]
    grads, outs = ([worker.empty(n) for worker in crew.workers] for _ in range(2))
    for grad in grads:
        grad[:] = 30.0
    for total in (-0.5, -1.0):
        later = workers[0].push_pull_async(grads[0], out=outs[0])
        workers[1].push_pull(grads[1], out=outs[1])
        later.wait(10)
        assert np.all(outs[0] == total)
        assert np.all(outs[1] == total)


def test_under_bsp_the_mean_of_rows_is_clipped(crew: Crew):
    tables = [w.table("t", 2, rule=wl.SGD(lr=1.0, clip_value=1.0), sync="bsp") for w in crew.workers]
    for table, rows in zip(tables, ([[3, 7]], [[-2, -1]]), strict=True):
        table.push([1], np.array(rows, np.float32))
    for worker in crew.workers:
        worker.tick()
    np.testing.assert_array_equal(tables[0].pull([1]), [[-0.5, -1]])


def test_under_bsp_all_workers_pushes_are_one_update(crew: Crew):
    both = [w.tensor("w", (5,), rule=wl.SGD(lr=1.0, schedule=wl.Schedule(warmup=4)), sync="bsp") for w in crew.workers]
    for total in (-0.25, -0.75, -1.5, -2.5, -3.5):
        later = both[0].push_pull_async(np.ones(5, np.float32))
        assert both[1].push_pull(np.ones(5, np.float32))[0] == total
        later.wait(10)
