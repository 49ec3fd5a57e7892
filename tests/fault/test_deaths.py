"""Servers and workers that are killed, stopped or started again: typed errors in time (R13), and nothing is left."""

import contextlib
import gc
import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import every_call, new_app, run_python, stopped

import windlass as wl
from windlass.testing import Faults, Proxy, Servers

KINDS = pytest.mark.parametrize("kind", ["tcp", "unix"])
LATE_S = 1.0  # what a call may take beyond its time
LOST_S = 0.4  # failure_timeout
STALL_S = 8.0  # far below the 30 s that a server waits for a peer that stops within a frame
MIB = 1 << 20
BIG = 4 * MIB  # int64 of 32 MiB, 64 shards


def timed(call: Callable[[], object], error: type[Exception] | tuple[type[Exception], ...], within: float) -> Exception:
    """The error that a call raises, in time."""
    started = time.monotonic()
    with pytest.raises(error) as raised:
        call()
    assert time.monotonic() - started < within + LATE_S, f"late: {raised.value}"
    return raised.value


def eventually(what: Callable[[], object], expected: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while (seen := what()) != expected:
        assert time.monotonic() < deadline, f"expected {expected}, saw {seen}"
        time.sleep(0.01)


def mine() -> tuple[int, int]:
    """How many threads and files this process has. An error keeps what was on the stack when it was raised."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def figures(servers: Servers, i: int = 0) -> tuple[int, int]:
    return servers.threads(i), servers.fds(i)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test leaves no thread and no file behind in this process."""
    with wl.connect(threads=1):  # what is made once stays
        before = (0, 0)
    while before != (before := mine()):  # what an earlier test had goes away
        time.sleep(0.05)
    yield
    eventually(lambda: max(0, mine()[0] - before[0]), 0)
    eventually(lambda: max(0, mine()[1] - before[1]), 0)


def int64(cluster: wl.Cluster, name: str, size: int) -> wl.Tensor:
    return cluster.tensor(name, (size,), rule=wl.Sum(), dtype=np.int64)


# -- a server that is killed -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
@KINDS
@pytest.mark.parametrize("killed", [0, 1], ids=["the first", "the second"])
def test_killed_while_idle_a_server_is_lost_in_time_and_the_other_goes_on(kind: str, killed: int):
    with Servers(2, kind=kind, threads=1) as servers:
        cluster = servers.connect(timeout=10, failure_timeout=LOST_S)
        both, table = int64(cluster, "both", 2 * 8192), cluster.table("t", 2, rule=wl.Sum())
        alone = [int64(cluster, "one", 1), int64(cluster, "other", 1)]  # of one shard: on the first and on the second
        for tensor in (both, *alone):
            tensor.push(np.ones(tensor.shape, np.int64)).wait()
        servers.kill(killed)
        said = str(timed(both.pull, wl.ServerLost, LOST_S))
        assert servers.addresses[killed] in said
        assert "pull of tensor 'both'" in said
        for call in (both.pull, lambda: both.push(np.ones(2 * 8192, np.int64)).wait(), lambda: len(table)):
            timed(call, wl.ServerLost, 0)  # known by now
        started = time.monotonic()
        assert alone[1 - killed].push_pull(np.ones(1, np.int64)) == 2
        assert time.monotonic() - started < LATE_S
        timed(alone[killed].pull, wl.ServerLost, 0)
        assert servers.threads(1 - killed) > 0
        started = time.monotonic()
        with contextlib.suppress(wl.ServerLost):
            cluster.close()
        assert time.monotonic() - started < LATE_S


def test_killed_a_server_is_a_timeout_for_whom_has_less_time_than_it_takes_to_give_it_up():
    with Servers(1, threads=1) as servers:
        cluster = servers.connect(timeout=10, failure_timeout=1.5)
        tensor = int64(cluster, "w", 4)
        servers.kill(0)
        timed(lambda: tensor.pull(timeout=0.2), wl.Timeout, 0.2)
        future = tensor.push(np.ones(4, np.int64))
        timed(lambda: future.wait(timeout=0.2), wl.Timeout, 0.2)
        timed(future.wait, wl.ServerLost, 1.5)
        with pytest.raises(wl.ServerLost):
            tensor.pull()
        timed(lambda: servers.connect(timeout=0.3, failure_timeout=5), wl.Timeout, 0.3)
        timed(lambda: servers.connect(timeout=10, failure_timeout=0.3), wl.ServerLost, 0.3)
        cluster.close()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("tcp", "pull"),
        ("unix", "pull"),
        ("tcp", "push"),
        ("unix", "push_pull"),
        ("tcp", "pushes under way"),
        ("unix", "pushes under way"),
        ("tcp", "small pushes under way"),
    ],
)
def test_killed_in_the_middle_of_requests_a_server_is_lost_in_time(kind: str, what: str):
    with Servers(2, kind=kind, threads=2) as servers:
        cluster = servers.connect(timeout=20, failure_timeout=LOST_S)
        tensor, small = int64(cluster, "w", BIG), int64(cluster, "s", 2 * 8192)
        grad = cluster.empty(BIG, np.int64)
        grad[:] = 1
        calls: dict[str, Callable[[], object]] = {
            "pull": tensor.pull,
            "push": lambda: tensor.push(grad).wait(),
            "push_pull": lambda: tensor.push_pull(grad),
            "pushes under way": lambda: wait_all([tensor.push(np.ones(BIG, np.int64)) for _ in range(4)]),
            "small pushes under way": lambda: wait_all(
                [small[5:9000].push(np.ones(8995, np.int64)) for _ in range(200)]
            ),
        }
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            servers.kill(1)

        killer = threading.Timer(random.uniform(0.05, 0.15), kill)
        killer.start()
        try:
            calls_made = count_until(calls[what], wl.ServerLost, seconds=20)
            ended = time.monotonic()
        finally:
            killer.join()
        print(f"lost {ended - killed[0]:.2f} s after it was killed, in call {calls_made}")
        assert ended - killed[0] < LOST_S + LATE_S
        started = time.monotonic()
        with contextlib.suppress(wl.ServerLost):  # of futures that nobody waited for
            cluster.close()
        assert time.monotonic() - started < LATE_S
        assert servers.threads(0) > 0
        grad[:] = 2  # is on loan to nobody


