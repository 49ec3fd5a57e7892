"""A cluster of real processes with a scheduler: who comes, who goes, who is refused."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._net.address import Address, listen
from windlass.control import messages as m
from windlass.control.auth import bearer
from windlass.control.member import Member, connect, new_incarnation
from windlass.launch import WORKERS_LOST
from windlass.testing import LocalCluster
from windlass.testing.cluster import Process, until

CONNECT = "import os, sys, time, windlass as wl; cluster = wl.connect(timeout=300); print('connected', flush=True)\n"
WITNESS = """
w = cluster.tensor("witness", 1000, rule=wl.Sum(), dtype="int64")
import numpy as np
one = np.ones(1000, np.int64)
"""


QUOTAS = """
[apps.small]
memory_bytes_max = 100_000
[apps.tables]
memory_bytes_max = "64Mi"
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    """A cluster that tests leave as they found it; each takes an app of its own."""
    with LocalCluster(servers=2, config=QUOTAS) as cluster:
        until(lambda: len(cluster.members("server")) == 2, "the servers have come", PATIENCE_S)
        yield cluster


def workers(cluster: LocalCluster, app: str, count: int) -> list[wl.Cluster]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: cluster.connect(app=app, rank=rank, world_size=count), range(count)))


# -- working ---------------------------------------------------------------------------------------------------------


def test_workers_share_what_lies_on_the_servers(shared: LocalCluster):
    one, two = workers(shared, "share", 2)
    with one, two:
        assert (one.rank, two.rank, one.world_size) == (0, 1, 2)
        w = one.tensor("w", (1000, 300), rule=wl.SGD(lr=0.5))
        t = one.table("t", 8, rule=wl.Sum())
        two.tensor("w", (1000, 300), rule=wl.SGD(lr=0.5)).push(np.ones((1000, 300), np.float32)).wait()
        two.table("t", 8, rule=wl.Sum()).push([7, -1], np.ones((2, 8), np.float32)).wait()
        assert (w.pull() == -0.5).all()
        assert (t.pull([-1, 7, 9]) == [[1] * 8, [1] * 8, [0] * 8]).all()
        assert one.fingerprint() == two.fingerprint()
        placed = {x["name"]: x for x in shared.status()["objects"]}
        assert placed["share/w"]["servers"] == placed["share/t"]["servers"] == [0, 1]


def test_apps_have_their_own_names_and_reach_each_other_by_full_name(shared: LocalCluster):
    with shared.connect(app="one") as one, shared.connect(app="two") as two:
        a = one.tensor("w", 3, rule=wl.Sum())
        b = two.tensor("w", 5, rule=wl.Sum())
        a.push(np.ones(3, np.float32)).wait()
        assert b.pull().shape == (5,)
        assert (two.tensor("one/w", 3, rule=wl.Sum()).pull() == 1).all()


def test_a_reader_sees_what_workers_do_and_is_waited_for_by_nobody(shared: LocalCluster):
    with shared.connect(app="read") as worker:
        w = worker.tensor("w", 100, rule=wl.Sum())
        w.push(np.ones(100, np.float32)).wait()
        with shared.connect(app="read", reader=True) as reader:
            assert (reader.tensor("w", 100, rule=wl.Sum()).pull() == 1).all()
            app = next(x for x in shared.status()["apps"] if x["name"] == "read")
            assert (app["workers"], app["readers"], app["view"]) == (1, 1, 1)


def test_an_app_is_held_to_its_quota_in_numbers(shared: LocalCluster):
    with shared.connect(app="small") as small:
        small.tensor("fits", 20_000, rule=wl.SGD(lr=0.1))
        with pytest.raises(wl.ResourceExhausted, match=r"needs 40000 bytes; app 'small' has 80000 of its 100000 taken"):
            small.tensor("does not", 10_000, rule=wl.SGD(lr=0.1))
        small.tensor("fits, too", 1_000, rule=wl.SGD(lr=0.1))


