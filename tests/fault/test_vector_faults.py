"""A vector operation is done once, in its place among its worker's pushes, whatever happens to frames, connections and
shards, and sees what the worker pushed to the other tensor before."""

import random
import threading
import time

import numpy as np
import pytest
from helpers import SHARD, new_app
from moving import Moving
from witness import Network, network

import windlass as wl
from windlass.testing import Faults

SIZE = 4 * SHARD  # int64: 8 shards


class Model:
    """Two tensors of equal numbers, and what they must be. All of it modulo 2**64."""

    def __init__(self, cluster: wl.Cluster) -> None:
        self.y = cluster.tensor("y", SIZE, rule=wl.Sum(), dtype=np.int64)
        self.x = cluster.tensor("x", like=self.y, rule=wl.Sum())
        self.values = {"y": 0, "x": 0}
        self.ones = np.ones(SIZE, np.int64)

    def exchange(self, source: random.Random, rounds: int) -> None:
        """Pushes and operations in any order and direction: one that came twice, or not, or too early would show."""
        values, futures = self.values, []
        for _ in range(rounds):
            for _ in range(source.randrange(3)):
                name = source.choice("yx")
                futures.append(getattr(self, name).push(self.ones))
                values[name] += 1
            one, other = source.choice(["yx", "xy", "xx", "yy"])
            to, of, a = getattr(self, one), getattr(self, other), source.randrange(1, 5)
            match source.randrange(5):
                case 0:
                    to.axpy(a, of)
                    values[one] += a * values[other]
                case 1:
                    to.add(of)
                    values[one] += values[other]
                case 2:
                    to.scale(a)
                    values[one] *= a
                case 3:
                    to.fill(a)
                    values[one] = a
                case 4:
                    assert (to.dot(of) - values[one] * values[other] * SIZE) % 2**64 == 0
        for future in futures:
            future.wait()

    def check(self) -> None:
        for name, value in self.values.items():
            got = {int(v) % 2**64 for v in getattr(self, name).snapshot().weights.tolist()}
            assert got == {value % 2**64}


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize(
    "faults",
    [{"cut": 0.05, "half_close": 0.03}, {"drop": 0.05, "duplicate": 0.2, "reorder": 0.1, "corrupt": 0.05}],
    ids=lambda faults: "+".join(faults),
)
def test_a_vector_operation_is_done_once_and_in_order(kind: str, faults: dict[str, float]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    with network(kind, count=2) as net, net.connect(app=new_app(), checksums=True) as cluster:
        model = Model(cluster)
        net.spoil(Faults(**faults, seed=seed))
        model.exchange(random.Random(seed), 60)
        model.check()
        assert spoiled(net) >= 10, "invalid: too few faults were made"
        net.spoil(Faults())


def spoiled(net: Network) -> int:
    return sum(sum(proxy.counts.values()) for proxy in net.proxies)


@pytest.mark.parametrize("kind", ["tcp", "arena"])
def test_vector_operations_follow_shards_that_move(kind: str) -> None:
    """Without a scheduler nobody tells the client of a move, and one of two shards is always there first."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    with Moving(kind) as moving, moving.connect(app=new_app()) as cluster:
        model = Model(cluster)
        shards = model.y.shards

        def move() -> None:
            source = random.Random(seed)
            for _ in range(40):
                shard, to = source.randrange(shards), source.randrange(3)
                for tensor in source.sample([model.y, model.x], 2):
                    if moving.owner(tensor._core.object, shard) != to:
                        moving.move(tensor._core.object, shard, to)

        moves = threading.Thread(target=move)
        moves.start()
        source = random.Random(seed)
        try:
            while True:
                model.exchange(source, 5)
                model.check()
                if not moves.is_alive():
                    break
        finally:
            moves.join(60)
        assert moving.moves > 30


def test_shards_that_stay_apart_are_named_when_time_is_up() -> None:
    with Moving("tcp") as moving, moving.connect(app=new_app()) as cluster:
        model = Model(cluster)
        y, x = model.y, model.x
        at, shard = moving.owner(y._core.object, 3), 3
        moving.move(x._core.object, shard, (at + 1) % 3)
        there = rf"shard 3 of 'y' is on server {at}, that of 'x' on server {(at + 1) % 3}; the last of 1 to be refused"
        begun = time.monotonic()
        for call in (lambda: y.add(x, timeout=0.5), lambda: y.dot(x, timeout=0.5)):
            with pytest.raises(wl.Timeout, match=rf"of tensor 'y': not done in time; .*{there}"):
                call()
        assert time.monotonic() - begun < 2 * (0.5 + 1)
        y.fill(2)
        moving.move(x._core.object, shard, at)
        y.axpy(3, x)
        y.push(model.ones)
        assert y.dot(y) == 9 * SIZE
