"""Memory shared with servers on the same host: the same results as sent, and nothing of it that can hurt."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._net.address import Address
from windlass.testing import Servers

ROWS, ROW = 700, 1000  # 2.8 MB: many shards on both servers
FLOAT32 = np.float32


@pytest.fixture(scope="module", params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """On TCP the client comes in by the side door."""
    with Servers(2, kind=request.param, threads=2) as servers:
        yield servers


@pytest.fixture
def cluster(pair: Servers) -> Iterator[wl.Cluster]:
    with pair.connect(transport="arena", timeout=20, app=f"app{time.monotonic_ns()}") as cluster:
        yield cluster


def mapped_bytes(servers: Servers, i: int) -> int:
    """What the server has mapped of its clients' memory."""
    total = 0
    for line in pathlib.Path(f"/proc/{servers.pids[i]}/maps").read_text().splitlines():
        if "/memfd:windlass" in line:
            first, _, end = line.split()[0].partition("-")
            total += int(end, 16) - int(first, 16)
    return total


def eventually_unmapped(servers: Servers) -> None:
    deadline = time.monotonic() + 10
    while any(mapped_bytes(servers, i) for i in range(2)):
        assert time.monotonic() < deadline, "memory of clients is still mapped"
        time.sleep(0.02)


# -- the same results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("rule", [wl.SGD(lr=0.1), wl.Adam(lr=0.01), wl.SGD(lr=0.1, momentum=0.9)], ids=str)
def test_what_is_pushed_and_pulled_in_place_is_what_the_embedded_engine_makes(
    cluster: wl.Cluster, pair: Servers, rule: wl.SGD | wl.Adam, registered: bool
):
    rng = np.random.default_rng(0)
    with wl.connect() as embedded:
        init = wl.Normal(std=1.0)
        theirs, ours = (c.tensor("w", (ROWS, ROW), rule=rule, init=init, seed=7) for c in (cluster, embedded))
        grad = cluster.empty((ROWS, ROW)) if registered else np.empty((ROWS, ROW), FLOAT32)
        out = cluster.empty((ROWS, ROW)) if registered else np.empty((ROWS, ROW), FLOAT32)
        for step in range(4):
            grad[:] = rng.standard_normal((ROWS, ROW), dtype=FLOAT32)
            expected = ours.push_pull(np.array(grad))
            np.testing.assert_array_equal(theirs.push_pull(grad, out=out), expected)
            rows = slice(100 * step, 100 * step + 250)
            ours[rows].push(grad[rows].copy()).wait()
            theirs[rows].push(grad[rows]).wait()
            np.testing.assert_array_equal(theirs.pull(out=out), ours.pull())
            listed = rng.permutation(ROWS)[:300]
            np.testing.assert_array_equal(theirs[listed].push_pull(grad[:300]), ours[listed].push_pull(grad[:300]))
            many = rng.integers(0, ROWS, 400)  # some of them several times
            np.testing.assert_array_equal(theirs[many].pull(out=out[:400]), ours[many].pull())
            np.testing.assert_array_equal(theirs[many].push_pull(grad[:400]), ours[many].push_pull(grad[:400]))
        assert theirs.fingerprint() == ours.fingerprint()
    if registered:
        assert all(mapped_bytes(pair, i) >= 2 * ROWS * ROW * 4 for i in range(2))


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("rule", [wl.RowAdagrad(lr=0.1), wl.Adam(lr=0.01), wl.Sum()], ids=str)
def test_rows_are_written_where_the_caller_wants_them(cluster: wl.Cluster, rule: wl.Adam | wl.Sum, registered: bool):
    rng = np.random.default_rng(1)
    with wl.connect() as embedded:
        init = wl.Normal(std=1.0)
        theirs, ours = (c.table("t", 16, rule=rule, init=init, seed=7) for c in (cluster, embedded))
        for _ in range(4):
            keys = rng.integers(-500, 500, 4000)  # many of them several times
            new = cluster.empty if registered else np.empty
            grads, out = new((4000, 16), FLOAT32), new((4000, 16), FLOAT32)
            out[:] = -1
            np.testing.assert_array_equal(theirs.pull(keys, out=out), ours.pull(keys))
            grads[:] = rng.standard_normal((4000, 16), dtype=FLOAT32)
            theirs.push(keys, grads).wait()
            ours.push(keys, np.array(grads)).wait()
            np.testing.assert_array_equal(theirs.pull(keys, out=out), ours.pull(keys))
            expected = ours.push_pull(keys, np.array(grads))
            np.testing.assert_array_equal(theirs.push_pull(keys, grads, out=out), expected)
            half = cluster.empty((4000, 16), "float16") if registered else np.empty((4000, 16), np.float16)
            np.testing.assert_array_equal(theirs.pull(keys, out=half), expected.astype(np.float16))
            half[:] = rng.standard_normal((4000, 16))
            theirs.push(keys, half).wait()
            ours.push(keys, np.array(half)).wait()
        assert theirs.fingerprint() == ours.fingerprint()


