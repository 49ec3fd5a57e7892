"""Clusters on server processes: where objects lie, who sees them, and what happens when servers do not answer."""

import contextlib
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import FLOAT32, SHARD, Connect, check_python, new_app, numbers, rng, stopped

import windlass as wl
from windlass.testing import Servers

KINDS = pytest.mark.parametrize("kind", ["tcp", "unix"])
WINDOW = 128  # requests without an answer that a client may have at each server
LARGE = 1 << 24  # float32 of 64 MiB: more than sockets take while nobody reads


@pytest.fixture(params=["tcp", "unix"])
def transport(request: pytest.FixtureRequest) -> str:
    """Servers alone: this module is about them."""
    return request.param


def rss_bytes() -> int:
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\s+(\d+) kB", status.read())[1]) << 10


def left() -> tuple[int, int]:
    """How many threads and open files this process has."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def run_threads(work: Callable[[int], None], n: int, seconds: float = 60.0) -> None:
    """Runs work(0) to work(n - 1) at once; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(n)]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def takes(least: float, most: float) -> Iterator[None]:
    """The block takes so many seconds."""
    begun = time.monotonic()
    yield
    assert least <= time.monotonic() - begun < most


# -- where objects lie -----------------------------------------------------------------------------------------------


def answered(requests: Callable[[], list[wl.types.Future]], servers: Servers, silent: int) -> list[bool]:
    """Which of the requests are answered while one server is stopped. All are in the end."""
    with stopped(servers, silent):
        futures = requests()
        time.sleep(0.3)
        done = [future.done() for future in futures]
    for future in futures:
        future.wait()
    return done


def test_the_shards_of_a_tensor_are_spread_evenly_over_the_servers(cluster: wl.Cluster, pair: Servers):
    tensor = cluster.tensor("w", (8, SHARD), rule=wl.Sum())
    assert tensor.shards == 8
    first, second = (answered(lambda: [tensor[[i]].pull_async() for i in range(8)], pair, i) for i in range(2))
    assert sum(first) == sum(second) == 4
    assert [a != b for a, b in zip(first, second, strict=True)] == [True] * 8


def test_the_rows_of_a_table_are_spread_over_the_servers(cluster: wl.Cluster, pair: Servers):
    table = cluster.table("t", 2, rule=wl.Sum())
    first, second = (answered(lambda: [table.pull_async([k]) for k in range(100)], pair, i) for i in range(2))
    assert 30 < sum(first) < 70  # by a hash of the key
    assert [a != b for a, b in zip(first, second, strict=True)] == [True] * 100


@KINDS
def test_small_tensors_go_where_there_is_least(kind: str):
    with Servers(2, kind=kind, threads=1) as servers, servers.connect() as cluster:
        tensors = [cluster.tensor(f"w{i}", (5,), rule=wl.Sum()) for i in range(10)]
        done = answered(lambda: [tensor.pull_async() for tensor in tensors], servers, 1)
        assert sum(done) == 5


def test_shards_elsewhere_go_on_while_a_server_is_silent(cluster: wl.Cluster, pair: Servers):
    tensor = cluster.tensor("w", (2, SHARD), rule=wl.Sum())
    ones = np.ones((1, SHARD), FLOAT32)
    with stopped(pair, 0):
        blocked = tensor.push(np.ones((2, SHARD), FLOAT32))
        here = 0
        try:
            tensor[:1].pull(timeout=0.3)
        except wl.Timeout:
            here = 1
        for step in range(20):
            assert (tensor[here : here + 1].push_pull(ones, timeout=5) == step + 2).all()
        assert not blocked.done()
    blocked.wait()
    assert sorted(tensor.pull()[:, 0]) == [1, 21]


# -- apps and workers ------------------------------------------------------------------------------------------------


def test_workers_of_one_app_share_its_objects(connect: Connect):
    app = new_app()
    with connect(app=app, rank=0, world_size=2) as one, connect(app=app, rank=1, world_size=2) as two:
        tensors = [c.tensor("w", (3, SHARD), rule=wl.Sum(), dtype="int64") for c in (one, two)]
        tables = [c.table("t", 2, rule=wl.Sum()) for c in (one, two)]
        for i in range(2):
            tensors[i].push(np.full((3, SHARD), 10**i)).wait()
            tables[i].push(range(50), np.full((50, 2), 10**i, FLOAT32)).wait()
        for i in range(2):
            assert (tensors[i].pull() == 11).all()
            assert (tables[i].pull(range(50)) == 11).all()
        assert tensors[0].fingerprint() == tensors[1].fingerprint()
        assert tables[0].fingerprint() == tables[1].fingerprint()