def count_until(call: Callable[[], object], error: type[Exception], seconds: float) -> int:
    """How often it could be called until it raised."""
    deadline = time.monotonic() + seconds
    for i in itertools.count(1):
        try:
            call()
        except error:
            return i
        assert time.monotonic() < deadline
    raise AssertionError


def wait_all(futures: list[wl.types.Future[Any]]) -> None:
    """Waits for all of them, and raises the last error."""
    error: Exception | None = None
    for future in futures:
        try:
            future.wait()
        except wl.WindlassError as raised:
            error = raised
    if error is not None:
        raise error


def names_of_calls() -> list[str]:
    with wl.connect(threads=1) as cluster:
        tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
        return list(every_call(cluster, tensor, table, cluster.empty((4, 2))))


CALLS = names_of_calls()
CONNECTS = {"Cluster.worker", "Cluster.reader"}
#: An all-reduce of one worker has nobody to ask.
NEED_NO_SERVER = {"Cluster.empty", "Cluster.slots", "Cluster.tick", "Cluster.all_reduce", "Cluster.all_reduce_counted"}


@pytest.mark.usefixtures("nothing_left")
def test_of_a_lost_server_every_call_says_so_at_once():
    with Servers(1, threads=1) as servers:
        cluster = servers.connect(timeout=10, failure_timeout=LOST_S)
        tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
        calls = every_call(cluster, tensor, table, cluster.empty((4, 2)))
        servers.kill(0)
        timed(tensor.pull, wl.ServerLost, LOST_S)
        for name, call in calls.items():
            if name not in NEED_NO_SERVER:
                error = timed(lambda call=call: waited(call()), wl.ServerLost, LOST_S * (name in CONNECTS))
                assert servers.addresses[0] in str(error), name
        cluster.close()


def waited(result: object) -> object:
    return result.wait() if isinstance(result, wl.types.Future) else result


