"""cluster.lease(): embedded, with threads as workers, and the static split."""

import collections
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from crew import at_once, together
from helpers import Connect, new_app

import windlass as wl
from windlass._client import open_clusters
from windlass._client.open_clusters import default_cluster
from windlass._data.lease import Order, permutation, range_of
from windlass.testing import LocalCluster, Servers
from windlass.testing.cluster import until

SECONDS = 30.0
ORDER = [5, 7, 8, 2, 9, 0, 3, 1, 6, 4]  # of 10 samples, seed 0, epoch 0: for ever


def run(world: int, work: Any, cluster: wl.Cluster) -> list[Any]:
    """work(worker) in a thread per rank, each of which leaves at its end."""
    return together(cluster, world, work, SECONDS)


def used(batches: list[np.ndarray]) -> collections.Counter[int]:
    return collections.Counter(int(i) for batch in batches for i in batch)


def status(cluster: wl.Cluster, name: str = "data") -> dict[str, int]:
    return cluster._near.ledgers.status()[name]


# -- one worker ------------------------------------------------------------------------------------------------------


def test_one_worker_gets_every_sample_of_every_epoch_once_in_another_order():
    with wl.connect(threads=1) as cluster:
        lease = cluster.lease(103, batch_size=10, epochs=3)
        assert (len(lease), lease.samples, lease.batch_size, lease.epochs) == (11, 103, 10, 3)
        epochs = []
        for epoch in range(3):
            batches = list(lease)
            assert lease.epoch == epoch
            assert {batch.dtype for batch in batches} == {np.dtype(np.int64)}
            assert [len(batch) for batch in batches] == [10] * 10 + [3]
            assert used(batches) == collections.Counter(range(103))
            epochs.append(np.concatenate(batches).tolist())
        assert len({tuple(order) for order in epochs}) == 3
        assert (lease.samples_done, lease.duplicates, lease.taken_back) == (309, 0, 0)
        assert status(cluster)["epoch"] == 3
        with pytest.raises(wl.InvalidArgument, match="its 3 epochs are over"):
            iter(lease)


def test_without_shuffling_samples_come_in_order():
    with wl.connect(threads=1) as cluster:
        assert np.concatenate(list(cluster.lease(50, batch_size=8, shuffle=False))).tolist() == list(range(50))


def test_a_lease_is_done_when_the_iteration_that_used_its_last_batch_is_closed():
    with wl.connect(threads=1) as cluster:
        lease = cluster.lease(40, batch_size=5, lease_size=10)
        batches = iter(lease)
        for done in (0, 0, 10, 10, 20):
            next(batches)
            assert lease.samples_done == done
            cluster.tick()
        next(batches)
        next(batches)
        assert lease.samples_done == 20
        cluster.tick()
        assert lease.samples_done == 30
        list(batches)
        assert status(cluster)["samples_done"] == 40


def test_pushes_close_iterations_too():
    with wl.connect(threads=1) as cluster:
        w = cluster.tensor("w", 4, rule=wl.SGD(lr=0.1))
        lease = cluster.lease(40, batch_size=5, lease_size=5)
        done = []
        for _ in lease:
            w.push_pull(np.ones(4, np.float32))
            done.append(lease.samples_done)
        assert done == [0, 10, 15, 20, 25, 30, 35, 40]


def test_what_an_epoch_left_early_has_not_used_comes_in_the_next():
    with wl.connect(threads=1) as cluster:
        lease = cluster.lease(100, batch_size=5, epochs=2)
        first = []
        for batch in lease:
            first.append(batch)
            if len(first) == 7:
                break
        assert used(first + list(lease)) == collections.Counter(list(range(100)) * 2)
        assert status(cluster)["samples_done"] == 200


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"samples": 0}, "samples must be a whole number between 1"),
        ({"samples": 1.5}, "samples must be a whole number"),
        ({"batch_size": 0}, "batch_size must be a whole number between 1"),
        ({"epochs": 0}, "epochs must be a whole number between 1"),
        ({"seed": -1}, "seed must be a whole number between 0"),
        ({"lease_size": 15}, "lease_size must be a multiple of batch_size=10, not 15"),
        ({"split": "even"}, 'split must be "leased" or "static", not \'even\''),
        ({"ahead_seconds": -1}, "ahead_seconds must be at least 0"),
        ({"name": ""}, "the name must be 1 to 256 printable characters"),
        ({"samples": 2**30, "batch_size": 1, "lease_size": 1}, "at most 1048576 ranges in an epoch"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], text: str):
    with wl.connect(threads=1) as cluster, pytest.raises(wl.InvalidArgument) as raised:
        cluster.lease(**{"samples": 100, "batch_size": 10, **arguments})
    assert text in str(raised.value)


