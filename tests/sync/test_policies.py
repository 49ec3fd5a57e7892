"""What each policy promises of pushes and pulls, inside the process and over both socket kinds."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from crew import ONE, Crew, together, waits
from helpers import Connect

import windlass as wl


def test_ssp_lets_nobody_be_further_ahead_than_it_says(crew: Crew) -> None:
    fast, slow = crew.tensor("ssp:2")
    for clock in range(2):
        assert fast.push_pull(ONE)[0] == clock + 1  # its own pushes are always there
    third = fast.push_pull_async(ONE)  # pulls at clock 3, and the other is at 0
    assert waits(third)
    slow.push_pull(10 * ONE)
    assert third.wait(10)[0] == 13  # the other has clock 1 now
    seen = third.seen
    assert (seen.asked, seen.clock, seen.staleness, seen.waited_for) == (3, 1, 2, 1)
    assert seen.waited_seconds > 0.1


def test_a_tick_closes_what_was_not_pushed_to(crew: Crew) -> None:
    fast, _ = crew.tensor("ssp:0")
    waiting = fast.push_pull_async(ONE)
    assert waits(waiting)
    crew.workers[1].tick()  # it pushed nothing
    assert waiting.wait(10)[0] == 1


def test_a_tick_closes_objects_that_its_worker_never_opened(cluster: wl.Cluster) -> None:
    first, second = (cluster.worker(rank, 2) for rank in range(2))
    w = first.tensor("w", 4, rule=wl.Sum(), sync="ssp:0")
    waiting = w.push_pull_async(ONE)
    assert waits(waiting)
    second.tick()
    assert waiting.wait(10)[0] == 1
    for worker in (first, second):
        worker.close()


def test_asp_never_waits_and_says_how_stale_it_was(crew: Crew) -> None:
    fast, _ = crew.tensor("asp")
    for clock in range(5):
        future = fast.push_pull_async(ONE)
        assert future.wait(10)[0] == clock + 1
    crew.workers[0].tick()
    pulled = fast.pull_async()
    pulled.wait(10)
    assert pulled.seen.staleness == 5
    assert pulled.seen.waited_for is None


def test_max_delay_waits_only_for_somebody_who_is_late(crew: Crew) -> None:
    fast, slow = crew.tensor(wl.MaxDelay(0.4))
    assert fast.push_pull(ONE)[0] == 1  # nobody is late yet
    time.sleep(0.5)
    waiting = fast.push_pull_async(ONE)
    assert waits(waiting)
    assert slow.push_pull(ONE)[0] == 3  # the lower clock never waits
    assert waiting.wait(10)[0] == 3


def test_max_delay_with_three_slow_workers_does_not_deadlock(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> float:
        w = worker.tensor("w", 4, rule=wl.Sum(), sync=wl.MaxDelay(0.005))
        for _ in range(15):
            if worker.rank != 0:
                time.sleep(0.01 * worker.rank)
            w.push_pull(ONE)
        return float(w.pull()[0])

    assert max(together(cluster, 4, work)) == 60


def test_bsp_makes_an_update_once_when_all_have_closed(crew: Crew) -> None:
    first, second = crew.tensor("bsp", rule=wl.SGD(lr=1.0))
    pushed = first.push(2 * ONE)
    crew.workers[0].tick()
    pulled = first.pull_async()
    assert waits(pulled)
    assert waits(pushed, 0)
    assert second.pull()[0] == 0  # at clock 0 there is nothing to wait for
    second.push(4 * ONE)
    second.push(6 * ONE)  # a second one in the same iteration: its weight counts, too
    assert waits(pulled)
    crew.workers[1].tick()
    assert pulled.wait(10)[0] == -4  # (2 + 4 + 6) / 3
    assert pushed.wait(10) is None


def test_bsp_without_any_push_changes_nothing(crew: Crew) -> None:
    first, second = crew.tensor("bsp", rule=wl.Adam(lr=0.1))
    before = first.fingerprint()
    for worker in crew.workers * 3:
        worker.tick()
    assert np.all(first.pull() == 0)
    assert np.all(second.pull() == 0)
    assert first.fingerprint() == before  # the rule's step count included


def test_bsp_takes_the_mean_by_weight(crew: Crew) -> None:
    first, second = crew.tensor("bsp", rule=wl.SGD(lr=1.0))
    later = first.push_pull_async(1 * ONE, weight=3)
    assert second.push_pull(5 * ONE, weight=1)[0] == -2  # (3 * 1 + 1 * 5) / 4
    assert later.wait(10)[0] == -2


@pytest.mark.parametrize(("rule", "expected"), [(wl.Sum(), 30), (wl.Max(), 20), (wl.Min(), -20), (wl.Assign(), 20)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_bsp_combines_sums_extremes_and_assignments(crew: Crew, rule: wl.Rule, expected: int, dtype: str) -> None:
    first, second = crew.tensor("bsp", rule=rule, dtype=dtype)
    sign = -1 if isinstance(rule, wl.Min) else 1  # weights start at 0
    later = second.push_pull_async(np.full(4, sign * 20, dtype))
    assert first.push_pull(np.full(4, sign * 10, dtype))[0] == expected
    assert later.wait(10)[0] == expected


def test_bsp_divides_by_everybody_who_pushed_the_table_also_where_they_touched_no_key(crew: Crew) -> None:
    first, second = (w.table("t", 2, rule=wl.SGD(lr=1.0), sync="bsp") for w in crew.workers)
    first.push([1], np.full((1, 2), 2, np.float32))
    second.push([1000 + k for k in range(50)], np.full((50, 2), 4, np.float32))
    for worker in crew.workers:
        worker.tick()
    np.testing.assert_array_equal(first.pull([1, 1000, 1049]), [[-1, -1], [-2, -2], [-2, -2]])


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("kind", ["table", "tensor", "in a step"])
def test_a_push_of_nothing_counts_in_the_mean(crew: Crew, kind: str, weight: float) -> None:
    """A worker whose batch had no ids: its gradient is 0, as that of DistributedDataParallel would be."""
    grads = [np.full((2, 2), 4, np.float32), np.zeros((0, 2), np.float32)]
    keys, weights = [[1, 3], []], [1.0, weight]

    def push(rank: int) -> Any:
        worker, mine = crew.workers[rank], {"weight": weights[rank]}
        if kind == "tensor":
            rows = worker.tensor("w", (4, 2), rule=wl.SGD(lr=1.0), sync="bsp")
            rows[keys[rank]].push(grads[rank], **mine)
            worker.tick()
            return rows[[1, 3]].pull()
        table = worker.table("t", 2, rule=wl.SGD(lr=1.0), sync="bsp")
        if kind == "table":
            table.push(keys[rank], grads[rank], **mine)
            worker.tick()
        else:
            with worker.step() as step:
                step.push(table, keys[rank], grads[rank], **mine)
        return table.pull([1, 3])

    seen = crew.at_once(push)[0]
    np.testing.assert_array_equal(seen, np.full((2, 2), -4 / (1 + weight)))


def test_a_push_of_nothing_counts_in_its_own_iteration_only(crew: Crew) -> None:
    first, second = (w.table("t", 2, rule=wl.SGD(lr=1.0), sync="bsp") for w in crew.workers)
    for weight, expected in ((1.0, -2), (None, -6)):
        first.push([1], np.full((1, 2), 4, np.float32))
        if weight is not None:
            second.push([], np.zeros((0, 2), np.float32), weight=weight)
        for worker in crew.workers:
            worker.tick()
        np.testing.assert_array_equal(first.pull([1]), [[expected, expected]])


def test_bsp_spare_goes_on_without_the_slowest_and_drops_what_comes_late(cluster: wl.Cluster) -> None:
    crew = Crew(cluster, 3)
    fast, other, slow = crew.tensor(wl.BSP(spare=1), rule=wl.SGD(lr=1.0))
    for clock in range(3):
        later = other.push_pull_async(3 * ONE)
        assert fast.push_pull(ONE)[0] == -2 * (clock + 1)
        later.wait(10)
    assert slow.push_pull(100 * ONE)[0] == -6  # late: acknowledged and dropped
    later = slow.push_pull_async(5 * ONE)  # and from here on it is with the others
    middle = other.push_pull_async(3 * ONE)
    # The first two of three make the update: means of 1, 3 and 5.
    assert fast.push_pull(1 * ONE, timeout=10)[0] in (-6 - 2, -6 - 3, -6 - 4)
    assert later.wait(10)[0] <= -8
    middle.wait(10)
    for worker in crew.workers:
        worker.close()


def test_bsp_spare_with_everybody_late_in_turn_comes_to_its_end(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> int:
        w = worker.tensor("w", 4, rule=wl.SGD(lr=1.0), sync=wl.BSP(spare=1))
        steps = 0
        while worker.clock < 24:
            if worker.clock % 3 == worker.rank:
                time.sleep(0.01)
            w.push_pull(ONE)
            steps += 1
        return steps

    assert all(3 <= steps <= 25 for steps in together(cluster, 3, work))


def test_waiting_for_a_push_that_only_the_caller_can_bring_about_is_an_error(crew: Crew) -> None:
    first, second = crew.tensor("bsp")
    pushed = first.push(ONE)
    with pytest.raises(wl.WouldDeadlock, match=r"push of tensor 'w'.*call tick\(\) first"):
        pushed.wait()
    crew.workers[0].tick()
    second.push_pull(ONE)
    assert pushed.wait(10) is None


def test_more_pushes_than_the_window_has_places_before_a_tick(crew: Crew) -> None:
    first, second = crew.tensor("bsp")
    futures = [first.push(ONE) for _ in range(300)]
    crew.workers[0].tick()
    assert second.push_pull(ONE)[0] == 301
    for future in futures:
        future.wait(10)


def test_a_step_closes_before_it_waits(crew: Crew) -> None:
    tensors = crew.tensor("bsp", rule=wl.SGD(lr=1.0))
    outs = [np.zeros(4, np.float32) for _ in tensors]

    def run(rank: int) -> None:
        with crew.workers[rank].step() as step:
            step.push(tensors[rank], (rank + 1) * ONE)
            step.push_pull(tensors[rank], (rank + 1) * ONE, out=outs[rank])

    thread = threading.Thread(target=run, args=(0,))
    thread.start()
    run(1)
    thread.join(10)
    assert [out[0] for out in outs] == [-1.5, -1.5]
    assert [worker.clock for worker in crew.workers] == [1, 1]


def test_a_timeout_at_a_gate_names_who_is_waited_for(crew: Crew) -> None:
    first, _ = crew.tensor("ssp:0")
    with pytest.raises(wl.Timeout, match=r"at clock 1 .*waits for rank 1, whose clock is 0"):
        first.push_pull(ONE, timeout=1.0)
    crew.workers[1].tick()
    assert first.pull()[0] == 1  # the push went on


def test_who_leaves_is_waited_for_no_more(crew: Crew) -> None:
    first, second = crew.tensor("bsp", rule=wl.SGD(lr=1.0))
    later = first.push_pull_async(3 * ONE)
    second.push_pull(ONE)
    later.wait(10)
    waiting = first.push_pull_async(ONE)
    assert waits(waiting)
    crew.workers[1].close()
    assert waiting.wait(10)[0] == -3
    assert first.push_pull(ONE)[0] == -4


def test_who_comes_late_begins_where_the_others_are(cluster: wl.Cluster) -> None:
    crew = Crew(cluster)
    first, second = crew.tensor("bsp", rule=wl.SGD(lr=1.0))
    for _ in range(3):
        later = second.push_pull_async(ONE)
        first.push_pull(ONE)
        later.wait(10)
    crew.workers[1].close()
    first.push_pull(ONE)
    again = cluster.worker(1, 2)
    assert again.clock >= 4
    joined = again.tensor("w", 4, rule=wl.SGD(lr=1.0), sync="bsp")
    while crew.workers[0].clock < again.clock:  # until they are in step nobody waits
        crew.workers[0].tick()
    before = first.pull()[0]
    waiting = first.push_pull_async(2 * ONE)
    assert waits(waiting)
    assert joined.push_pull(4 * ONE)[0] == before - 3
    assert waiting.wait(10)[0] == before - 3
    for worker in (crew.workers[0], again):
        worker.close()


def test_the_goodbye_of_a_first_session_leaves_its_successor_of_the_same_rank(cluster: wl.Cluster) -> None:
    crew = Crew(cluster)
    first, _ = crew.tensor("bsp", rule=wl.SGD(lr=1.0))
    successor = cluster.worker(1, 2)
    again = successor.tensor("w", 4, rule=wl.SGD(lr=1.0), sync="bsp")
    crew.workers[1].close()
    waiting = first.push_pull_async(ONE)
    assert waits(waiting)
    assert again.push_pull(3 * ONE)[0] == -2
    assert waiting.wait(10)[0] == -2
    successor.close()
    assert first.push_pull(ONE, timeout=10)[0] == -3
    crew.workers[0].close()


def test_outsiders_look_without_waiting_and_do_not_push_under_bsp(cluster: wl.Cluster, crew: Crew) -> None:
    first, _ = crew.tensor("bsp", rule=wl.SGD(lr=1.0))
    outside = cluster.tensor("w", 4, rule=wl.SGD(lr=1.0), sync="bsp")  # of a world of one
    waiting = first.push_pull_async(ONE)
    assert waits(waiting)
    cluster.tick()
    assert outside.pull()[0] == 0
    with pytest.raises(wl.InvalidArgument, match="under BSP only"):
        outside.push_pull(ONE)
    crew.workers[1].tick()
    waiting.wait(10)


def test_policies_are_part_of_the_spec(crew: Crew) -> None:
    crew.tensor("ssp:1")
    with pytest.raises(wl.SpecMismatch, match=r"(?s)sync=SSP\(1\).*sync=BSP\(\)"):
        crew.workers[0].tensor("w", 4, rule=wl.Sum(), sync="bsp")


def test_close_closes_the_last_iteration(connect: Connect) -> None:
    with connect() as alone:
        w = alone.tensor("w", 4, rule=wl.Sum(), sync="bsp")
        future = w.push(ONE)
    assert future.wait() is None


def test_a_pull_that_waits_can_be_cancelled(crew: Crew) -> None:
    first, _ = crew.tensor("ssp:0")
    first.push(ONE)
    crew.workers[0].tick()
    waiting = first.pull_async()
    assert waits(waiting)
    waiting.cancel()
    crew.workers[1].tick()
    assert first.pull()[0] == 1


def calls(tensor: wl.Tensor) -> list[Callable[[], Any]]:
    return [lambda: tensor.pull(timeout=0.2), lambda: tensor.push_pull(ONE, timeout=0.2)]


@pytest.mark.parametrize("which", [0, 1])
def test_what_timed_out_at_a_gate_leaves_nothing_behind(crew: Crew, which: int) -> None:
    first, second = crew.tensor("ssp:0")
    first.push_pull_async(ONE)
    crew.workers[0].tick()
    for _ in range(3):
        with pytest.raises(wl.Timeout):
            calls(first)[which]()
    total = 1 + 3 * which
    while crew.workers[1].clock < crew.workers[0].clock + 1:
        crew.workers[1].tick()
    assert first.pull()[0] == total
    crew.workers[0].tick()
    assert second.pull()[0] == total
