"""``windlass bench control``: how long a cluster takes to start, to gather, and what it costs to do nothing."""

import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

import windlass as wl
from windlass.bench._figures import MEASURED, Suite
from windlass.bench._turns import Times, in_turns, timed
from windlass.control import messages as m
from windlass.control.events import Came, Died, Said
from windlass.control.model import Spec, Terms
from windlass.control.state import State
from windlass.testing import LocalCluster
from windlass.testing.cluster import until

SERVERS, WORKERS = 2, 2
PROCESSES, SESSIONS = 4, 200
MEMBERS = 10_000
PARTS = 5  # of a feed of events: what other suites call rounds
SESSION = """
import sys, threading, time
import windlass as wl
first, count, world = map(int, sys.argv[1:])
clusters = [None] * count
def join(i):
    clusters[i] = wl.connect(rank=first + i, world_size=world, timeout=60)
print("ready", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=join, args=(i,)) for i in range(count)]
for t in threads: t.start()
for t in threads: t.join()
print("joined", sum(c is not None for c in clusters), flush=True)
sys.stdin.readline()
for c in clusters: c.close()
"""


def run(console: Console, rows: int, short: bool = False) -> Suite:
    """All figures. `rows` has no meaning here; short: to see that it works, not how fast."""
    del rows
    suite = Suite("control", console, f"{MEASURED} Idle processes: their processor time, once.", short=short)
    start(suite)
    gather(suite, 20 if short else SESSIONS)
    events(suite, 500 if short else MEMBERS)
    idle(suite, 1.0 if short else 10.0)
    restart(suite)
    grow_and_shrink(suite, 16 << 20 if short else 1 << 30)
    return suite