def test_a_name_is_leased_once_by_a_worker_and_on_one_set_of_terms():
    with wl.connect(threads=1) as cluster:
        cluster.lease(100, batch_size=10)
        with pytest.raises(wl.InvalidArgument, match="has made it already"):
            cluster.lease(100, batch_size=10)
        cluster.lease(100, batch_size=10, name="more")
        next(iter(cluster.worker(0, 2).lease(100, batch_size=10, name="third")))
        with pytest.raises(wl.SpecMismatch, match=r"there: 100 samples, 1 epochs"):
            next(iter(cluster.worker(1, 2).lease(100, batch_size=10, epochs=2, name="third")))


def test_after_close_a_lease_says_so():
    cluster = wl.connect(threads=1)
    batches = iter(cluster.lease(100, batch_size=10))
    next(batches)
    cluster.close()
    with pytest.raises(wl.Closed):
        next(batches)
    with pytest.raises(wl.Closed):
        cluster.lease(100, batch_size=10, name="other")


def test_large_data_has_no_more_ranges_than_a_ledger_takes():
    assert range_of(5000, 128) == 128
    assert range_of(1_000_000, 128) == 8 * 128
    assert 10**12 / range_of(10**12, 1) <= 2**20


# -- orders ----------------------------------------------------------------------------------------------------------


