"""Functions of the user's that read: servers call them, and results are merged."""

import time
from typing import Any

import numpy as np
import own_rules
import pytest
from helpers import HASTY_SECONDS

import windlass as wl


@pytest.fixture
def cluster(own: wl.Cluster) -> wl.Cluster:
    return own


def test_a_function_sees_every_number_once(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", (5000, 30), rule=wl.Sum(), init=wl.Normal())
    all_of_it = w.pull()
    assert w.call(own_rules.above) == (all_of_it > 0).sum()
    assert w.call(own_rules.above, limit=1.5) == (all_of_it > 1.5).sum()
    found = w.call(own_rules.places)
    assert [part["shard"] for part in found] == list(range(w.shards))
    assert sum(part["shape"][0] for part in found) == 5000
    assert all(part["shape"][1] == 30 for part in found)
    assert [part["first"] for part in found] == [i * w.shard_elements for i in range(w.shards)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_numbers_have_their_own_type(cluster: wl.Cluster, dtype: str) -> None:
    w = cluster.tensor("w", (7,), rule=wl.Sum(), dtype=dtype)
    w.push(np.arange(7).astype(dtype)).wait()
    assert w.call(own_rules.places)[0]["sum"] == 21
    assert w.call(own_rules.places)[0]["shape"] == [7, 1]


def test_a_function_gets_keys_and_rows_of_a_table(cluster: wl.Cluster) -> None:
    t = cluster.table("t", dim=16, rule=wl.Sum(), init=wl.Normal())
    assert t.call(own_rules.far_keys, 4.0).size == 0
    keys = np.arange(20_000, dtype=np.uint64)
    rows = t.pull(keys)
    np.testing.assert_array_equal(t.call(own_rules.far_keys, 4.5), keys[np.linalg.norm(rows, axis=1) > 4.5])


def test_a_large_shard_comes_in_several_parts(cluster: wl.Cluster) -> None:
    dim = 1 << 18  # 16 rows are what one call gets
    t = cluster.table("t", dim=dim, rule=wl.Sum())
    small = cluster.table("small", dim=1, rule=wl.Sum())  # keys are in the same shards
    small.pull(np.arange(20_000))
    some = small.call(own_rules.keys)[7][:40]
    for k in some:
        t.push([k], np.full((1, dim), 1.0, np.float32)).wait()
    found = [part for part in t.call(own_rules.places) if part["shape"][0]]
    assert [part["shard"] for part in found] == [7, 7, 7]
    assert [part["shape"][0] for part in found] == [16, 16, 8]
    assert sum(part["sum"] for part in found) == 40 * dim


def test_own_pushes_are_seen_and_training_goes_on_meanwhile(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", (3000, 100), rule=wl.Sum())
    ones = np.ones((3000, 100), np.float32)
    for i in range(5):
        w.push(ones)
        assert w.call(own_rules.above, i + 0.5) == 300_000
    assert w.call(own_rules.waits, 0.0) == w.shards - 1


# The interpreter reports an interrupt that falls into a callback of its own; the next one ends the function.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_the_time_of_a_function_is_limited(hasty: wl.Cluster) -> None:
    w = hasty.tensor("w", (10,), rule=wl.Sum())
    start = time.monotonic()
    with pytest.raises(wl.FunctionFailed, match=f"took longer than {HASTY_SECONDS:g} s"):
        w.call(own_rules.waits, 30.0)
    assert time.monotonic() - start < HASTY_SECONDS + 1
    assert w.call(own_rules.waits, 0.0) == 0  # others go on without it


def test_what_a_function_may_take_is_limited(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", (10,), rule=wl.Sum())
    assert w.call(own_rules.much, 1 << 20)[0].nbytes == 1 << 20
    with pytest.raises(wl.ResourceExhausted, match=r"returned .* bytes, at most 16777216"):
        w.call(own_rules.much, (16 << 20) + 1)
    with pytest.raises(wl.InvalidArgument, match=r"a name and arguments of .* bytes, at most 1048576"):
        w.call(own_rules.above, np.zeros(1 << 20))
    with pytest.raises(wl.InvalidArgument, match="'own_rules:odd': its result: expected None, numbers"):
        w.call(own_rules.odd)
    with pytest.raises(wl.FunctionFailed, match="raised KeyError: 'not there'"):
        w.call(own_rules.fails)
    with pytest.raises(wl.FunctionFailed, match=r"raised TypeError: .*unexpected keyword argument 'limmit'"):
        w.call(own_rules.above, limmit=3)


def test_wrong_functions_are_refused_at_once(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", (10,), rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match=r"expected a function with @wl\.function"):
        w.call(len)  # type: ignore[arg-type]
    with pytest.raises(wl.InvalidArgument, match=r"arguments of 'own_rules:above': expected None, numbers"):
        w.call(own_rules.above, object())
    with pytest.raises(wl.InvalidArgument, match="expected a first parameter"):
        wl.function(lambda: 3)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2.5,
        "text",
        b"\x00\xff",
        [1, [2, "x"]],
        {"a": {"b": 1}},
        np.arange(6).reshape(2, 3),
        np.float32(2),
    ],
    ids=str,
)
def test_values_travel(value: Any) -> None:
    from windlass._net.value_codec import pack, unpack

    got = unpack(pack(value, "a value"), "a value")
    np.testing.assert_array_equal(got, value) if isinstance(value, np.ndarray) else None
    assert isinstance(value, np.ndarray) or got == value


def test_arrays_of_objects_do_not_travel() -> None:
    import msgspec

    from windlass._net.value_codec import pack, unpack

    with pytest.raises(wl.InvalidArgument, match="a value: expected"):
        pack(np.array([{}]), "a value")
    head = msgspec.msgpack.encode(("|O", (1,)))
    forged = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, len(head).to_bytes(2, "little") + head + bytes(8)))
    with pytest.raises(wl.InvalidArgument, match="a value: malformed: an array of"):
        unpack(forged, "a value")
    for data in (b"", b"\xc1", msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"")), forged[:-3]):
        with pytest.raises(wl.InvalidArgument, match="malformed"):
            unpack(data, "a value")


def test_a_closed_cluster_calls_nothing(own: wl.Cluster) -> None:
    w = own.tensor("w", (10,), rule=wl.Sum())
    t = own.table("t", dim=2, rule=own_rules.sometimes())
    own.close()
    for call in (
        lambda: w.call(own_rules.above),
        lambda: t.call(own_rules.above),
        lambda: t.push([1], np.ones((1, 2))),
    ):
        with pytest.raises(wl.Closed):
            call()
