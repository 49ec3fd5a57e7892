"""What a request does to a shard is the same inside the process, over sockets, and in shared memory.

Each of these was once different between them.
"""

import threading
import time

import numpy as np
import pytest
from crew import together
from helpers import held

import windlass as wl

SIZES = [4, 4096]  # over a Unix socket the larger one lies in shared memory


def steps(worker: wl.Cluster, w: wl.Tensor, grad: np.ndarray, out: np.ndarray) -> None:
    with worker.step() as step:
        step.push_pull(w, grad, out=out)


def push_pulls(worker: wl.Cluster, w: wl.Tensor, grad: np.ndarray, out: np.ndarray) -> None:
    w.push_pull(grad, out=out)


def pushes_and_ticks(worker: wl.Cluster, w: wl.Tensor, grad: np.ndarray, out: np.ndarray) -> None:
    pushed = w.push(grad)
    worker.tick()
    pushed.wait()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("iterate", [steps, push_pulls, pushes_and_ticks])
def test_a_worker_whose_pushes_were_dropped_catches_up(cluster: wl.Cluster, iterate, size: int) -> None:
    """Under BSP(spare=1) a late worker goes on where the others are, whichever way it iterates."""
    ended = threading.Event()

    def work(worker: wl.Cluster) -> int:
        w = worker.tensor("w", size, rule=wl.Sum(), sync=wl.BSP(spare=1))
        grad, out = worker.empty(size), worker.empty(size)
        grad[:] = 1
        late = worker.rank == 2
        try:
            for i in range(8 if late else 60):
                if late and i == 0:
                    time.sleep(0.3)  # the others are far ahead by now
                iterate(worker, w, grad, out)
                if ended.is_set():
                    break
                if not late:
                    time.sleep(0.01)
            return worker.clock
        finally:
            if not late:
                ended.set()

    first, second, late = together(cluster, 3, work)
    assert late > 12, f"the late worker has clock {late}, the others {first} and {second}"


def test_a_delete_is_an_update(cluster: wl.Cluster) -> None:
    """Versions count what changed a shard, so that a gradient's staleness is the same everywhere."""
    first, second = (cluster.worker(rank, 2) for rank in range(2))
    t, u = (c.table("t", 2, rule=wl.SGD(lr=1.0, staleness=1.0)) for c in (first, second))
    keys = np.arange(100, 5100)  # some in every shard
    u.push(keys, np.ones((len(keys), 2), np.float32)).wait()
    t.pull([7])
    assert u.delete(keys) == len(keys)  # one update of the shard that has row 7
    t.push([7], np.ones((1, 2), np.float32)).wait()
    np.testing.assert_allclose(u.pull([7]), [[-0.5, -0.5]])
    for worker in (first, second):
        worker.close()


@pytest.mark.embedded("a request to a process may have left; csrc/server/host_test.cc sends such a push")
def test_a_push_that_was_taken_back_is_no_update(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", 4, rule=wl.Sum())
    w.push(np.ones(4, np.float32)).wait()
    before = w.pull_newer().version
    with held(w):
        assert w.push(np.ones(4, np.float32)).cancel()
    assert not w.pull_newer(before).changed


@pytest.mark.parametrize("sync", ["ssp:4", "bsp"])
def test_what_a_lost_worker_had_closed_is_not_done_again_by_the_one_in_its_place(
    cluster: wl.Cluster, sync: str
) -> None:
    """The new one begins with the iteration that was not closed everywhere; where it was, its push is a repeat."""
    one = np.ones(4, np.float32)
    lost, other = (cluster.worker(rank, 2) for rank in range(2))
    a, _ = (lost.tensor(name, 4, rule=wl.Sum(), sync=sync) for name in "ab")
    others = [other.tensor(name, 4, rule=wl.Sum(), sync=sync) for name in "ab"]
    first = a.push_pull_async(one)  # closes the iteration at `a`; at `b` it never does
    if sync != "bsp":
        first.wait()
    again = cluster.worker(0, 2)
    assert again.clock == 0
    pushed = [again.tensor(name, 4, rule=wl.Sum(), sync=sync).push(one) for name in "ab"]
    again.tick()
    for tensor in others:
        tensor.push_pull(one)
    for future in pushed:
        future.wait()
    assert [tensor.pull()[0] for tensor in others] == [2, 2]
    for worker in (again, other):
        worker.close()