def test_tables_that_grow_beyond_their_apps_quota_are_refused_and_others_grow(shared: LocalCluster):
    with shared.connect(app="tables") as limited, shared.connect(app="free") as free:
        table, other = (cluster.table("t", 64, rule=wl.Sum()) for cluster in (limited, free))
        rows = np.ones((10_000, 64), np.float32)

        def fill(what: wl.Table) -> int:
            for batch in range(100):  # 256 MB in all
                what.push(np.arange(10_000) + 10_000 * batch, rows).wait()
            return len(what)

        with pytest.raises(wl.ResourceExhausted, match="of its app's share of this server, 33554432"):
            fill(table)
        assert 50_000 < len(table) < 250_000
        assert (table.pull([5]) == 1).all()

        def refused() -> bool:  # what tables take counts for tensors, too, once the servers have reported it
            try:
                limited.tensor(f"w{time.monotonic()}", 3_000_000, rule=wl.Sum())
            except wl.ResourceExhausted as error:
                return "app 'tables' has" in str(error)
            return False

        until(refused, "its tables count", PATIENCE_S)
        assert fill(other) == 1_000_000


def test_a_spec_that_differs_is_refused_by_the_scheduler(shared: LocalCluster):
    with shared.connect(app="specs") as cluster:
        cluster.tensor("w", 3, rule=wl.Sum())
        with pytest.raises(wl.SpecMismatch, match="'w' exists with another spec"):
            cluster.tensor("w", 4, rule=wl.Sum())


def test_status_says_who_is_there_and_where_settings_came_from(shared: LocalCluster):
    with shared.connect(app="status") as cluster:
        cluster.tensor("w", 1 << 20, rule=wl.Adam())
        for _ in range(3):
            cluster.tick()
        until(lambda: any(x.get("clock") == 3 for x in shared.members("worker")), "the clock is reported", PATIENCE_S)
        status = shared.status()
        mine = next(x for x in status["members"] if x.get("app") == "status")
        assert mine["pid"] == os.getpid()
        assert [x["index"] for x in status["members"] if x["role"] == "server"] == [0, 1]
        assert status["settings"]["failure_timeout"] == {"value": 2.0, "from": "environment, WINDLASS_FAILURE_TIMEOUT"}
        assert status["timeouts"]["heartbeat"] == 0.2
        until(lambda: all(x["memory_bytes"] > 4e6 for x in shared.members("server")), "memory is reported", PATIENCE_S)
        assert all(x["requests"] > 0 and x["bytes_in"] > 0 and x["bytes_out"] > 0 for x in shared.members("server"))


def test_the_http_port_is_for_those_who_know_the_token(shared: LocalCluster):
    address = Address.parse(shared.address)

    def get(path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=PATIENCE_S)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body

    assert get("/healthz") == (200, "ok\n")
    good = {"Authorization": f"Bearer {bearer(shared.token.encode())}"}
    for path in ("/api/v1/status", "/metrics"):
        for header in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": f"Bearer {bearer(b'other')}"}):
            assert get(path, **header)[0] == 401
        assert get(path, **good)[0] == 200
    text = get("/metrics", **good)[1]
    assert 'windlass_members{role="server"} 2.0' in text
    assert "windlass_server_memory_bytes" in text
    assert json.loads(get("/api/v1/status", **good)[1])["servers_expected"] == 2
    assert get("/nothing")[0] == 404


# -- who is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["another", "a token of test", "a token of testss"])
def test_without_the_token_nobody_comes_in(shared: LocalCluster, token: str):
    with pytest.raises(wl.AccessDenied, match="refused us"):
        shared.connect(token=token, timeout=PATIENCE_S)


def test_a_rank_that_is_taken_is_refused_with_who_has_it(shared: LocalCluster):
    with (
        shared.connect(app="taken"),
        pytest.raises(wl.RankTaken, match=rf"rank 0 is taken, by worker 0 of app 'taken' \(process {os.getpid()}"),
    ):
        shared.connect(app="taken", rank=0, world_size=1)


def test_who_comes_before_the_death_of_its_predecessor_is_known_gets_its_rank_when_it_is(
    caplog: pytest.LogCaptureFixture,
):
    elsewhere = (
        "import windlass.control.evidence as e; e.home = lambda: 'another host'"  # whose kernel tells us nothing
    )
    with LocalCluster(servers=1, prelude=elsewhere, failure_timeout=1.0) as cluster:
        first = cluster.worker(CONNECT + "time.sleep(1000)")
        until(lambda: "connected" in first.output(), "it has come", PATIENCE_S)
        first.kill()
        with cluster.connect(rank=0, timeout=PATIENCE_S) as again:
            assert again.rank == 0
        assert "rank 0 is taken, by worker 0" in caplog.text
        assert "tries again for 2 s" in caplog.text


