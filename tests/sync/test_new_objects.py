"""An object that is made when workers have closed iterations already begins at their clocks."""

from typing import Any

import numpy as np
import pytest
from crew import together

import windlass as wl

ONE = np.ones(4, np.float32)


def close_some(worker: wl.Cluster, how: str) -> None:
    old = worker.tensor("old", 4, rule=wl.Sum(), sync=wl.BSP())
    for _ in range(3):
        if how == "step":
            with worker.step() as s:
                s.push_pull(old, ONE)
        elif how == "tick":
            worker.tick()
        else:
            old.push_pull(ONE)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["push_pull", "step", "tick"])
@pytest.mark.parametrize("sync", [wl.BSP(), wl.SSP(0)], ids=str)
def test_it_can_be_pulled_and_pushed_to(cluster: wl.Cluster, world: int, how: str, sync: wl.Sync) -> None:
    def work(worker: wl.Cluster) -> Any:
        close_some(worker, how)
        new = worker.tensor("new", 4, rule=wl.Sum(), sync=sync)
        first = new.pull(timeout=20).copy()
        return first, new.push_pull(ONE, timeout=20).copy(), worker.clock

    for first, after, _ in together(cluster, world, work):
        assert first.tolist() == [0] * 4 or sync == wl.SSP(0)
        assert after.tolist() == [world] * 4


@pytest.mark.parametrize("how", ["push_pull", "step"])
def test_tables_too(cluster: wl.Cluster, how: str) -> None:
    def work(worker: wl.Cluster) -> Any:
        close_some(worker, how)
        new = worker.table("new", 2, rule=wl.Sum(), sync=wl.BSP())
        assert new.pull([1, 2], timeout=20).tolist() == [[0, 0], [0, 0]]
        return new.push_pull([1, 2], np.ones((2, 2), np.float32), timeout=20).tolist()

    assert together(cluster, 2, work) == [[[2, 2], [2, 2]]] * 2
