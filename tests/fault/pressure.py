"""For processes of their own: pushes at full speed against servers that do not keep up, and what memory that takes."""

import contextlib
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

import windlass as wl
from windlass.testing import Servers

MIB = 1 << 20
LARGE, KEYS = MIB, 50_000  # int64 of 8 MiB; keys of a push to a table


def rss_bytes() -> int:
    """The anonymous memory of this process."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@dataclasses.dataclass
class Figures:
    """What a run printed."""

    begun: int = 0  # pushes that will be applied
    refused: int = 0  # calls that could not begin in time
    late: int = 0  # calls that began and were not done in time
    applied: float = 0  # pushes that were, by the totals
    grown_bytes: int = 0  # the client's memory, at most
    server_grown_bytes: int = 0
    seconds: float = 0.0

    def print(self) -> None:
        print(json.dumps(dataclasses.asdict(self)))


class Target:
    """An object, and how to push to it."""

    def __init__(self, cluster: wl.Cluster, what: str) -> None:
        self.tensor = self.table = None
        if "table" in what:
            self.table, self.keys = cluster.table("t", 4, rule=wl.Sum()), np.arange(KEYS)
            self.grad = np.ones((KEYS, 4), np.float32)
        else:
            size = 64 if "small" in what else LARGE
            self.tensor, self.grad = (
                cluster.tensor("w", (size,), rule=wl.Sum(), dtype=np.int64),
                np.ones(size, np.int64),
            )
        self.out = np.empty_like(self.grad)
        self.again = "push_pull" in what

    def push(self, timeout: float) -> wl.types.Future[None] | None:
        keys = [] if self.table is None else [self.keys]
        thing = self.tensor if self.table is None else self.table
        if self.again:
            thing.push_pull(*keys, self.grad, out=self.out, timeout=timeout)
            return None
        return thing.push(*keys, self.grad, timeout=timeout)

    def applied(self) -> float:
        """How many pushes the servers have; -1 where the numbers do not agree on it."""
        numbers = self.tensor.pull() if self.table is None else self.table.pull(self.keys)
        return float(numbers.flat[0]) if (numbers == numbers.flat[0]).all() else -1


def overload(
    servers: Servers, what: str, seconds: float, calls: int, slow: Callable[[], contextlib.AbstractContextManager]
) -> None:
    """Pushes ordinary arrays for so long while `slow()`, and prints figures. Some were pushed before."""
    with servers.connect(timeout=60) as cluster:
        target, figures = Target(cluster, what), Figures()
        for _ in range(3):
            if (future := target.push(60)) is not None:
                future.wait()
        before, server_before = rss_bytes(), sum(map(servers.rss_bytes, range(len(servers.pids))))
        futures, started = [], time.monotonic()
        with slow():
            while time.monotonic() < started + seconds and figures.begun + figures.refused < calls:
                try:
                    futures.append(target.push(0.02))
                    figures.begun += 1
                except wl.Timeout as error:
                    figures.refused += "not begun" in str(error)
                    figures.late += "goes on" in str(error)
                    figures.begun += "goes on" in str(error)
                figures.grown_bytes = max(figures.grown_bytes, rss_bytes() - before)
                server_now = sum(map(servers.rss_bytes, range(len(servers.pids))))
                figures.server_grown_bytes = max(figures.server_grown_bytes, server_now - server_before)
                futures = [future for future in futures if future is not None and not future.done()]
        for future in futures:
            future.wait(timeout=60)
        figures.applied = target.applied() - 3
        figures.seconds = time.monotonic() - started
        figures.print()


def against_stopped(kind: str, what: str, calls: int) -> None:
    @contextlib.contextmanager
    def slow() -> Iterator[None]:
        servers.stop(0)
        yield
        servers.cont(0)

    with Servers(1, kind=kind, threads=1) as servers:
        overload(servers, what, 20, calls, slow)


def refused(kind: str, calls: int) -> None:
    """Large pulls while as many requests as may be are under way to a stopped server."""
    with Servers(1, kind=kind, threads=1) as servers, servers.connect(timeout=60) as cluster:
        table, keys, figures = cluster.table("t", 4, rule=wl.Sum()), np.arange(KEYS), Figures()
        servers.stop(0)
        while figures.refused == 0:
            try:
                table.push([1], np.ones((1, 4), np.float32), timeout=0.02)
                figures.begun += 1
            except wl.Timeout:
                figures.refused += 1
        before, figures.refused = rss_bytes(), 0
        out = np.empty((KEYS, 4), np.float32)
        for _ in range(calls):
            try:
                table.pull(keys, out=out, timeout=0.001)
            except wl.Timeout as error:
                figures.refused += "not begun" in str(error)
        figures.grown_bytes = rss_bytes() - before
        servers.cont(0)
        figures.print()


def against_slow(kind: str, what: str, seconds: float) -> None:
    """The server has a tenth of the time."""

    @contextlib.contextmanager
    def slow() -> Iterator[None]:
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(0.002):
                servers.stop(0)
                ended.wait(0.018)
                servers.cont(0)

        thread = threading.Thread(target=run)
        thread.start()
        yield
        ended.set()
        thread.join()

    with Servers(1, kind=kind, threads=1) as servers:
        overload(servers, what, seconds, 1 << 62, slow)