def test_after_a_death_a_new_cluster_on_other_servers_works_in_the_same_process():
    with Servers(2, threads=1) as servers, Servers(2, threads=1) as fresh:
        cluster = servers.connect(timeout=10, failure_timeout=LOST_S)
        tensor = int64(cluster, "w", 2 * 8192)
        servers.kill(0)
        with fresh.connect(timeout=10) as anew:
            again = int64(anew, "w", 2 * 8192)
            again.push(np.ones(2 * 8192, np.int64)).wait()
            timed(tensor.pull, wl.ServerLost, LOST_S)
            np.testing.assert_array_equal(again.pull(), np.ones(2 * 8192))
        cluster.close()


@KINDS
@pytest.mark.parametrize("under_way", [False, True], ids=["idle", "with a push under way"])
def test_started_again_a_server_is_lost_since_it_lost_what_it_held(kind: str, under_way: bool):
    with Servers(1, kind=kind, threads=1) as servers, Proxy(servers.addresses[0]) as proxy:
        cluster = wl.connect(servers=[proxy.address], timeout=10)
        tensor = int64(cluster, "w", 4)
        tensor.push(np.ones(4, np.int64)).wait()
        future = None
        if under_way:
            servers.stop(0)
            future = tensor.push(np.ones(4, np.int64))
        servers.kill(0)
        proxy.target = servers.restart(0)
        error = timed(future.wait if future is not None else tensor.pull, wl.ServerLost, 0)
        assert f"{proxy.address} was started again and has lost what it held" in str(error)
        timed(tensor.pull, wl.ServerLost, 0)
        with wl.connect(servers=[proxy.address], timeout=10) as anew:
            np.testing.assert_array_equal(int64(anew, "w", 4).pull(), np.zeros(4))
        cluster.close()


def test_a_server_that_is_away_for_less_than_the_failure_timeout_is_not_lost():
    with Servers(1, threads=1) as servers, Proxy(servers.addresses[0]) as proxy:
        cluster = wl.connect(servers=[proxy.address], timeout=10, failure_timeout=2)
        tensor = int64(cluster, "w", 4)
        proxy.refuse()
        proxy.set(Faults(cut=1.0))
        future = tensor.push(np.ones(4, np.int64))
        time.sleep(0.3)
        assert not future.done()
        proxy.set(Faults())
        proxy.accept()
        future.wait()
        np.testing.assert_array_equal(tensor.pull(), np.ones(4))
        assert proxy.counts["refused"] > 0
        cluster.close()


# -- a server that is stopped ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """Two servers that tests stop, and let go on."""
    with Servers(2, kind=request.param, threads=1) as servers:
        yield servers


@KINDS
def test_stopped_a_server_is_given_up_in_time_once_its_connections_are_gone(kind: str):
    """The kernel accepts for it, and nobody answers."""
    with Servers(1, kind=kind, threads=1) as servers, Proxy(servers.addresses[0]) as proxy:
        seconds = 2.5  # more than one attempt takes: lanes that wait for each other must not add theirs up
        cluster = wl.connect(servers=[proxy.address], timeout=20, failure_timeout=seconds)
        tensor = int64(cluster, "w", 10)
        with stopped(servers, 0):
            proxy.cut()
            timed(tensor.pull, wl.ServerLost, seconds)
            started = time.monotonic()
            with contextlib.suppress(wl.ServerLost):
                cluster.close()
            assert time.monotonic() - started < LATE_S


