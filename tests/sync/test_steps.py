"""A step is one iteration, however often it pushes to an object."""

import threading
from typing import Any

import numpy as np
import pytest
from crew import ONE, Crew
from helpers import PATIENCE_S

import windlass as wl

STEPS = [("push", "push"), ("push", "push_pull"), ("push_pull", "push"), ("push_pull", "pull", "push_pull")]


@pytest.mark.parametrize("sync", ["bsp", "ssp:0"])
@pytest.mark.parametrize("verbs", STEPS, ids="+".join)
def test_pushes_to_a_tensor_in_one_step_are_one_iteration(crew: Crew, verbs: tuple[str, ...], sync: str) -> None:
    tensors = crew.tensor(sync)
    pushes = sum(verb != "pull" for verb in verbs)
    for clock in range(3):
        before = 11 * pushes * clock
        outs: dict[tuple[int, int], Any] = {}

        def work(rank: int) -> None:
            with crew.workers[rank].step(timeout=30) as s:
                for i, verb in enumerate(verbs):
                    grad = () if verb == "pull" else (10**rank * ONE,)
                    outs[rank, i] = getattr(s, verb)(tensors[rank], *grad)  # noqa: B023

        crew.at_once(work)
        assert [worker.clock for worker in crew.workers] == [clock + 1] * 2
        for (_, i), out in outs.items():
            if sync == "bsp" and verbs[i] != "push":  # one update, which a pull before the last push does not wait for
                assert out[0] == before + (11 * pushes if verbs[i] == "push_pull" else 0)
        assert [tensor.pull()[0] for tensor in tensors] == [before + 11 * pushes] * 2


@pytest.mark.parametrize("verbs", STEPS, ids="+".join)
def test_pushes_to_a_table_in_one_step_are_one_iteration(crew: Crew, verbs: tuple[str, ...]) -> None:
    tables = [w.table("t", 2, rule=wl.Sum(), sync="bsp") for w in crew.workers]
    keys = [np.arange(100 * i, 100 * i + 200) for i in range(len(verbs))]  # some of them twice
    total = np.zeros(100 * len(verbs) + 100, np.float32)
    for clock in range(3):
        outs: dict[tuple[int, int], Any] = {}

        def work(rank: int) -> None:
            with crew.workers[rank].step(timeout=30) as s:
                for i, verb in enumerate(verbs):
                    grads = () if verb == "pull" else (np.full((200, 2), 10**rank, np.float32),)
                    outs[rank, i] = getattr(s, verb)(tables[rank], keys[i], *grads)  # noqa: B023

        crew.at_once(work)
        assert [worker.clock for worker in crew.workers] == [clock + 1] * 2
        for i, verb in enumerate(verbs):
            if verb != "pull":
                total[keys[i]] += 11
        for (_, i), out in outs.items():
            if verbs[i] == "push_pull":
                np.testing.assert_array_equal(out[:, 0], total[keys[i]])
        np.testing.assert_array_equal(tables[clock % 2].pull(np.arange(len(total)))[:, 0], total)


def test_pushes_in_one_step_are_one_contribution_to_a_mean(crew: Crew) -> None:
    tensors = crew.tensor("bsp", rule=wl.SGD(lr=1.0))

    def work(rank: int) -> None:
        with crew.workers[rank].step(timeout=30) as s:
            s.push_pull(tensors[rank], (rank + 1) * ONE)
            if rank == 0:
                s.push_pull(tensors[rank], 6 * ONE, weight=2)

    crew.at_once(work)
    assert [tensor.pull()[0] for tensor in tensors] == [-(1 + 12 + 2) / 4] * 2
    assert [worker.clock for worker in crew.workers] == [1, 1]


def test_a_step_begins_a_new_iteration_before_its_first_push_or_not_at_all(crew: Crew) -> None:
    a = [w.tensor("a", 4, rule=wl.Sum(), sync="bsp") for w in crew.workers]
    b = [w.tensor("b", 4, rule=wl.Sum(), sync="bsp") for w in crew.workers]
    first = b[0].push_pull_async(ONE)
    b[1].push_pull(ONE)
    first.wait(PATIENCE_S)

    def step() -> None:
        with crew.workers[0].step(timeout=30) as s:
            s.push(a[0], ONE)
            s.push(b[0], ONE)  # here iteration 0 is closed already, so both are in iteration 1

    thread = threading.Thread(target=step)
    thread.start()
    crew.workers[1].tick()
    assert a[1].pull(timeout=10)[0] == 0  # update 0 of a is there, and nobody pushed
    crew.workers[1].tick()
    thread.join(10)
    assert not thread.is_alive()
    assert (a[1].pull()[0], b[1].pull()[0]) == (1, 3)
    assert crew.workers[0].clock == 2


@pytest.mark.parametrize("sync", ["bsp", "ssp:0"])
def test_more_push_pulls_in_a_step_than_the_window_has_places(crew: Crew, sync: str) -> None:
    tables = [w.table("t", 2, rule=wl.Sum(), sync=sync) for w in crew.workers]
    row = np.ones((1, 2), np.float32)

    def work(rank: int) -> None:
        with crew.workers[rank].step(timeout=30) as s:
            for _ in range(300):
                s.push_pull(tables[rank], [5], row)

    crew.at_once(work)
    assert tables[0].pull([5])[0, 0] == 600
    assert [worker.clock for worker in crew.workers] == [1, 1]
