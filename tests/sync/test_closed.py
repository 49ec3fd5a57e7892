"""Pulls at shards that their worker has closed and where its clock has not moved yet."""

import threading
from typing import Any

import numpy as np
import pytest
from crew import ONE, Crew, together, waits
from helpers import SHARD, held

import windlass as wl


@pytest.mark.parametrize("sync", ["bsp", "ssp:0"])
def test_a_pull_after_a_push_pull_that_timed_out_waits_for_its_update(crew: Crew, sync: str) -> None:
    first, second = crew.tensor(sync)
    with pytest.raises(wl.Timeout):
        first.push_pull(ONE, timeout=0.1)
    assert crew.workers[0].clock == 0  # at the shards it touched the iteration is closed all the same
    waiting = first.pull_async()
    assert waits(waiting)
    assert second.pull()[0] == (0 if sync == "bsp" else 1)  # at clock 0 there is nothing to wait for
    second.push_pull(10 * ONE)
    assert waiting.wait(10)[0] == 11
    assert waiting.seen.asked == 1
    assert waiting.seen.waited_for == 1
    assert first.push_pull_async(ONE).done() is False  # an iteration later
    assert crew.workers[0].clock == 1


def test_a_pull_waits_only_at_the_shards_that_its_worker_has_closed(crew: Crew) -> None:
    first, second = (w.tensor("w", (2, SHARD), rule=wl.Sum(), sync="bsp") for w in crew.workers)
    assert first.shards == 2
    row = np.ones((1, SHARD), np.float32)
    with pytest.raises(wl.Timeout):
        first[0:1].push_pull(row, timeout=0.1)
    assert (first[1:2].pull(timeout=10) == 0).all()  # that row is still open
    waiting = first.pull_async()
    assert waits(waiting)
    second[0:1].push_pull(row)
    assert waiting.wait(10)[:, 0].tolist() == [2, 0]


@pytest.mark.parametrize("sync", ["bsp", "ssp:0"])
def test_a_pull_of_rows_after_a_push_pull_that_timed_out_waits_for_its_update(crew: Crew, sync: str) -> None:
    first, _ = (w.table("t", 2, rule=wl.Sum(), sync=sync) for w in crew.workers)
    keys, rows = np.arange(50), np.ones((50, 2), np.float32)
    with pytest.raises(wl.Timeout):
        first.push_pull(keys, rows, timeout=0.1)
    waiting = first.pull_async(keys)
    assert waits(waiting)
    crew.workers[1].tick()
    assert (waiting.wait(10) == 1).all()


@pytest.mark.parametrize("sync", ["bsp", "ssp:0"])
def test_a_pull_in_a_step_after_a_push_pull_that_timed_out_waits_for_its_update(crew: Crew, sync: str) -> None:
    first, second = crew.tensor(sync)
    table = crew.workers[0].table("t", 2, rule=wl.Sum(), sync=sync)
    with pytest.raises(wl.Timeout):
        first.push_pull(ONE, timeout=0.1)
    with pytest.raises(wl.Timeout):
        table.push_pull([7], np.ones((1, 2), np.float32), timeout=0.1)
    got: list[Any] = []

    def step() -> None:
        with crew.workers[0].step() as s:
            got.extend([s.pull(first), s.pull(table, [7])])

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    second.push_pull(10 * ONE)
    crew.workers[1].tick()
    thread.join(10)
    assert [array.flat[0] for array in got] == [11, 1]
    assert crew.workers[0].clock == 1


def test_rows_ahead_have_all_pushes_but_the_last_so_many(cluster: wl.Cluster) -> None:
    keys, rows = np.arange(8), np.ones((8, 2), np.float32)

    def work(worker: wl.Cluster) -> int:
        table = worker.table("t", 2, rule=wl.Sum(), sync="bsp")
        for step, (batch, got) in enumerate(table.ahead([keys] * 12, delay=2)):
            assert 2 * (step - 2) <= got[0, 0] <= 2 * step  # of both workers
            table.push_pull_async(batch, rows)
        return worker.clock

    assert together(cluster, 2, work) == [11, 11]


@pytest.mark.embedded("what has left for servers elsewhere is not taken back")
def test_a_push_pull_that_is_taken_back_holds_up_nobody(crew: Crew) -> None:
    n = 300_000  # large enough to be left in the queues of its shards
    first, second = (w.tensor("w", n, rule=wl.SGD(lr=1.0), sync="bsp") for w in crew.workers)
    grad, out = (crew.workers[0].empty(n) for _ in range(2))
    grad[:] = 1
    with held(first, *range(first.shards)):
        future = first.push_pull_async(grad, out=out)
        assert future.cancel()
    assert (second.push_pull(np.full(n, 3, np.float32), timeout=10) == -3).all()
    assert (first.pull(timeout=10) == -3).all()


@pytest.mark.embedded("what has left for servers elsewhere is not taken back")
def test_a_push_that_is_taken_back_is_not_in_the_mean(crew: Crew) -> None:
    n = 300_000
    first, second = (w.tensor("w", n, rule=wl.SGD(lr=1.0), sync="bsp") for w in crew.workers)
    grad = crew.workers[0].empty(n)
    grad[:] = 100
    with held(first, *range(first.shards)):
        future = first.push(grad, weight=5.0)
        assert future.cancel()
    first.push(np.full(n, 2, np.float32))
    second.push(np.full(n, 4, np.float32))
    for worker in crew.workers:
        worker.tick()
    assert (first.pull(timeout=10) == -3).all()