def test_apps_have_their_own_names_and_reach_each_others_objects(connect: Connect):
    mine, yours = new_app(), new_app()
    with connect(app=mine) as one, connect(app=yours) as two:
        w1, w2 = (c.tensor("w", (3, SHARD), rule=wl.Sum(), init=wl.Normal()) for c in (one, two))
        t1, t2 = (c.table("t", 2, rule=wl.Sum(), init=wl.Normal()) for c in (one, two))
        start = w1.pull()
        np.testing.assert_array_equal(w2.pull(), start)  # an initial value depends on the own name, not the app's
        np.testing.assert_array_equal(t1.pull([1, 2]), t2.pull([1, 2]))
        two.tensor("v", (5,), rule=wl.Sum())  # a name that the first does not have
        w1.push(np.ones((3, SHARD), FLOAT32)).wait()
        t1.push([1], np.ones((1, 2), FLOAT32)).wait()
        np.testing.assert_array_equal(w2.pull(), start)
        assert w1.fingerprint() != w2.fingerprint()

        reached = two.tensor(f"{mine}/w", (3, SHARD), rule=wl.Sum(), init=wl.Normal())
        np.testing.assert_array_equal(reached.pull(), start + 1)
        reached.push(np.ones((3, SHARD), FLOAT32)).wait()
        np.testing.assert_array_equal(w1.pull(), start + 1 + 1)
        assert reached.fingerprint() == w1.fingerprint()
        rows = two.table(f"{mine}/t", 2, rule=wl.Sum(), init=wl.Normal())
        np.testing.assert_array_equal(rows.pull([1]), t1.pull([1]))
        with pytest.raises(wl.SpecMismatch, match="'w'"):
            two.tensor(f"{mine}/w", (4, SHARD), rule=wl.Sum())


def test_the_own_app_may_be_named_too(connect: Connect):
    app = new_app()
    with connect(app=app) as cluster:
        short, long = (cluster.tensor(name, (3, SHARD), rule=wl.Sum()) for name in ("w", f"{app}/w"))
        for _ in range(5):  # pushes of one worker, in one order
            short.push(np.ones((3, SHARD), FLOAT32))
            long.push(np.ones((3, SHARD), FLOAT32))
        assert (short.pull() == 10).all()
        assert (long.pull() == 10).all()


def test_an_object_stays_when_its_worker_leaves(connect: Connect):
    app = new_app()
    with connect(app=app) as first:
        first.tensor("w", (3, SHARD), rule=wl.Sum()).push(np.ones((3, SHARD), FLOAT32))
        first.table("t", 2, rule=wl.Sum()).push(range(9), np.ones((9, 2), FLOAT32))
    with connect(app=app) as second:  # pushes are numbered anew
        tensor, table = second.tensor("w", (3, SHARD), rule=wl.Sum()), second.table("t", 2, rule=wl.Sum())
        assert (tensor.push_pull(np.ones((3, SHARD), FLOAT32)) == 2).all()
        assert (table.push_pull(range(9), np.ones((9, 2), FLOAT32)) == 2).all()


def test_the_end_of_one_worker_leaves_the_others(cluster: wl.Cluster):
    worker = cluster.worker(1, 2)
    tensors = [c.tensor("w", (3, SHARD), rule=wl.Sum()) for c in (cluster, worker)]
    tensors[1].push(np.ones((3, SHARD), FLOAT32))
    worker.close()
    with pytest.raises(wl.Closed):
        tensors[1].pull()
    assert (tensors[0].pull() == 1).all()


def test_workers_share_registered_arrays(cluster: wl.Cluster, pair: Servers):
    worker = cluster.worker(1, 2)
    tensors = [c.tensor("w", (3, SHARD), rule=wl.Sum()) for c in (cluster, worker)]
    grad = cluster.empty((3, SHARD))
    grad[:] = 1
    with stopped(pair):
        future = tensors[0].push(grad)
        with pytest.raises(wl.BufferInUse):
            tensors[1].push(grad)
    future.wait()
    tensors[1].push(grad).wait()
    assert (tensors[0].pull() == 2).all()


