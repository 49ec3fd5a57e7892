"""A gradient that is pushed in pieces: one contribution of its worker, and of what was pushed alone."""

import numpy as np
import pytest
from crew import together
from helpers import SHARD, numbers

import windlass as wl

N = 5 * SHARD + 100  # six shards, the last of them short
BUCKETS = [(0, 2), (2, 3), (3, 6)]  # of whole shards
RULES = [wl.SGD(lr=0.1, momentum=0.9, weight_decay=0.01), wl.Adam(lr=0.01), wl.AdamW(lr=0.01, weight_decay=0.1)]


def gradient(rank: int, clock: int) -> np.ndarray:
    return numbers(N, seed=100 * rank + clock)


def bounds(tensor: wl.Tensor, bucket: tuple[int, int]) -> slice:
    each = tensor.shard_elements
    return slice(bucket[0] * each, min(bucket[1] * each, len(tensor)))


def train(cluster: wl.Cluster, name: str, rule: wl.Rule, weights: tuple[float, ...], pieces: bool) -> str:
    """Five iterations of every worker. Rank 1 never has anything for the second bucket."""

    def work(worker: wl.Cluster) -> None:
        w = worker.tensor(name, N, rule=rule, init=wl.Normal(std=0.1), sync="bsp")
        weight = weights[worker.rank]
        out = np.empty(N, np.float32)
        for clock in range(5):
            g = gradient(worker.rank, clock)
            if worker.rank == 1:
                g[bounds(w, BUCKETS[1])] = 0
            if not pieces:
                w.push_pull(g, out=out, weight=weight)
                continue
            mine = [b for b in BUCKETS if worker.rank != 1 or b != BUCKETS[1]]
            futures = []
            for bucket in mine if (worker.rank + clock) % 2 else mine[::-1]:
                part = bounds(w, bucket)
                futures.append(w[part].push_pull_async(g[part], out=out[part], weight=weight))
            if worker.rank == 1 and clock % 2:  # else the next push closes what is left
                worker.tick()
            for future in futures:
                future.wait()
        worker.tick()
        w.pull(out=out)

    together(cluster, len(weights), work)
    tensor = cluster.tensor(name, N, rule=rule, init=wl.Normal(std=0.1), sync="bsp")
    return f"{tensor.fingerprint()} {tensor.pull(timeout=30).tobytes()!r}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (2.5, 1, 1)], ids=str)
def test_buckets_of_whole_shards_are_one_contribution(
    cluster: wl.Cluster, rule: wl.Rule, weights: tuple[float, ...]
) -> None:
    """The same bits as whole pushes, in any order, with weights, and where a worker leaves a bucket out."""
    # The fingerprint has the name in it: one name, the second time in a cluster of its own app.
    with wl.connect(threads=2) as apart:
        whole = train(apart, "w", rule, weights, pieces=False)
    assert train(cluster, "w", rule, weights, pieces=True) == whole


def test_pushes_to_one_shard_add_up_and_to_others_they_do_not(cluster: wl.Cluster) -> None:
    """Rank 0 pushes shard 0 twice and shard 1 once: it weighs 2. Rank 1 weighs 1. So shards divide by 3."""

    def work(worker: wl.Cluster) -> np.ndarray:
        w = worker.tensor("w", 2 * SHARD, rule=wl.SGD(lr=1.0), sync="bsp")
        ones = np.ones(SHARD, np.float32)
        if worker.rank == 0:
            w[:SHARD].push(3 * ones)
            w[:SHARD].push(3 * ones)
            w[SHARD:].push(6 * ones)
        else:
            w[:SHARD].push(9 * ones)
        worker.tick()
        return np.array(w.pull())

    for got in together(cluster, 2, work):
        assert set(got[:SHARD]) == {-5.0}
        assert set(got[SHARD:]) == {-2.0}