def test_keys_that_change_meanwhile_were_copied_first(cluster: wl.Cluster):
    table = cluster.table("t", 8, rule=wl.Sum())
    keys, ones = np.zeros(4096, np.int64), np.ones((4096, 8), FLOAT32)
    stop = threading.Event()

    def change() -> None:
        rng = np.random.default_rng(2)
        while not stop.is_set():
            keys[:] = rng.integers(0, 1000, 4096)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            table.push(keys, ones).wait()
    finally:
        stop.set()
        thread.join()
    assert table.pull(np.arange(1000)).sum() == 300 * 4096 * 8  # every gradient went somewhere, once


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_other_dtypes_and_versions(cluster: wl.Cluster, dtype: str):
    w = cluster.tensor("sum", (ROWS * ROW,), rule=wl.Sum(), dtype=dtype)
    grad, out = cluster.empty(ROWS * ROW, dtype), cluster.empty(ROWS * ROW, dtype)
    grad[:] = np.arange(ROWS * ROW)
    for k in (1, 2):
        np.testing.assert_array_equal(w.push_pull(grad, out=out), k * grad)
    first = w.pull_newer(out=out)
    assert first.changed
    assert not w.pull_newer(first.version, out=out).changed
    w[5:6].push(grad[5:6]).wait()
    assert w.pull_newer(first.version, out=out).changed
    assert out[5] == 15


def test_futures_of_ordinary_arrays_take_a_copy(cluster: wl.Cluster):
    w = cluster.tensor("w", ROWS * ROW, rule=wl.Sum())
    grad = np.ones(ROWS * ROW, FLOAT32)
    pushes = []
    for k in range(8):
        grad[:] = 10**k
        pushes.append(w.push(grad))
    pulled = w.pull_async()
    grad[:] = -1
    for push in pushes:
        push.wait()
    assert (pulled.wait() == 11111111).all()


def test_numbers_that_must_be_finite_are_checked_where_they_lie(cluster: wl.Cluster):
    w = cluster.tensor("w", ROWS * ROW, rule=wl.Sum(), reject_nonfinite=True)
    grad = cluster.empty(ROWS * ROW)
    grad[:] = 1
    grad[-1] = np.nan
    with pytest.raises(wl.NonFinite):
        w.push(grad).wait()
    assert not w.pull().any()


