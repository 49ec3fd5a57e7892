"""Two hosts with a network between them, which fails: namespaces that are joined by a veth pair.

    host A, 10.87.0.1   scheduler, server 0, worker 0
    host B, 10.87.0.2   server 1, worker 1

The job pushes whole numbers to a tensor that is on both servers: one that is lost or applied twice changes the total.
"""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from helpers import PATIENCE_S

from windlass.testing.cluster import Process, until

A, B = "10.87.0.1", "10.87.0.2"
JOB = """
import contextlib, pathlib, sys, time
import numpy as np
import windlass as wl

stop, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
with wl.connect(timeout=300) as cluster:
    print("connected", cluster.rank, "of", cluster.world_size, flush=True)
    w = cluster.tensor("witness", 200_000, rule=wl.Sum(), dtype="int64")
    counts = cluster.tensor("counts", 2, rule=wl.Sum(), dtype="int64")
    n, mine = 0, np.full(200_000, cluster.rank + 1)
    try:
        while not stop.exists():
            w.push_pull(mine, timeout=seconds)
            n += 1
            print("step", n, flush=True)
            time.sleep(0.01)
        counts.push(n * np.eye(2, dtype="int64")[cluster.rank]).wait()
        while not counts.pull().all():  # until the other has said how many, too
            time.sleep(0.01)
    except wl.WindlassError as error:
        print("raised", type(error).__name__, str(error), flush=True)
        with contextlib.suppress(wl.WindlassError):
            cluster.close(timeout=1)  # what is under way may never get there
        raise SystemExit(3)
    steps, seen = counts.pull(), w.pull()
    print("exact" if (seen == steps[0] + 2 * steps[1]).all() else f"WRONG {steps} {seen}", *steps, flush=True)
"""