def test_a_member_of_another_cluster_is_refused(shared: LocalCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_CLUSTER", "00000000deadbeef")
    with pytest.raises(wl.AccessDenied, match="not 00000000deadbeef, which was meant"):
        shared.connect(timeout=PATIENCE_S)


def test_a_client_of_no_cluster_is_refused_by_a_server_of_one(shared: LocalCluster):
    address = shared.members("server")[0]["address"]
    with pytest.raises(wl.AccessDenied, match="of another cluster"):
        wl.connect(servers=[address], token=shared.token, timeout=PATIENCE_S)


def test_a_worker_that_says_what_servers_say_is_out_and_others_go_on(shared: LocalCluster):
    with shared.connect(app="honest") as honest:
        w = honest.tensor("w", 10, rule=wl.Sum())
        join = m.Join("worker", new_incarnation(), "liar", 0, 1)
        liar = Member(Address.parse(shared.address), shared.token.encode(), join, lambda _: None)
        liar.start(time.monotonic() + 5)
        liar.tell(m.Moved(1))
        until(lambda: liar.ended is not None, "it is out", PATIENCE_S)
        assert isinstance(liar.ended, wl.ProtocolError)
        assert "a worker does not say Moved" in str(liar.ended)
        w.push(np.ones(10, np.float32)).wait()
        assert shared.scheduler.process.poll() is None


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xc1", b"\xff" * 1000, m.encode(m.Moved(1)), m.encode(m.Welcome(1, 1, 1, 1))]
)
def test_bytes_that_are_no_join_are_answered_with_a_reason(shared: LocalCluster, data: bytes):
    ws = connect(Address.parse(shared.address), "/control", shared.token.encode(), time.monotonic() + 5, None)
    ws.send(data)
    answer = m.read_scheduler(ws.receive(time.monotonic() + 5))
    assert isinstance(answer, m.Refused)
    assert answer.error == "ProtocolError"
    ws.end()


def test_what_is_no_scheduler_says_so():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(wl.ProtocolError, match="is no scheduler"):
            wl.connect(address, timeout=PATIENCE_S)
        thread.join()


def pull_until_it_raises(w: wl.Tensor) -> None:
    while True:
        w.pull(timeout=10)


# -- who is missing --------------------------------------------------------------------------------------------------


def test_connect_names_those_who_have_not_come():
    with LocalCluster(servers=2, start_timeout=30) as cluster:
        cluster.servers.pop().close()  # as if it had never come
        until(lambda: len(cluster.members("server")) == 1, "the other has come", PATIENCE_S)
        begun = time.monotonic()
        with pytest.raises(wl.Timeout, match=r"missing: server 1, worker 0 of app 'default'"):
            cluster.connect(rank=1, world_size=2, timeout=12)  # the scheduler names them every five seconds
        assert time.monotonic() - begun < 15
        assert "still missing: server 1, worker 0 of app 'default'" in cluster.scheduler.output()


def test_connect_waits_as_long_as_start_timeout_says_and_its_calls_do_not(monkeypatch: pytest.MonkeyPatch):
    with LocalCluster(servers=1) as cluster:
        until(lambda: len(cluster.members("server")) == 1, "the server has come", PATIENCE_S)
        monkeypatch.setenv("WINDLASS_START_TIMEOUT", "8")
        begun = time.monotonic()
        with pytest.raises(wl.Timeout, match=r"has not started .* missing:"):
            wl.connect(cluster.address, rank=0, world_size=2, token=cluster.token)
        assert 7.9 < time.monotonic() - begun < 50  # calls have 60
    monkeypatch.setenv("WINDLASS_START_TIMEOUT", str(PATIENCE_S))
    with LocalCluster(servers=1) as cluster, cluster.connect(timeout=None) as alone:
        assert alone._timeout == 60.0


def test_the_scheduler_gives_up_at_its_own_timeout_and_says_why():
    class PatientServers(LocalCluster):
        """Theirs is the time that they have to find the scheduler."""

        def start_server(self, i: int, **more: str) -> Process:
            return super().start_server(i, WINDLASS_START_TIMEOUT=str(PATIENCE_S), **more)

    with PatientServers(servers=1, start_timeout=1.0) as cluster:
        until(lambda: len(cluster.members("server")) == 1, "the server has come", PATIENCE_S)  # the clock starts below
        with pytest.raises(wl.Timeout, match=r"not all had come within 1 s; missing: worker 1 of app 'default'"):
            cluster.connect(rank=0, world_size=2)
        assert cluster.scheduler.wait(PATIENCE_S) == 1
        assert cluster.servers[0].wait(PATIENCE_S) == 0


