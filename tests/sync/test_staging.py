"""The staging limit inside the process, as Python sees it: whoever waits for room lets other threads run."""

import threading
import time

import numpy as np
import pytest
from crew import ONE, at_once

import windlass as wl

LARGE = 8 << 20  # float32: 32 MiB
PUSHES = 8  # of it use up the 256 MiB there are
KEYS = np.arange(4, dtype=np.uint64)


def fill(worker: wl.Cluster) -> list[wl.types.Future[None]]:
    """Pushes that wait for their update, until there is no room for another."""
    large = worker.tensor("large", LARGE, rule=wl.Sum(), sync=wl.BSP())
    gradient = np.zeros(LARGE, np.float32)
    return [large.push(gradient) for _ in range(PUSHES)]


@pytest.mark.embedded("where servers are elsewhere, they stop reading a connection instead")
@pytest.mark.parametrize("kind", ["tensor", "table"])
@pytest.mark.parametrize("verb", ["push", "push_pull"])
def test_whoever_waits_for_room_lets_other_threads_run(cluster: wl.Cluster, verb: str, kind: str) -> None:
    """The request is small enough to keep the GIL where it need not wait."""
    workers = [cluster.worker(rank, 2) for rank in range(2)]
    if kind == "tensor":
        small = [w.tensor("small", 4, rule=wl.Sum(), sync=wl.BSP()) for w in workers]
        arguments = (ONE,)
    else:
        small = [w.table("small", 1, rule=wl.Sum(), sync=wl.BSP()) for w in workers]
        arguments = (KEYS, ONE.reshape(4, 1))
    filled = fill(workers[1])
    begun, other_goes_on = threading.Event(), threading.Event()

    def work(rank: int) -> None:
        if rank == 0:
            assert begun.wait(20)
            time.sleep(0.2)  # the other waits for room by now
            other_goes_on.set()
            pushed = small[0].push(*arguments)
            workers[0].tick()
            pushed.wait(timeout=40)
            return
        begun.set()
        if verb == "push_pull":
            small[1].push_pull(*arguments, timeout=20)
            assert other_goes_on.is_set()
            workers[1].tick()
        else:
            pushed = small[1].push(*arguments, timeout=20)
            assert other_goes_on.is_set()
            workers[1].tick()
            pushed.wait(timeout=40)
        for future in filled:
            future.wait(timeout=40)

    at_once(2, work)
    seen = small[0].pull() if kind == "tensor" else small[0].pull(KEYS)
    assert (np.asarray(seen).ravel() == 2).all()


@pytest.mark.embedded("where servers are elsewhere, they stop reading a connection instead")
def test_a_push_that_finds_no_room_in_time_says_for_whom_it_waits(cluster: wl.Cluster) -> None:
    workers = [cluster.worker(rank, 2) for rank in range(2)]
    small = [w.tensor("small", 4, rule=wl.Sum(), sync=wl.BSP()) for w in workers]
    filled = fill(workers[1])
    with pytest.raises(wl.Timeout, match=r"push_pull of tensor 'small': not begun.*for rank 0, whose clock is 0"):
        small[1].push_pull(ONE, timeout=0.05)
    with pytest.raises(wl.Timeout, match=r"push of tensor 'small': not begun.*for rank 0, whose clock is 0"):
        small[1].push(ONE, timeout=0.05)
    for worker in workers:
        worker.tick()
    for future in filled:
        future.wait(timeout=40)
    assert (small[0].pull() == 0).all()  # nothing of either was pushed
