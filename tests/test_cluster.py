"""Clusters: sessions, workers and clocks."""

import numpy as np
import pytest
from helpers import FLOAT32, SHARD

import windlass as wl


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


@pytest.mark.embedded("workers inside a process share its engine; elsewhere, each has connections of its own")
def test_the_end_of_one_worker_is_the_end_of_the_engine(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3,), rule=wl.Sum())
    cluster.worker(1, 2).close()
    with pytest.raises(wl.Closed):
        tensor.pull()


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
