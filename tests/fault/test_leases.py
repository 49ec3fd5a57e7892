"""R4 and R5 for leased data: workers that are killed in the middle of an epoch, and a scheduler that is away."""

import os
import random
import re
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing import LocalCluster
from windlass.testing.cluster import Process, until

FAILURE_S = 1.0  # failure_timeout
LATE_S = 1.0
SAMPLES, BATCH, EPOCHS = 900, 4, 5

WORKER = """
import time, numpy as np, windlass as wl
SAMPLES, BATCH, EPOCHS = {samples}, {batch}, {epochs}
with wl.connect() as c:
    seen = c.tensor("seen", SAMPLES, rule=wl.Sum(), dtype=np.int64)
    w = c.tensor("w", 4, rule=wl.SGD(lr=0.1), sync="bsp")
    lease = c.lease(SAMPLES, batch_size=BATCH, epochs=EPOCHS)
    stall, count, last = 0.0, 0, time.monotonic()
    for epoch in range(EPOCHS):
        for indices in lease:
            all_there = len(c._attendance.view.workers) == c.world_size
            time.sleep({seconds} if all_there else 5 * {seconds})  # so that a replacement comes in time
            seen[indices].push(np.ones(len(indices), np.int64)).wait()
            w.push_pull(np.ones(4, np.float32))
            count, now = count + 1, time.monotonic()
            stall, last = max(stall, now - last), now
            print("batch", count, "held", len(lease._holding), "stall", round(stall, 3), flush=True)
print("end", lease.samples_done, lease.duplicates, lease.taken_back, stall, flush=True)
"""


def start(cluster: LocalCluster, rank: int, world: int, **changed: object) -> Process:
    terms = {"samples": SAMPLES, "batch": BATCH, "epochs": EPOCHS, "seconds": 0.01, **changed}
    return cluster.worker(WORKER.format(**terms), rank, world)


def last(worker: Process, what: str) -> float:
    """The last number after that word in what a worker said."""
    found = re.findall(rf"\b{what} ([0-9.]+)", worker.output())
    return float(found[-1]) if found else 0.0


def wait_for(worker: Process, true: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    until(lambda: true() or worker.process.poll() is not None, what, seconds)
    assert true(), f"{what}: the worker has ended with {worker.process.poll()}"


def test_a_killed_workers_leases_are_done_by_the_others_and_a_new_one_takes_some():
    seed = random.randrange(2**32)
    at = random.Random(seed).randint(1, 100)
    print(f"seed {seed}: kill at batch {at}")
    kill_one(LocalCluster(servers=1, failure_timeout=FAILURE_S), at)


def kill_one(cluster: LocalCluster, at: int, epochs: int = EPOCHS, seconds: float = 0.01) -> None:
    """Kills one of three workers when it has done so many batches, starts another, and checks what was promised."""
    with cluster:
        workers = [start(cluster, rank, 3, epochs=epochs, seconds=seconds) for rank in range(3)]
        victim = workers.pop(1)
        wait_for(victim, lambda: last(victim, "batch") >= at, "the victim has got so far")
        victim.kill()
        killed_at = last(victim, "batch")
        until(lambda: len(cluster.members("worker")) == 2, "its death is known", FAILURE_S + LATE_S)
        fresh = start(cluster, 1, 3, epochs=epochs, seconds=seconds)
        for worker in (*workers, fresh):
            assert worker.wait(PATIENCE_S) == 0, worker.output()
        ledger = cluster.status()["leases"][0]
        with cluster.connect(reader=True) as reader:
            seen = reader.tensor("seen", SAMPLES, rule=wl.Sum(), dtype=np.int64).pull()
        stalls = [last(worker, "stall") for worker in workers]
        print(f"killed at batch {killed_at}; stalls {stalls}; {ledger}; the new one: {fresh.output().splitlines()[-1]}")
        assert (seen >= epochs).all(), f"{(seen < epochs).sum()} samples were used less than once in an epoch"
        assert ledger["epoch"] == epochs
        assert ledger["samples_done"] == SAMPLES * epochs
        # The rest is what the dead one had pushed and nobody counted: at most what it held.
        assert 0 <= seen.sum() - ledger["samples_done"] - ledger["duplicates"] <= SAMPLES
        assert last(fresh, "end") > 0, "the new worker got nothing"
        assert max(stalls) <= FAILURE_S + LATE_S


def test_a_scheduler_that_is_killed_stops_nobody_who_holds_leases():
    with LocalCluster(servers=1, failure_timeout=FAILURE_S) as cluster:
        workers = [start(cluster, rank, 2, samples=80, epochs=4000, seconds=0.005) for rank in range(2)]
        for worker in workers:
            wait_for(worker, lambda worker=worker: last(worker, "held") > 1000, "much is held")
        cluster.scheduler.kill()
        before = [last(worker, "batch") for worker in workers]
        for worker, count in zip(workers, before, strict=True):  # 10 batches of an epoch are its own: 40 epochs
            wait_for(worker, lambda worker=worker, count=count: last(worker, "batch") > count + 400, "it goes on")
        for worker, count in zip(workers, before, strict=True):  # by now: of the first that ends nobody would hear
            stall = last(worker, "stall")
            print(f"{last(worker, 'batch') - count:.0f} batches without a scheduler; the longest took {stall} s")
            assert stall <= LATE_S
            worker.kill()


@pytest.mark.long
def test_a_scheduler_that_is_away_for_30_seconds_does_not_slow_the_loop():
    def rate(worker: Process, seconds: float) -> float:
        count, begun = last(worker, "batch"), time.monotonic()
        time.sleep(seconds)
        return (last(worker, "batch") - count) / (time.monotonic() - begun)

    with LocalCluster(servers=1, failure_timeout=FAILURE_S) as cluster:
        workers = [start(cluster, rank, 2, samples=8000, epochs=100) for rank in range(2)]
        for worker in workers:
            wait_for(worker, lambda worker=worker: last(worker, "held") > 400, "32 s and more are held")
        before = rate(workers[0], 5.0)
        cluster.scheduler.kill()
        after = rate(workers[0], 30.0)
        stall = max(last(worker, "stall") for worker in workers)
        print(f"{before:.1f} batches/s before, {after:.1f} without a scheduler; the longest took {stall} s")
        assert after >= 0.9 * before
        assert stall <= LATE_S
        for worker in workers:
            worker.kill()


NAIVE = """
import sys
from windlass.control import state
from windlass.launch.roles import main

class Naive(state.Ledger):
    def left(self, who):
        pass

    def _take_back(self, *_):
        return False

    def _copy(self, *_):
        return False

state.Ledger = Naive
sys.argv[1:] = ["scheduler"]
sys.exit(main())
"""


class NaiveCluster(LocalCluster):
    """Its scheduler gives every range once, for good."""

    def start_scheduler(self, listen_fd: int) -> None:
        os.set_inheritable(listen_fd, True)
        more = {"WINDLASS_LISTEN_FD": str(listen_fd), "WINDLASS_SERVERS": "1"}
        self.scheduler = Process([sys.executable, "-c", NAIVE], self.environment(**more), [listen_fd])


def test_a_scheduler_that_takes_nothing_back_from_the_dead_is_noticed():
    with pytest.raises(AssertionError, match="were used less than once"):
        kill_one(NaiveCluster(servers=1, failure_timeout=FAILURE_S), at=20, epochs=2, seconds=0.004)
