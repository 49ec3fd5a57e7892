"""A worker of ``windlass bench local`` inside a run: worker 0 measures, the others do what it says.

What they all do at once, worker 0 asks for over a Unix socket, with a line of JSON::

    {"work": "push_pull", "size_bytes": 1000000, "calls": 30}   ->   [0.00012, 0.00011, ...]
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench._figures import Suite
from windlass.bench._turns import Side, in_turns, scatter, timed, timed_over
from windlass.bench._work import (
    KB,
    MB,
    Empty,
    bar_of,
    fill,
    filled,
    fused_loop,
    keys_of,
    ordinary,
    own_arrays,
    push_pull,
    size_of,
    table_rows,
    threads_of,
)
from windlass.bench.wire import Bare

DIM, KEYS, TABLE_ROWS = 64, 256, 100_000
FEW_KEYS = ((16, 25.0, None), (KEYS, 70.0, 50.0))  # how many; bars in us: of a pull, and of its CPU time
SIZES = (64 * KB, 256 * KB, 1 * MB, 4 * MB, 16 * MB, 64 * MB)
TOGETHER_SIZES = (1 * MB, 16 * MB, 64 * MB)
WHERE = "in a run"
MEET_S, ANSWER_S = 60.0, 120.0  # for workers to find each other; for a turn
ITERATION = ("pull + push + tick", "pull", "push", "tick")
ITERATION_BARS = {"SSP(2)": 500.0, "BSP": 750.0}  # us


def alone(suite: Suite, cluster: wl.Cluster, own: Empty, rows: int) -> None:
    """One worker with registered arrays and with ordinary ones."""
    smallest(suite, cluster)
    few_keys(suite, cluster)
    for size_bytes in suite.sizes(SIZES):
        rule, bar = wl.SGD(lr=1e-6), bar_of(size_bytes)
        push_pull(suite, cluster, own, "SGD", rule, size_bytes, where=WHERE, bar=bar)
        where = f"{WHERE}, ordinary arrays"
        push_pull(suite, cluster, own, "SGD", rule, size_bytes, where=where, bar=None, empty=ordinary)
    kinds = [(WHERE, cluster.empty, 0.55, 0.45), (f"{WHERE}, ordinary arrays", ordinary, None, None)]
    table_rows(suite, cluster, own, rows, DIM, kinds=kinds)


def smallest(suite: Suite, cluster: wl.Cluster) -> None:
    """A push_pull of 4 floats, call upon call."""
    w = cluster.tensor("smallest", 4, rule=wl.SGD(lr=1e-6))
    with Bare("unix") as bare:
        for where, empty in ((WHERE, cluster.empty), (f"{WHERE}, ordinary arrays", ordinary)):
            grad, out = filled(empty, 4), filled(empty, 4)
            ours, limit = in_turns(
                timed(lambda: w.push_pull(grad, out=out)),  # noqa: B023 (called here)
                bare.round_trips(spinning=True),
                length=suite.length,
            )
            name = f"push_pull SGD of 4 floats, {where}"
            suite.latency(name, "us", ours, limit, against="bare round trip, spinning")


def few_keys(suite: Suite, cluster: wl.Cluster) -> None:
    """A few rows of a table, call upon call, with ordinary arrays; and the CPU time of worker and server for each."""
    table = cluster.table("few", DIM, rule=wl.SGD(lr=1e-6), init=wl.Normal(std=0.01))
    all_keys = keys_of(TABLE_ROWS)
    fill(table, all_keys, cluster)
    rng = np.random.default_rng(0)
    for keys, bar, cpu_bar in FEW_KEYS:
        drawn = itertools.cycle([all_keys[rng.choice(TABLE_ROWS, keys, replace=False)] for _ in range(100)])
        grads = filled(ordinary, (keys, DIM))
        calls = {"pull": table.pull, "push": lambda batch: table.push(batch, grads).wait()}  # noqa: B023 (called here)
        for verb, call in calls.items():
            side = Metered(timed_over(drawn, call))
            (ours,) = in_turns(side, length=suite.length)
            name, pulls = f"{verb} of {keys} keys, {WHERE}", verb == "pull"
            suite.latency(name, "us", ours, value_bar=bar if pulls else None)
            suite.value(
                f"{name}, CPU time of both sides",
                1e6 * statistics.median(side.cpu),
                "us",
                noise=scatter(side.cpu),
                value_bar=cpu_bar if pulls else None,
                calls=ours.calls,
            )


class Metered:
    """A side that also notes the CPU seconds of each call, of all processes of the run, by turns."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self.cpu: list[float] = []

    def __call__(self, calls: int) -> list[float]:
        before = _cpu_of_run()
        took = self._side(calls)
        self.cpu.append((_cpu_of_run() - before) / calls)
        return took


