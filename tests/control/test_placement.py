"""Where shards go."""

import itertools
import random

import pytest
from specs import table_spec, tensor_spec

from windlass.control.placement import place, runs_of
from windlass.control.scheduler import read_spec

# The MNIST network of two convolutions, 1.2 M parameters: (name, shape).
MNIST_CNN = [
    ("conv1.weight", (32, 1, 3, 3)),
    ("conv1.bias", (32,)),
    ("conv2.weight", (64, 32, 3, 3)),
    ("conv2.bias", (64,)),
    ("fc1.weight", (128, 9216)),
    ("fc1.bias", (128,)),
    ("fc2.weight", (10, 128)),
    ("fc2.bias", (10,)),
]


def spread(objects: list[list[int]], servers: int) -> float:
    """The largest share over the mean."""
    loads = dict.fromkeys(range(servers), 0)
    for sizes in objects:
        for owner, size in zip(place(sizes, loads), sizes, strict=True):
            loads[owner] += size
    return max(loads.values()) / (sum(loads.values()) / servers)


def cut(shape: tuple[int, ...]) -> list[int]:
    return read_spec(tensor_spec("app/w", shape, "sgd", dtype=0)).shard_bytes


@pytest.mark.parametrize("servers", [2, 3, 4])
def test_the_mnist_network_is_spread_evenly(servers: int):
    sizes = [cut(shape) for _, shape in MNIST_CNN]
    assert sum(map(sum, sizes)) == 1_199_882 * 4
    for order in itertools.islice(itertools.permutations(sizes), 0, 40_320, 2_017):  # whatever comes first
        assert spread(list(order), servers) <= 1.1


def test_many_objects_of_any_size_are_spread_evenly():
    rng = random.Random(1)
    for servers in (2, 5, 16):
        objects = [[rng.randrange(1, 1 << 20)] * rng.choice([1, 1, 3, 64]) for _ in range(200)]
        assert spread(objects, servers) <= 1.1


def test_what_a_server_lacks_it_gets_first():
    assert place([1] * 8, {0: 6, 1: 2, 2: 0}) == [2, 2, 2, 2, 2, 1, 1, 1]
    assert place([5], {0: 1, 1: 0}) == [1]
    assert place([1] * 4, {7: 100, 3: 0}) == [3, 3, 3, 3]


def test_shards_that_take_nothing_yet_are_divided_evenly_in_runs():
    owners = place([0] * 256, {0: 0, 1: 0, 2: 0})
    assert [owners.count(server) for server in range(3)] == [85, 86, 85]
    assert len(runs_of(owners, [1] * 256)) == 3


def test_every_shard_has_an_owner_and_every_server_one_run_at_most():
    rng = random.Random(2)
    for _ in range(300):
        servers = rng.randrange(1, 9)
        sizes = [rng.randrange(0, 3) * rng.randrange(1, 1000) for _ in range(rng.randrange(1, 100))]
        loads = {server: rng.randrange(0, 10_000) for server in range(servers)}
        owners = place(sizes, loads)
        assert len(owners) == len(sizes)
        assert len(runs_of(owners, [1] * len(owners))) == len(set(owners))


def test_there_must_be_a_server():
    with pytest.raises(ValueError, match="there is no server"):
        place([1], {})


def test_a_spec_says_what_its_shards_take():
    spec = read_spec(tensor_spec("app/w", (1000, 100), "sgd", dtype=0))
    assert (spec.name, spec.is_table, sum(spec.shard_bytes)) == ("app/w", False, 400_000)
    with_state = read_spec(tensor_spec("app/w", (1000, 100), "row_adagrad", dtype=0))
    assert sum(with_state.shard_bytes) == 400_000 + 1000 * 4
    table = read_spec(table_spec("app/t", 64))
    assert (table.is_table, len(table.shard_bytes), sum(table.shard_bytes)) == (True, 256, 0)
