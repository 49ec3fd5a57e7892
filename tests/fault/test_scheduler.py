"""R5: the scheduler is killed and begins again with its journal, while workers train on leased data.

With nothing in the journal (WINDLASS_BREAK=journal) the same load is red.
"""

import pathlib
import re
import time

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing import LocalCluster
from windlass.testing.cluster import Process, until

FAILURE_S = 2.0  # failure_timeout
RIGHT_S = 5.0  # from a scheduler's beginning to a status that is right
LATE_S = 2.0

WORKER = """
import os, time, numpy as np, windlass as wl
with wl.connect() as c:
    w = c.tensor("w", 1000, rule=wl.Sum(), dtype=np.int64)
    rows = c.table("rows", dim=2, rule=wl.SGD(lr=1.0), init=wl.Zeros())
    lease = c.lease(200_000, batch_size=4, epochs=10)
    stall, pushes, last = 0.0, 0, time.monotonic()
    for _ in range(10):
        for indices in lease:
            w.push(np.ones(1000, np.int64)).wait()
            rows.push(np.arange(4), -np.ones((4, 2), np.float32)).wait()
            time.sleep(0.01)
            pushes, now = pushes + 1, time.monotonic()
            stall, last = max(stall, now - last), now
            print("push", pushes, "held", len(lease._holding), "stall", round(stall, 3), flush=True)
            if os.path.exists({stop!r}):
                break
        if os.path.exists({stop!r}):
            break
print("end", pushes, flush=True)
"""


def last(worker: Process, what: str) -> float:
    """The last number after that word in what a worker said."""
    found = re.findall(rf"\b{what} ([0-9.]+)", worker.output())
    return float(found[-1]) if found else 0.0


def steps(workers: list[Process], seconds: float) -> float:
    """Pushes per second of all of them."""
    before, begun = sum(last(worker, "push") for worker in workers), time.monotonic()
    time.sleep(seconds)
    return (sum(last(worker, "push") for worker in workers) - before) / (time.monotonic() - begun)


def is_right(cluster: LocalCluster, generation: int, workers: int) -> bool:
    """Whether the status has everything that there is."""
    status = cluster.status()
    members = [(one["role"], one["index"]) for one in status["members"] if one["away_seconds"] is None]
    return (
        status["generation"] == generation
        and sorted(members) == [("server", 0), ("server", 1), *(("worker", i) for i in range(workers))]
        and [one["name"] for one in status["objects"]] == ["default/w", "default/rows"]
        and status["apps"][0]["workers"] == workers
        and status["leases"] != []
        and (status["returning"], status["missing"], status["moves"]) == ([], [], 0)
        and all(one["clock"] > 0 for one in status["members"] if one["role"] == "worker")
    )


def kill_and_restart(folder: pathlib.Path, away_s: float, measure_s: float) -> tuple[float, float]:
    """Twice in a row. Pushes per second before, and while there was no scheduler."""
    stop = folder / "stop"
    with LocalCluster(servers=2, failure_timeout=FAILURE_S, keeps=True) as cluster:
        code = WORKER.format(stop=str(stop))
        workers = [cluster.worker(code, rank, 2) for rank in range(2)]
        until(lambda: all(last(w, "held") > away_s for w in workers), "enough is held", PATIENCE_S)
        before = steps(workers, measure_s)
        without = []
        for life in (2, 3):
            cluster.scheduler.kill()
            late = cluster.worker(code, len(workers), len(workers) + 1)  # a worker that joins during the outage
            without.append(steps(workers, away_s))
            assert last(late, "push") == 0, "nobody can have let it in"
            cluster.restart_scheduler()
            begun = time.monotonic()
            workers.append(late)
            until(lambda: is_right(cluster, life, len(workers)), "the status is right", PATIENCE_S)  # noqa: B023
            took = time.monotonic() - begun
            print(f"{without[-1]:.1f} steps/s without a scheduler, {before:.1f} before; right after {took:.2f} s")
            until(lambda: last(late, "push") > 0, "the new worker pushes", PATIENCE_S)  # noqa: B023
            assert took < RIGHT_S or not measure_s > 1
        stalls = [last(worker, "stall") for worker in workers]
        stop.touch()
        codes = [worker.wait(PATIENCE_S) for worker in workers]
        assert codes == [0] * 4, "no push failed"
        pushes = sum(last(worker, "end") for worker in workers)
        with cluster.connect(reader=True, app="default") as reader:
            assert (reader.tensor("w").pull() == pushes).all(), "each was applied once"
            assert (reader.table("rows").pull(np.arange(4)) == pushes).all()
        print(f"{pushes:.0f} pushes; the longest pauses {stalls}")
        assert max(stalls) < LATE_S + FAILURE_S
        return before, min(without)


def test_a_scheduler_that_is_killed_twice_goes_on_with_its_journal_and_no_push_fails(tmp_path: pathlib.Path):
    kill_and_restart(tmp_path, 2.0, 0.5)


@pytest.mark.long
@pytest.mark.alone("measures steps per second")
def test_a_scheduler_that_is_away_for_30_seconds_slows_nobody_down(tmp_path: pathlib.Path):
    before, without = kill_and_restart(tmp_path, 30.0, 10.0)
    assert without >= 0.9 * before


def test_a_scheduler_that_keeps_nothing_is_noticed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_BREAK", "journal")
    with LocalCluster(servers=1, failure_timeout=FAILURE_S, keeps=True) as cluster, cluster.connect() as worker:
        w = worker.tensor("w", 4, rule=wl.Sum())
        cluster.scheduler.kill()
        cluster.restart_scheduler()
        with pytest.raises((wl.AccessDenied, wl.ServerLost, wl.Closed), match="this is cluster"):
            until(lambda: not w.push_pull(np.ones(4, np.float32)).any(), "a push fails", PATIENCE_S)


def test_a_worker_that_ends_while_the_scheduler_is_away_has_left_in_peace():
    with LocalCluster(servers=1, failure_timeout=30.0, keeps=True) as cluster:
        code = """
import sys, windlass as wl
with wl.connect(on_worker_loss="wait") as c:
    print("here", flush=True)
    sys.stdin.read(1)
"""
        workers = [cluster.worker(code, rank, 2) for rank in range(2)]
        until(lambda: all("here" in worker.output() for worker in workers), "both are there", PATIENCE_S)
        cluster.scheduler.kill()
        for worker in workers:
            assert worker.process.stdin is not None
            worker.process.stdin.write(b"x")
            worker.process.stdin.flush()
        until(lambda: all("is away; waits" in worker.output() for worker in workers), "they wait", PATIENCE_S)
        cluster.restart_scheduler()
        assert [worker.wait(PATIENCE_S) for worker in workers] == [0, 0]
        status = cluster.status()
        assert (status["apps"][0]["waited"], status["apps"][0]["workers"]) == ([], 0)
        assert "is gone" not in cluster.scheduler.output()