def _cpu_of_run() -> float:
    """Seconds that the launcher's children have used."""
    launcher = os.getppid()
    pids = map(int, pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    return sum(time.clock_gettime(_cpu_clock(pid)) for pid in pids)


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, as clock_getcpuclockid(3) gives it; Python has that for threads alone."""
    return (~pid << 3) | 2


class Work:
    """What a worker does when all of them work."""

    def __init__(self, cluster: wl.Cluster) -> None:
        self._cluster = cluster
        self._tensors: dict[int, tuple[Any, Any, Any]] = {}
        self._table: tuple[Any, Iterator[Any], Any] | None = None

    def do(self, request: dict[str, Any]) -> list[float]:
        """The seconds of each call."""
        if request["work"] == "push_pull":
            return self._push_pull(request["size_bytes"], request["calls"])
        return self._iterate(request["part"], request["calls"])

    def _push_pull(self, size_bytes: int, calls: int) -> list[float]:
        n, empty = size_bytes // 4, self._cluster.empty
        if size_bytes not in self._tensors:
            w = self._cluster.tensor(f"together {size_bytes}", n, rule=wl.SGD(lr=1e-6))
            self._tensors[size_bytes] = w, filled(empty, n), filled(empty, n)
        w, grad, out = self._tensors[size_bytes]
        return timed(lambda: w.push_pull(grad, out=out))(calls)

    def _iterate(self, part: str, calls: int) -> list[float]:
        """Iterations of a loop over a table, with ordinary arrays as most have them; the seconds of one part of it."""
        if self._table is None:
            table = self._cluster.table("t", DIM, rule=wl.SGD(lr=1e-6), init=wl.Normal(std=0.01))
            keys = keys_of(TABLE_ROWS)
            fill(table, keys, self._cluster)
            rng = np.random.default_rng(self._cluster.rank)
            drawn = [keys[rng.choice(TABLE_ROWS, KEYS, replace=False)] for _ in range(100)]
            self._table = table, itertools.cycle(drawn), filled(ordinary, (KEYS, DIM))
        table, batches, grads = self._table
        took = []
        for _ in range(calls):
            batch = next(batches)
            begun = time.perf_counter()
            table.pull(batch)
            pulled = time.perf_counter()
            table.push(batch, grads)
            pushed = time.perf_counter()
            self._cluster.tick()
            ticked = time.perf_counter()
            seconds = (ticked - begun, pulled - begun, pushed - pulled, ticked - pushed)
            took.append(seconds[ITERATION.index(part)])
        return took


class Leader:
    """Worker 0's end: asks all others for what it does itself."""

    def __init__(self, work: Work, path: pathlib.Path, workers: int) -> None:
        self._work, self.workers = work, workers
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(workers)
            listener.settimeout(MEET_S)
            self._files = [_lines(listener.accept()[0]) for _ in range(workers - 1)]

    def together(self, **request: Any) -> Side:
        """A side of all workers' calls at once."""

        def turn(calls: int) -> list[float]:
            asked = {**request, "calls": calls}
            for file in self._files:
                file.write(json.dumps(asked) + "\n")
                file.flush()
            took = self._work.do(asked)
            for file in self._files:
                answer = file.readline()
                if not answer:
                    raise RuntimeError(f"a worker of the bench ended while it did {asked}")
                took += json.loads(answer)
            return took

        return turn

    def close(self) -> None:
        """The others end."""
        for file in self._files:
            file.close()


def follow(work: Work, path: pathlib.Path) -> None:
    """The others' end: until worker 0 closes its."""
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(socket.socket(socket.AF_UNIX))
        deadline = time.monotonic() + MEET_S
        while True:
            try:
                link.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        file = stack.enter_context(_lines(link, timeout=None))
        for line in file:
            file.write(json.dumps(work.do(json.loads(line))) + "\n")
            file.flush()


def _lines(link: socket.socket, timeout: float | None = ANSWER_S) -> Any:
    with link:
        link.settimeout(timeout)
        return link.makefile("rw")


def iterations(suite: Suite, leader: Leader, policy: str) -> None:
    """A loop that pulls and pushes rows of a table and ticks: all of it, and each call of it."""
    for part in ITERATION:
        (ours,) = in_turns(leader.together(work="iteration", part=part), length=suite.length)
        of, bar = ("", ITERATION_BARS.get(policy)) if part == ITERATION[0] else (f", the {part}", None)
        name = f"{ITERATION[0]} of {KEYS} keys, {policy}, {leader.workers} workers {WHERE}{of}"
        suite.latency(name, "us", ours, value_bar=bar)


def push_pulls(suite: Suite, leader: Leader, own: Empty, policy: str) -> None:
    """push_pull of all workers at once: the sum over them."""
    threads = _core.cores()
    for size_bytes in suite.sizes(TOGETHER_SIZES):
        ours, limit = in_turns(
            leader.together(work="push_pull", size_bytes=size_bytes),
            fused_loop(own, "SGD", size_bytes, threads),
            length=suite.length,
        )
        name = f"push_pull SGD {size_of(size_bytes)}, {policy}, {leader.workers} workers {WHERE}, together"
        against = f"fused loop, {threads_of(threads)}"
        suite.rate(name, size_bytes / 1e9, "GB/s", ours.shared_by(leader.workers), limit, against=against)


def main() -> None:
    """The only argument is JSON, as in_run.py writes it."""
    options = json.loads(sys.argv[1])
    out, parts, policy = pathlib.Path(options["out"]), options["parts"], options["policy"]
    suite = Suite("local", Console(quiet=True), "", short=options["short"])
    with wl.connect() as cluster, own_arrays() as own:
        if parts == ["alone"]:
            alone(suite, cluster, own, options["rows"])
        elif cluster.rank > 0:
            follow(Work(cluster), out.with_suffix(".socket"))
            return
        else:
            leader = Leader(Work(cluster), out.with_suffix(".socket"), cluster.world_size)
            with contextlib.closing(leader):
                if "iterations" in parts:  # first: its ticks are to find nothing but the table
                    iterations(suite, leader, policy)
                if "push_pulls" in parts:
                    push_pulls(suite, leader, own, policy)
    out.write_text(json.dumps([dataclasses.asdict(figure) for figure in suite.figures]))


if __name__ == "__main__":
    main()
