"""Limits of threads, processes and address space: a server refuses what it has no thread or memory for, everything else
goes on, and it ends as usual."""

import contextlib
import os
import pathlib
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import bound
import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing import Servers
from windlass.testing.cluster import until

MIB = 1 << 20
TOKEN = "of a server that is another user"  # and finds none by itself
Limit = Callable[[int], contextlib.AbstractContextManager[None]]


def address_space(pid: int) -> int:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))


@contextlib.contextmanager
def limited(pid: int, what: int, most: int) -> Iterator[None]:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(pid, what, before)


def no_more_address_space(pid: int, left: int = 4 * MIB) -> contextlib.AbstractContextManager[None]:
    """The process can map no other stack. Threads that have ended leave a few stacks for others."""
    return limited(pid, resource.RLIMIT_AS, address_space(pid) + left)


@contextlib.contextmanager
def no_more_processes(pid: int) -> Iterator[None]:
    """Its user has more than he may, and threads count, too. For servers of `bound_python`."""

    def most() -> str:
        lines = pathlib.Path(f"/proc/{pid}/limits").read_text().splitlines()
        return next(line.split()[2] for line in lines if line.startswith("Max processes"))

    os.kill(pid, signal.SIGUSR1)
    until(lambda: most() == str(bound.MOST), "the limit is set", PATIENCE_S)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGUSR2)
            until(lambda: most() != str(bound.MOST), "the limit is lifted", PATIENCE_S)


@pytest.fixture
def bound_python(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that the test starts are bound by a limit of processes."""
    if subprocess.run([sys.executable, bound.__file__], capture_output=True, check=False).returncode != 0:
        pytest.skip("no limit of processes binds here: this is root, and it may not become another user")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nshift 2  # -m windlass\nexec "{sys.executable}" "{bound.__file__}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize("limit", [no_more_address_space, no_more_processes])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_without_a_thread_connections_are_refused_the_others_go_on_and_sigterm_works(
    kind: str, limit: Limit, request: pytest.FixtureRequest, accurate: bool
):
    count = 200 if accurate else 20
    if limit is no_more_processes:
        request.getfixturevalue("bound_python")
    with (
        Servers(1, kind=kind, threads=2, token=TOKEN) as servers,
        servers.connect(timeout=PATIENCE_S) as cluster,
    ):
        w = cluster.tensor("w", 1000, rule=wl.Sum())
        w.push_pull(np.ones(1000, np.float32))
        with contextlib.ExitStack() as stack, limit(servers.pids[0]):
            refused = 0
            for i in range(count):
                try:
                    stack.enter_context(servers.connect(app=f"other{i}", timeout=10))
                except wl.ResourceExhausted as error:
                    refused += "no thread" in str(error)
            print(f"{refused} of {count} connections were refused")
            assert refused >= count // 4, "invalid: there were threads"
            assert (w.push_pull(np.ones(1000, np.float32)) == 2).all()
        with servers.connect(app="late", timeout=PATIENCE_S) as late:  # there are threads again
            late.tensor("w", 1000, rule=wl.Sum()).push(np.ones(1000, np.float32)).wait()
        with limit(servers.pids[0]):
            assert servers.terminate(0) == 0


@pytest.mark.usefixtures("bound_python")
@pytest.mark.parametrize("switch", ["", "threads"])
def test_without_a_thread_for_its_answers_a_request_is_refused_and_only_without_the_mechanism_the_server_ends(
    switch: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WINDLASS_BREAK", switch)
    with Servers(1, kind="tcp", threads=2, token=TOKEN) as servers:
        cluster = servers.connect(timeout=PATIENCE_S, transport="socket")
        with contextlib.closing(cluster):
            w = cluster.tensor("w", 1000, rule=wl.Sum(), sync=wl.SSP(0))
            with no_more_processes(servers.pids[0]):
                future = w.push(np.ones(1000, np.float32))
                if not switch:
                    with pytest.raises(wl.ResourceExhausted, match="no thread to be had for answers"):
                        future.wait()
                    return
                process = servers._servers[0].process
                until(lambda: process.poll() is not None, "the server has ended", PATIENCE_S)
                assert process.poll() == -signal.SIGABRT
                with pytest.raises(wl.WindlassError):
                    future.wait()


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