def test_pushes_of_a_step_in_pieces_are_one_contribution(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> np.ndarray:
        w = worker.tensor("w", 2 * SHARD, rule=wl.SGD(lr=1.0), sync="bsp")
        ones = np.full(SHARD, worker.rank + 1, np.float32)
        out = np.empty(2 * SHARD, np.float32)
        for _ in range(3):
            with worker.step() as s:
                s.push(w[:SHARD], ones)
                s.push(w[SHARD:], ones)
                s.pull(w, out=out)
        return np.array(w.pull())

    for got in together(cluster, 2, work):
        assert set(got) == {-4.5}


def test_a_bucket_that_was_taken_back_leaves_the_others_their_weight(cluster: wl.Cluster) -> None:
    """Rank 0 cancels one of its buckets if it still can; the mean there is of both workers either way."""
    size = 64 * SHARD

    def work(worker: wl.Cluster) -> tuple[bool, np.ndarray]:
        w = worker.tensor("w", size, rule=wl.SGD(lr=1.0), sync="bsp")
        ones = np.ones(size // 2, np.float32)
        first = w[: size // 2].push_pull_async(2 * ones)
        second = w[size // 2 :].push_pull_async(2 * ones)
        taken = worker.rank == 0 and second.cancel()
        first.wait()
        if not taken:
            second.wait()
        return taken, np.array(w.pull())

    (taken, got), (_, also) = together(cluster, 2, work)
    np.testing.assert_array_equal(got, also)
    assert set(got[: size // 2]) == {-2.0}
    assert set(got[size // 2 :]) == ({-1.0} if taken else {-2.0})


def test_rows_of_a_table_in_two_pushes_are_one_contribution_where_no_shard_has_both(cluster: wl.Cluster) -> None:
    keys = np.arange(2000)

    def work(worker: wl.Cluster) -> np.ndarray:
        table = worker.table("t", 2, rule=wl.SGD(lr=1.0), sync="bsp")
        one = np.full((1, 2), 3, np.float32)
        table.push(keys[:1], one)
        table.push(keys[1:2], one)  # of another shard
        worker.tick()
        return np.array(table.pull(keys[:2]))

    for got in together(cluster, 2, work):
        assert set(got.ravel()) == {-3.0}


@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("rule", [*RULES, wl.Adagrad(lr=0.1, weight_decay=0.1)], ids=lambda rule: type(rule).__name__)
def test_a_push_of_part_of_a_shard_touches_what_was_pushed_and_nothing_else(
    cluster: wl.Cluster, rule: wl.Rule, sync: str
) -> None:
    """Rank 0 pushes rows 0 to 20, rank 1 rows 10 to 30 of 50. Then everybody pushes all, which shows the state."""
    n, rank0, rank1 = 50, slice(0, 20), slice(10, 30)
    ones = np.ones(n, np.float32)
    alone = cluster.tensor("alone", n, rule=rule, init=wl.Constant(1))
    untouched = 1 - np.array(alone.push_pull(ones))  # the first step of an element that had none before

    def work(worker: wl.Cluster) -> list[np.ndarray]:
        w = worker.tensor("w", n, rule=rule, init=wl.Constant(1), sync=sync)
        part = rank0 if worker.rank == 0 else rank1
        w[part].push(ones[part])
        worker.tick()
        if sync == "asp":
            return []
        return [np.array(w.pull())]

    seen = together(cluster, 2, work)
    w = cluster.tensor("w", n, rule=rule, init=wl.Constant(1), sync=sync)
    got = seen[0][0] if sync == "bsp" else np.array(w.pull())
    assert (got[30:] == 1).all()
    assert (got[:30] < 1).all()
    assert len(set(got[:10])) == len(set(got[10:20])) == len(set(got[20:30])) == 1
    if isinstance(rule, wl.SGD) and sync == "bsp":  # half a gradient of one, a whole one of two
        np.testing.assert_allclose(got[:10], 1 - rule.lr * (0.5 + rule.weight_decay), rtol=1e-6)
        np.testing.assert_allclose(got[10:20], 1 - rule.lr * (1 + rule.weight_decay), rtol=1e-6)
    if sync == "asp" and not isinstance(rule, wl.Adam):  # Adam's count is of the shard
        np.testing.assert_array_equal(1 - w.push_pull(ones)[30:], untouched[30:])
