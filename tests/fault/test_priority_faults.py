"""Requests of different priorities are applied once and in the order of each shard, whatever connections do."""

import random

import numpy as np
import pytest
from helpers import SHARD, new_app
from witness import network

import windlass as wl
from windlass.testing import Faults

SIZE = 8 * SHARD


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("faults", [{"cut": 0.05}, {"drop": 0.05, "duplicate": 0.1}], ids=lambda f: "+".join(f))
def test_a_retry_applies_every_push_once_and_in_order(kind: str, faults: dict[str, float]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    with network(kind, count=1) as net, net.connect(app=new_app()) as cluster:
        sums = [cluster.tensor(f"sum{i}", SIZE, rule=wl.Sum(), dtype=np.int64) for i in range(3)]
        last = cluster.tensor("last", SIZE, rule=wl.Assign(), dtype=np.int64)
        expected, final, futures = np.zeros((3, SIZE), np.int64), np.zeros(SIZE, np.int64), []
        net.spoil(Faults(**faults, seed=seed))
        for step in range(1, 80):
            begin = source.randrange(SIZE)
            part = slice(begin, source.randrange(begin, SIZE) + 1)
            values = np.full(part.stop - part.start, step)
            which, priority = source.randrange(4), source.randrange(256)
            futures.append((sums[which] if which < 3 else last)[part].push(values, priority=priority))
            if which < 3:
                expected[which, part] += step
            else:
                final[part] = step
        np.testing.assert_array_equal(last.pull_async(priority=255).wait(), final)
        for i, tensor in enumerate(sums):
            np.testing.assert_array_equal(tensor.pull(), expected[i])
        for future in futures:
            future.wait()
        assert sum(sum(proxy.counts.values()) for proxy in net.proxies) >= 3, "invalid: too few faults were made"
        net.spoil(Faults())
