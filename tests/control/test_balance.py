"""Which shards move: servers come within ten percent of the mean, by few moves, and a drained one gives everything."""

import collections
import random

import pytest

from windlass.control.balance import TOLERANCE, Item, is_even, plan

MB = 1 << 20


def items(server: int, *sizes: int) -> list[Item]:
    return [Item(size, (f"w{server}", shard)) for shard, size in enumerate(sizes)]


def after(there: dict[int, list[Item]], drained: set[int]) -> tuple[dict[int, int], int]:
    """Bytes by server, and how many moves."""
    where = {item: server for server, of in there.items() for item in of}
    steps = plan(there, drained)
    for step in steps:
        assert where[step.item] == step.source, "a step begins where its item is by then"
        assert step.source != step.target
        where[step.item] = step.target
    loads: collections.Counter[int] = collections.Counter(dict.fromkeys(there, 0))
    for item, server in where.items():
        loads[server] += item.bytes
    for server in drained:
        assert loads.pop(server) == 0
        assert server not in where.values()
    return dict(loads), len(steps)


def test_a_server_that_joins_gets_its_share():
    loads, moves = after({0: items(0, *[MB] * 60), 1: items(1, *[MB] * 60), 2: []}, set())
    assert is_even(loads)
    assert moves <= 40, "no more than what the new one is to have"


def test_what_is_even_stays_where_it_is():
    assert plan({0: items(0, MB, MB), 1: items(1, MB, MB)}) == []
    assert plan({0: items(0, *[100] * 21), 1: items(1, *[100] * 19)}) == [], "within the tolerance"


def test_large_items_go_first():
    steps = plan({0: items(0, 10 * MB, 40 * MB, *[MB] * 30), 1: []})
    assert steps[0].item.bytes == 40 * MB
    assert len(steps) == 1


def test_an_item_that_is_too_large_to_help_stays():
    assert plan({0: items(0, 64 * MB), 1: [], 2: []}) == []
    steps = plan({0: items(0, 64 * MB, MB), 1: []})
    assert [step.item.bytes for step in steps] == [MB]


def test_empty_tables_are_divided_when_a_server_is_drained():
    _, moves = after({0: items(0, *[0] * 85), 1: items(1, *[0] * 85), 2: items(2, *[0] * 86)}, {2})
    assert moves == 86
    targets = collections.Counter(step.target for step in plan({0: items(0), 1: items(1), 2: items(2, *[0] * 86)}, {2}))
    assert targets == {0: 43, 1: 43}


def test_the_last_server_cannot_give():
    assert plan({0: items(0, MB)}, {0}) == []
    assert plan({}) == []


@pytest.mark.parametrize("seed", range(60))
def test_whatever_there_is_comes_within_the_tolerance_or_cannot(seed: int):
    source = random.Random(seed)
    servers = range(source.randrange(2, 9))
    sizes = [source.choice([0, 1000, 64 << 10, MB, source.randrange(1, 4 * MB)]) for _ in range(source.randrange(300))]
    there: dict[int, list[Item]] = {server: [] for server in servers}
    for shard, size in enumerate(sizes):
        there[source.choice(list(servers)[: source.randrange(1, len(servers) + 1)])].append(Item(size, ("w", shard)))
    drained = set(source.sample(servers, source.randrange(len(servers) - 1)))
    loads, moves = after(there, drained)
    left = [server for server in servers if server not in drained]
    mean = sum(sizes) / len(left)
    largest = max(sizes, default=0)
    assert all(abs(load - mean) <= max(TOLERANCE * mean, largest) for load in loads.values())
    if largest <= TOLERANCE * mean:
        assert is_even(loads)
    given = sum(len(there[server]) for server in drained)
    most = sum(len(there[server]) for server in servers)
    assert moves <= given + most
    assert plan(there, drained) == plan(there, drained)
