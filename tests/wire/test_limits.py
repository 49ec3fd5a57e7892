"""Limits of threads, processes and address space: a server refuses what it has no thread or memory for, everything else
goes on, and it ends as usual."""

import contextlib
import pathlib
import resource
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing import Servers

MIB = 1 << 20


def address_space(pid: int) -> int:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))


@contextlib.contextmanager
def no_more_address_space(pid: int, left: int = 4 * MIB) -> Iterator[None]:
    """The process can map no other stack. Threads that have ended leave a few stacks for others."""
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (address_space(pid) + left, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_AS, before)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_without_a_thread_connections_are_refused_the_others_go_on_and_sigterm_works(kind: str):
    with Servers(1, kind=kind, threads=2) as servers, servers.connect(timeout=PATIENCE_S) as cluster:
        w = cluster.tensor("w", 1000, rule=wl.Sum())
        w.push_pull(np.ones(1000, np.float32))
        with contextlib.ExitStack() as stack, no_more_address_space(servers.pids[0]):
            refused = 0
            for i in range(20):
                try:
                    stack.enter_context(servers.connect(app=f"other{i}", timeout=10))
                except wl.ResourceExhausted as error:
                    refused += "no thread" in str(error)
            assert refused >= 5, "invalid: there were threads"
            assert (w.push_pull(np.ones(1000, np.float32)) == 2).all()
        with servers.connect(app="late", timeout=PATIENCE_S) as late:  # there are threads again
            late.tensor("w", 1000, rule=wl.Sum()).push(np.ones(1000, np.float32)).wait()
        with no_more_address_space(servers.pids[0]):
            assert servers.terminate(0) == 0


@pytest.mark.parametrize("sync", [wl.ASP(), wl.BSP()])
def test_without_memory_a_server_refuses_requests_and_lives(sync: wl.Sync):
    n = 16 * MIB
    with Servers(1, kind="tcp", threads=2) as servers:
        with servers.connect(timeout=PATIENCE_S, transport="socket") as cluster:
            w = cluster.tensor("w", n // 4, rule=wl.Sum(), sync=sync)
            small = cluster.tensor("small", 1000, rule=wl.Sum())
            w.push_pull(np.ones(n // 4, np.float32))
            with no_more_address_space(servers.pids[0], left=MIB):
                for _ in range(5):
                    with contextlib.suppress(wl.WindlassError):
                        w.push_pull(np.ones(n // 4, np.float32), timeout=2)
                    assert (small.push_pull(np.ones(1000, np.float32)) > 0).all()
            assert w.pull(timeout=PATIENCE_S)[0] >= 1
        assert servers.terminate(0) == 0
