"""cluster.all_reduce(): one result of what all workers give, the same bits for all."""

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from crew import at_once, together
from helpers import PATIENCE_S

import windlass as wl
from windlass._client import scheduler_client
from windlass.control.messages import REDUCE_BYTES_MAX
from windlass.testing import LocalCluster, Servers
from windlass.testing.cluster import Process, until

embedded = pytest.mark.embedded("with servers=[...] nobody knows the workers")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler on a busy machine gets the time to say who is missing."""
    monkeypatch.setattr(scheduler_client, "_LAST_WORD_SECONDS", 30.0)


# -- inside the process ----------------------------------------------------------------------------------------------


@embedded
@pytest.mark.parametrize(("op", "expected"), [("sum", 6), ("mean", 2), ("max", 3), ("min", 1)])
def test_each_operation(cluster: wl.Cluster, op: Any, expected: float) -> None:
    def work(worker: wl.Cluster) -> list[float]:
        return worker.all_reduce(np.full(2, worker.rank + 1, np.float32), op).tolist()

    assert together(cluster, 3, work) == [[expected] * 2] * 3


@embedded
def test_all_have_the_same_bits_in_every_round(cluster: wl.Cluster) -> None:
    seed, rounds = random.randrange(2**32), 30
    print(f"seed {seed}")

    def work(worker: wl.Cluster) -> list[bytes]:
        rng, found = np.random.default_rng(seed + worker.rank), []
        for _ in range(rounds):
            time.sleep(rng.choice([0, 0, 0.002]))
            found.append(worker.all_reduce(rng.normal(size=100)).tobytes())
        return found

    first, *others = together(cluster, 4, work)
    assert len(set(first)) == rounds
    assert others == [first] * 3
    parts = [np.random.default_rng(seed + rank) for rank in range(4)]
    for rng in parts:
        rng.choice([0, 0, 0.002])
    total = np.zeros(100)
    for rng in parts:
        total += rng.normal(size=100)
    np.testing.assert_allclose(np.frombuffer(first[0]), total, rtol=1e-14, atol=1e-14)


@embedded
@pytest.mark.parametrize(
    "x",
    [
        2.5,
        7,
        np.float32(2.5),
        np.float64(2.5),
        np.int64(7),
        np.ones((2, 3), np.float32),
        np.ones((3, 2), np.float32).T,
        np.ones(3)[::2],
        np.array(3.0),
        np.ones(0),
        torch.ones(2, 3),
        torch.ones(2, dtype=torch.float64),
        torch.tensor(7),
        torch.ones(3, requires_grad=True),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')}{list(getattr(x, 'shape', []))}",
)
def test_the_result_has_the_form_of_what_was_given(cluster: wl.Cluster, x: Any) -> None:
    for got in together(cluster, 2, lambda worker: worker.all_reduce(x)):
        assert type(got) is type(x)
        assert getattr(got, "dtype", None) == getattr(x, "dtype", None)
        assert np.shape(got) == np.shape(x)
        assert np.array_equal(np.asarray(got), 2 * np.asarray(x.detach() if isinstance(x, torch.Tensor) else x))


@embedded
def test_a_list_becomes_an_array_that_the_caller_may_write(cluster: wl.Cluster) -> None:
    for right, total in together(cluster, 2, lambda worker: worker.all_reduce([3, 4])):
        assert (right, total) == (6, 8)
    (got, _) = together(cluster, 2, lambda worker: worker.all_reduce([0.5]))
    got += 1
    assert got.tolist() == [2.0]


@embedded
def test_what_was_given_is_not_written_and_may_be_changed_at_once(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> tuple[list[float], list[float]]:
        mine = np.full(3, float(worker.rank))
        total = worker.all_reduce(mine)
        total += 100
        return mine.tolist(), worker.all_reduce(mine).tolist()

    assert together(cluster, 2, work) == [([0, 0, 0], [1, 1, 1]), ([1, 1, 1], [1, 1, 1])]


@embedded
def test_who_has_left_is_not_in_the_result_and_the_count_says_so(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> list[tuple[float, int]]:
        return [tuple(worker.all_reduce_counted(1.0)) for _ in range(1 + worker.rank)]

    first, second, third = together(cluster, 3, work)
    assert first == [(3.0, 3)]
    assert second == [(3.0, 3), (2.0, 2)]
    assert third == [(3.0, 3), (2.0, 2), (1.0, 1)]


@embedded
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (
            (np.ones(2), np.ones(3)),
            wl.ShapeMismatch,
            r"rank 0 gave float64 of shape \(2,\).*rank 1 float64 of shape \(3,\)",
        ),
        ((np.ones(2), np.ones(2, np.float32)), wl.InvalidArgument, "rank 0 gave float64 .* rank 1 float32"),
        ((1, 1.0), wl.InvalidArgument, "rank 0 gave int64 .* rank 1 float64"),
    ],
)
def test_ranks_that_differ_get_an_error_that_names_both_and_can_go_on(
    cluster: wl.Cluster, given: tuple[Any, Any], error: Any, said: str
) -> None:
    def work(worker: wl.Cluster) -> float:
        with pytest.raises(error, match="all_reduce: " + said):
            worker.all_reduce(given[worker.rank])
        return worker.all_reduce(1.0)

    assert together(cluster, 2, work) == [2.0, 2.0]


@embedded
def test_operations_that_differ_and_a_plain_barrier_are_errors_for_both(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> float:
        with pytest.raises(wl.InvalidArgument, match=r"rank 0 gave .*op='sum', rank 1 .*op='max'"):
            worker.all_reduce(1.0, ("sum", "max")[worker.rank])  # type: ignore[arg-type]
        with pytest.raises(wl.InvalidArgument, match=r"rank 0 gave nothing \(barrier\), rank 1 int64 of shape \(\)"):
            worker.all_reduce(1) if worker.rank else worker.barrier()
        return worker.all_reduce(1.0)

    assert together(cluster, 2, work) == [2.0, 2.0]


@embedded
def test_after_a_timeout_only_the_same_call_goes_on(cluster: wl.Cluster) -> None:
    first, second = (cluster.worker(rank, 2) for rank in range(2))
    with pytest.raises(wl.Timeout, match=r"all_reduce 1: 1 of 2 workers have arrived; missing: rank 1$"):
        first.all_reduce(1.0, timeout=0.1)
    for other in (lambda: first.all_reduce(2.0), lambda: first.all_reduce(1.0, "max"), first.barrier):
        with pytest.raises(wl.InvalidArgument, match="has not ended, and what it gave there may count"):
            other()
    assert second.all_reduce(10.0) == 11.0  # the first has given its number
    assert first.all_reduce(1.0) == 11.0  # and is told so
    assert at_once(2, lambda rank: (first, second)[rank].all_reduce(1)) == [2, 2]
    first.close()
    second.close()


@embedded
def test_it_settles_nothing_and_closes_no_iteration(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> tuple[bool, int]:
        pushed = worker.tensor("w", 4, rule=wl.Sum(), sync="bsp").push(np.ones(4))
        worker.all_reduce(1)
        early = pushed.done(), worker.clock
        worker.all_reduce(1)
        return early

    assert together(cluster, 2, work) == [(False, 0)] * 2


def test_alone_it_is_what_was_given(cluster: wl.Cluster) -> None:
    assert cluster.all_reduce([1.5, 2]).tolist() == [1.5, 2]
    assert cluster.all_reduce(np.ones(2, np.int64), "mean").tolist() == [1.0, 1.0]
    assert cluster.all_reduce_counted(3) == (3, 1)


@pytest.mark.parametrize(
    ("x", "op", "said"),
    [
        (1.0, "product", "op must be one of sum, mean, max, min, not 'product'"),
        (np.ones(2, np.int32), "sum", "expected dtype float32, float64 or int64, saw int32"),
        (np.ones(2, bool), "sum", "saw bool"),
        (True, "sum", "saw bool"),
        ("text", "sum", "expected dtype float32, float64 or int64, saw"),
        (None, "sum", "expected dtype float32, float64 or int64, saw object"),
        (torch.ones(2, dtype=torch.bfloat16), "sum", "saw bfloat16"),
        ([[1], [1, 2]], "sum", "all_reduce: "),
        (2**63, "sum", "saw uint64"),
        (np.ones(REDUCE_BYTES_MAX // 8 + 1), "sum", "of 1048584 bytes .* at most 1048576 .* rule Sum"),
    ],
)
def test_what_cannot_be_reduced_is_refused_before_anybody_waits(
    cluster: wl.Cluster, x: Any, op: Any, said: str
) -> None:
    with pytest.raises(wl.InvalidArgument, match=said):
        cluster.worker(0, 2).all_reduce(x, op)


@embedded
def test_an_array_of_the_largest_size_is_taken(cluster: wl.Cluster) -> None:
    x = np.arange(REDUCE_BYTES_MAX // 8)
    assert (together(cluster, 2, lambda worker: worker.all_reduce(x))[1] == 2 * x).all()


def test_servers_without_a_scheduler_know_no_workers() -> None:
    refused = pytest.raises(wl.InvalidArgument, match=r"all_reduce: .* no scheduler that could count 2 workers")
    with Servers(1) as servers, servers.connect(rank=0, world_size=2) as cluster, refused:
        cluster.all_reduce(1.0)


# -- with a scheduler ------------------------------------------------------------------------------------------------

WORKER = """
import hashlib, os, time
import numpy as np, windlass as wl
with wl.connect() as c:
    for i in range({rounds}):
        print("at", i, flush=True)
        total, workers = c.all_reduce_counted(np.full(1000, (i + 1) * 0.1 ** c.rank))
        print("got", i, workers, hashlib.sha256(total.tobytes()).hexdigest()[:16], total[0], flush=True)
    {then}