class Hosts:
    """The two namespaces and whatever was started in them."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.names = {A: f"windlass-a-{os.getpid()}", B: f"windlass-b-{os.getpid()}"}
        self.folder = folder
        self.processes: dict[str, Process] = {}
        (folder / "job.py").write_text(JOB)
        (folder / "token").write_text("a token of two hosts")

    def ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode != 0:
            raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    def make(self) -> None:
        """Raises OSError where that is not permitted."""
        for name in self.names.values():
            self.ip("netns", "add", name)
        one, two = self.names.values()
        self.ip("link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", two)
        for address, name in self.names.items():
            self.ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            self.ip("-n", name, "link", "set", "lo", "up")
            self.ip("-n", name, "link", "set", "eth0", "up")

    def link(self, state: str) -> float:
        """Takes the link "down" or "up"; when that was."""
        self.ip("-n", self.names[A], "link", "set", "eth0", state)
        return time.monotonic()

    def start(self, host: str, name: str, *arguments: str) -> Process:
        """`windlass ...` on a host."""
        command = ["ip", "netns", "exec", self.names[host], sys.executable, "-m", "windlass", *arguments]
        self.processes[name] = Process(command, {"PYTHONUNBUFFERED": "1"})
        return self.processes[name]

    def start_all(
        self, *scheduler: str, server: tuple[str, ...] = ("--listen", f"tcp://{B}:0"), seconds: float = 60.0
    ) -> None:
        """All five. scheduler, server: options of the scheduler and of server 1. seconds: what a step may take."""
        token, file = ("--token-file", str(self.folder / "token")), self.folder / "address"
        where = ("--listen", f"tcp://{A}:0", "--address-file", str(file), *token, "--exit-with-stdin")
        self.start(A, "scheduler", "scheduler", "--servers", "2", *where, *scheduler)
        until(file.exists, "the scheduler says where it is", PATIENCE_S)
        cluster = ("--address", file.read_text().strip(), *token)
        on_a = ("--listen", f"tcp://{A}:0")
        for i, (host, listen) in enumerate(((A, on_a), (B, server))):
            told = ("--number", str(i), "--address-file", str(self.folder / f"server-{i}"), "--exit-with-stdin")
            self.start(host, f"server {i}", "server", *listen, *told, *cluster)
        job = ("--", sys.executable, str(self.folder / "job.py"), str(self.folder / "stop"), str(seconds))
        for rank, host in enumerate((A, B)):
            self.start(host, f"worker {rank}", "worker", *cluster, "--rank", str(rank), "--world-size", "2", *job)

    def said(self, name: str) -> str:
        return self.processes[name].output()

    def steps(self) -> list[int]:
        """How far each worker is."""
        return [self.said(f"worker {rank}").count("step ") for rank in range(2)]

    def until_both_step(self, more: int, seconds: float) -> float:
        """How long that took."""
        goal = [n + more for n in self.steps()]
        return until(lambda: all(n >= g for n, g in zip(self.steps(), goal, strict=True)), "both go on", seconds)

    def until_all_end(self, seconds: float) -> dict[str, int]:
        """Exit codes by name."""
        deadline = time.monotonic() + seconds
        return {name: p.wait(max(0.1, deadline - time.monotonic())) for name, p in self.processes.items()}

    def finish(self) -> None:
        """Ends the job, and checks that nothing was lost, nor applied twice, and that all ended well."""
        counts = self.steps()
        (self.folder / "stop").touch()
        assert set(self.until_all_end(20).values()) == {0}
        for rank in range(2):
            exact = re.search(r"^exact (\d+) (\d+)$", self.said(f"worker {rank}"), re.MULTILINE)
            assert exact is not None
            assert all(int(exact[i + 1]) >= counts[i] > 0 for i in range(2))

    def close(self) -> None:
        for process in self.processes.values():
            process.close()
        for name in self.names.values():
            with contextlib.suppress(OSError):
                self.ip("netns", "delete", name)


@pytest.fixture
def hosts(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here to make hosts with")
    hosts = Hosts(tmp_path)
    try:
        try:
            hosts.make()
        except OSError as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield hosts
    finally:
        for name in hosts.processes:
            lines = hosts.said(name).splitlines()
            print(f"--- {name} said:", *(line for line in lines if not line.startswith("step ")), sep="\n")
        hosts.close()


def test_a_job_runs_on_two_hosts_and_a_server_is_reached_where_it_says(hosts: Hosts):
    hosts.start_all(server=("--listen", "tcp://0.0.0.0:0", "--advertise", B))
    hosts.until_both_step(20, 40)
    assert re.fullmatch(rf"tcp://{re.escape(B)}:[1-9]\d*\n", (hosts.folder / "server-1").read_text())
    assert f"windlass server listening on tcp://{B}:" in hosts.said("server 1")
    hosts.finish()


def test_a_link_that_is_down_for_three_seconds_is_survived(hosts: Hosts):
    hosts.start_all()
    hosts.until_both_step(20, 40)
    went = hosts.link("down")
    time.sleep(1.0)
    before = hosts.steps()
    time.sleep(max(0.0, went + 3.0 - time.monotonic()))
    assert hosts.steps() == before  # it is the link that they need
    hosts.link("up")
    took = hosts.until_both_step(10, 10)
    print(f"both go on {took:.2f} s after the link is up")
    hosts.finish()
    assert "is gone" not in hosts.said("scheduler")


def test_a_link_that_stays_down_is_an_error_that_says_who_is_out_of_reach(hosts: Hosts):
    hosts.start_all("--failure-timeout", "2", seconds=6.0)
    hosts.until_both_step(10, 40)
    here = (hosts.folder / "server-0").read_text().strip()
    went = hosts.link("down")
    # On the scheduler's side it is the scheduler who says so.
    assert hosts.processes["worker 0"].wait(PATIENCE_S) == 3
    assert re.search(
        r"^raised ServerLost push_pull of tensor 'witness': server 1 \(process \d+ on .*\): no heartbeat for 2 s$",
        hosts.said("worker 0"),
        re.MULTILINE,
    )
    assert hosts.processes["scheduler"].wait(PATIENCE_S) == 1
    for who in ("server 1", "worker 1 of app 'default'"):
        assert re.search(
            rf"^ERROR {who} \(process \d+ on .*\) is gone: no heartbeat for 2 s$", hosts.said("scheduler"), re.M
        )
    assert "shards were on server 1 and are lost" in hosts.said("scheduler")
    assert hosts.processes["server 0"].wait(PATIENCE_S) == 0
    # Whoever is cut off from it finds out alone, within the time that a step may take.
    assert hosts.processes["worker 1"].wait(max(0.1, went + 10 - time.monotonic())) == 3
    raised = re.search(r"^raised (ServerLost|Timeout) push_pull of tensor 'witness': .*", hosts.said("worker 1"), re.M)
    assert raised is not None
    assert here in raised[0]


def test_who_was_given_up_ends_when_it_can_reach_the_scheduler_again(hosts: Hosts):
    hosts.start_all("--failure-timeout", "1", "--linger", seconds=30.0)
    hosts.until_both_step(10, 40)
    hosts.link("down")
    until(lambda: hosts.said("scheduler").count("is gone: no heartbeat for 1 s") == 2, "they are given up", PATIENCE_S)
    hosts.link("up")
    assert hosts.processes["server 1"].wait(PATIENCE_S) == 1
    assert "this process was given up: no heartbeat for 1 s" in hosts.said("server 1")
    assert hosts.processes["worker 1"].wait(PATIENCE_S) == 3
    assert re.search(r"^raised \w+ .*(given up|server 1)", hosts.said("worker 1"), re.MULTILINE)