# -- loans -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped(servers: Servers) -> Iterator[None]:
    """Neither of them does anything meanwhile."""
    try:
        for pid in servers.pids:
            os.kill(pid, signal.SIGSTOP)
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                    while (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                        time.sleep(0.001)
        yield
    finally:
        for pid in servers.pids:
            os.kill(pid, signal.SIGCONT)


def test_a_borrowed_array_is_refused_until_the_request_is_done(cluster: wl.Cluster, pair: Servers):
    w = cluster.tensor("w", ROWS * ROW, rule=wl.Sum())
    grad, out = cluster.empty(ROWS * ROW), cluster.empty(ROWS * ROW)
    grad[:] = 1
    w.push_pull(grad, out=out)
    with stopped(pair):
        future = w.push_pull_async(grad, out=out)
        with pytest.raises(wl.Timeout):
            future.wait(0.05)
        for array in (grad, out):
            with pytest.raises(wl.BufferInUse):
                w.push(array)
    assert (future.wait() == 2).all()
    w.push(grad).wait()  # the loan has ended with the answer


def test_an_ordinary_array_is_the_callers_again_after_a_timeout(cluster: wl.Cluster, pair: Servers):
    w = cluster.tensor("w", ROWS * ROW, rule=wl.Sum())
    ordinary = np.full(ROWS * ROW, 5, FLOAT32)
    w.push(ordinary).wait()
    with stopped(pair):
        with pytest.raises(wl.Timeout):
            w.pull(out=ordinary, timeout=0.05)
        with pytest.raises(wl.Timeout):
            w.push_pull(ordinary, out=ordinary, timeout=0.05)
        ordinary[:] = -1
    assert (w.pull() == 10).all()  # the push goes on, with what it was given
    assert (ordinary == -1).all()


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_server_keeps_no_memory_of_clients_that_are_gone_or_have_freed_it(pair: Servers):
    with pair.connect(transport="arena", app="freed") as cluster:
        w = cluster.tensor("w", 1 << 20, rule=wl.Sum())
        for _ in range(3):
            w.push(np.ones(1 << 20, FLOAT32)).wait()
        assert mapped_bytes(pair, 0) > 0
    eventually_unmapped(pair)
    code = f"""
import numpy as np, sys
import windlass as wl
cluster = wl.connect(servers={pair.addresses!r}, transport="arena", app="killed")
w = cluster.tensor("w", 1 << 20, rule=wl.Sum())
grad, out = cluster.empty(1 << 20), cluster.empty(1 << 20)
grad[:] = 1
w.push_pull(grad, out=out)
print("there", flush=True)
while True:
    w.push_pull(grad, out=out)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"there\n"
        deadline = time.monotonic() + 10
        while not mapped_bytes(pair, 0):
            assert time.monotonic() < deadline, "nothing was shared"
            time.sleep(0.01)
        worker.kill()
    eventually_unmapped(pair)
    with pair.connect(app="killed") as cluster:  # every shard has whole pushes
        values = cluster.tensor("w", 1 << 20, rule=wl.Sum()).pull()
        assert (values == np.round(values)).all()
        assert values[0] > 0


def test_the_child_of_a_fork_has_none_of_the_files(cluster: wl.Cluster):
    w = cluster.tensor("w", 1 << 18, rule=wl.Sum())
    grad = cluster.empty(1 << 18)
    grad[:] = 1
    w.push(grad).wait()

    def files() -> int:
        count = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the folder's own descriptor
                count += "memfd:windlass" in os.readlink(f"/proc/self/fd/{fd}")
        return count

    assert files() > 0
    child = os.fork()
    if child == 0:
        os._exit(files())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    w.push(grad).wait()
    assert (w.pull() == 2).all()


def test_an_arena_above_the_cap_is_refused_with_the_number():
    with Servers(1, kind="unix", arena_bytes_max=8 << 20) as servers, servers.connect(transport="arena") as cluster:
        w = cluster.tensor("w", 4 << 20, rule=wl.Sum())
        grad = cluster.empty(4 << 20)
        grad[:] = 1
        w.push(grad).wait()  # sent, while the server says what it thinks of the arena
        with pytest.raises(wl.ResourceExhausted, match=f"at most {8 << 20} in all"):
            w.push(grad).wait()
        assert (w[:1000].pull() == 1).all()  # others go on


def test_memory_that_cannot_be_had_is_an_error_and_requests_go_on_without_it():
    code = """
import resource
import numpy as np
import windlass as wl
from windlass.testing import Servers

with Servers(1, kind="unix", threads=1) as servers, servers.connect(transport="arena") as cluster:
    w = cluster.tensor("w", 1 << 20, rule=wl.Sum())
    grad, out = np.ones(1 << 20, np.float32), np.empty(1 << 20, np.float32)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # files in memory, too
    for size in (1 << 22, 1000):
        try:
            cluster.empty(size)
            raise SystemExit("there was memory")
        except wl.ResourceExhausted as error:
            print(error)
    for _ in range(3):
        w.push_pull(grad, out=out)
    print((out == 3).all())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    large, small, right = done.stdout.splitlines()
    assert large == "empty: no memory for 16777216 bytes (fallocate: File too large)"
    assert small == "empty: no memory for 4000 bytes (fallocate: File too large)"
    assert right == "True"


def test_wrong_transports_are_refused():
    with pytest.raises(wl.InvalidArgument, match="transport must be"):
        wl.connect(servers=["unix://@x"], transport="pigeon")
    with pytest.raises(wl.InvalidArgument, match=r"needs servers on this host, not \['tcp://192.0.2.1:1'\]"):
        wl.connect(servers=["unix://@x", "tcp://192.0.2.1:1"], transport="arena")


# -- which servers it is shared with ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize(("asked", "shared"), [(None, True), ("auto", True), ("arena", True), ("socket", False)])
def test_memory_is_shared_with_servers_of_this_host_unless_that_is_not_wanted(
    kind: str, asked: str | None, shared: bool
):
    options = {} if asked is None else {"transport": asked}
    with Servers(1, kind=kind, threads=1) as servers, servers.connect(**options) as cluster:
        w = cluster.tensor("w", 1 << 20, rule=wl.Sum())
        grad = cluster.empty(1 << 20)
        grad[:] = 1
        for _ in range(3):
            w.push(grad).wait()
        assert (mapped_bytes(servers, 0) > 0) == shared
        assert (w.pull() == 3).all()


def test_the_environment_may_say_what_is_shared(monkeypatch: pytest.MonkeyPatch, pair: Servers):
    monkeypatch.setenv("WINDLASS_TRANSPORT", "socket")
    with pair.connect() as cluster:
        assert cluster._remote.transport == "socket"
    monkeypatch.setenv("WINDLASS_TRANSPORT", "smoke")
    with pytest.raises(wl.InvalidArgument, match="not 'smoke'"):
        pair.connect()


def test_who_cannot_use_the_side_door_comes_in_by_the_front(monkeypatch: pytest.MonkeyPatch):
    # Another host or another network namespace: the name leads nowhere.
    monkeypatch.setattr("windlass._net.dial.side_door", lambda door: Address("unix", name=f"nowhere-{door.hex()}"))
    with Servers(1, threads=1) as servers:
        with servers.connect() as cluster:
            w = cluster.tensor("w", 1 << 20, rule=wl.Sum())
            for _ in range(3):
                w.push(np.ones(1 << 20, FLOAT32)).wait()
            assert mapped_bytes(servers, 0) == 0
            assert (w.pull() == 3).all()
        with pytest.raises(wl.InvalidArgument, match="is not on this host"):
            servers.connect(transport="arena")