@pytest.mark.parametrize("name", CALLS)
def test_stopped_a_server_is_a_timeout_in_time_and_what_was_pushed_is_applied_once(pair: Servers, name: str):
    def handles() -> tuple[wl.Tensor, wl.Table]:
        return cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())

    def hasty_handles() -> tuple[wl.Tensor, wl.Table]:
        """With a time that is short for servers that run, too."""
        cluster._timeout = 0.1
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(wl.Timeout):
                return handles()
            assert time.monotonic() < deadline, "not once in time"

    with pair.connect(timeout=20, app=new_app()) as cluster:
        handles()[1].push([1], np.ones((1, 2), np.float32)).wait()
        registered = cluster.empty((4, 2))
        registered[:] = 1
        call = every_call(cluster, *hasty_handles(), registered)[name]
        with stopped(pair):
            if name in NEED_NO_SERVER:
                call()
            else:
                timed(lambda: waited(call()), wl.Timeout, 0.1)
            started = time.monotonic()
        cluster._timeout = 20
        tensor, table = handles()
        np.testing.assert_array_equal(
            tensor.pull(), np.full((4, 2), int(name.startswith(("Tensor.push", "Tensor.put", "Tensor.fill"))))
        )
        assert time.monotonic() - started < LATE_S
        pushed, deleted, put = int(name.startswith("Table.push")), name == "Table.delete", name == "Table.put"
        expected = [[0, 0] if deleted else [1 + pushed] * 2, [int(pushed or put)] * 2]
        np.testing.assert_array_equal(table.pull([1, 2], create=False), expected)
        with contextlib.suppress(wl.NotFound) if name == "Cluster.delete" else contextlib.nullcontext():  # it is done
            if isinstance(result := waited(call()), wl.Cluster):
                result.close()


@pytest.mark.parametrize("switch", ["", "deadlines"])
def test_a_wait_at_a_gate_ends_in_time_and_only_without_the_mechanism_it_hangs(switch: str):
    code = f"""
        import os, threading, time
        import windlass as wl

        cluster = wl.connect(threads=2)
        w = [cluster.worker(rank, 2).tensor("w", 10, rule=wl.Sum(), sync=wl.SSP(0)) for rank in range(2)][1]
        w._cluster.tick()

        def pull():
            began = time.monotonic()
            try:
                w.pull(timeout={LOST_S})
            except wl.Timeout:
                print("late" if time.monotonic() - began > {LOST_S + LATE_S} else "in time", flush=True)

        thread = threading.Thread(target=pull, daemon=True)
        thread.start()
        thread.join({LOST_S + 3 * LATE_S})
        print("hangs" if thread.is_alive() else "over", flush=True)
        os._exit(0)
    """
    done = run_python(code, WINDLASS_BREAK=switch)
    assert done.stdout.split("\n")[:-1] == (["hangs"] if switch else ["in time", "over"]), done.stderr


def test_close_and_connect_are_in_time_with_a_stopped_server(pair: Servers):
    cluster = pair.connect(timeout=20, app=new_app())
    tensor = int64(cluster, "w", 2 * 8192)
    with stopped(pair, 1):
        future = tensor.push(np.ones(2 * 8192, np.int64))
        timed(lambda: pair.connect(timeout=0.1), wl.Timeout, 0.1)
        timed(lambda: cluster.close(timeout=0.1), wl.Timeout, 0.1)
        timed(future.wait, wl.Closed, 0)
        timed(tensor.pull, wl.Closed, 0)


def test_many_futures_that_timed_out_are_all_applied_once(pair: Servers):
    with pair.connect(timeout=20, app=new_app()) as cluster:
        tensor, table = int64(cluster, "w", 2 * 8192), cluster.table("t", 2, rule=wl.Sum())
        futures = []
        with stopped(pair):
            for i in range(60):
                futures.append(tensor.push(np.ones(2 * 8192, np.int64)))
                futures.append(tensor[i : 9000 + i].push(np.ones(9000, np.int64)))
                futures.append(table.push([i, 1000], np.ones((2, 2), np.float32)))
                with pytest.raises(wl.Timeout):
                    futures[-1].wait(timeout=0.001)
                if len(futures) > 100:
                    break
        wait_all(futures)
        rounds = len(futures) // 3
        expected = np.full(2 * 8192, rounds)
        for i in range(rounds):
            expected[i : 9000 + i] += 1
        np.testing.assert_array_equal(tensor.pull(), expected)
        np.testing.assert_array_equal(table.pull([0, 1000]), [[1, 1], [rounds, rounds]])