# -- who dies --------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_is_known_long_before_the_failure_timeout_though_its_forked_children_live():
    with LocalCluster(servers=1, failure_timeout=1000.0) as cluster:
        fork = "if os.fork() == 0:\n  time.sleep(1000)\n  os._exit(0)\n"
        first = cluster.worker(CONNECT + fork + "print('forked', flush=True)\ntime.sleep(1000)", 0, 2)
        cluster.worker(CONNECT + "time.sleep(1000)", 1, 2)
        until(lambda: "forked" in first.output(), "it has forked", PATIENCE_S)
        time.sleep(0.3)
        first.kill()
        took = until(lambda: len(cluster.members("worker")) == 1, "its death is known", PATIENCE_S)
        print(f"known after {took:.2f} s")
        assert "worker 0 of app 'default'" in cluster.scheduler.output()


def test_a_worker_whose_gil_is_held_lives(accurate: bool):
    timeout, held = (10.0, 15) if accurate else (2.0, 5)
    with LocalCluster(servers=1, failure_timeout=timeout) as cluster:
        hold = f"import ctypes; ctypes.PyDLL(None).usleep({held}_000_000)\n"
        after = WITNESS + "w.push(one).wait(); print(int(w.pull()[0]), 'after', flush=True)\n"
        worker = cluster.worker(CONNECT + hold + after)
        assert worker.wait(PATIENCE_S) == 0
        assert "1 after" in worker.output()
        assert "no heartbeat" not in cluster.scheduler.output()


def test_a_worker_that_is_stopped_is_given_up_after_the_failure_timeout_and_stays_out():
    with LocalCluster(servers=1, failure_timeout=1.0) as cluster:
        worker = cluster.worker(CONNECT + "time.sleep(1000)")
        until(lambda: "connected" in worker.output(), "it has come", PATIENCE_S)
        worker.stop()
        took = until(lambda: not cluster.members("worker"), "it is given up", PATIENCE_S)
        assert took > 0.7
        assert "no heartbeat for 1 s" in cluster.scheduler.output()
        worker.cont()
        until(lambda: "this process was given up" in worker.output(), "it is told", PATIENCE_S)


@pytest.mark.parametrize(
    ("error", "waited"), [(KeyError("that one"), [0]), (SystemExit(3), [0]), (SystemExit(0), []), (None, [])]
)
def test_a_worker_whose_block_raises_has_not_left_in_peace(
    shared: LocalCluster, error: BaseException | None, waited: list[int]
):
    app = f"block {error!r}"
    with contextlib.suppress(KeyError, SystemExit), shared.connect(app=app, on_worker_loss="wait"):
        if error is not None:
            raise error
    until(lambda: not any(x["app"] == app for x in shared.members("worker")), "it has left", PATIENCE_S)
    seen = next(x for x in shared.status()["apps"] if x["name"] == app)
    assert (seen["waited"], seen["started"]) == (waited, bool(waited))
    with shared.connect(app=app, on_worker_loss="wait") as again:
        assert again._attendance is not None
        view = again._attendance.view
        assert (view.waited, view.workers[0].since == view.started) == ([], not waited)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_is_an_error_with_its_name_within_the_failure_timeout(number: signal.Signals):
    with LocalCluster(servers=2, failure_timeout=1.0) as cluster, cluster.connect() as worker:
        w = worker.tensor("w", 1 << 20, rule=wl.SGD(lr=0.1))
        w.push(np.ones(1 << 20, np.float32)).wait()
        pid = next(x["pid"] for x in cluster.members("server") if x["index"] == 1)
        os.kill(pid, number)
        begun = time.monotonic()
        with pytest.raises(wl.ServerLost, match="server 1"):
            pull_until_it_raises(w)
        assert time.monotonic() - begun < 3.0
        assert list(cluster.status()["servers_lost"]) == ["1"]
        with cluster.connect(app="late", timeout=PATIENCE_S) as late:  # on the server that is left
            assert late.tensor("w", 4, rule=wl.Sum()).push_pull(np.ones(4, np.float32)).sum() == 4


