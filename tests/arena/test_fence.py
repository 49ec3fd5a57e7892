"""Fencing: a server that was given up and goes on later changes nothing in the worker's memory."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing import Servers

FLOAT32 = np.float32

# A server that stops inside a pass over a request's shards; the worker gives it up, goes on with its memory, and the
# server continues. Says whether that changed anything.
SCENE = """
import os, pathlib, signal, sys, time
import numpy as np
import windlass as wl
from windlass.testing import Proxy, Servers

how, broken = sys.argv[1:]
os.environ["WINDLASS_STOP"] = "pass:204"  # three requests of 64 shards come first
N = 1 << 21
with Servers(1, kind="unix", threads=1) as servers, Proxy(servers.addresses[0]) as proxy:
    address = proxy.address if how == "cut" else servers.addresses[0]
    cluster = wl.connect(servers=[address], transport="arena", timeout=20, failure_timeout=1.0)
    w = cluster.tensor("w", N, rule=wl.Sum())
    flat = cluster.empty(4 * N)  # the request has a part of it
    if how.endswith("slices"):
        grad, out = flat[:N], flat[N:2 * N]
    else:
        grad, out = cluster.empty(N), cluster.empty(N)
    grad[:] = 1
    out[:] = 0
    for _ in range(3):  # until both arrays are known to the server
        w.push_pull(grad, out=out)
    future = w.push_pull_async(grad, out=out)
    stat = pathlib.Path(f"/proc/{servers.pids[0]}/stat")
    deadline = time.monotonic() + 20
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "the server did not stop"
        time.sleep(0.001)
    try:
        w.push(grad)
        raise SystemExit("the gradient was not on loan")
    except wl.BufferInUse:
        pass
    expected = wl.ServerLost
    if how.startswith("abandon"):
        cluster.abandon(servers.addresses[0] if how == "abandon" else 0)
    elif how == "close":
        expected = wl.Closed
        try:
            cluster.close(timeout=0.1)
        except wl.Timeout:
            pass
    elif how == "cut":
        proxy.cut()
    try:
        future.wait(timeout=20)
        raise SystemExit("the request was answered")
    except expected:
        pass
    begun = int((out == 4).sum())
    assert 0 < begun < N, begun  # some of it was written before the server stopped
    assert (grad == 1).all()
    flat[:], grad[:], out[:] = 5, 6, 7
    os.kill(servers.pids[0], signal.SIGCONT)
    maps = pathlib.Path(f"/proc/{servers.pids[0]}/maps")
    while "/memfd:windlass" in maps.read_text():  # it keeps the memory for as long as it works on it
        assert time.monotonic() < deadline, "the server did not go on"
        time.sleep(0.001)
    same = (grad == 6).all() and (out == 7).all() and (flat[2 * N:] == 5).all()
    print("unchanged" if same else "changed")
    if how != "close":
        cluster.close(timeout=1)
"""


def play(how: str, broken: str = "") -> str:
    environment = {**os.environ, "WINDLASS_BREAK": broken}
    done = subprocess.run(
        [sys.executable, "-c", SCENE, how, broken], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("how", ["abandon", "abandon slices", "close", "cut"])
def test_a_server_that_stops_inside_a_pass_is_given_up_and_goes_on_changes_nothing(how: str):
    assert play(how) == "unchanged"


@pytest.mark.parametrize("how", ["abandon", "close"])
def test_without_the_fence_it_would(how: str):
    assert play(how, "fence") == "changed"


def state(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_other_servers_go_on_and_get_the_memory_anew():
    with (
        Servers(2, kind="unix", threads=1) as servers,
        servers.connect(transport="arena", timeout=10) as cluster,
        cluster.worker(1, 2) as other,
    ):
        both = cluster.tensor("both", 1 << 20, rule=wl.Sum())
        small = [cluster.tensor(f"s{i}", 8000, rule=wl.Sum()) for i in range(8)]  # each on one server
        grad, out = cluster.empty(1 << 20), cluster.empty(1 << 20)
        grad[:] = 1
        theirs = other.tensor("both", 1 << 20, rule=wl.Sum())
        for _ in range(3):
            both.push_pull(grad, out=out)
            theirs.push_pull(grad, out=out)
        os.kill(servers.pids[1], signal.SIGSTOP)
        while state(servers.pids[1]) != "T":
            time.sleep(0.001)
        writer_ends = threading.Event()
        try:
            future = both.push_pull_async(grad, out=out)
            own = cluster.empty(8000)
            own[:] = 0

            def write() -> None:  # an array that shares its segment with others, and is nobody's loan
                while not writer_ends.is_set():
                    own[:] += 1
                    if not (own == own[0]).all():
                        return
                    time.sleep(0)

            writer = threading.Thread(target=write, daemon=True)
            writer.start()
            time.sleep(0.05)
            cluster.abandon(1)
            with pytest.raises(wl.ServerLost, match="was abandoned"):
                future.wait()
            time.sleep(0.05)
            alive = writer.is_alive()
            writer_ends.set()
            writer.join()
            assert alive, "a write of the worker's own was lost"
            reached = 0
            for s in small:
                try:
                    s.push(grad[:8000]).wait()
                except wl.ServerLost:
                    continue
                for _ in range(2):
                    s.push(grad[:8000]).wait()
                assert (s.pull() == 3).all()
                reached += 1
            assert 0 < reached < 8
            with pytest.raises(wl.Timeout):  # a worker that uses the same memory, and has not given that server up
                theirs.push_pull(grad, out=out, timeout=0.05)
            with pytest.raises(wl.ServerLost, match="was abandoned"):
                both.pull()
        finally:
            writer_ends.set()
            os.kill(servers.pids[1], signal.SIGCONT)
        for _ in range(50):  # that push is applied now, and the loan of the arrays ends
            with contextlib.suppress(wl.BufferInUse):
                theirs.push_pull(grad, out=out)
                break
            time.sleep(0.1)
        assert len(set(out.tolist())) <= 2  # what the first server has, and what the second has


def test_whom_to_abandon_must_be_a_server():
    with wl.connect() as cluster, pytest.raises(wl.InvalidArgument, match="inside this process"):
        cluster.abandon(0)
    with Servers(1, kind="unix", threads=1) as servers, servers.connect() as cluster:
        for wrong in (1, -1, True, "unix://@nobody"):
            with pytest.raises(wl.InvalidArgument, match="is none of the servers"):
                cluster.abandon(wrong)
        with pytest.raises(wl.InvalidArgument, match="expected tcp://"):
            cluster.abandon("somewhere")
        w = cluster.tensor("w", 4, rule=wl.Sum())
        cluster.abandon(servers.addresses[0])
        cluster.abandon(0)  # again
        with pytest.raises(wl.ServerLost):
            w.pull()