def test_threads_whose_calls_time_out_on_several_servers_do_not_lock_each_other_out(pair: Servers):
    """Objects go over the servers in different orders; a timeout takes what it needs of all of them."""
    with pair.connect(timeout=20, app=new_app()) as cluster:
        tensors = [int64(cluster, "one", 2 * 8192)]
        for i in range(6):
            int64(cluster, f"load-{i}", 1)  # now the other server has less
            tensors.append(int64(cluster, f"w-{i}", 2 * 8192))
        counts = [0] * len(tensors)
        end = time.monotonic() + 2

        def push(i: int) -> None:
            grad = np.ones(2 * 8192, np.int64)
            while time.monotonic() < end:
                try:
                    tensors[i].push_pull(grad, timeout=0.0005)
                except wl.Timeout as error:
                    counts[i] += "the push goes on" in str(error)
                else:
                    counts[i] += 1

        threads = [threading.Thread(target=push, args=[i], daemon=True) for i in range(len(tensors))]
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            with stopped(pair):
                time.sleep(0.05)
            time.sleep(0.02)
        for thread in threads:
            thread.join(5)
        assert not any(thread.is_alive() for thread in threads), f"stuck after {counts}"
        for tensor, count in zip(tensors, counts, strict=True):
            np.testing.assert_array_equal(tensor.pull(), np.full(2 * 8192, count))


# -- a worker that is killed or stopped ------------------------------------------------------------------------------

WORKER = """
    import sys
    import numpy as np
    import windlass as wl

    cluster = wl.connect(servers=sys.argv[2:], timeout=60)
    tensor = cluster.tensor("w", (4 << 20,), rule=wl.Sum(), dtype=np.int64)
    table = cluster.table("t", 16, rule=wl.Sum())
    grad = cluster.empty(4 << 20, np.int64)
    grad[:] = 1
    keys, rows = np.arange(20_000), np.ones((20_000, 16), np.float32)
    futures = []
    print("ready", flush=True)
    for i in range(1_000_000 if "forever" in sys.argv[1] else 20):
        if "big" in sys.argv[1]:
            tensor.push(grad).wait()
        if "pull" in sys.argv[1]:
            tensor.pull(out=grad)
        if "table" in sys.argv[1]:
            futures.append(table.push(keys, rows))
        if "small" in sys.argv[1]:
            futures += [tensor[j : j + 9000].push(np.ones(9000, np.int64)) for j in range(8)]
        while len(futures) > 60:
            futures.pop(0).wait()
        if i == 1:
            print("goes", flush=True)
    for future in futures:
        future.wait()
    cluster.close()
    print("done", flush=True)
"""


