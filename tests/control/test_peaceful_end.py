"""A worker that leaves in peace is never taken for one that was lost, however many leave at once."""

import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import PATIENCE_S

from windlass._net.address import Address
from windlass.control import messages as m
from windlass.control.member import Member, here, new_incarnation
from windlass.testing import LocalCluster
from windlass.testing.cluster import until

WORKERS = 24
UNEVEN = """
import numpy as np
import windlass as wl

with wl.connect(timeout=300) as cluster:
    w = cluster.tensor("w", 100_000, rule=wl.SGD(lr=0.1))
    for _ in range(40 + cluster.rank // 4):
        w.push_pull(np.ones(100_000, np.float32))
"""


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=1) as made:
        yield made


def gather(cluster: LocalCluster, app: str, count: int) -> list[Member]:
    """Workers that do nothing, once their app has started."""

    def come(rank: int) -> Member:
        join = m.Join("worker", new_incarnation(), app, rank, count, on_worker_loss="wait", **here())
        started = threading.Event()
        member = Member(Address.parse(cluster.address), cluster.token.encode(), join, lambda _: started.set())
        member.start(time.monotonic() + PATIENCE_S)
        assert started.wait(PATIENCE_S)
        assert member.beating.wait(PATIENCE_S)
        return member

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(come, range(count)))


def waited(cluster: LocalCluster) -> dict[str, list[int]]:
    """Ranks of workers that the scheduler takes for lost, by app."""
    return {app["name"]: app["waited"] for app in cluster.status()["apps"] if app["waited"]}


def leave_together(members: list[Member], leave_one: Callable[[Member], None] = Member.close) -> None:
    together = threading.Barrier(len(members))

    def leave(member: Member) -> None:
        together.wait(PATIENCE_S)
        leave_one(member)

    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(leave, members))


def test_workers_that_leave_together_have_all_left_in_peace(cluster: LocalCluster, accurate: bool):
    rounds = 100 if accurate else 5
    for i in range(rounds):
        leave_together(gather(cluster, f"app{i}", WORKERS))
    print(f"{rounds} times {WORKERS} workers")
    assert not cluster.members("worker")  # close() has waited for that
    assert waited(cluster) == {}
    assert "is gone" not in cluster.scheduler.output()


def hang_up(member: Member) -> None:
    """Says that it leaves, and does not wait until the scheduler has read it."""
    ws = member._ws
    assert ws is not None
    member._leaving.set()
    ws.send(m.encode(m.Leave()))
    member._closed.set()
    ws.close()
    if member._beat is not None:
        member._beat.stop()


def test_it_turns_red_when_members_hang_up_first(cluster: LocalCluster):
    for i in range(10):
        leave_together(gather(cluster, f"app{i}", WORKERS), hang_up)
        until(lambda: not cluster.members("worker"), "they have left or were given up", PATIENCE_S)
        if lost := waited(cluster):
            print(f"in round {i + 1} lost: {lost}")
            return
    pytest.fail(f"10 times all {WORKERS} workers were heard")


def test_a_worker_whose_connection_breaks_as_it_leaves_comes_back_to_say_so(cluster: LocalCluster):
    for i in range(20):
        [member] = gather(cluster, f"app{i}", 1)
        ws = member._ws
        assert ws is not None
        if i % 2:
            ws.close()
        else:  # the scheduler has read it, and its word of that is lost
            ws.send(m.encode(m.Leave()))
            ws.close()
        member.close()
    until(lambda: not cluster.members("worker"), "all have left", PATIENCE_S)
    assert waited(cluster) == {}
    assert "is gone" not in cluster.scheduler.output()


def test_a_scheduler_that_stands_still_keeps_nobody_from_leaving_and_hears_of_it_later(cluster: LocalCluster):
    [member] = gather(cluster, "app", 1)
    cluster.scheduler.stop()
    begun = time.monotonic()
    member.close(timeout=0.5)
    assert time.monotonic() - begun < 8
    cluster.scheduler.cont()
    until(lambda: not cluster.members("worker"), "it has left", PATIENCE_S)
    assert waited(cluster) == {}


def test_a_scheduler_that_is_killed_keeps_nobody_from_leaving(cluster: LocalCluster):
    members = gather(cluster, "app", 2)
    cluster.scheduler.kill()
    begun = time.monotonic()
    leave_together(members)
    assert time.monotonic() - begun < 8


def run_unevenly(folder: pathlib.Path) -> str:
    """What a run with uneven loops prints. Raises if it hangs or fails."""
    script = folder / "train.py"
    script.write_text(UNEVEN)
    options = ["--servers", "2", "--workers", "10", "--sync", "bsp", "--on-worker-loss", "wait", "--verbose"]
    command = [sys.executable, "-m", "windlass", "run", *options, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout


def test_a_run_whose_workers_have_uneven_loops_ends_well(tmp_path: pathlib.Path):
    assert "is gone" not in run_unevenly(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_runs_whose_workers_have_uneven_loops_end_well(tmp_path: pathlib.Path):
    for i in range(100):
        assert "is gone" not in run_unevenly(tmp_path)
        print(f"{i + 1} of 100 runs ended well", flush=True)
