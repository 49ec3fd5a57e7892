"""Deletes by a condition are made once, and queries are answered, whatever happens to frames and connections."""

import random

import numpy as np
import pytest
from helpers import new_app
from witness import network

import windlass as wl
from windlass.testing import Faults

KEYS = np.arange(3000, dtype=np.uint64)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize(
    "faults",
    [{"cut": 0.05, "half_close": 0.03}, {"drop": 0.05, "duplicate": 0.2, "reorder": 0.1, "corrupt": 0.05}],
    ids=lambda faults: "+".join(faults),
)
def test_a_delete_by_a_condition_is_made_once(kind: str, faults: dict[str, float]) -> None:
    """A delete that came twice would take out rows that were made again since, or answer with another number."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = np.random.default_rng(seed)
    with network(kind, count=2) as net, net.connect(app=new_app(), checksums=True) as cluster:
        table = cluster.table("t", 4, rule=wl.Sum())
        net.spoil(Faults(**faults, seed=seed))
        rows: dict[int, int] = {}
        for _ in range(12):
            some = source.choice(KEYS, 1000, replace=False)
            futures = [table.push(some, np.ones((1000, 4), np.float32)) for _ in range(2)]
            for key in some.tolist():
                rows[key] = rows.get(key, 0) + 2
            listed = source.choice(KEYS, 1500, replace=False)
            gone = [key for key in listed.tolist() if rows.get(key, 0) >= 4]
            assert table.delete(listed, where=wl.row[0] >= 4) == len(gone)
            for key in gone:
                del rows[key]
            assert table.count() == len(rows)
            assert table.sum() == 4 * sum(rows.values())
            for future in futures:
                future.wait()
        spoiled = sum(sum(proxy.counts.values()) for proxy in net.proxies)
        net.spoil(Faults())
        assert spoiled >= 10, "invalid: too few faults were made"
        assert {int(k): int(w[0]) for c in table.export() for k, w in zip(*c, strict=True)} == rows
