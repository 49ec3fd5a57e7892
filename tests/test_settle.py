"""cluster.settle(): everything that this worker has pushed and closed has arrived."""

import numpy as np
import pytest
from crew import Crew
from helpers import held

import windlass as wl

ONE = np.ones(4, np.float32)


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_what_was_pushed_has_arrived(cluster: wl.Cluster, size: int) -> None:
    first, second = (cluster.worker(rank, 2) for rank in range(2))
    w, other = (c.tensor("w", size, rule=wl.Sum()) for c in (first, second))
    t, rows = (c.table("t", 2, rule=wl.Sum()) for c in (first, second))
    grad = np.ones(size, np.float32)
    for _ in range(20):
        w.push(grad)
        t.push(range(100), np.ones((100, 2), np.float32))
    first.settle()
    assert (other.pull() == 20).all()
    assert (rows.pull(range(100)) == 20).all()
    for worker in (first, second):
        worker.close()


def test_closes_have_arrived(cluster: wl.Cluster) -> None:
    crew = Crew(cluster)
    first, second = crew.tensor("bsp")
    first.push(ONE)
    crew.workers[0].tick()
    crew.workers[0].settle()
    assert second.push_pull(ONE, timeout=10)[0] == 2  # nobody is waited for any more
    crew.leave()


def test_nothing_to_settle_is_settled(cluster: wl.Cluster) -> None:
    cluster.settle()
    cluster.tensor("w", 4, rule=wl.Sum())
    cluster.settle()


def test_it_ends_when_its_time_is_up_and_can_be_asked_again(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", 4, rule=wl.Sum())
    with held(w):
        pushed = w.push(ONE)
        with pytest.raises(wl.Timeout, match="settle"):
            cluster.settle(timeout=0.2)
    cluster.settle()
    assert pushed.done()
    assert (w.pull() == 1).all()


def test_an_error_that_nobody_looked_at_is_raised(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", 4, rule=wl.SGD(lr=0.1), reject_nonfinite=True)
    good = cluster.empty(4)
    good[:] = 1
    w.push(good)
    cluster.settle()
    with pytest.raises(wl.NonFinite):
        w.push(np.full(4, np.nan, np.float32))
