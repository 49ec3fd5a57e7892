"""Clusters: sessions, workers and clocks."""

import numpy as np
import pytest
from crew import at_once
from helpers import FLOAT32, SHARD

import windlass as wl
from windlass.testing import LocalCluster


def test_a_cluster_is_worker_0_of_1_by_default(cluster: wl.Cluster):
    assert (cluster.rank, cluster.world_size, cluster.clock) == (0, 1, 0)


def test_a_cluster_says_where_it_is(cluster: wl.Cluster):
    where = "embedded" if cluster._remote is None else f"2 servers, app '{cluster._remote.app}'"
    assert repr(cluster) == f"<Cluster, {where}, rank 0 of 1, open>"
    assert repr(cluster.worker(2, 3)) == f"<Cluster, {where}, rank 2 of 3, open>"
    cluster.close()
    assert repr(cluster) == f"<Cluster, {where}, rank 0 of 1, closed>"


def test_connect_needs_no_arguments():
    with wl.connect() as cluster:
        assert cluster.tensor("w", (3,), rule=wl.Sum()).push_pull([1, 2, 3]).tolist() == [1, 2, 3]


def test_workers_share_objects_and_have_their_own_rank(cluster: wl.Cluster):
    workers = [cluster.worker(rank, 3) for rank in range(3)]
    assert [(w.rank, w.world_size) for w in workers] == [(0, 3), (1, 3), (2, 3)]
    tensors = [w.tensor("w", (3, SHARD), rule=wl.Sum()) for w in workers]
    for tensor in tensors:
        tensor.push(np.ones((3, SHARD), FLOAT32)).wait()
    assert all((t.pull() == 3).all() for t in tensors)
    with pytest.raises(wl.SpecMismatch):
        workers[1].tensor("w", (4,), rule=wl.Sum())


def test_the_end_of_a_further_worker_is_the_end_of_nobody_else(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3,), rule=wl.Sum())
    with cluster.worker(0, 2) as one, cluster.worker(1, 2) as other:
        theirs, table = other.tensor("w", (3,), rule=wl.Sum()), other.table("t", 2, rule=wl.Sum())
        theirs.push(np.ones(3, FLOAT32))
        other.close()
        other.close()  # again
        assert repr(other).endswith("rank 1 of 2, closed>")
        calls = [theirs.pull, lambda: theirs.push(np.ones(3, FLOAT32)), theirs.pull_async, theirs.sum, theirs.snapshot]
        calls += [lambda: table.pull([1]), lambda: table.push([1], [[1, 1]]), lambda: list(table.export())]
        calls += [other.tick, other.settle, lambda: other.tensor("v", (3,), rule=wl.Sum()), other.fingerprint]
        calls += [lambda: other.lease(10, 5), lambda: other.empty(3), lambda: theirs.put([1.0, 1.0, 1.0])]
        for call in calls:
            with pytest.raises(wl.Closed, match="closed"):
                call()
        assert one.tensor("w", (3,), rule=wl.Sum()).push_pull(np.ones(3, FLOAT32)).tolist() == [2, 2, 2]
    assert tensor.pull().tolist() == [2, 2, 2]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_thread_is_a_worker_for_as_long_as_its_block(cluster: wl.Cluster, sync: str):
    """The others wait for it no longer, and what it had pushed when its block ended counts."""

    def work(rank: int) -> float:
        with cluster.worker(rank, 3) as worker:
            w = worker.tensor("w", (3,), rule=wl.Sum(), sync=sync)
            for _ in range(rank):
                w.push_pull(np.ones(3, FLOAT32))
            w.push(np.ones(3, FLOAT32))
        return worker.clock

    at_once(3, work)
    assert cluster.tensor("w", (3,), rule=wl.Sum(), sync=sync).pull().tolist() == [6, 6, 6]


def test_threads_are_workers_with_a_scheduler_as_without():
    def work(of: wl.Cluster, rank: int) -> list[float]:
        with of.worker(rank, 3) as worker:
            w = worker.tensor("w", (3,), rule=wl.Sum(), sync="bsp")
            for _ in range(4):
                weights = w.push_pull(np.ones(3, FLOAT32))
            return weights.tolist()

    expected = [[12.0] * 3] * 3
    with wl.connect() as cluster:
        assert at_once(3, lambda rank: work(cluster, rank)) == expected
    with LocalCluster(servers=2) as there, there.connect(reader=True) as cluster:
        assert at_once(3, lambda rank: work(cluster, rank)) == expected


def test_a_cluster_that_is_a_worker_says_so_when_a_thread_is_to_take_its_rank():
    with LocalCluster(servers=1) as there, there.connect() as cluster:
        with pytest.raises(wl.InvalidArgument, match=r"worker: this cluster is worker 0 itself; .*reader=True"):
            cluster.worker(0, 2)
        with cluster.worker(1, 2) as other:
            assert (other.rank, other.world_size) == (1, 2)


def test_tick_closes_an_iteration_of_its_own_worker(cluster: wl.Cluster):
    other = cluster.worker(1, 2)
    cluster.tick()
    cluster.tick()
    assert (cluster.clock, other.clock) == (2, 0)


def test_a_push_closes_nothing(cluster: wl.Cluster):
    tensor, table = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    for _ in range(3):
        tensor.push(np.ones(3 * SHARD, FLOAT32))
        tensor.pull()
        table.push([1], [[1, 1]])
        table.pull([1])
    assert cluster.clock == 0


@pytest.mark.parametrize("verb", ["push_pull", "push_pull_async"])
def test_a_loop_of_push_pulls_needs_no_tick(cluster: wl.Cluster, verb: str):
    tensor, table = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    ones = np.ones(3 * SHARD, FLOAT32)
    for step in range(4):
        getattr(tensor, verb)(ones)
        assert cluster.clock == step  # the next push to a closed shard ticks first
        getattr(table, verb)([1], [[1, 1]])  # another object belongs to the same iteration
        assert cluster.clock == step
    cluster.tick()
    assert cluster.clock == 4
    getattr(tensor, verb)(ones)
    assert cluster.clock == 4


def test_a_push_to_a_closed_shard_ticks_first(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum())
    ones = np.ones(SHARD, FLOAT32)
    tensor[:SHARD].push_pull(ones)
    tensor[SHARD : 2 * SHARD].push_pull(ones)  # another shard: still open
    tensor[2 * SHARD :].push(ones)
    assert cluster.clock == 0
    tensor[:SHARD].push(ones)
    assert cluster.clock == 1


def test_two_handles_of_one_worker_are_one_session(cluster: wl.Cluster):
    ones = np.ones(3 * SHARD, FLOAT32)
    first, second = (cluster.tensor("w", (3 * SHARD,), rule=wl.Sum()) for _ in range(2))
    for _ in range(5):
        first.push(ones).wait()
        second.push(ones).wait()
    del first
    third = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum())  # goes on where the others are
    third.push(ones).wait()
    assert (second.pull() == 11).all()


@pytest.mark.embedded("what other processes take is not counted here")
def test_memory_is_counted(cluster: wl.Cluster):
    assert cluster.memory_bytes == 0
    cluster.tensor("w", (1 << 18,), rule=wl.Adam())
    dense = cluster.memory_bytes
    assert 3 << 20 <= dense < 4 << 20  # weights and two moments
    table = cluster.table("t", 16, rule=wl.Sum())
    assert cluster.memory_bytes == dense
    table.pull([1])
    assert cluster.memory_bytes > dense
