"""R10: the bound of every policy holds for every pull, over real servers, and whoever is killed."""

import contextlib
import itertools
import pathlib
import random
import re
import time

import pytest
from helpers import PATIENCE_S, new_app
from history import DIGIT, History, Pull, run

import windlass as wl
from windlass.testing import LocalCluster, Servers

POLICIES = [wl.BSP(), wl.SSP(0), wl.SSP(1), wl.SSP(3)]
PULLS, PULLS_LONG = 10_000, 1_000_000
WAITED = 0.05  # of all pulls: below, the run says nothing


def check(sync: wl.Sync, pulls: int) -> None:
    with Servers(2, kind="unix", threads=2) as servers, servers.connect(app=new_app()) as cluster:
        history = run(cluster, sync, pulls)
    print(history)
    assert history.violations()[:5] == []
    assert len(history.pulls) >= pulls
    assert history.waited() >= WAITED * len(history.pulls), "too few waited: the run says nothing"


@pytest.mark.parametrize("sync", POLICIES, ids=str)
def test_no_pull_misses_more_than_its_policy_allows(sync: wl.Sync):
    check(sync, PULLS // len(POLICIES))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sync", POLICIES, ids=str)
def test_no_pull_of_a_million_misses_more_than_its_policy_allows(sync: wl.Sync):
    check(sync, PULLS_LONG // len(POLICIES))


@pytest.mark.parametrize("sync", [wl.BSP(), wl.SSP(0), wl.SSP(2)], ids=str)
def test_a_gate_that_is_loose_by_one_is_noticed(sync: wl.Sync, monkeypatch: pytest.MonkeyPatch):
    servers = Servers(2, kind="unix", threads=2)
    with monkeypatch.context() as patch:  # of the servers alone
        patch.setenv("WINDLASS_BREAK", "gate")
        servers.__enter__()
    with contextlib.closing(servers), servers.connect(app=new_app()) as cluster:
        history = run(cluster, sync, 1000)
    violations = history.violations()
    print(history, violations[:3])
    assert len(violations) >= 10
    assert any("the server says" in text for text in violations)
    assert any(re.search(r"pushes of rank \d", text) for text in violations)  # and not only by what the server says


def test_the_checker_needs_no_word_of_the_server():
    history = History(wl.SSP(1), 2)
    fresh, stale = (3 | 2 << DIGIT), (3 | 1 << DIGIT)
    history.pulls.append(Pull(0, "w", 3, 3, False, fresh))
    assert history.violations() == []
    history.pulls.append(Pull(0, "w", 3, 3, False, stale))
    assert len(history.violations()) == 1
    assert history.violations(live=[0]) == []
    history.pulls[:] = [Pull(0, "w", 3, 1, False, fresh)]
    assert len(history.violations()) == 1


WORKER = """
import time, windlass as wl
from history import unit
with wl.connect() as cluster:
    w = cluster.tensor("w", 1, dtype="int64", rule=wl.Sum(), sync="SYNC")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        future = w.push_pull_async(unit(cluster.rank))
        value = int(future.wait(60.0)[0])
        seen = future.seen
        print(f"{time.monotonic()} {seen.asked} {seen.clock} {int(seen.waited_seconds > 0)} {value}")
        time.sleep(0.01 if cluster.rank == 2 else 0.001)
"""


def notes_of(output: str, rank: int) -> list[tuple[float, Pull]]:
    lines = [line.split() for line in output.splitlines() if re.fullmatch(r"[\d.]+( \d+){4}", line)]
    return [(float(t), Pull(rank, "w", int(a), int(s), w == "1", int(v))) for t, a, s, w, v in lines]


def check_kill(sync: wl.Sync, seed: int) -> None:
    """A worker is killed at a random moment; the others go on."""
    chance = random.Random(seed)
    timeout, seconds = 1.0, 5.0
    code = WORKER.replace("SYNC", str(sync)).replace("SECONDS", str(seconds))
    with LocalCluster(servers=2, failure_timeout=timeout) as cluster:
        here = pathlib.Path(__file__).parent
        path = {"PYTHONPATH": f"{here}:{here.parent}"}
        workers = [cluster.worker(code, rank, 3, **path) for rank in range(3)]
        deadline = time.monotonic() + 60
        while not notes_of(workers[0].output(), 0):
            assert time.monotonic() < deadline, "nobody begins"
            time.sleep(0.01)
        time.sleep(chance.uniform(0.2, 1.5))
        lost = chance.randrange(3)
        before = time.monotonic()
        workers[lost].kill()
        killed = time.monotonic()
        rest = [rank for rank in range(3) if rank != lost]
        for rank in rest:
            assert workers[rank].wait(PATIENCE_S) == 0, workers[rank].output()
        notes = {rank: notes_of(workers[rank].output(), rank) for rank in range(3)}
    history = History(sync, 3)
    end = min(notes[rank][-1][0] for rank in rest)  # then the first of them leaves
    for rank in rest:
        history.pulls = [pull for t, pull in notes[rank] if t < before]
        assert history.violations()[:5] == [], f"seed {seed}"
        assert len(history.pulls) >= 5
        history.pulls = [pull for t, pull in notes[rank] if before <= t < end]
        assert history.violations(live=rest)[:5] == [], f"seed {seed}"
        times = [t for t, _ in notes[rank] if t <= end]
        stall = max(b - a for a, b in itertools.pairwise(times))
        after = sum(t > killed + timeout + 1 for t in times)
        print(f"{sync}, seed {seed}: rank {lost} killed, rank {rank} stood for {stall:.2f} s, {after} pulls after that")
        assert stall <= timeout + 1
        assert after >= 20


@pytest.mark.parametrize("sync", [wl.BSP(), wl.SSP(2)], ids=str)
def test_who_is_killed_holds_up_the_others_for_the_failure_timeout_and_no_longer(sync: wl.Sync):
    check_kill(sync, 1)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sync", [wl.BSP(), wl.SSP(0), wl.SSP(2)], ids=str)
def test_thirty_kills(sync: wl.Sync):
    for seed in range(10):
        check_kill(sync, seed)
