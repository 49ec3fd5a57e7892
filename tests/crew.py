"""Threads that act as workers, for tests of consistency."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import windlass as wl

SECONDS = 60.0
ONE = np.ones(4, np.float32)


def at_once(world: int, work: Callable[[int], Any], seconds: float = SECONDS) -> list[Any]:
    """Runs ``work(rank)`` in a thread per rank. What each returned; the first error is raised."""
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results


def together(cluster: wl.Cluster, world: int, work: Callable[[wl.Cluster], Any], seconds: float = SECONDS) -> list[Any]:
    """Runs ``work(worker)`` in a thread per rank, each of which leaves at its end. What each returned."""
    workers = [cluster.worker(rank, world) for rank in range(world)]

    def run(rank: int) -> Any:
        try:
            return work(workers[rank])
        finally:
            workers[rank].close()

    return at_once(world, run, seconds)


class Crew:
    """Two workers whose calls the test makes by hand, each in its own time."""

    def __init__(self, cluster: wl.Cluster, world: int = 2) -> None:
        self.workers = [cluster.worker(rank, world) for rank in range(world)]

    def tensor(self, sync: Any, rule: Any = None, **options: Any) -> list[wl.Tensor]:
        return [w.tensor("w", 4, rule=rule or wl.Sum(), sync=sync, **options) for w in self.workers]

    def at_once(self, work: Callable[[int], Any], seconds: float = SECONDS) -> list[Any]:
        return at_once(len(self.workers), work, seconds)

    def leave(self) -> None:
        for worker in self.workers:
            worker.close()


def waits(future: wl.types.Future[Any], seconds: float = 0.15) -> bool:
    """Whether it is still under way after a while."""
    time.sleep(seconds)
    return not future.done()
