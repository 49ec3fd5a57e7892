"""Threads that act as workers, for tests of consistency."""

import threading
from collections.abc import Callable
from typing import Any

import windlass as wl

SECONDS = 60.0


def together(cluster: wl.Cluster, world: int, work: Callable[[wl.Cluster], Any], seconds: float = SECONDS) -> list[Any]:
    """Runs ``work(worker)`` in a thread per rank. What each returned; the first error is raised."""
    workers = [cluster.worker(rank, world) for rank in range(world)]
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(workers[rank])
        except BaseException as error:
            errors.append(error)
        finally:
            workers[rank].leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results
