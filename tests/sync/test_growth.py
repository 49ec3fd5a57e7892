"""An app that grows while it trains: workers beyond those it began with."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_cluster_sync import run_threads

import windlass as wl
from windlass.testing import LocalCluster

SIZE = 100_000  # float32 or int64: shards on both servers
KEYS = np.arange(500)
BEFORE, AFTER = 20, 30  # iterations without the third worker, at least, and with it


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=2) as made:
        yield made


def two(cluster: LocalCluster, **arguments: object) -> list[wl.Cluster]:
    """The workers that an app begins with."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: cluster.connect(rank=rank, world_size=2, **arguments), range(2)))


class Run:
    """Two workers train in threads, a third joins when they are under way; when each stops is known once it has."""

    def __init__(self, cluster: LocalCluster, sync: str, loss: str) -> None:
        self.cluster, self.sync, self.loss = cluster, sync, loss
        self.under_way = [threading.Event(), threading.Event()]
        self.begun = 0  # the clock at which the third begins
        self.end: int | None = None

    def connect(self, rank: int, world_size: int) -> wl.Cluster:
        return self.cluster.connect(rank=rank, world_size=world_size, on_worker_loss=self.loss)

    def objects(self, worker: wl.Cluster) -> tuple[wl.Tensor, wl.Table]:
        return (
            worker.tensor("w", SIZE, rule=wl.SGD(lr=1.0), sync=self.sync),
            worker.table("t", 4, rule=wl.SGD(lr=1.0), sync=self.sync),
        )

    def train(self, rank: int, world_size: int) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """What it saw: the clock, how stale that was, and the weights."""
        if rank == 2:
            assert all(event.wait(30) for event in self.under_way)
        seen = []
        with self.connect(rank, world_size) as worker:
            w, t = self.objects(worker)
            if rank == 2:
                self.begun = worker.clock
                self.end = worker.clock + AFTER
            grad, rows = np.full(SIZE, rank + 1, np.float32), np.full((len(KEYS), 4), rank + 1, np.float32)
            while self.end is None or worker.clock < self.end:
                t.push(KEYS, rows)
                pushed = w.push_pull_async(grad)
                weights = pushed.wait()
                worker.tick()
                seen.append((worker.clock, pushed.seen.staleness, weights, t.pull(KEYS)))
                if rank != 2 and worker.clock == BEFORE:
                    self.under_way[rank].set()
            assert worker.world_size == 3
        return seen

    def all(self) -> list[list[tuple[int, int, np.ndarray, np.ndarray]]]:
        return run_threads(lambda: self.train(0, 2), lambda: self.train(1, 2), lambda: self.train(2, 3))


@pytest.mark.parametrize("loss", ["continue", "wait"])
def test_under_bsp_the_mean_is_over_three_from_the_clock_at_which_the_third_begins(cluster: LocalCluster, loss: str):
    run = Run(cluster, "bsp", loss)
    everybody = run.all()
    assert run.begun > BEFORE
    assert [clock for clock, *_ in everybody[2]] == list(range(run.begun + 1, run.begun + AFTER + 1))
    for saw in everybody:
        assert saw[-1][0] == run.begun + AFTER
        for clock, staleness, weights, rows in saw:
            expected = -(1.5 * min(clock, run.begun) + 2.0 * max(0, clock - run.begun))
            assert staleness == 0
            assert (weights == np.float32(expected)).all(), (clock, run.begun)
            assert (rows == np.float32(expected)).all(), (clock, run.begun)
    with cluster.connect(reader=True) as reader, wl.connect() as alone:
        (w, t), (v, u) = run.objects(reader), run.objects(alone)
        for clock in range(run.begun + AFTER):
            mean = np.float32(1.5 if clock < run.begun else 2.0)
            v.push_pull(np.full(SIZE, mean))
            u.push_pull(KEYS, np.full((len(KEYS), 4), mean))
        assert (w.fingerprint(), t.fingerprint()) == (v.fingerprint(), u.fingerprint())
    assert "app 'default' grows from 2 to 3 workers" in cluster.scheduler.output()


@pytest.mark.parametrize("loss", ["continue", "wait"])
def test_under_ssp_all_three_train_on_within_the_bound(cluster: LocalCluster, loss: str):
    run = Run(cluster, "ssp:2", loss)
    everybody = run.all()
    assert run.begun >= BEFORE - 2
    assert [saw[-1][0] for saw in everybody] == [run.begun + AFTER] * 3
    assert max(staleness for saw in everybody for _, staleness, *_ in saw) <= 2
    total = -(1.0 + 2.0) * (run.begun + AFTER) - 3.0 * AFTER
    with cluster.connect(reader=True) as reader:
        w, t = run.objects(reader)
        assert (w.pull() == np.float32(total)).all()
        assert (t.pull(KEYS) == np.float32(total)).all()


@pytest.mark.parametrize("loss", ["continue", "wait"])
def test_under_ssp_the_third_is_waited_for_from_its_clock_on(cluster: LocalCluster, loss: str):
    one = np.ones(SIZE, np.int64)
    a, b = two(cluster, on_worker_loss=loss)
    with a, b:
        first, second = [worker.tensor("w", SIZE, rule=wl.Sum(), dtype="int64", sync="ssp:1") for worker in (a, b)]
        for _ in range(10):
            first.push_pull(one)
            second.push_pull(one)
        with cluster.connect(rank=2, world_size=3, on_worker_loss=loss) as c:
            begun = c.clock
            assert begun in (9, 10)  # what was closed with a push_pull is not a tick yet
            third = c.tensor("w", SIZE, rule=wl.Sum(), dtype="int64", sync="ssp:1")
            pushes = 20

            def go_on() -> None:
                nonlocal pushes
                for w in [first, second] * 5:
                    pushes += 1
                    w.push_pull(one, timeout=2.0)

            with pytest.raises(wl.Timeout, match="waits for rank 2"):
                go_on()
            assert a.clock <= begun + 2
            while c.clock < a.clock:
                third.push_pull(one, timeout=10)
                pushes += 1
                c.tick()
            assert (third.pull(timeout=10) == pushes).all()
            assert (first.pull(timeout=10) == pushes).all()
        for _ in range(5):  # it has left: nobody waits for it
            for pushed in [first.push_pull_async(one), second.push_pull_async(one)]:
                pushed.wait(timeout=10)


def test_a_worker_alone_is_joined_at_its_clock_also_by_one_with_objects_of_its_own(cluster: LocalCluster):
    one = np.ones(8, np.float32)
    with cluster.connect(rank=0, world_size=1) as a:
        w = a.tensor("w", 8, rule=wl.Sum(), sync="ssp:0")
        for _ in range(20):
            w.push_pull(one)
        a.tick()
        with cluster.connect(rank=1, world_size=2) as b:
            assert b.clock == 20
            assert (a.world_size, b.world_size) == (2, 2)
            own = b.tensor("own", 8, rule=wl.Sum(), sync="ssp:0")
            pushed = [own.push_pull_async(one), w.push_pull_async(one)]
            a.tick()
            b.tick()
            assert [future.wait(timeout=10)[0] for future in pushed] == [1, 21]
