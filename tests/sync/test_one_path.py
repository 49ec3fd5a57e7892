"""What a request does to a shard is the same inside the process, over sockets, and in shared memory.

Each of these was once different between them.
"""

import threading
import time

import numpy as np
import pytest
from crew import together

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