@contextlib.contextmanager
def worker(servers: Servers, what: str) -> Iterator[subprocess.Popen[str]]:
    """A process that pushes; it is in the middle of that when the block begins, and gone when it ends."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(WORKER), what, *servers.addresses],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n", "goes\n"]
        time.sleep(random.uniform(0.01, 0.05))
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("kind", "what"), [("tcp", "big"), ("unix", "big"), ("tcp", "pull"), ("tcp", "small"), ("unix", "table")]
)
def test_killed_workers_leave_nothing_at_the_server_and_others_go_on(kind: str, what: str):
    with Servers(1, kind=kind, threads=2) as servers, servers.connect(timeout=20) as cluster:
        tensor, mine = int64(cluster, "w", BIG), int64(cluster, "mine", BIG // 4)
        table = cluster.table("t", 16, rule=wl.Sum())
        table.push(np.arange(20_000), np.ones((20_000, 16), np.float32)).wait()
        out = cluster.empty(BIG, np.int64)
        tensor.pull(out=out)
        grad = np.ones(BIG // 4, np.int64)
        mine.push(grad).wait()
        before = figures(servers)
        rss = 0
        for i in range(1, 3):
            with worker(servers, f"{what} forever") as process:
                process.kill()
                process.wait()
                mine.push(grad).wait(timeout=STALL_S)
            eventually(lambda: figures(servers), before)
            if i == 1:
                rss = servers.rss_bytes(0)
        assert servers.rss_bytes(0) < rss + 8 * MIB
        np.testing.assert_array_equal(mine.pull(), np.full(BIG // 4, 3))
        tensor.pull(out=out)  # part by part: a shard has all of a push or nothing of it
        cut = BIG // tensor.shards
        for shard in range(tensor.shards) if what in ("big", "table") else ():
            assert (out[shard * cut : (shard + 1) * cut] == out[shard * cut]).all()


@KINDS
def test_a_stopped_worker_in_the_middle_of_a_push_keeps_nobody_and_loses_nothing(kind: str):
    with Servers(1, kind=kind, threads=2) as servers, servers.connect(timeout=20) as cluster:
        tensor = int64(cluster, "w", BIG)
        grad, pushes = cluster.empty(BIG, np.int64), 0
        grad[:] = 1
        with worker(servers, "big small") as process:
            for _ in range(5):
                process.send_signal(signal.SIGSTOP)
                for _ in range(3):
                    tensor.push(grad).wait(timeout=STALL_S)
                    pushes += 1
                process.send_signal(signal.SIGCONT)
                time.sleep(0.02)
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
        expected = np.full(BIG, pushes + 20)
        for j in range(8):
            expected[j : j + 9000] += 20
        np.testing.assert_array_equal(tensor.pull(), expected)


@KINDS
@pytest.mark.parametrize("what", ["big", "pull"])
def test_terminated_with_a_worker_stopped_in_the_middle_of_a_request_a_server_ends_well(kind: str, what: str):
    with Servers(1, kind=kind, threads=2) as servers, worker(servers, f"{what} forever") as process:
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert servers.terminate(0) == 0, servers.output(0)
        assert time.monotonic() - started < LATE_S
        assert servers.output(0).count("\n") == 2, servers.output(0)  # where it and its token are, and no complaint


@pytest.mark.long
@KINDS
def test_a_worker_that_is_stopped_for_longer_than_a_server_waits_goes_on_afterwards(kind: str):
    with Servers(1, kind=kind, threads=2) as servers, servers.connect(timeout=20) as cluster:
        tensor = int64(cluster, "w", BIG)
        before = figures(servers)
        with worker(servers, "big small") as process:
            process.send_signal(signal.SIGSTOP)
            time.sleep(40)
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
        eventually(lambda: figures(servers), before)
        expected = np.full(BIG, 20)
        for j in range(8):
            expected[j : j + 9000] += 20
        np.testing.assert_array_equal(tensor.pull(), expected)


# -- nothing is left -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
@KINDS
def test_connections_that_come_and_go_leave_nothing_on_either_side(kind: str):
    with Servers(1, kind=kind, threads=1) as servers, Proxy(servers.addresses[0]) as proxy:
        with wl.connect(servers=[proxy.address], timeout=10) as cluster:
            int64(cluster, "w", 4).push(np.ones(4, np.int64)).wait()
        before = None
        while before != figures(servers):  # until what that client left has gone
            before = figures(servers)
            time.sleep(0.2)
        for i in range(15):
            proxy.set(Faults(cut=0.1 * (i % 3), half_close=0.1 * (i % 2), seed=i))
            with wl.connect(servers=[proxy.address], timeout=10) as cluster:
                tensor = int64(cluster, "w", 4)
                for _ in range(10):
                    tensor.push(np.ones(4, np.int64))
                tensor.pull()
                proxy.set(Faults())
        eventually(lambda: figures(servers), before)
        with wl.connect(servers=[proxy.address], timeout=10) as cluster:
            np.testing.assert_array_equal(int64(cluster, "w", 4).pull(), np.full(4, 151))


def test_a_cluster_that_is_dropped_and_not_closed_leaves_nothing():
    with Servers(1, threads=1) as servers:
        before, there = mine(), figures(servers)
        for _ in range(5):
            cluster = servers.connect(timeout=10)
            int64(cluster, "w", 4).push(np.ones(4, np.int64)).wait()
            del cluster
        eventually(mine, before)
        eventually(lambda: figures(servers), there)


def children(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_servers_end_with_a_process_that_was_killed_in_the_middle_of_pushes():
    code = """
        import time
        import numpy as np
        import windlass as wl
        from windlass.testing import Servers

        with Servers(2) as servers, servers.connect() as cluster:
            tensor = cluster.tensor("w", (4 << 20,), rule=wl.Sum(), dtype=np.int64)
            servers.stop(1)
            future = tensor.push(np.ones(4 << 20, np.int64))
            print("goes", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "goes\n"
    pids = children(process.pid)
    assert len(pids) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    eventually(lambda: [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()], [], 10)