print("end", flush=True)
"""


def start(cluster: LocalCluster, rank: int, world: int, rounds: int, then: str = "pass", **more: str) -> Process:
    return cluster.worker(WORKER.format(rounds=rounds, then=then), rank, world, **more)


def results(worker: Process) -> list[tuple[str, ...]]:
    """What it got in each round: how many workers, a checksum, and the first number."""
    lines = [line.split() for line in worker.output().splitlines()]
    return [tuple(line[line.index("got") + 2 :]) for line in lines if "got" in line]


def has_said(worker: Process, what: str) -> None:
    until(lambda: what in worker.output() or worker.process.poll() is not None, what, PATIENCE_S)
    assert what in worker.output(), worker.output()


def test_processes_get_the_same_bits() -> None:
    with LocalCluster(servers=1) as cluster:
        workers = [start(cluster, rank, 3, 20) for rank in range(3)]
        for worker in workers:
            assert worker.wait(PATIENCE_S) == 0, worker.output()
        first, *others = map(results, workers)
        assert len(first) == 20
        assert others == [first] * 2
        assert float(first[3][2]) == pytest.approx(4 * 1.11, rel=1e-12)


def test_a_worker_that_is_killed_in_the_round_is_not_in_the_sum_and_the_count_says_so() -> None:
    with LocalCluster(servers=1, failure_timeout=2.0) as cluster:
        workers = [start(cluster, rank, 3, 4) for rank in range(2)]
        victim = start(cluster, 2, 3, 2, "time.sleep(1000)")
        has_said(victim, "got 1")
        for worker in workers:
            has_said(worker, "at 2")
        assert "got 2" not in workers[0].output()
        victim.kill()
        for worker in workers:
            assert worker.wait(PATIENCE_S) == 0, worker.output()
        first, second = map(results, workers)
        assert first == second
        assert [workers for workers, *_ in first] == ["3", "3", "2", "2"]
        assert float(first[2][2]) == pytest.approx(3 * 1.1, rel=1e-12)


def test_a_worker_that_is_killed_where_it_waits_is_not_in_the_sum_either() -> None:
    with LocalCluster(servers=1, failure_timeout=2.0) as cluster:
        victim = start(cluster, 2, 3, 2)
        slow = start(cluster, 1, 3, 1)
        with cluster.connect(rank=0, world_size=3) as worker:
            assert worker.all_reduce_counted(np.full(1000, 1.0)).workers == 3
            assert slow.wait(PATIENCE_S) == 0, slow.output()
            has_said(victim, "at 1")
            until(lambda: _stands(worker), "the victim stands at the second", PATIENCE_S)
            victim.kill()
            until(lambda: len(cluster.members("worker")) == 1, "its death is known", PATIENCE_S)
            total, workers = worker.all_reduce_counted(np.full(1000, 5.0))
            assert (total[0], workers) == (5.0, 1)


def _stands(worker: wl.Cluster) -> bool:
    """Whether nobody but this worker is missing at its barrier."""
    try:
        worker._attendance.member.ask(  # type: ignore[union-attr]
            lambda n: scheduler_client.m.Arrive(n, worker._attendance._barrier - 1, False),  # type: ignore[union-attr]
            "a repeat of the last arrival",
            PATIENCE_S,
        )
    except wl.Timeout:
        return False
    return True


def test_the_replacement_of_a_killed_worker_completes_the_sum() -> None:
    with LocalCluster(servers=1, failure_timeout=2.0) as cluster:
        wait = {"WINDLASS_ON_WORKER_LOSS": "wait"}
        first = start(cluster, 0, 2, 4, **wait)
        victim = start(cluster, 1, 2, 2, "time.sleep(1000)", **wait)
        has_said(first, "at 2")
        has_said(victim, "got 1")
        victim.kill()
        until(lambda: len(cluster.members("worker")) == 1, "its death is known", PATIENCE_S)
        time.sleep(0.3)
        assert "got 2" not in first.output()
        fresh = start(cluster, 1, 2, 2, **wait)  # what is left: the rounds 2 and 3, where it gives its own numbers
        for worker in (first, fresh):
            assert worker.wait(PATIENCE_S) == 0, worker.output()
        assert results(first)[2:] == results(fresh)
        assert [workers for workers, *_ in results(first)] == ["2"] * 4


def test_a_connection_that_breaks_changes_nothing() -> None:
    with LocalCluster(servers=1) as cluster:
        first, second = at_once(2, lambda rank: cluster.connect(rank=rank, world_size=2))
        for i in range(3):

            def work(rank: int, i: int = i) -> float:
                if rank:
                    time.sleep(0.2)
                    first._attendance.member._ws.close()
                    return second.all_reduce(10.0 + i)
                return first.all_reduce(1.0)

            assert at_once(2, work) == [11.0 + i] * 2
        first.close()
        second.close()


def test_of_a_scheduler_errors_timeouts_and_bounds_are_told_in_its_words() -> None:
    with LocalCluster(servers=1) as cluster:
        first, second = at_once(2, lambda rank: cluster.connect(rank=rank, world_size=2, app="x"))
        with pytest.raises(wl.Timeout, match=r"all_reduce 1 of app 'x': 1 of 2 workers have arrived; missing: rank 1$"):
            first.all_reduce(1.0, timeout=0.1)
        with pytest.raises(wl.InvalidArgument, match="call that again with the same numbers"):
            first.all_reduce(2.0)
        with pytest.raises(
            wl.ShapeMismatch, match=r"rank 0 gave float64 of shape \(\).*rank 1 float64 of shape \(1,\)"
        ):
            second.all_reduce([1.0])
        with pytest.raises(wl.ShapeMismatch, match="rank 0 gave"):
            first.all_reduce(1.0)
        assert at_once(2, lambda rank: (first, second)[rank].all_reduce(3)) == [6, 6]
        first.close()
        second.close()


def test_a_reader_takes_part_in_nothing() -> None:
    refused = pytest.raises(wl.AccessDenied, match="all_reduce: a reader is not waited for")
    with LocalCluster(servers=1) as cluster, cluster.connect(reader=True) as reader, refused:
        reader.all_reduce(1.0)
