"""Servers as processes: they come, can be watched, stopped and killed, and never outlive the test."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import check_python

import windlass as wl
from windlass._net.address import Address, dial
from windlass.testing import Servers

KINDS = pytest.mark.parametrize("kind", ["tcp", "unix"])
TOKEN = "a secret of this test, 0123456789abcdef"


@pytest.fixture(scope="module")
def pair() -> Iterator[Servers]:
    """Two servers for tests that leave them as they are."""
    with Servers(2, threads=1, token=TOKEN) as servers:
        yield servers


def answers(address: str, seconds: float = 5.0) -> bool:
    """Whether somebody greets there."""
    try:
        with dial(Address.parse(address), time.monotonic() + seconds) as sock:
            sock.settimeout(seconds)
            return sock.recv(48).startswith(b"WINDLASS")
    except OSError:
        return False


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


# -- while they run --------------------------------------------------------------------------------------------------


@KINDS
def test_every_server_answers_at_its_address_and_none_is_left_behind(kind: str):
    with Servers(2, kind=kind) as servers:
        assert len(set(servers.addresses)) == len(set(servers.pids)) == 2
        for address in servers.addresses:
            assert address.startswith(f"{kind}://")
            assert answers(address)
        pids = servers.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(answers(address) for address in servers.addresses)


@KINDS
def test_connect_gives_a_cluster_on_them(kind: str):
    with Servers(2, kind=kind, threads=1, token=TOKEN) as servers, servers.connect(timeout=20) as cluster:
        tensor = cluster.tensor("w", (1 << 16,), rule=wl.Sum(), dtype=np.int64)
        tensor.push(np.arange(1 << 16)).wait()
        np.testing.assert_array_equal(tensor.push_pull(np.ones(1 << 16, np.int64)), np.arange(1, (1 << 16) + 1))


def test_connect_with_another_token_is_denied(pair: Servers):
    with pytest.raises(wl.WindlassError) as raised:
        pair.connect(token="not that one", timeout=5)
    assert TOKEN not in str(raised.value)


def test_the_token_is_in_no_command_line_and_no_output(pair: Servers):
    for i, pid in enumerate(pair.pids):
        assert TOKEN not in Path(f"/proc/{pid}/cmdline").read_text()
        assert TOKEN not in pair.output(i)


def test_a_token_of_the_environment_is_not_passed_on_unasked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    with Servers(1) as servers:
        assert b"WINDLASS_TOKEN" not in Path(f"/proc/{servers.pids[0]}/environ").read_bytes()


def test_figures_are_those_of_the_process(pair: Servers):
    assert 1 << 20 < pair.rss_bytes(0) < 1 << 30
    assert 1 <= pair.threads(0) < 100
    files = pair.fds(0)
    with dial(Address.parse(pair.addresses[0]), time.monotonic() + 5) as sock:
        assert len(sock.recv(48)) == 48
        assert pair.fds(0) == files + 1
    before = pair.cpu_seconds(0)
    deadline = time.monotonic() + 20
    while pair.cpu_seconds(0) < before + 0.02:
        assert answers(pair.addresses[0])
        assert time.monotonic() < deadline


def test_no_server_holds_the_pipe_of_another(pair: Servers):
    pipes = [{os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")} for pid in pair.pids]
    assert not {x for x in pipes[0] & pipes[1] if x.startswith("pipe:")}


# -- kill, stop, restart ---------------------------------------------------------------------------------------------


def test_killed_a_server_is_gone_and_the_others_go_on():
    with Servers(2) as servers:
        servers.kill(0)
        assert not Path(f"/proc/{servers.pids[0]}").exists()
        assert [answers(address) for address in servers.addresses] == [False, True]
        servers.kill(0)  # once more does no harm
        for use in (servers.stop, servers.cont, servers.rss_bytes, servers.cpu_seconds, servers.threads, servers.fds):
            with pytest.raises(ProcessLookupError, match="server 0 has ended with status -9"):
                use(0)


def test_stopped_a_server_is_silent_until_it_goes_on():
    with Servers(1) as servers:
        servers.stop(0)
        assert not answers(servers.addresses[0], 0.2)
        servers.cont(0)
        assert answers(servers.addresses[0])


def test_terminated_a_server_ends_well():
    with Servers(1) as servers:
        assert servers.terminate(0) == 0
        assert not Path(f"/proc/{servers.pids[0]}").exists()


@KINDS
def test_restarted_a_server_is_another_process_that_answers(kind: str):
    with Servers(2, kind=kind) as servers:
        pids, addresses = servers.pids, list(servers.addresses)
        servers.kill(0)
        for i in range(2):  # one that was killed, one that runs
            assert servers.restart(i) == servers.addresses[i]
            assert answers(servers.addresses[i])
        assert not any(map(alive, pids))
        assert not set(pids) & set(servers.pids)
        if kind == "unix":
            assert servers.addresses == addresses


# -- how they end ----------------------------------------------------------------------------------------------------


def test_the_end_of_the_block_ends_stopped_servers_too():
    with Servers(2) as servers:
        servers.stop(0)
        pids = servers.pids
        started = time.monotonic()
    assert time.monotonic() - started < 4  # before SIGKILL would come
    assert not any(map(alive, pids))


def test_an_error_within_the_block_is_raised_and_ends_the_servers():
    pids: list[int] = []

    def fail() -> None:
        with Servers(1) as servers:
            pids.extend(servers.pids)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(pids) == 1
    assert not any(map(alive, pids))


ORPHANS = """
import os, signal, subprocess, sys, time
from windlass.testing import Servers

with Servers(3, kind="unix") as servers:
    sibling = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], close_fds=False)
    if (child := os.fork()) == 0:
        time.sleep(1000)
        os._exit(0)
    servers.stop(1)
    print(*servers.pids, sibling.pid, child, flush=True)
    time.sleep(1000)
"""


def test_no_server_outlives_a_process_that_is_killed_while_its_children_live_on():
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        *pids, sibling, child = map(int, parent.stdout.readline().split())
        try:
            parent.kill()
            assert len(pids) == 3
            assert all_end(pids)
            assert alive(sibling)
            assert alive(child)
        finally:
            for pid in (sibling, child, *filter(alive, pids)):
                os.kill(pid, signal.SIGKILL)


def test_a_forked_child_may_end_without_ending_the_servers():
    check_python(
        """
        import os
        from windlass.testing import Servers

        with Servers(1) as servers:
            if child := os.fork():
                assert os.waitpid(child, 0)[1] == 0
                assert servers.threads(0) >= 1
            else:
                assert servers.pids == []
        """
    )


# -- when they do not start ------------------------------------------------------------------------------------------


def test_a_server_that_refuses_to_start_is_quoted():
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 2 .*--threads"), Servers(2, threads=0):
        pass


def test_servers_that_take_too_long_are_given_up_and_ended():
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with pytest.raises(TimeoutError, match="did not say in time"), Servers(2, start_seconds=0.0):
        pass
    assert children.read_text() == before


@pytest.mark.parametrize("wrong", [{"count": 0}, {"kind": "udp"}])
def test_servers_that_cannot_be_are_refused(wrong: dict):
    with pytest.raises(wl.InvalidArgument):
        Servers(**wrong)
