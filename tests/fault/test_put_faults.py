"""A put is applied once, in its place among its worker's pushes, whatever happens to frames, connections and shards."""

import random
import threading

import numpy as np
import pytest
from helpers import SHARD, new_app
from moving import Moving
from witness import Network, network

import windlass as wl
from windlass.testing import Faults

SIZE = 4 * SHARD
KEYS = np.arange(3000)


def exchange(tensor: wl.Tensor, source: random.Random, rounds: int) -> int:
    """Pushes and puts in any order. What every element is at the end: a put that came twice would take pushes back."""
    futures, value = [], 0
    ones = np.ones(SIZE, np.int64)
    for i in range(rounds):
        for _ in range(source.randrange(4)):
            futures.append(tensor.push(ones))
            value += 1
        if source.random() < 0.5:
            value = 1000 * (i + 1)
            tensor.put(np.full(SIZE, value))
    for future in futures:
        future.wait()
    return value


def exchange_rows(table: wl.Table, source: random.Random, rounds: int) -> int:
    """The same with the rows of a table."""
    futures, value = [], 0
    ones = np.ones((len(KEYS), 4), np.float32)
    for i in range(rounds):
        for _ in range(source.randrange(4)):
            futures.append(table.push(KEYS, ones))
            value += 1
        if source.random() < 0.5:
            value = 1000 * (i + 1)
            table.put(KEYS, value * ones)
    for future in futures:
        future.wait()
    return value


FAULTS = pytest.mark.parametrize(
    "faults",
    [{"cut": 0.05, "half_close": 0.03}, {"drop": 0.05, "duplicate": 0.2, "reorder": 0.1, "corrupt": 0.05}],
    ids=lambda faults: "+".join(faults),
)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@FAULTS
def test_rows_are_put_once_and_in_order(kind: str, faults: dict[str, float]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    with network(kind, count=2) as net, net.connect(app=new_app(), checksums=True) as cluster:
        table = cluster.table("t", 4, rule=wl.Sum())
        net.spoil(Faults(**faults, seed=seed))
        expected = exchange_rows(table, random.Random(seed), 40)
        assert set(table.pull(KEYS).ravel().tolist()) == {expected}
        chunks = list(table.export(chunk_rows=1000, state=True))
        assert spoiled(net) >= 10, "invalid: too few faults were made"
        net.spoil(Faults())
        assert sorted(key for chunk in chunks for key in chunk.keys.tolist()) == KEYS.tolist()
        assert {number for chunk in chunks for number in chunk.weights.ravel().tolist()} == {expected}


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@FAULTS
def test_a_put_is_applied_once_and_in_order(kind: str, faults: dict[str, float]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    with network(kind, count=2) as net, net.connect(app=new_app(), checksums=True) as cluster:
        tensor = cluster.tensor("w", SIZE, rule=wl.Sum(), dtype=np.int64)
        net.spoil(Faults(**faults, seed=seed))
        expected = exchange(tensor, random.Random(seed), 40)
        got = tensor.snapshot().weights
        assert spoiled(net) >= 10, "invalid: too few faults were made"
        net.spoil(Faults())
        assert set(got.tolist()) == {expected}


def spoiled(net: Network) -> int:
    return sum(sum(proxy.counts.values()) for proxy in net.proxies)


def test_puts_and_snapshots_follow_shards_that_move() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    with Moving("tcp") as moving, moving.connect(app=new_app()) as cluster:
        tensor = cluster.tensor("w", SIZE, rule=wl.Sum(), dtype=np.int64)
        shards = [(tensor._core.object, i) for i in range(tensor.shards)]
        moves = threading.Thread(target=lambda: moving.shuffle(shards, random.Random(seed), 60))
        moves.start()
        try:
            while True:
                expected = exchange(tensor, source, 5)
                assert set(tensor.snapshot().weights.tolist()) == {expected}
                assert set(tensor.pull().tolist()) == {expected}
                tensor.put(np.zeros(SIZE, np.int64))
                if not moves.is_alive():
                    break
        finally:
            moves.join(60)
        assert moving.moves == 60


def test_rows_that_are_put_follow_shards_that_move() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    with Moving("tcp") as moving, moving.connect(app=new_app()) as cluster:
        table = cluster.table("t", 4, rule=wl.Adam())
        shards = [(table._core.object, i) for i in range(0, 256, 8)]
        moves = threading.Thread(target=lambda: moving.shuffle(shards, random.Random(seed), 60))
        moves.start()
        try:
            while True:
                rows = np.full((len(KEYS), 4), source.random(), np.float32)
                table.put(KEYS, rows, {"exp_avg": rows, "exp_avg_sq": 2 * rows}, 7)
                np.testing.assert_array_equal(table.pull(KEYS), rows)
                chunks = list(table.export(chunk_rows=700, state=True))
                assert sum(len(chunk.keys) for chunk in chunks) == len(KEYS)
                for chunk in chunks:
                    assert set(chunk.state["exp_avg"].ravel().tolist()) == {float(rows[0, 0])}
                    assert set(chunk.updates.tolist()) == {7}
                if not moves.is_alive():
                    break
        finally:
            moves.join(60)
        assert moving.moves == 60
