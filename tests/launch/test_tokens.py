"""Tokens that nobody was given: processes of one user on one host find them, and other users get in nowhere."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._net.token import own_token, own_token_file
from windlass.launch import rundir
from windlass.testing.cluster import Process, until

WINDLASS = [sys.executable, "-m", "windlass"]
TRAINS = "import windlass as wl\nwith wl.connect(timeout=300) as c: print(c.tensor('w', 3, rule=wl.Sum()).pull())"
Start = Callable[..., Process]

#: Becomes another user, and tries all doors with what it has: no token, or the one it can read.
STRANGER = """
import encodings.idna, os, pathlib, socket, sys, time  # after setuid() nothing more can be imported
import windlass as wl
wl.connect  # all that there is
from windlass._net.address import Address, dial
from windlass._net.handshake import greet
from windlass._net.token import read_token
from windlass.control.member import connect
from windlass.observe.status import fetch

scheduler, token_file, *servers = sys.argv[1:]
os.setgroups([])
os.setuid(65534)
tokens = [b"", b"a token"]
for file in (pathlib.Path(token_file), *pathlib.Path(token_file).parent.glob("run-*/token")):
    try:
        tokens.append(read_token(file))
        print("read", file)
    except wl.InvalidArgument:
        pass
tried = 0
for token in tokens:
    deadline = time.monotonic() + 300
    address = Address.parse(scheduler)
    for enter in (
        lambda: fetch(address, token),
        lambda: connect(address, "/control", token, deadline, None),
        lambda: connect(address, "/heartbeat", token, deadline, None),
        *(lambda at=at: greet(dial(Address.parse(at), deadline), token, None, deadline) for at in servers),
    ):
        tried += 1
        try:
            enter()
            print("got in")
        except wl.AccessDenied:
            pass
print(tried, "tried")
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a process of a user whose folder is this test's alone, in one that all can enter; all are ended."""
    folder = tempfile.TemporaryDirectory(prefix="wl-")
    pathlib.Path(folder.name).chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder.name)
    started: list[Process] = []

    def start(*command: str, pass_fds: list[int] | None = None, **environment: str) -> Process:
        started.append(Process(list(command), {"PYTHONUNBUFFERED": "1", **environment}, pass_fds))
        return started[-1]

    yield start
    for process in started:
        print(f"--- {' '.join(process.process.args[1:])}", process.output(), sep="\n")
        process.close()
    folder.cleanup()


def listening(process: Process, says: str = "token") -> list[str]:
    """Where it listens, once it has said so, and where its token is."""
    until(lambda: says in process.output() or process.process.poll() is not None, "it listens", PATIENCE_S)
    return re.findall(r"^windlass \w+ listening on (\S+)$", process.output(), re.MULTILINE)


def windlass(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    everything = {**own, "COLUMNS": "300", **environment}
    return subprocess.run([*WINDLASS, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, env=everything)


def test_processes_of_one_user_on_one_host_find_the_schedulers_token(start: Start):
    scheduler = start(*WINDLASS, "scheduler", "--linger")
    [address] = listening(scheduler)
    assert f"windlass scheduler: its token is in {own_token_file()}, where" in scheduler.output()
    assert own_token().decode() not in scheduler.output()
    start(*WINDLASS, "server", "--address", address)
    worker = start(sys.executable, "-c", TRAINS, WINDLASS_ADDRESS=address)
    assert worker.wait(PATIENCE_S) == 0
    assert worker.output() == "[0. 0. 0.]\n"
    assert windlass("status", "--address", address).returncode == 0
    doctor = windlass("doctor", "--address", address)
    assert doctor.returncode == 0, doctor.stdout
    assert re.search(rf"^ok +token +{own_token_file()}, your own on this host$", doctor.stdout, re.MULTILINE)
    refused = windlass("status", "--address", address, WINDLASS_TOKEN="another")
    assert refused.returncode == 1
    assert "has another token" in refused.stderr


def test_who_comes_before_the_scheduler_finds_the_same_token(start: Start):
    with wl.testing.Servers(2) as servers, servers.connect() as cluster:  # servers by themselves have it, too
        assert cluster.tensor("w", 3, rule=wl.Sum()).pull().tolist() == [0, 0, 0]
        made = own_token()
    scheduler = start(*WINDLASS, "scheduler", "--linger")
    [address] = listening(scheduler)
    assert own_token() == made
    assert windlass("status", "--address", address).returncode == 0


def test_a_token_may_come_from_a_pipe_which_can_be_read_once(start: Start):
    end, pipe = os.pipe()
    os.write(pipe, b"from a pipe\n")
    os.close(pipe)
    scheduler = start(*WINDLASS, "scheduler", "--linger", "--token-file", f"/dev/fd/{end}", pass_fds=[end])
    os.close(end)
    [address] = listening(scheduler, says="expecting")
    assert str(own_token_file()) not in scheduler.output()
    assert windlass("status", "--address", address, WINDLASS_TOKEN="from a pipe").returncode == 0


def test_without_a_token_all_have_to_say_so_and_nobody_listens_beyond_loopback(start: Start):
    scheduler = start(*WINDLASS, "scheduler", "--linger", "--no-token")
    [address] = listening(scheduler)
    assert "windlass scheduler: without a token: everybody on this machine gets in" in scheduler.output()
    assert windlass("status", "--address", address, "--no-token").returncode == 0
    server = start(*WINDLASS, "server", "--address", address, "--no-token")
    listening(server)
    worker = start(sys.executable, "-c", TRAINS, WINDLASS_ADDRESS=address, WINDLASS_NO_TOKEN="1")
    assert worker.wait(PATIENCE_S) == 0
    refused = start(*WINDLASS, "server", "--address", address)
    assert refused.wait(PATIENCE_S) == 1
    assert "refused us: it has another token, or none" in refused.output()
    doctor = windlass("doctor", "--address", address, "--no-token")
    assert re.search(
        r"^warning +token +none \(no_token, flag\): everybody on this machine gets in$", doctor.stdout, re.M
    )
    for role in ("scheduler", "server"):
        beyond = windlass(role, "--no-token", "--listen", "tcp://0.0.0.0:0")
        assert beyond.returncode == 2
        assert "tcp://0.0.0.0:0: beyond loopback a token is required" in beyond.stderr
        both = windlass(role, "--no-token", WINDLASS_TOKEN="one")
        assert both.returncode == 2
        assert "no_token (flag): expected no token, but one is given, too" in both.stderr


def what_another_user_reaches(start: Start, *options: str) -> list[str]:
    """The check: somebody of another uid tries the scheduler, its server, and a server by itself."""
    [scheduler] = listening(start(*WINDLASS, "scheduler", "--linger", *options))
    listen = ["--listen", "tcp://127.0.0.1:0", "--listen", "unix", *options]
    servers = listening(start(*WINDLASS, "server", "--address", scheduler, *listen))
    servers += listening(start(*WINDLASS, "server", *listen))
    run = rundir.make("tcp://127.0.0.1:1")
    stranger = start(sys.executable, "-c", STRANGER, scheduler, str(own_token_file()), *servers)
    assert stranger.wait(PATIENCE_S) == 0
    rundir.remove(run)
    return stranger.output().splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_gets_in_nowhere(start: Start):
    assert what_another_user_reaches(start) == ["14 tried"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_check_of_other_users_notices_a_cluster_without_a_token(start: Start):
    *found, last = what_another_user_reaches(start, "--no-token")
    assert found.count("got in") >= 4  # over TCP; on a Unix socket the kernel says who it is
    assert last == "14 tried"