def test_an_order_follows_from_seed_and_epoch():
    assert permutation(10, 0, 0).tolist() == ORDER
    assert sorted(permutation(1000, 3, 4).tolist()) == list(range(1000))
    orders = {tuple(permutation(20, seed, epoch).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    order = Order(1000, True, 3)
    pieces = [order(4, begin, begin + 100) for begin in range(0, 1000, 100)]
    np.testing.assert_array_equal(np.concatenate(pieces), permutation(1000, 3, 4))
    pieces[0][:] = 0  # the caller's
    np.testing.assert_array_equal(order(4, 0, 100), permutation(1000, 3, 4)[:100])


def test_an_order_is_even():
    places = np.array([permutation(8, seed, 0) for seed in range(4000)])
    counts = np.array([np.bincount(places[:, place], minlength=8) for place in range(8)])
    assert abs(counts - 500).max() < 120  # over five standard deviations


# -- several workers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:2"])
def test_threads_share_the_epochs_and_nobody_waits_for_ever(sync: str):
    def work(worker: wl.Cluster) -> tuple[int, int, list[np.ndarray]]:
        w = worker.tensor("w", 4, rule=wl.SGD(lr=0.1))
        lease = worker.lease(1000, batch_size=7, epochs=3)
        batches = []
        for _ in range(3):
            for batch in lease:
                batches.append(batch)
                w.push_pull(np.ones(4, np.float32))
        worker.close()
        return lease.samples_done, lease.duplicates, batches

    with wl.connect(threads=1, sync=sync) as cluster:
        results = run(3, work, cluster)
        at = status(cluster)
        assert (at["epoch"], at["samples_done"]) == (3, 3000)
        count = used([batch for _, _, batches in results for batch in batches])
        assert min(count[i] for i in range(1000)) >= 3
        assert count.total() == 3000 + at["duplicates"]
        assert sum(duplicates for _, duplicates, _ in results) == at["duplicates"]


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads of Python take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_that_become_workers_at_the_same_time_share_one_ledger(restless: None, accurate: bool):
    world = 8
    for _ in range(200 if accurate else 20):
        with wl.connect(threads=1) as cluster:
            begin = threading.Barrier(world)

            def work(rank: int, cluster: wl.Cluster = cluster, begin: threading.Barrier = begin) -> list[np.ndarray]:
                begin.wait(SECONDS)
                worker = cluster.worker(rank, world)
                lease = worker.lease(200, batch_size=5)
                batches = []
                for batch in lease:
                    batches.append(batch)
                    worker.tick()
                worker.close()
                return batches

            count = used([batch for batches in at_once(world, work, SECONDS) for batch in batches])
            at = status(cluster)
            assert at["samples_done"] == 200
            assert count.total() == 200 + at["duplicates"]


def test_threads_that_need_a_cluster_at_the_same_time_get_the_same_one(restless: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(open_clusters, "_open", weakref.WeakSet())  # without those of other tests
    begin = threading.Barrier(8)

    def need(rank: int) -> wl.Cluster:
        begin.wait(SECONDS)
        return default_cluster()

    for _ in range(20):
        found = set(at_once(8, need, SECONDS))
        for cluster in found:
            cluster.close()
        assert len(found) == 1


def test_what_a_worker_that_leaves_has_not_done_is_done_by_the_others():
    with wl.connect(threads=1) as cluster:
        gone, other = cluster.worker(0, 2), cluster.worker(1, 2)
        batches = iter(gone.lease(100, batch_size=5, lease_size=10))
        first = [next(batches) for _ in range(3)]
        gone.close()
        rest = list(other.lease(100, batch_size=5, lease_size=10))
        assert used(rest) == collections.Counter(set(range(100)) - set(used(first[:2])))
        assert status(cluster)["samples_done"] == 100


def test_a_slow_worker_is_relieved():
    with wl.connect(threads=1) as cluster:
        begun = threading.Event()
        done = threading.Event()

        def work(worker: wl.Cluster) -> int:
            lease = worker.lease(200, batch_size=5, lease_size=10)
            if worker.rank == 0:
                batches = iter(lease)
                next(batches)
                begun.set()
                assert done.wait(SECONDS)
                assert not list(batches)  # not even the rest of what it had begun
                return lease.taken_back
            assert begun.wait(SECONDS)
            list(lease)
            done.set()
            return -1

        taken_back, _ = run(2, work, cluster)
        assert taken_back == 1
        assert status(cluster)["samples_done"] == 200


def test_who_comes_late_joins_in_the_epoch_the_others_are_in():
    with wl.connect(threads=1) as cluster:
        first, late = cluster.worker(0, 2), cluster.worker(1, 2)
        lease = first.lease(100, batch_size=10, epochs=3)
        list(lease)
        list(lease)
        comes = late.lease(100, batch_size=10, epochs=3)
        assert [len(list(comes)) for _ in range(3)] == [0, 0, 10]


# -- the static split ------------------------------------------------------------------------------------------------


def test_a_static_split_is_the_same_every_time_and_covers_the_data(connect: Connect):
    def epochs(cluster: wl.Cluster) -> list[list[list[int]]]:
        found = []
        for rank in range(3):
            with cluster.worker(rank, 3) as worker:
                lease = worker.lease(100, batch_size=7, epochs=2, split="static", seed=5)
                found.append([[i for batch in lease for i in batch.tolist()] for _ in range(2)])
                assert len(lease) == 5
                assert lease.samples_done == sum(map(len, found[-1]))
        return found

    with connect() as cluster:
        first, again = epochs(cluster), epochs(cluster)
    assert first == again
    for epoch in range(2):
        assert sorted(i for worker in first for i in worker[epoch]) == list(range(100))
    order = permutation(100, 5, 0).tolist()
    assert first[1][0][:7] == order[7:14]


def test_without_a_scheduler_several_workers_need_the_static_split():
    with Servers(1, threads=1) as servers:
        with servers.connect() as cluster:
            assert used(list(cluster.lease(50, batch_size=10))) == collections.Counter(range(50))
        with servers.connect(rank=0, world_size=2) as worker:
            with pytest.raises(wl.InvalidArgument, match='use split="static"'):
                worker.lease(100, batch_size=10)
            assert len(list(worker.lease(100, batch_size=10, split="static"))) == 5


# -- with a scheduler ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scheduled() -> Iterator[LocalCluster]:
    with LocalCluster(servers=1) as cluster:
        yield cluster


@contextlib.contextmanager
def pair(cluster: LocalCluster) -> Iterator[list[wl.Cluster]]:
    """Two workers of a new app."""
    app, workers = new_app(), [None, None]
    threads = [
        threading.Thread(target=lambda i=i: workers.__setitem__(i, cluster.connect(app=app, rank=i, world_size=2)))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    with workers[0], workers[1]:
        yield workers


def in_scheduler(cluster: LocalCluster, worker: wl.Cluster) -> dict[str, Any]:
    [one] = [lease for lease in cluster.status()["leases"] if lease["app"] == worker._attendance.at.app]
    return one


def test_a_slow_worker_is_relieved_by_the_scheduler(scheduled: LocalCluster):
    with pair(scheduled) as (slow, quick):
        lease = slow.lease(200, batch_size=5, lease_size=10, ahead_seconds=1000)
        batches = iter(lease)
        first = [next(batches), next(batches), next(batches)]
        until(lambda: len(lease._holding) > 3, "it holds its share", SECONDS)
        rest = list(quick.lease(200, batch_size=5, lease_size=10, ahead_seconds=1000))
        assert used(first + rest).keys() == set(range(200))
        until(lambda: not lease._holding.has_work, "it has heard of that", SECONDS)
        assert lease.taken_back > 3
        assert not list(batches)  # not even the rest of what it had begun
        until(lambda: lease.duplicates == 15, "and has said what it used in vain", SECONDS)
        shown = in_scheduler(scheduled, slow)
        assert (shown["epoch"], shown["samples_done"]) == (1, 200)
        assert shown["samples_done"] + shown["duplicates"] == len(np.concatenate(first + rest))


def test_the_scheduler_refuses_other_terms_and_readers(scheduled: LocalCluster):
    with pair(scheduled) as (one, other):
        next(iter(one.lease(100, batch_size=10)))
        with pytest.raises(wl.SpecMismatch, match="asked: 100 samples, 2 epochs"):
            next(iter(other.lease(100, batch_size=10, epochs=2)))
    with scheduled.connect(reader=True) as reader, pytest.raises(wl.AccessDenied, match="a reader takes no leases"):
        reader.lease(100, batch_size=10)


def test_what_was_used_before_a_cluster_is_closed_is_done(scheduled: LocalCluster):
    with pair(scheduled) as (one, other):
        batches = iter(one.lease(100, batch_size=10, lease_size=10))
        first = [next(batches) for _ in range(3)]
        one.close()
        rest = list(other.lease(100, batch_size=10, lease_size=10))
        assert used(first + rest) == collections.Counter(range(100))
        assert in_scheduler(scheduled, other)["duplicates"] == 0


def test_without_a_scheduler_and_without_leases_there_is_an_error_in_time():
    with LocalCluster(servers=1) as cluster, cluster.connect() as worker:
        lease = worker.lease(1000, batch_size=10, lease_size=10, ahead_seconds=0)
        batches = iter(lease)
        next(batches)
        cluster.scheduler.kill()
        worker._timeout = 0.5
        begun = time.monotonic()
        with pytest.raises(wl.Timeout, match="nothing is held any more"):
            list(batches)
        assert time.monotonic() - begun < 3.0
        worker._timeout = 1.0


# -- the default cluster ---------------------------------------------------------------------------------------------


def test_the_default_cluster_is_the_one_that_connect_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(open_clusters, "_open", weakref.WeakSet())  # whatever other tests have left open
    with wl.connect(threads=1) as cluster:
        cluster.worker(0, 2)
        assert default_cluster() is cluster
        with wl.connect(threads=1), pytest.raises(wl.InvalidArgument, match="2 open clusters"):
            default_cluster()
    made = default_cluster()
    try:
        assert made is not cluster
        assert default_cluster() is made
    finally:
        made.close()


def test_asking_inside_the_process_takes_little_time():
    with wl.connect(threads=1) as cluster:
        lease = cluster.lease(100_000, batch_size=10)
        begun = time.monotonic()
        count = sum(1 for _ in lease)
        each = (time.monotonic() - begun) / count
        print(f"{1e6 * each:.1f} us per batch")
        assert each < 0.001