def test_rank_and_world_size_come_from_the_environment(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    with connect() as cluster:
        assert (cluster.rank, cluster.world_size) == (2, 5)
    with connect(rank=1, world_size=3) as cluster:
        assert (cluster.rank, cluster.world_size) == (1, 3)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(wl.InvalidArgument, match="RANK=two is not a whole number"):
        connect()


@KINDS
def test_clients_come_and_go_without_leaving_threads_or_sockets_at_the_servers(kind: str):
    with Servers(2, kind=kind, threads=1) as servers:
        before = [(servers.fds(i), servers.threads(i)) for i in range(2)]
        for _ in range(10):
            with servers.connect() as cluster:
                cluster.tensor("w", (2, SHARD), rule=wl.Sum()).pull()
        wait_until(lambda: [(servers.fds(i), servers.threads(i)) for i in range(2)] == before)


# -- the same bits everywhere ----------------------------------------------------------------------------------------


def trained(cluster: wl.Cluster) -> str:
    """Trains some tensors and tables, and returns the fingerprint of everything."""
    rules = [wl.SGD(lr=0.1, momentum=0.9), wl.Adagrad(), wl.RowAdagrad(), wl.Adam(), wl.AdamW(), wl.Sum(), wl.Max()]
    rules += [wl.Min(), wl.RMSProp(momentum=0.9, centered=True), wl.NAdam(), wl.FTRL(l1=0.1)]
    rules += [wl.Adam(clip_value=0.5, clip_weights=(-1, 1), schedule=wl.Schedule(warmup=2, decay="cosine", updates=3))]
    for i, rule in enumerate(rules):
        tensor = cluster.tensor(f"w{i}", (5, SHARD // 2 + 100), rule=rule, init=wl.Normal(), seed=i)
        table = cluster.table(f"t{i}", 5 + i, rule=rule, init=wl.Uniform(-1, 1), seed=i)
        for step in range(3):
            tensor.push(numbers(5, SHARD // 2 + 100, seed=step), **({"lr": 0.05} if step and i < 5 else {}))
            tensor[[3, 1, 3]].push_pull(numbers(3, SHARD // 2 + 100, seed=step).astype(np.float16))
            keys = rng(step).integers(-300, 300, 700)  # some repeat
            table.push(keys, numbers(700, 5 + i, seed=step))
            table.push_pull(keys[:50], numbers(50, 5 + i, seed=step))
        table.delete(range(40))
    return cluster.fingerprint()


@pytest.fixture(scope="module")
def embedded_print() -> str:
    with wl.connect(threads=1) as cluster:
        return trained(cluster)


@pytest.mark.parametrize(("count", "kind"), [(1, "tcp"), (2, "tcp"), (2, "unix"), (3, "unix")])
def test_fingerprints_are_equal_inside_a_process_and_on_any_number_of_servers(
    embedded_print: str, count: int, kind: str
):
    with Servers(count, kind=kind, threads=2) as servers, servers.connect() as cluster:
        assert trained(cluster) == embedded_print
        with servers.connect(app="other") as other:  # everything on the servers, whoever asks
            assert other.fingerprint() == embedded_print
            other.tensor("w", (5,), rule=wl.Sum())
            assert other.fingerprint() == cluster.fingerprint() != embedded_print


def test_everything_can_be_fingerprinted_while_another_worker_makes_objects():
    with Servers(2, kind="unix", threads=1) as servers, servers.connect() as one, servers.connect() as two:
        ends = threading.Event()

        def work(i: int) -> None:
            if i == 0:
                for n in range(200):
                    one.tensor(f"w{n}", (2, SHARD), rule=wl.Sum())
                ends.set()
            while not ends.is_set():
                two.fingerprint()

        run_threads(work, 2)
        assert two.fingerprint() == one.fingerprint()


@pytest.mark.parametrize("checksums", [False, True])
def test_checksums_change_no_bits(connect: Connect, checksums: bool):
    prints = []
    for options in ({}, {"checksums": checksums}):
        with connect(**options) as cluster:
            tensor, table = cluster.tensor("w", (5, SHARD), rule=wl.Adam()), cluster.table("t", 3, rule=wl.Adam())
            for step in range(3):
                tensor.push_pull(numbers(5, SHARD, seed=step))
                table.push_pull(range(500), numbers(500, 3, seed=step))
            prints.append((tensor.fingerprint(), table.fingerprint()))
    assert prints[0] == prints[1]


# -- connecting ------------------------------------------------------------------------------------------------------


def nowhere(kind: str) -> str:
    """An address where nobody listens."""
    if kind == "unix":
        return f"unix://@windlass-test-nobody-{os.getpid()}-{time.monotonic_ns()}"
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


def use(connect: Connect) -> None:
    """Servers that nobody has used may be given another list."""
    with connect() as cluster:
        cluster.tensor("w", (4, SHARD), rule=wl.Sum())  # on both


def test_another_list_of_servers_is_refused_and_both_are_shown(connect: Connect, transport: str, pair: Servers):
    use(connect)
    with Servers(1, kind=transport, threads=1) as third:
        first, second = pair.addresses
        for asked in ([second, first], [first], [second], [first, third.addresses[0]]):
            with takes(0, 3), pytest.raises(wl.SpecMismatch) as caught:
                connect(servers=asked)
            message = str(caught.value)
            assert f"\n  there: [{first}, {second}]\n" in message
            assert message.endswith(f"\n  asked: [{', '.join(asked)}]")
    with connect() as cluster:  # the others are as they were
        assert cluster.tensor("w", (3,), rule=wl.Sum()).pull().tolist() == [0, 0, 0]


@KINDS
def test_nobody_at_the_address_is_a_lost_server_after_failure_timeout(kind: str):
    address = nowhere(kind)
    with takes(0.4, 3), pytest.raises(wl.ServerLost, match=re.escape(address) + r" has been out of reach for 0.4 s"):
        wl.connect(servers=[address], failure_timeout=0.4)


@KINDS
def test_one_of_two_servers_that_is_not_there_is_named(kind: str):
    absent = nowhere(kind)
    lost = pytest.raises(wl.ServerLost, match=re.escape(absent))
    with Servers(1, kind=kind, threads=1) as servers, takes(0.4, 3), lost:
        wl.connect(servers=[servers.addresses[0], absent], failure_timeout=0.4)


@KINDS
def test_the_time_to_connect_may_be_shorter_than_failure_timeout(kind: str):
    address = nowhere(kind)
    with takes(0.2, 2), pytest.raises(wl.Timeout, match="connecting to " + re.escape(address)):
        wl.connect(servers=[address], timeout=0.2, failure_timeout=10)


def test_a_server_that_is_silent_is_lost_after_failure_timeout(pair: Servers):
    with stopped(pair, 0), takes(1.0, 1.7), pytest.raises(wl.ServerLost, match=re.escape(pair.addresses[0])):
        wl.connect(servers=pair.addresses, failure_timeout=1.0)


def test_a_server_that_comes_within_failure_timeout_is_not_lost():
    address, ready = f"unix://@windlass-test-late-{os.getpid()}", threading.Event()
    made: list[Any] = []

    def start() -> None:
        with Servers(1, kind="unix", threads=1) as servers:
            servers.kill(0)
            servers._listen[0] = address
            servers.restart(0)
            ready.wait(20)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        with wl.connect(servers=[address], failure_timeout=20) as cluster:
            made.append(cluster.tensor("w", (3,), rule=wl.Sum()).push_pull([1, 2, 3]).tolist())
    finally:
        ready.set()
        thread.join()
    assert made == [[1, 2, 3]]


@contextlib.contextmanager
def listener(says: bytes | None) -> Iterator[str]:
    """Somebody who is no Windlass server: says something to everyone, or (None) hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        met: list[socket.socket] = []

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    if says is None:
                        sock.close()
                        continue
                    sock.sendall(says)
                    met.append(sock)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in met:
                sock.close()


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", bytes(48)])
def test_a_port_that_is_no_windlass_server_is_a_protocol_error_at_once(says: bytes):
    with listener(says) as address, takes(0, 3), pytest.raises(wl.ProtocolError) as caught:
        wl.connect(servers=[address])
    assert address in str(caught.value)
    assert repr(says)[2:10] in str(caught.value)


@pytest.mark.parametrize("says", [b"", None], ids=["silent", "hangs up"])
def test_a_port_that_never_greets_is_a_lost_server(says: bytes | None):
    with listener(says) as address, takes(0.4, 4), pytest.raises(wl.ServerLost, match=re.escape(address)):
        wl.connect(servers=[address], failure_timeout=0.4)


@KINDS
def test_a_wrong_token_is_access_denied_at_once(kind: str, monkeypatch: pytest.MonkeyPatch):
    with Servers(2, kind=kind, threads=1, token="right") as servers:
        servers.connect().close()
        for token in ("another", b"right\xff", None):
            with takes(0, 3), pytest.raises(wl.AccessDenied) as caught:
                servers.connect(token=token)
            assert "right" not in str(caught.value)
        monkeypatch.setenv("WINDLASS_TOKEN", "right")  # where there is no argument
        servers.connect(token=None).close()
        monkeypatch.setenv("WINDLASS_TOKEN", "wrong")
        servers.connect().close()
        with pytest.raises(wl.AccessDenied):
            servers.connect(token=None)


def test_a_token_that_is_none_is_refused_before_anything_is_sent():
    for token, wrong in (("", "empty"), (b" \n", "empty"), ("a\0b", "NUL"), (4097 * b"x", "at most"), (7, "int")):
        with pytest.raises(wl.InvalidArgument, match=f"connect: token.*{wrong}"):
            wl.connect(servers=["127.0.0.1:1"], token=token)


def test_a_list_that_was_mistyped_does_not_bind_a_server():
    with Servers(2, kind="unix", threads=1) as servers:
        first, second = servers.addresses
        for wrong in ([first], [second, first], [first, "unix:@nobody-there"]):
            with contextlib.suppress(wl.WindlassError), wl.connect(servers=wrong, timeout=0.5, failure_timeout=0.2):
                pass
        with servers.connect() as cluster:
            cluster.tensor("w", (4,), rule=wl.Sum())
            with pytest.raises(wl.SpecMismatch, match="another list"):
                wl.connect(servers=[first])
        with pytest.raises(wl.SpecMismatch, match="another list"):  # there is something now
            wl.connect(servers=[first])


def test_a_token_that_nobody_asked_for_is_access_denied(connect: Connect):
    with takes(0, 3), pytest.raises(wl.AccessDenied):
        connect(token="a token")


ADDRESS = "tcp://127.0.0.1:9"
WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "servers must be a list": {"servers": ADDRESS},
    "servers must be a list of addresses": {"servers": []},
    "servers must be a list of addresses, not": {"servers": [1]},
    "servers has an address twice": {"servers": [ADDRESS, ADDRESS]},
    "address 'udp://127.0.0.1:9'": {"servers": ["udp://127.0.0.1:9"]},
    "app must be": {"servers": [ADDRESS], "app": "a/b"},
    "app must be 1 to 256": {"servers": [ADDRESS], "app": ""},
    "app must be 1 to 256 bytes": {"servers": [ADDRESS], "app": "a" * 257},
    "app must be 1 to 256 bytes of printable text": {"servers": [ADDRESS], "app": "a\nb"},
    "rank 1 is not in a world of 1": {"servers": [ADDRESS], "rank": 1},
    "rank 2 is not in a world of 2": {"servers": [ADDRESS], "rank": 2, "world_size": 2},
    "failure_timeout must be above 0": {"servers": [ADDRESS], "failure_timeout": 0},
    "failure_timeout must be above 0 seconds": {"servers": [ADDRESS], "failure_timeout": float("nan")},
    "timeout must be at least 0": {"servers": [ADDRESS], "timeout": -1},
    "threads and memory_bytes_max are settings of `windlass server`": {"servers": [ADDRESS], "threads": 1},
    "go with an address or servers": {"app": "mine"},
    "checksums and transport go with an address or servers": {"checksums": True},
}


@pytest.mark.parametrize("complaint", WRONG_OPTIONS)
def test_connect_refuses_what_cannot_be_before_it_dials(complaint: str):
    with takes(0, 1), pytest.raises(wl.InvalidArgument, match=re.escape(complaint)):
        wl.connect(**WRONG_OPTIONS[complaint])


def test_a_failed_connect_leaves_neither_threads_nor_sockets_behind(connect: Connect, pair: Servers):
    use(connect)
    before = left()
    for servers, options in ((pair.addresses[::-1], {}), (pair.addresses, {"token": "none of this"})):
        with pytest.raises(wl.WindlassError):
            wl.connect(servers=servers, **options)
    wait_until(lambda: left() <= before)


# -- servers that are silent or gone ---------------------------------------------------------------------------------


def test_a_timeout_says_which_server_and_shard_it_waits_for(cluster: wl.Cluster, pair: Servers):
    tensor, table = cluster.tensor("w", (4, SHARD), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    waiting = f"waiting for ({'|'.join(map(re.escape, pair.addresses))}), shard "
    with stopped(pair):
        with pytest.raises(wl.Timeout, match=rf"pull of tensor 'w': not done in time; {waiting}\d"):
            tensor.pull(timeout=0.05)
        with pytest.raises(wl.Timeout, match=rf"pull of table 't': not done in time; {waiting}\d+"):
            table.pull([1], timeout=0.05)
        with pytest.raises(wl.Timeout, match=rf"push_pull of tensor 'w'.*{waiting}\d; the push goes on"):
            tensor.push_pull(np.ones((4, SHARD), FLOAT32), timeout=0.05)
        for call in (tensor.fingerprint, table.fingerprint, cluster.fingerprint):
            with takes(0.05, 2), pytest.raises(wl.Timeout, match="waiting for"):
                call(timeout=0.05)
        cluster._timeout = 0.05
        with pytest.raises(wl.Timeout, match="tensor 'v'"):
            cluster.tensor("v", (3,), rule=wl.Sum())
    cluster._timeout = 60.0
    assert (tensor.pull() == 1).all()
    assert cluster.tensor("v", (3,), rule=wl.Sum()).pull().tolist() == [0, 0, 0]


def test_many_requests_that_timed_out_do_no_harm(cluster: wl.Cluster, pair: Servers):
    tensor = cluster.tensor("w", (4, SHARD), rule=wl.Sum())
    out = np.full((4, SHARD), -1, FLOAT32)
    with stopped(pair):
        for _ in range(20):
            with pytest.raises(wl.Timeout):
                tensor.pull(timeout=0.001)
            with pytest.raises(wl.Timeout):
                tensor.push_pull(np.ones((4, SHARD), FLOAT32), out=out, timeout=0.001)
            out[:] = -2  # the caller's again
    assert (tensor.pull() == 20).all()
    assert (out == -2).all()


@KINDS
def test_what_goes_to_a_server_that_has_ended_fails_after_failure_timeout(kind: str):
    with Servers(3, kind=kind, threads=1) as servers:
        cluster = servers.connect(failure_timeout=0.5)
        tensor = cluster.tensor("w", (3, SHARD), rule=wl.Sum())
        ones = np.ones((3, SHARD), FLOAT32)
        lost = [re.escape(address) + " has been out of reach for 0.5 s" for address in servers.addresses]
        with stopped(servers, 2):
            futures = [tensor.push(ones), tensor.pull_async()]
            servers.kill(2)  # with something on its way there
            for future in futures:
                with takes(0, 3), pytest.raises(wl.ServerLost, match=rf"(push|pull) of tensor 'w': {lost[2]}"):
                    future.wait()
        for call in (tensor.pull, tensor.fingerprint, cluster.fingerprint):
            with takes(0, 1), pytest.raises(wl.ServerLost, match=lost[2]):
                call()
        assert servers.terminate(1) == 0  # while nothing is under way
        alive = 0
        for i in range(3):  # the shards of the last server can still be used
            try:
                with takes(0, 3):
                    assert (tensor[i : i + 1].push_pull(ones[:1]) == 2).all()
                alive += 1
            except wl.ServerLost as error:
                assert re.search("|".join(lost[1:]), str(error))  # noqa: PT017 (one of the three is not lost)
        assert alive == 1
        cluster.close()
        with pytest.raises(wl.Closed):
            tensor.pull()


def test_a_server_that_was_started_again_has_lost_what_it_held():
    with Servers(2, kind="unix", threads=1) as servers, servers.connect(failure_timeout=20) as cluster:
        tensor = cluster.tensor("w", (2, SHARD), rule=wl.Sum())
        tensor.push(np.ones((2, SHARD), FLOAT32)).wait()
        servers.restart(1)
        lost = re.escape(servers.addresses[1]) + r" was started again and has lost what it held; connect\(\) again"
        with takes(0, 5), pytest.raises(wl.ServerLost, match=lost):
            tensor.pull()


def test_the_error_of_a_dropped_push_to_a_server_that_is_gone_is_raised_by_tick():
    with Servers(2, threads=1) as servers:
        cluster = servers.connect(failure_timeout=0.3)
        tensor = cluster.tensor("w", (2, SHARD), rule=wl.Sum())
        servers.kill(1)
        with contextlib.suppress(wl.ServerLost):
            tensor.push(np.ones((2, SHARD), FLOAT32))
        gc.collect()
        caught: list[wl.WindlassError] = []

        def ticks() -> bool:
            try:
                cluster.tick()
            except wl.ServerLost as error:
                caught.append(error)
            return bool(caught)

        wait_until(ticks)
        assert "push of tensor 'w'" in str(caught[0])
        assert "whose future was dropped" in str(caught[0])
        cluster.tick()  # once
        cluster.close()


@KINDS
def test_a_refused_object_leaves_neither_name_nor_memory_behind(kind: str):
    with Servers(2, kind=kind, threads=1, memory_bytes_max=1 << 20) as servers, servers.connect() as cluster:
        with pytest.raises(wl.ResourceExhausted, match=r"tensor 'w'.*memory_bytes_max=1048576"):
            cluster.tensor("w", (1 << 22,), rule=wl.Sum())
        tensor = cluster.tensor("w", (1 << 17,), rule=wl.Sum())
        assert not tensor.push_pull(np.zeros(1 << 17, FLOAT32)).any()
        assert len(cluster.fingerprint()) == 16


# -- futures ---------------------------------------------------------------------------------------------------------


def test_a_push_that_has_not_begun_can_be_cancelled(cluster: wl.Cluster, pair: Servers):
    tensor = cluster.tensor("w", (LARGE,), rule=wl.Sum())
    grads = [cluster.empty(LARGE) for _ in range(2)]
    grads[0][:] = 1
    grads[1][:] = 100
    with stopped(pair):
        first, second = (tensor.push(grad) for grad in grads)
        assert second.cancel() is True
        assert first.cancel() is False  # some of it is away
    assert first.wait() is None
    for _ in range(2):
        with pytest.raises(wl.Cancelled, match="push of tensor 'w': cancelled"):
            second.wait()
    assert second.cancel() is True  # as before
    grads[1][:] = 10  # the loan has ended
    tensor.push(grads[1]).wait()  # pushes after one that was taken back are applied
    assert (tensor.pull() == 11).all()


def test_a_small_push_that_is_away_cannot_be_cancelled(cluster: wl.Cluster, pair: Servers):
    tensor, table = cluster.tensor("w", (4, 10), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    with stopped(pair):
        futures = [tensor.push(np.ones((4, 10), FLOAT32)), table.push([1, 2], np.ones((2, 2), FLOAT32))]
        assert [future.cancel() for future in futures] == [False, False]
    for future in futures:
        assert future.wait() is None
        assert future.cancel() is False
    assert (tensor.pull() == 1).all()
    assert (table.pull([1, 2]) == 1).all()


def test_a_cancelled_push_that_is_dropped_is_nobodys_error(cluster: wl.Cluster, pair: Servers):
    tensor = cluster.tensor("w", (LARGE,), rule=wl.Sum())
    grads = [cluster.empty(LARGE) for _ in range(2)]
    for grad in grads:
        grad[:] = 1
    with stopped(pair):
        first, second = (tensor.push(grad) for grad in grads)
        assert second.cancel()
        del second
    first.wait()
    assert tensor.pull()[-1] == 1
    cluster.tick()


def test_a_pull_that_is_away_cannot_be_cancelled_and_one_that_is_not_can(cluster: wl.Cluster, pair: Servers):
    tensor = cluster.tensor("w", (LARGE,), rule=wl.Sum())
    grad, out = cluster.empty(LARGE), cluster.empty(LARGE)
    grad[:] = 1
    with stopped(pair):
        away = tensor.pull_async()
        assert away.cancel() is False
        push = tensor.push(grad)  # more than the sockets take
        waits = tensor.pull_async(out=out)
        for _ in range(2):
            assert waits.cancel() is True
        with pytest.raises(wl.Cancelled, match="pull of tensor 'w': cancelled"):
            waits.wait()
        again = tensor.push(out)  # it is not lent any more
        assert again.cancel() is True
    assert not away.wait().any()
    push.wait()
    with pytest.raises(wl.Cancelled):
        again.wait()
    assert (tensor.pull(out=out) == 1).all()


def test_pulls_that_timed_out_take_no_room_from_others(cluster: wl.Cluster, pair: Servers):
    tensor, table = cluster.tensor("w", (4, SHARD), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    out = np.zeros((4, SHARD), FLOAT32)
    with stopped(pair):
        for _ in range(200):  # more than may be without an answer
            with pytest.raises(wl.Timeout, match="not done in time; waiting for"):  # not for room to begin
                tensor.pull(out=out, timeout=0.001)
            with pytest.raises(wl.Timeout, match="not done in time; waiting for"):
                table.pull([1, 2], timeout=0.001)
        push = tensor.push(out)
    push.wait()
    out[:] = -1
    assert not tensor.pull(out=out).any()
    assert not table.pull([1, 2]).any()


def test_a_registered_array_is_sent_from_where_it_lies(cluster: wl.Cluster, pair: Servers):
    tensor = cluster.tensor("w", (LARGE,), rule=wl.Sum())
    grad, out = cluster.empty(LARGE), cluster.empty(LARGE)
    grad[:] = 1
    before = rss_bytes()
    out[:] = 0
    with stopped(pair):
        future = tensor.push_pull_async(grad, out=out)
        time.sleep(0.1)
        assert rss_bytes() - before < LARGE * 4 + (16 << 20)  # out itself, and no copy
        grad[-1] = 2  # the caller breaks the rules of the loan; it shows that nothing was copied
    assert future.wait() is out
    assert out[0] == 1
    assert out[-1] == 2


def test_an_ordinary_array_may_be_overwritten_as_soon_as_push_returns(cluster: wl.Cluster):
    tensor, table = cluster.tensor("w", (5, SHARD), rule=wl.Sum()), cluster.table("t", 4, rule=wl.Sum())
    grad, rows, keys = np.empty((5, SHARD), FLOAT32), np.empty((300, 4), FLOAT32), np.empty(300, np.int64)
    for i in range(200):
        grad[:] = i
        rows[:] = i
        keys[:] = np.arange(300)
        tensor.push(grad)
        table.push(keys, rows)
        tensor[[4, 0]].push(grad[:2])
        grad[:] = -1e6
        rows[:] = -1e6
        keys[:] = 7
    expected = np.full((5, SHARD), sum(range(200)), FLOAT32)
    expected[[0, 4]] *= 2
    np.testing.assert_array_equal(tensor.pull(), expected)
    assert (table.pull(np.arange(300)) == sum(range(200))).all()


def test_a_full_window_blocks_until_there_is_room(cluster: wl.Cluster, pair: Servers):
    tensor = cluster.tensor("w", (100,), rule=wl.Sum())
    grad = np.ones(100, FLOAT32)
    with stopped(pair) as go_on:
        before = rss_bytes()
        futures = [tensor.push(grad, timeout=0.2) for _ in range(WINDOW)]
        for call in (tensor.push, tensor.push_pull_async, tensor.push_pull):
            with takes(0.1, 2), pytest.raises(wl.Timeout, match=f"not begun; {WINDOW} requests are without an answer"):
                call(grad, timeout=0.1)
        for pull in (tensor.pull, tensor.pull_async):
            with takes(0.1, 2), pytest.raises(wl.Timeout, match=f"not begun; {WINDOW} requests are without an answer"):
                pull(timeout=0.1)
        assert rss_bytes() - before < 8 << 20
        timer = threading.Timer(0.3, go_on)
        timer.start()
        with takes(0.2, 5):
            futures.append(tensor.push(grad))  # waits for room
        timer.join()
    for future in futures:
        future.wait()
    assert (tensor.pull() == WINDOW + 1).all()


def test_many_requests_under_way_take_no_more_memory_than_a_few(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (1 << 18,), rule=wl.Sum())
    grad = np.ones(1 << 18, FLOAT32)
    for _ in range(200):
        tensor.push(grad)
    tensor.pull()
    before = rss_bytes()
    for _ in range(1000):  # 1 GiB
        tensor.push(grad)
    assert tensor.pull()[0] == 1200
    assert rss_bytes() - before < 80 << 20


# -- threads ---------------------------------------------------------------------------------------------------------


def test_many_threads_may_use_one_cluster(cluster: wl.Cluster):
    tensor, table = cluster.tensor("w", (6, SHARD), rule=wl.Sum(), dtype="int64"), cluster.table("t", 2, rule=wl.Sum())

    def work(i: int) -> None:
        grad, keys, rows = np.full((6, SHARD), i + 1), np.arange(200), np.ones((200, 2), FLOAT32)
        last = 0
        for step in range(10):
            if step % 2:
                seen = tensor.push_pull(grad)
            else:
                tensor.push(grad)
                seen = tensor.pull()
            assert seen.min() >= last + i + 1  # its own push, and everything it saw before
            last = int(seen.min())
            table.push(keys, rows)
            assert table.pull([i])[0, 0] >= step + 1

    run_threads(work, 12)
    assert (tensor.pull() == 10 * sum(range(1, 13))).all()
    assert (table.pull(np.arange(200)) == 120).all()


def test_more_threads_than_the_window_has_room_for(cluster: wl.Cluster):
    tensors = [cluster.tensor(f"w{i}", (2, SHARD), rule=wl.Sum()) for i in range(4)]

    def work(i: int) -> None:
        for step in range(4):
            tensors[(i + step) % 4].push_pull(np.ones((2, SHARD), FLOAT32), timeout=30)

    run_threads(work, 2 * WINDOW + 50)
    assert all((tensor.pull() == 2 * WINDOW + 50).all() for tensor in tensors)


# -- close -----------------------------------------------------------------------------------------------------------


def test_a_close_that_times_out_gives_up_what_is_under_way(connect: Connect, pair: Servers):
    cluster = connect()
    tensor = cluster.tensor("w", (4, SHARD), rule=wl.Sum())
    grad = cluster.empty((4, SHARD))
    with stopped(pair):
        futures = [tensor.push(grad), tensor.pull_async()]
        with takes(0.1, 3), pytest.raises(wl.Timeout, match="2 requests are still under way; they are given up"):
            cluster.close(timeout=0.1)
        for future in futures:
            wait_until(future.done, 2)
            with pytest.raises(wl.Closed):
                future.wait()
        with takes(0, 1):
            cluster.close()  # a second one has nothing to wait for
    with pytest.raises(wl.Closed):
        tensor.pull()


def test_close_ends_the_calls_of_other_threads(connect: Connect, pair: Servers):
    cluster = connect()
    tensor, table = cluster.tensor("w", (4, SHARD), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    caught: list[type] = []

    def work(call: Callable[[], Any]) -> None:
        try:
            call()
        except wl.WindlassError as error:
            caught.append(type(error))

    calls = [
        tensor.pull,
        lambda: table.pull(range(9)),
        tensor.fingerprint,
        lambda: len(table),
        tensor.pull_async().wait,
    ]
    with stopped(pair):
        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        with takes(0.1, 3), contextlib.suppress(wl.Timeout):
            cluster.close(timeout=0.1)
        for thread in threads:
            thread.join(3)
        assert not any(thread.is_alive() for thread in threads)
    assert caught.count(wl.Closed) >= 4
    assert set(caught) == {wl.Closed}


def test_close_while_other_threads_push_ends_them_with_closed(connect: Connect):
    app = new_app()
    cluster = connect(app=app)
    tensor = cluster.tensor("w", (4, SHARD), rule=wl.Sum())
    counts, started = [0] * 6, threading.Barrier(7)

    def work(i: int) -> None:
        started.wait()
        with contextlib.suppress(wl.Closed):
            while True:
                if i % 2:
                    tensor.push_pull(np.ones((4, SHARD), FLOAT32))
                else:
                    tensor.push(np.ones((4, SHARD), FLOAT32)).wait()
                counts[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.1)
    cluster.close()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    with connect(app=app) as again:  # close() waited: what was begun was also counted
        total = again.tensor("w", (4, SHARD), rule=wl.Sum()).pull()
    assert (total == total[0, 0]).all()
    assert total[0, 0] == sum(counts)


def test_close_leaves_neither_threads_nor_sockets_behind(connect: Connect):
    connect().close()
    before = left()
    for _ in range(8):
        with connect() as cluster:
            cluster.worker(1, 2).close()
        del cluster
    wait_until(lambda: left() <= before)
    for _ in range(8):  # likewise for those who are only let go
        connect().tensor("w", (3,), rule=wl.Sum()).push([1, 2, 3])
    wait_until(lambda: left() <= before)


# -- fork ------------------------------------------------------------------------------------------------------------


def test_a_future_of_the_parent_raises_in_the_child_and_is_done_in_the_parent(here: dict[str, str], pair: Servers):
    out = check_python(
        """
        import os, pathlib, signal, time
        import numpy as np
        import windlass as wl
        from helpers import connect_here

        def stops(pid):
            threads = pathlib.Path(f"/proc/{pid}/task").iterdir()
            try:
                return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
            except FileNotFoundError:  # a thread that has just ended
                return False

        cluster = connect_here()
        tensor, table = cluster.tensor("w", (4, 16384), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
        pids = [int(pid) for pid in os.environ["PIDS"].split()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            while not all(map(stops, pids)):
                time.sleep(0.001)
            futures = [tensor.push(np.ones((4, 16384), np.float32)), table.pull_async([1, 2])]
            child = os.fork()
            if child == 0:
                for future in futures:
                    try:
                        future.wait(timeout=5)
                    except wl.ForkedProcess:
                        continue
                    os._exit(1)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert not futures[0].done()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        futures[0].wait()
        assert futures[1].wait().shape == (2, 2)
        assert (tensor.push_pull(np.ones((4, 16384), np.float32)) == 2).all()
        print("parent goes on")
        """,
        PIDS=" ".join(map(str, pair.pids)),
        **here,
    )
    assert out == "parent goes on\n"


def test_the_end_of_a_child_leaves_the_parents_connections(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (4, SHARD), rule=wl.Sum())
    grad = np.ones((4, SHARD), FLOAT32)
    for step in range(5):
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert (tensor.push_pull(grad) == step + 1).all()
        assert os.waitpid(child, 0)[1] == 0
