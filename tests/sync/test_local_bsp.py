"""Local steps under BSP: every worker waits for all at each exchange, and the outer rule gets their mean."""

from typing import Any

import numpy as np
import pytest
from helpers import numbers
from test_local import Outer, together

import windlass as wl

F = np.float32
WORKERS, PERIODS, EVERY = 3, 4, 2
SHAPE = (50, 40)


def run(cluster: wl.Cluster, make: Any, seen: dict[tuple[int, int], np.ndarray]) -> list[np.ndarray]:
    """Every worker makes a schedule and takes steps of its own; `seen` has its weights after each exchange."""
    centres: dict[int, np.ndarray] = {}

    def work(rank: int) -> None:
        w = numbers(*SHAPE, seed=100 + rank)  # each begins with another, and gets rank 0's
        schedule = make(cluster.worker(rank, WORKERS), w)
        seen[rank, 0] = w.copy()
        for period in range(1, PERIODS + 1):
            for step in range(EVERY):
                w -= moves(rank, period, step)
                assert schedule.step() == (step == EVERY - 1)
            seen[rank, period] = w.copy()
        centres[rank] = schedule.centre()

    together(*[lambda rank=rank: work(rank) for rank in reversed(range(WORKERS))])
    return [centres[rank] for rank in range(WORKERS)]


def moves(rank: int, period: int, step: int) -> np.ndarray:
    return F(0.1) * numbers(*SHAPE, seed=1000 * rank + 10 * period + step)


def mean(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total / F(len(arrays))


@pytest.mark.parametrize("outer", [wl.SGD(lr=1.0), wl.SGD(lr=0.7, momentum=0.9, nesterov=True)], ids=str)
def test_the_outer_rule_gets_the_mean_of_what_the_workers_have_moved(cluster: wl.Cluster, outer: wl.SGD):
    seen: dict[tuple[int, int], np.ndarray] = {}
    run(cluster, lambda c, w: c.local(w, every=EVERY, outer=outer, sync="bsp"), seen)
    reference = Outer(outer, numbers(*SHAPE, seed=100))
    for period in range(PERIODS + 1):
        if period:
            deltas = []
            for rank in range(WORKERS):
                now = reference.start
                for step in range(EVERY):
                    now = now - moves(rank, period, step)
                deltas.append(reference.start - now)
            reference.exchange(reference.start - mean(deltas))
        for rank in range(WORKERS):
            np.testing.assert_array_equal(seen[rank, period], seen[0, period])
            np.testing.assert_allclose(seen[rank, period], reference.start, rtol=1e-5, atol=1e-6)


def test_average_is_the_mean_of_the_workers_to_the_last_bit(cluster: wl.Cluster):
    seen: dict[tuple[int, int], np.ndarray] = {}
    centres = run(cluster, lambda c, w: c.local(w, every=EVERY, outer=wl.Average(), sync="bsp"), seen)
    centre = numbers(*SHAPE, seed=100)
    for period in range(PERIODS + 1):
        if period:
            workers = []
            for rank in range(WORKERS):
                now = centre
                for step in range(EVERY):
                    now = now - moves(rank, period, step)
                workers.append(now)
            centre = mean(workers)
        for rank in range(WORKERS):
            np.testing.assert_array_equal(seen[rank, period], centre)
    for final in centres:
        np.testing.assert_array_equal(final, centre)


def test_elastic_averaging_is_synchronous(cluster: wl.Cluster):
    seen: dict[tuple[int, int], np.ndarray] = {}
    centres = run(cluster, lambda c, w: c.elastic(w, every=EVERY, alpha=0.25, sync="bsp"), seen)
    centre = numbers(*SHAPE, seed=100)
    workers = [centre] * WORKERS
    for period in range(1, PERIODS + 1):
        given = []
        for rank in range(WORKERS):
            for step in range(EVERY):
                workers[rank] = workers[rank] - moves(rank, period, step)
            given.append(F(0.25) * (workers[rank] - centre))
            workers[rank] = workers[rank] - given[rank]
        for d in given:
            centre = centre + d
        for rank in range(WORKERS):
            np.testing.assert_allclose(seen[rank, period], workers[rank], rtol=1e-5, atol=1e-6)
    for final in centres:
        np.testing.assert_allclose(final, centre, rtol=1e-5, atol=1e-6)


def test_what_is_on_the_servers_wins_for_workers_that_come_again(cluster: wl.Cluster):
    def again(rank: int) -> None:
        w = np.full(4, rank, F)
        local = workers[rank].local(w, every=1, outer=wl.SGD(lr=1.0), sync="bsp")
        first[rank] = w.tolist()
        w -= 2 * rank
        local.step()
        w[:] = -1
        second = workers[rank].local(w, every=1, outer=wl.SGD(lr=1.0), sync="bsp")
        np.testing.assert_array_equal(w, second.centre())
        last[rank] = w.tolist()

    workers = [cluster.worker(rank, 2) for rank in range(2)]
    first: dict[int, list[float]] = {}
    last: dict[int, list[float]] = {}
    together(lambda: again(1), lambda: again(0))
    assert first == {0: [0] * 4, 1: [0] * 4}
    assert last == {0: [-1] * 4, 1: [-1] * 4}


def test_the_last_period_may_be_short(cluster: wl.Cluster):
    ends: dict[int, list[float]] = {}

    def work(rank: int) -> None:
        w = np.zeros(4, F)
        with cluster.worker(rank, 2).local(w, every=4, outer=wl.SGD(lr=1.0), sync="bsp") as local:
            for _ in range(6):
                w += 2 * rank
                local.step()
        ends[rank] = w.tolist()

    together(lambda: work(0), lambda: work(1))
    assert ends == {0: [6] * 4, 1: [6] * 4}
