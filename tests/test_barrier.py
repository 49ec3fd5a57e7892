"""cluster.barrier(): every worker of the view has arrived."""

import random
import signal
import threading
import time
from concurrent import futures
from typing import Any

import numpy as np
import pytest
from crew import at_once, together
from helpers import PATIENCE_S, run_python

import windlass as wl
from windlass._client import scheduler_client
from windlass.testing import LocalCluster, Servers
from windlass.testing.cluster import Process, until

ONE = np.ones(4, np.float32)
embedded = pytest.mark.embedded("with servers=[...] nobody knows the workers")


class Call:
    """A call in a thread of its own."""

    def __init__(self, call: Any) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Any) -> None:
        try:
            call()
        except BaseException as error:
            self.error = error

    def waits(self, seconds: float = 0.2) -> bool:
        """Whether it has not ended after a while."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def end(self) -> None:
        """Waits for its end, and raises its error."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler on a busy machine gets the time to say who is missing."""
    monkeypatch.setattr(scheduler_client, "_LAST_WORD_SECONDS", 30.0)


# -- inside the process ----------------------------------------------------------------------------------------------


@embedded
def test_nobody_is_through_before_all_have_arrived(cluster: wl.Cluster) -> None:
    seed, rounds = random.randrange(2**32), 50
    print(f"seed {seed}")
    arrived = [0, 0, 0]

    def work(worker: wl.Cluster) -> None:
        rng = random.Random(seed + worker.rank)
        for i in range(1, rounds + 1):
            time.sleep(rng.choice([0, 0, 0.002]))
            arrived[worker.rank] = i
            worker.barrier()
            assert min(arrived) >= i
            assert max(arrived) <= i + 1

    together(cluster, 3, work)
    together(cluster, 3, lambda worker: worker.barrier())  # another group, after the first has left


@embedded
@pytest.mark.parametrize("size", [4, 1 << 20])
def test_what_anybody_pushed_before_is_in_everybodys_pull_after(cluster: wl.Cluster, size: int) -> None:
    grad = np.ones(size, np.float32)

    def work(worker: wl.Cluster) -> None:
        w = worker.tensor("w", size, rule=wl.Sum())
        for i in range(1, 6):
            w.push(grad)
            worker.barrier()
            assert (w.pull() == 2 * i).all()
            worker.barrier()

    together(cluster, 2, work)