def test_when_the_scheduler_is_killed_pushes_and_pulls_go_on_and_the_cluster_says_so(caplog: pytest.LogCaptureFixture):
    with LocalCluster(servers=2, failure_timeout=1.0) as cluster, cluster.connect() as worker:
        w = worker.tensor("w", 100_000, rule=wl.Sum(), dtype="int64")
        cluster.scheduler.kill()
        begun, pushes = time.monotonic(), 0
        while time.monotonic() - begun < 3:
            w.push(np.ones(100_000, np.int64)).wait()
            pushes += 1
        assert (w.pull() == pushes).all()
        assert pushes > 10
        assert "is away" in caplog.text
        assert "pushes and pulls continue" in caplog.text
        worker._timeout = 0.5
        with pytest.raises(wl.Timeout, match="which is away"):
            worker.tensor("new", 3, rule=wl.Sum())
        assert all(server.process.poll() is None for server in cluster.servers)


def test_servers_leave_when_the_workers_are_done():
    with LocalCluster(servers=2, linger=False) as cluster:
        with cluster.connect() as worker:
            worker.tensor("w", 10, rule=wl.Sum())
        assert cluster.scheduler.wait(PATIENCE_S) == 0
        assert [server.wait(PATIENCE_S) for server in cluster.servers] == [0, 0]


class Hasty(LocalCluster):
    """Servers have little time to join, so they begin when the scheduler is there. `of_servers`: their own settings."""

    of_servers: dict[str, str] = {}

    def start_server(self, i: int, **more: str) -> Process:
        self.status()
        return super().start_server(i, **self.of_servers, **more)


def test_servers_end_when_their_scheduler_stays_away_and_the_last_worker_has_left():
    with Hasty(servers=1, linger=False, start_timeout=3.0, failure_timeout=0.5) as cluster:
        until(lambda: len(cluster.members("server")) == 1, "the server has come", PATIENCE_S)
        worker = cluster.connect(timeout=PATIENCE_S)
        cluster.scheduler.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.servers[0].wait(5.0)  # the worker needs it
        worker.close()
        assert cluster.servers[0].wait(60) == 1
        said = rf"server 0 ends: its scheduler at {cluster.address} has been away for 3 s and no worker is connected"
        assert said in cluster.servers[0].output()


@pytest.mark.parametrize("whose", ["server", "scheduler"])
def test_servers_of_a_cluster_that_lingers_wait_for_their_scheduler(whose: str):
    class Lingering(Hasty):
        """One side alone was told to."""

        of_servers = {"WINDLASS_LINGER": str(whose == "server")}

    with Lingering(servers=1, linger=whose == "scheduler", start_timeout=3.0, failure_timeout=0.5) as cluster:
        until(lambda: len(cluster.members("server")) == 1, "the server has come", PATIENCE_S)
        cluster.scheduler.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.servers[0].wait(6.0)


@pytest.mark.parametrize("killed", [False, True])
def test_the_schedulers_exit_code_says_that_a_worker_was_lost_and_not_replaced(killed: bool):
    with LocalCluster(servers=1, linger=False, start_timeout=PATIENCE_S) as cluster:
        other = cluster.worker(CONNECT + f"time.sleep({1000 * killed})", 1, 2)
        with cluster.connect(rank=0, world_size=2, timeout=PATIENCE_S):
            if killed:
                other.kill()
            else:
                assert other.wait(PATIENCE_S) == 0
            until(lambda: len(cluster.members("worker")) == 1, "its end is known", PATIENCE_S)
        assert cluster.scheduler.wait(PATIENCE_S) == (WORKERS_LOST if killed else 0)
        assert ("lost and not replaced" in cluster.scheduler.output()) == killed


def test_a_server_whose_scheduler_never_comes_gives_up(tmp_path: object):
    with LocalCluster(servers=0, start_timeout=1.0) as cluster:
        cluster.scheduler.kill()
        server = cluster.start_server(0)
        try:
            assert server.wait(PATIENCE_S) == 1
            assert "connect to" in server.output()
        finally:
            server.close()


def test_members_are_refused_by_the_scheduler_of_another_cluster_at_the_same_address():
    with LocalCluster(servers=1) as cluster, cluster.connect() as worker:
        w = worker.tensor("w", 3, rule=wl.Sum())
        cluster.scheduler.kill()
        cluster.scheduler.close()
        with listen(Address.parse(cluster.address), 16) as listener:
            cluster.start_scheduler(listener.fileno())
        assert cluster.servers[0].wait(PATIENCE_S) == 1
        assert "this is cluster" in cluster.servers[0].output()
        until(lambda: worker._attendance is not None and worker._attendance.over is not None, "it hears", PATIENCE_S)
        with pytest.raises(wl.WindlassError, match="this is cluster"):
            w.push_pull(np.ones(3, np.float32))