def start(suite: Suite) -> None:
    """An empty script under `windlass run`, against as many bare interpreters that import windlass, all at once."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "empty.py"
        script.write_text("")
        command = [sys.executable, "-m", "windlass", "run", "--servers", str(SERVERS), "--workers", str(WORKERS)]

        def ours() -> None:
            subprocess.run([*command, str(script)], check=True)

        def bare() -> None:
            processes = [
                subprocess.Popen([sys.executable, "-c", "import windlass"]) for _ in range(SERVERS + WORKERS + 1)
            ]
            for process in processes:
                process.wait()

        mine, limit = in_turns(timed(ours), timed(bare), length=suite.runs if suite.short else suite.length)
    suite.latency(
        f"run of an empty script, {SERVERS} servers, {WORKERS} workers",
        "ms",
        mine,
        limit,
        bar=2.5,
        against=f"{SERVERS + WORKERS + 1} interpreters that import windlass",
    )


def gather(suite: Suite, sessions: int) -> None:
    """Many sessions that join at once: until all of them are in a view. A call has a cluster of its own."""
    each = sessions // PROCESSES
    (ours,) = in_turns(lambda calls: [_gathered(each) for _ in range(calls)], length=suite.runs)
    suite.latency(f"{each * PROCESSES} sessions from {PROCESSES} processes, all in a view", "s", ours, value_bar=10)


def _gathered(each: int) -> float:
    """Seconds until so many sessions of each process are in a view."""
    with LocalCluster(servers=1, failure_timeout=10.0) as cluster:
        environment = os.environ | cluster.environment(WINDLASS_TRANSPORT="socket")
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SESSION, str(i * each), str(each), str(each * PROCESSES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for i in range(PROCESSES)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
            begun = time.perf_counter()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            joined = sum(int(process.stdout.readline().split()[1]) for process in processes if process.stdout)
            seconds = time.perf_counter() - begun
            if joined != each * PROCESSES:
                raise RuntimeError(f"{joined} of {each * PROCESSES} sessions joined")
        finally:
            for process in processes:
                process.communicate("end\n", timeout=60)
    return seconds


def events(suite: Suite, members: int) -> None:
    """What an event costs the state machine when there are many members."""
    spec = Spec("default/w", True, "", [0] * 256)
    state = State(Terms(1, servers=100, linger=True), lambda data: spec, lambda a, b: True)

    def each(what: str, feed: list[object]) -> None:
        took = [timed(lambda: state.handle(event))(1)[0] for event in feed]  # type: ignore[arg-type]  # noqa: B023
        parts = [tuple(took[i * len(took) // PARTS : (i + 1) * len(took) // PARTS]) for i in range(PARTS)]
        suite.latency(f"{what}, {members} members", "us", Times(tuple(parts)))

    for i in range(100):
        state.handle(Came(i, m.Join("server", 1 + i, addresses=[f"tcp://h:{1 + i}"])))
        state.handle(Said(1 + i, m.Ready()))
    workers = members - 100
    joins = [Came(1000 + r, m.Join("worker", 1000 + r, "default", r, workers)) for r in range(workers)]
    each("join", list(joins[:-1]))
    state.handle(joins[-1])
    each("open", [Said(1000, m.Open(i, b"")) for i in range(200)])
    each("report", [Said(1000 + i, m.Report(clock=i)) for i in range(workers)])
    each("death, with a view for all", [Died(1000 + i, "killed") for i in range(5)])


def idle(suite: Suite, seconds: float) -> None:
    """The processor time of members that do nothing."""
    with LocalCluster(servers=1, failure_timeout=10.0) as cluster:
        worker = cluster.worker(
            "import time, windlass as wl\nc = wl.connect()\nprint('connected', flush=True)\ntime.sleep(600)"
        )
        until(lambda: "connected" in worker.output(), "it has joined", 30)
        time.sleep(0.5)
        processes = {"scheduler": cluster.scheduler.pid, "server": cluster.servers[0].pid, "worker": worker.pid}
        before = {name: _cpu_seconds(pid) for name, pid in processes.items()}
        time.sleep(seconds)
        for name, pid in processes.items():
            share = (_cpu_seconds(pid) - before[name]) / seconds
            suite.value(f"idle {name}", share * 100, "% of a core", value_bar=1)


def restart(suite: Suite) -> None:
    """A scheduler that is killed: until another one has its journal, and all members are back."""
    with LocalCluster(servers=2, failure_timeout=10.0, keeps=True) as cluster, cluster.connect() as worker:
        worker.tensor("w", 1000, rule=wl.Sum())

        def again() -> float:
            before = cluster.status()["generation"]
            cluster.scheduler.kill()
            begun = time.perf_counter()
            cluster.restart_scheduler()
            until(lambda: _is_right(cluster.status(), before + 1), "the status is right", 60)
            return time.perf_counter() - begun

        (took,) = in_turns(lambda calls: [again() for _ in range(calls)], length=suite.runs)
    suite.latency("scheduler killed, until the next one's status is right", "s", took, value_bar=5)


def _is_right(status: dict[str, Any], generation: int) -> bool:
    there = [one for one in status["members"] if one["away_seconds"] is None]
    return status["generation"] == generation and not status["returning"] and len(there) == 3


def grow_and_shrink(suite: Suite, nbytes: int) -> None:
    """A third server: until bytes are even, against a copy of those that must move. Then one is drained."""
    with LocalCluster(servers=2, failure_timeout=10.0) as cluster, cluster.connect(timeout=600) as worker:
        large = worker.tensor("large", nbytes // 4, rule=wl.SGD(lr=0.1))
        large.push(np.zeros(nbytes // 4, np.float32)).wait()
        small = worker.tensor("small", 1 << 16, rule=wl.SGD(lr=0.1))
        grad = worker.empty(1 << 16)
        grad[:] = 0
        ended = threading.Event()
        steps = [0]

        def train() -> None:
            while not ended.is_set():
                small.push_pull(grad)
                steps[0] += 1

        def rate(true: Callable[[], object]) -> float:
            before, begun = steps[0], time.perf_counter()
            until(true, "measured", 600)
            return (steps[0] - before) / (time.perf_counter() - begun)

        def held() -> list[int]:
            return [int(one["placed_bytes"]) for one in cluster.members("server")]

        begun = time.perf_counter()
        cluster.servers.append(cluster.start_server(None))
        until(lambda: len(held()) == 3 and min(held()) > 0 and not cluster.status()["level"]["joins"], "even", 600)
        took = time.perf_counter() - begun
        moved = held()[2]
        source = np.ones(moved, np.uint8)
        copied = source.copy()
        copying = timed(lambda: np.copyto(copied, source))(1)[0]
        name = f"a server joins 2 that have {nbytes >> 20} MiB, until all are even"
        suite.value(name, took, "s", limit=copying, against=f"a copy of the {moved >> 20} MiB that moved")
        thread = threading.Thread(target=train)
        thread.start()
        try:
            until(lambda: steps[0] > 10, "it trains", 60)
            wait = time.perf_counter() + (0.5 if suite.short else 3.0)
            before = rate(lambda: time.perf_counter() > wait)
            draining = threading.Thread(target=lambda: _drain(cluster))
            draining.start()
            during = rate(lambda: not draining.is_alive())
        finally:
            ended.set()
            thread.join()
        suite.value("steps/s while a server is drained, of before", during / before, "x")


def _drain(cluster: LocalCluster) -> None:
    with cluster.operator(60.0) as operator:
        operator.drain(2, 600.0)


def _cpu_seconds(pid: int) -> float:
    """As the kernel's scheduler counts it, by the nanosecond."""
    total = 0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9