@embedded
def test_it_closes_no_iteration(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> tuple[bool, int]:
        w = worker.tensor("w", 4, rule=wl.Sum(), sync="bsp")
        pushed = w.push(ONE)
        worker.barrier()  # the push waits for its iteration, and the barrier does not
        early, clock = pushed.done(), worker.clock
        worker.barrier()
        worker.tick()
        worker.barrier()
        assert w.pull()[0] == 2
        return early, clock

    assert together(cluster, 2, work) == [(False, 0), (False, 0)]


@embedded
def test_who_leaves_is_waited_for_no_more(cluster: wl.Cluster) -> None:
    first, second, third = (cluster.worker(rank, 3) for rank in range(3))
    calls = [Call(worker.barrier) for worker in (first, second)]
    assert calls[0].waits()
    third.close()
    for call in calls:
        call.end()
    first.close()
    second.barrier()  # alone
    with pytest.raises(wl.Closed, match="worker 0 has been closed"):
        first.barrier()
    second.close()


@embedded
def test_time_that_is_up_names_the_missing_and_called_again_it_is_the_same_barrier(cluster: wl.Cluster) -> None:
    workers = [cluster.worker(rank, 4) for rank in range(3)]  # rank 3 has not come
    call = Call(workers[2].barrier)
    for timeout in (0, 0.3):
        with pytest.raises(wl.Timeout, match=r"barrier 1: [12] of 4 workers have arrived; missing: ranks 1,( 2,)? 3$"):
            workers[0].barrier(timeout=timeout)
    workers.append(cluster.worker(3, 4))
    both = [Call(workers[rank].barrier) for rank in (1, 3)]
    for other in (call, *both):
        other.end()  # rank 0 has arrived, though its time was up
    workers[0].barrier(timeout=0)  # and is told so
    with pytest.raises(wl.Timeout, match=r"barrier 2: 1 of 4 .* missing: ranks 1, 2, 3$"):
        workers[0].barrier(timeout=0)
    for worker in workers:
        worker.close()


@embedded
def test_who_comes_in_place_of_one_that_left_begins_at_the_current_barrier(cluster: wl.Cluster) -> None:
    first, second = (cluster.worker(rank, 2) for rank in range(2))
    at_once(2, lambda rank: (first, second)[rank].barrier())
    second.close()
    again = cluster.worker(1, 2)
    call = Call(first.barrier)
    assert call.waits()
    again.barrier()
    call.end()
    other = cluster.worker(1, 2)  # takes the place of one that is there
    call = Call(first.barrier)
    with pytest.raises(wl.Closed, match="another has taken its rank 1"):
        again.barrier()
    again.close()
    assert call.waits()
    other.barrier()
    call.end()
    first.close()
    other.close()


@embedded
def test_closing_the_cluster_ends_it(connect: Any) -> None:
    cluster = connect()
    call = Call(cluster.worker(0, 2).barrier)
    assert call.waits()
    begun = time.monotonic()
    cluster.close()
    with pytest.raises(wl.Closed):
        call.end()
    assert time.monotonic() - begun < 30  # not its 60 s
    with pytest.raises(wl.Closed):
        cluster.barrier()


def test_a_process_ends_in_peace_while_a_thread_waits() -> None:
    ended = run_python("""
        import threading, time, windlass as wl
        cluster = wl.connect()
        worker = cluster.worker(0, 2)

        def wait():
            try:
                worker.barrier()
            except wl.Closed:
                pass

        threading.Thread(target=wait, daemon=True).start()
        while not cluster._near.barriers._worlds[2].barrier._arrived:
            time.sleep(0.01)
        time.sleep(0.1)
    """)
    assert (ended.returncode, ended.stderr) == (0, "")


@embedded
def test_two_threads_of_one_worker_are_refused(cluster: wl.Cluster) -> None:
    first, second = (cluster.worker(rank, 2) for rank in range(2))
    call = Call(first.barrier)
    assert call.waits()
    with pytest.raises(wl.InvalidArgument, match="another thread of this worker"):
        first.barrier()
    second.barrier()
    call.end()
    first.close()
    second.close()


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_none_is_refused(cluster: wl.Cluster, timeout: float) -> None:
    with pytest.raises(wl.InvalidArgument, match="barrier: timeout must be at least 0"):
        cluster.barrier(timeout=timeout)


def test_a_worker_that_is_alone_passes(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", 4, rule=wl.Sum())
    pushed = w.push(ONE)
    for _ in range(3):
        cluster.barrier()
    assert pushed.done()
    alone = cluster.worker(0, 1)
    alone.barrier()
    alone.close()


def test_servers_without_a_scheduler_know_no_workers() -> None:
    refused = pytest.raises(wl.InvalidArgument, match="there is no scheduler that could count 2 workers")
    with Servers(1) as servers, servers.connect(rank=0, world_size=2) as cluster, refused:
        cluster.barrier()


# -- with a scheduler ------------------------------------------------------------------------------------------------

WORKER = """
import windlass as wl
with wl.connect() as c:
    w = c.tensor("w", 4, rule=wl.Sum())
    print("begun", flush=True)
    for i in range({rounds}):
        w.push([1.0] * 4)
        print("at", i, flush=True)
        c.barrier()
        print("through", i, "sum", w.pull()[0], flush=True)
    {then}
print("end", flush=True)
"""


def start(cluster: LocalCluster, rank: int, world: int, rounds: int, then: str = "pass", **more: str) -> Process:
    return cluster.worker(WORKER.format(rounds=rounds, then=then), rank, world, **more)


def has_said(worker: Process, what: str) -> None:
    until(lambda: what in worker.output() or worker.process.poll() is not None, what, PATIENCE_S)
    assert what in worker.output(), worker.output()


def test_processes_meet() -> None:
    with LocalCluster(servers=1) as cluster:
        workers = [start(cluster, rank, 3, 20) for rank in range(3)]
        for worker in workers:
            assert worker.wait(PATIENCE_S) == 0, worker.output()
            sums = [float(line.split()[-1]) for line in worker.output().splitlines() if "sum" in line]
            assert all(3 * (i + 1) <= seen <= 3 * (i + 2) for i, seen in enumerate(sums))


@pytest.mark.parametrize("how", ["killed", "left"])
def test_the_others_pass_without_a_worker_that_is(how: str) -> None:
    with LocalCluster(servers=1, failure_timeout=2.0) as cluster:
        workers = [start(cluster, rank, 3, 4) for rank in range(2)]
        then = "import time; time.sleep(1000)" if how == "killed" else "pass"
        victim = start(cluster, 2, 3, 2, then)
        has_said(victim, "through 1")
        if how == "killed":
            for worker in workers:
                has_said(worker, "at 2")
            assert "through 2" not in workers[0].output()
            victim.kill()
        for worker in workers:
            assert worker.wait(PATIENCE_S) == 0, worker.output()
            assert "through 3" in worker.output()


def test_the_replacement_of_a_killed_worker_lets_the_others_pass() -> None:
    with LocalCluster(servers=1, failure_timeout=2.0) as cluster:
        wait = {"WINDLASS_ON_WORKER_LOSS": "wait"}
        first, victim = (
            start(cluster, 0, 2, 4, **wait),
            start(cluster, 1, 2, 2, "import time; time.sleep(1000)", **wait),
        )
        has_said(first, "at 2")
        has_said(victim, "through 1")
        victim.kill()
        until(lambda: len(cluster.members("worker")) == 1, "its death is known", PATIENCE_S)
        time.sleep(0.3)
        assert "through 2" not in first.output()
        fresh = start(cluster, 1, 2, 2, **wait)  # what is left: the barriers 3 and 4
        for worker in (first, fresh):
            assert worker.wait(PATIENCE_S) == 0, worker.output()
        assert "through 3" in first.output()
        assert "through 1" in fresh.output()


def test_a_worker_that_joins_later_begins_at_the_current_barrier() -> None:
    with LocalCluster(servers=1) as cluster, cluster.connect(rank=0, world_size=1) as first:
        for _ in range(3):
            first.barrier()
        with cluster.connect(rank=1, world_size=2) as second:
            until(lambda: first.world_size == 2, "the first knows of the second", PATIENCE_S)
            call = Call(first.barrier)
            assert call.waits()
            second.barrier()
            call.end()
            with pytest.raises(wl.Timeout, match=r"barrier 5 of app 'default': 1 of 2 workers .*; missing: rank 0$"):
                second.barrier(timeout=0)
        first.barrier()  # where the second stood when it left
        first.barrier()


def test_of_a_scheduler_a_timeout_names_the_missing_and_the_arrival_counts() -> None:
    with LocalCluster(servers=1) as cluster:
        workers: list[wl.Cluster] = at_once(3, lambda rank: cluster.connect(rank=rank, world_size=3, app="x"))
        missing = r"barrier 1 of app 'x': 1 of 3 workers have arrived; missing: ranks 0, 2$"
        for timeout in (0, 0.3):
            with pytest.raises(wl.Timeout, match=missing):
                workers[1].barrier(timeout=timeout)
        at_once(2, lambda i: workers[2 * i].barrier())  # rank 1 has arrived, though its time was up
        workers[1].barrier(timeout=30)
        with pytest.raises(wl.Timeout, match=r"barrier 2 of app 'x': 1 of 3 .* ranks 0, 2$"):
            workers[1].barrier(timeout=0)
        for worker in workers:
            worker.close()


def test_a_connection_to_the_scheduler_that_breaks_changes_nothing() -> None:
    with LocalCluster(servers=1) as cluster:
        first, second = at_once(2, lambda rank: cluster.connect(rank=rank, world_size=2))
        for _ in range(3):
            call = Call(first.barrier)
            assert call.waits()
            member = first._attendance.member
            before = member._ws
            member._ws.close()
            until(lambda member=member, before=before: member._ws not in (None, before), "it is back", PATIENCE_S)
            assert call.waits()
            second.barrier()
            call.end()
        first.close()
        second.close()


def test_a_scheduler_that_is_away_is_said_when_time_is_up() -> None:
    with LocalCluster(servers=1) as cluster, cluster.connect() as worker:
        worker.barrier()
        cluster.scheduler.kill()
        until(lambda: worker._attendance.member.away, "its end is known", PATIENCE_S)
        with pytest.raises(wl.Timeout, match=r"barrier 2 of app 'default': .* which is away"):
            worker.barrier(timeout=0.3)


def test_closing_a_worker_or_ending_the_cluster_ends_it() -> None:
    with LocalCluster(servers=1) as cluster:
        workers: list[wl.Cluster] = at_once(3, lambda rank: cluster.connect(rank=rank, world_size=3))
        calls = [Call(worker.barrier) for worker in workers[:2]]
        assert calls[0].waits()
        begun = time.monotonic()
        workers[0].close()
        with pytest.raises(wl.Closed):
            calls[0].end()
        assert calls[1].waits()
        with cluster.operator() as operator:
            operator.stop("enough", 30)
        with pytest.raises(wl.Closed):
            calls[1].end()
        assert time.monotonic() - begun < 45  # not their 60 s
        for worker in workers[1:]:
            worker.close()


def test_a_reader_has_no_barriers() -> None:
    refused = pytest.raises(wl.AccessDenied, match="barrier: a reader is not waited for")
    with LocalCluster(servers=1) as cluster, cluster.connect(reader=True) as reader, refused:
        reader.barrier()


CTRL_C = """
import windlass as wl
cluster = wl.connect()
worker = cluster.worker(0, 2) if {near} else cluster
try:
    print("begun", flush=True)
    worker.barrier(timeout=600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
worker.close()
"""


@pytest.mark.parametrize("near", [True, False])
def test_ctrl_c_ends_it(near: bool) -> None:
    with LocalCluster(servers=1) as cluster, futures.ThreadPoolExecutor(1) as pool:
        environment = {"WINDLASS_ADDRESS": "", "WORLD_SIZE": "1"} if near else {}
        other = None if near else pool.submit(cluster.connect, rank=1, world_size=2)  # is there, and never arrives
        worker = cluster.worker(CTRL_C.format(near=near), 0, 2, **environment)
        has_said(worker, "begun")
        time.sleep(0.3)
        worker.process.send_signal(signal.SIGINT)
        has_said(worker, "interrupted")
        assert worker.wait(PATIENCE_S) == 0, worker.output()
        if other is not None:
            other.result().close()
