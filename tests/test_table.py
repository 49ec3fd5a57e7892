"""Tables: maps from 64-bit keys to rows, which grow by themselves."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import FLOAT32, Connect, check_python, held, numbers, rng

import windlass as wl

MANY = 200_000


def ones(n: int, dim: int) -> np.ndarray:
    return np.ones((n, dim), FLOAT32)


def rows_of(keys: Any, dim: int) -> np.ndarray:
    """A row that tells its key."""
    bits = np.asarray(keys).astype(np.int64).view(np.uint64)
    low = (bits & np.uint64(0xFFFFF)).astype(FLOAT32)
    return low[:, None] + np.arange(dim, dtype=FLOAT32) / 8


# -- create and open -------------------------------------------------------------------------------------------------


def test_a_name_opens_what_was_created(cluster: wl.Cluster):
    cluster.table("t", 3, rule=wl.Sum()).push([5], ones(1, 3))
    assert cluster.table("t", 3, rule=wl.Sum()).pull([5]).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("change", "there", "asked"),
    [
        ({"dim": 4}, "dim=3", "dim=4"),
        ({"rule": wl.Adam()}, "rule=Adagrad", "rule=Adam"),
        ({"init": wl.Normal(std=0.25)}, "std=0.5", "std=0.25"),
        ({"seed": 2}, "seed=1", "seed=2"),
        ({"reject_nonfinite": True}, "reject_nonfinite=False", "reject_nonfinite=True"),
    ],
)
def test_another_spec_is_refused_and_both_are_shown(cluster: wl.Cluster, change: Any, there: str, asked: str):
    spec: dict[str, Any] = {"dim": 3, "rule": wl.Adagrad(), "init": wl.Normal(std=0.5), "seed": 1}
    cluster.table("t", **spec)
    with pytest.raises(wl.SpecMismatch) as caught:
        cluster.table("t", **{**spec, **change})
    first, there_line, asked_line = str(caught.value).splitlines()
    assert "'t'" in first
    assert there in there_line
    assert asked in asked_line


@pytest.mark.parametrize("dim", [0, -1, 2**20 + 1, 1.0, "3", None, True, (3,)])
def test_a_dim_that_cannot_be_is_refused(cluster: wl.Cluster, dim: Any):
    with pytest.raises(wl.InvalidArgument, match="table 't': dim must be a whole number between 1 and 1048576"):
        cluster.table("t", dim, rule=wl.Sum())


def test_a_table_says_what_it_is(cluster: wl.Cluster):
    table = cluster.table("t", 3, rule=wl.SGD(lr=0.5), seed=7)
    assert (table.name, table.dim, table.seed, len(table)) == ("t", 3, 7, 0)
    assert table.rule == wl.SGD(lr=0.5)
    assert table.init == wl.Zeros()
    assert "'t'" in repr(table)
    assert "dim=3" in repr(table)


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 8, 15, 16, 17, 32, 64, 100, 128, 1000])
def test_rows_of_every_dim_come_back(cluster: wl.Cluster, dim: int):
    table = cluster.table("t", dim, rule=wl.Assign())
    keys = rng(dim).integers(-(2**63), 2**63 - 1, 1000)
    table.push(keys, rows_of(keys, dim))
    order = rng(1).permutation(1000)
    np.testing.assert_array_equal(table.pull(keys[order]), rows_of(keys[order], dim))
    assert len(table) == 1000


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64, ">i8", ">u8", ">i4"])
def test_keys_of_every_type_are_the_same_keys(cluster: wl.Cluster, dtype: Any):
    table = cluster.table("t", 2, rule=wl.Assign())
    keys = np.array([0, 1, 5, 2**31 - 1], np.int64)
    table.push(keys, rows_of(keys, 2))
    np.testing.assert_array_equal(table.pull(keys.astype(dtype), create=False), rows_of(keys, 2))
    table.push(keys.astype(dtype), 2 * rows_of(keys, 2))
    np.testing.assert_array_equal(table.pull(keys), 2 * rows_of(keys, 2))
    assert len(table) == 4


@pytest.mark.parametrize(
    "minus_one",
    [
        [-1],
        [2**64 - 1],
        np.array([-1], np.int64),
        np.array([-1], np.int32),
        np.array([2**64 - 1], np.uint64),
        torch.tensor([-1]),
        torch.tensor([-1], dtype=torch.int32),
    ],
    ids=repr,
)
def test_minus_one_is_the_largest_key_however_it_is_written(cluster: wl.Cluster, minus_one: Any):
    table = cluster.table("t", 2, rule=wl.Sum())
    table.push([-1], ones(1, 2))
    table.push(minus_one, ones(1, 2))
    assert len(table) == 1
    np.testing.assert_array_equal(np.asarray(table.pull(minus_one)), 2 * ones(1, 2))
    assert next(table.export()).keys.tolist() == [2**64 - 1]


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**31)])
def test_no_key_is_reserved(cluster: wl.Cluster, key: int):
    table = cluster.table("t", 2, rule=wl.Assign())
    table.push([key], ones(1, 2))
    assert table.pull([key], create=False).tolist() == [[1, 1]]
    assert not table.pull([key ^ 1], create=False).any()
    assert len(table) == 1
    assert table.delete([key]) == 1
    assert len(table) == 0


def test_repeated_keys_are_one_row(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Sum())
    keys = rng(0).integers(0, 50, 2000)
    grads = rng(1).integers(-9, 9, (2000, 2)).astype(FLOAT32)
    got = table.push_pull(keys, grads)
    expected = np.zeros((50, 2), FLOAT32)
    np.add.at(expected, keys, grads)
    np.testing.assert_array_equal(got, expected[keys])
    np.testing.assert_array_equal(table.pull(keys[::-1]), expected[keys[::-1]])
    assert len(table) == len(np.unique(keys))


def test_a_key_in_every_shard_twice(cluster: wl.Cluster):
    table = cluster.table("t", 1, rule=wl.Assign())
    keys = np.concatenate([np.arange(5000), np.arange(5000)[::-1]])
    table.push(keys, np.arange(10_000, dtype=FLOAT32)[:, None])
    np.testing.assert_array_equal(table.pull(np.arange(5000))[:, 0], np.arange(5000, 10_000)[::-1])


@pytest.mark.parametrize("keys", [[], (), np.array([], np.int64), np.array([], np.uint64), torch.tensor([]).long()])
def test_an_empty_batch_does_nothing(cluster: wl.Cluster, keys: Any):
    table = cluster.table("t", 3, rule=wl.Sum())
    nothing = np.zeros((0, 3), FLOAT32)
    assert table.push(keys, nothing).wait() is None
    assert table.pull(keys).shape == (0, 3)
    assert table.pull(keys, create=False).shape == (0, 3)
    assert table.pull_async(keys).wait().shape == (0, 3)
    assert table.push_pull(keys, nothing).shape == (0, 3)
    assert table.push_pull_async(keys, nothing, out=nothing).wait() is nothing
    assert table.delete(keys) == 0
    assert len(table) == 0
    assert list(table.export()) == []


def test_keys_need_not_be_contiguous(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Assign())
    keys = np.arange(20)[::-2]
    table.push(keys, rows_of(keys, 2)[:, ::1])
    np.testing.assert_array_equal(table.pull(np.asfortranarray(keys)), rows_of(keys, 2))
    np.testing.assert_array_equal(table.pull(torch.arange(20)[1::2])[0], rows_of([1], 2)[0])


def test_lists_are_gradients_too(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Sum())
    table.push([3, 4], [[1, 2], [3.5, 4]])
    assert table.push_pull(range(3, 5), ((1, 1), (1, 1))).tolist() == [[2, 3], [4.5, 5]]


# -- pull ------------------------------------------------------------------------------------------------------------


def test_a_pull_makes_missing_rows_and_create_false_does_not(cluster: wl.Cluster):
    table = cluster.table("t", 5, rule=wl.Sum(), init=wl.Normal())
    keys = np.arange(300) * 17
    peeked = table.pull(keys, create=False)
    assert len(table) == 0
    assert table.pull_async(keys, create=False).wait().tolist() == peeked.tolist()
    assert len(table) == 0
    np.testing.assert_array_equal(table.pull(keys), peeked)
    assert len(table) == 300
    assert peeked.std() > 0.9  # the initialiser's values, not zeros


def test_create_false_mixes_rows_that_are_there_and_those_that_are_not(cluster: wl.Cluster):
    table = cluster.table("t", 5, rule=wl.Sum(), init=wl.Constant(7.0))
    table.push([1, 3], ones(2, 5))
    got = table.pull([0, 1, 2, 3, 1, 0], create=False, dtype="float16")
    assert got[:, 0].tolist() == [7, 8, 7, 8, 8, 7]
    assert len(table) == 2


def test_a_push_makes_rows_from_their_initial_value(cluster: wl.Cluster):
    table = cluster.table("t", 5, rule=wl.Sum(), init=wl.Normal())
    start = table.pull([4], create=False)
    np.testing.assert_array_equal(table.push_pull([4], ones(1, 5)), start + 1)


@pytest.mark.parametrize("kind", ["numpy", "torch", "registered"])
@pytest.mark.parametrize("verb", ["pull", "pull_async", "push_pull", "push_pull_async"])
def test_out_is_filled_and_returned(cluster: wl.Cluster, verb: str, kind: str):
    table = cluster.table("t", 3, rule=wl.Sum(), init=wl.Normal())
    keys, grads = np.array([9, 2, 9]), ones(3, 3)
    start = table.pull(keys)
    out: Any = cluster.empty((3, 3)) if kind == "registered" else np.empty((3, 3), FLOAT32)
    out = torch.from_numpy(out) if kind == "torch" else out
    got = getattr(table, verb)(keys, *([grads] if "push" in verb else []), out=out)
    got = got.wait() if "async" in verb else got
    assert got is out
    added = np.array([[2], [1], [2]], FLOAT32) if "push" in verb else 0
    np.testing.assert_array_equal(np.asarray(out), start + added)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_short_dtypes_travel_both_ways(cluster: wl.Cluster, dtype: Any):
    table = cluster.table("t", 17, rule=wl.Assign())
    keys = np.arange(2000) % 1500  # repeated ones too
    grads = numbers(2000, 17).astype(dtype)
    table.push(keys, grads)
    expected = grads[np.concatenate([np.arange(1500, 2000), np.arange(500, 1500)])]
    np.testing.assert_array_equal(table.pull(np.arange(1500)), expected.astype(FLOAT32))
    got = table.pull(np.arange(1500), dtype=dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_in_torch_out(cluster: wl.Cluster, dtype: str):
    kind = getattr(torch, dtype)
    table = cluster.table("t", 3, rule=wl.Sum())
    keys, grads = torch.tensor([3, 1]), torch.tensor([[1, 2, 3], [4, 5, 6]]).to(kind)
    for got in (table.push_pull(keys, grads), table.push_pull_async(keys, grads).wait()):
        assert isinstance(got, torch.Tensor)
        assert got.dtype == torch.float32
    assert torch.equal(table.pull(keys), 2 * grads.float())
    assert torch.equal(table.pull(keys, dtype=kind), 2 * grads)
    assert torch.equal(table.pull_async(keys).wait(), 2 * grads.float())
    assert type(table.pull([3])) is np.ndarray


def test_gradients_that_require_grad_are_read(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Sum())
    parameter = torch.nn.Parameter(torch.ones(1, 2))
    table.push(torch.tensor([1]), parameter * 3)
    assert table.pull([1]).tolist() == [[3, 3]]


def test_out_and_dtype_must_agree(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match="out is float32, but dtype=float16"):
        table.pull([1], out=ones(1, 2), dtype="float16")
    assert table.pull([1], out=ones(1, 2), dtype="float32").tolist() == [[0, 0]]


def test_pushes_of_one_worker_are_applied_in_order(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Assign())
    keys = np.arange(1000)  # every shard
    with held(table, 3, 77):
        futures = [table.push(keys, np.full((1000, 2), i, FLOAT32)) for i in range(20)]
        assert not futures[0].done()
    futures[-1].wait()
    assert (table.pull(keys) == 19).all()


def test_large_requests_run_on_several_threads(cluster: wl.Cluster):
    table = cluster.table("t", 64, rule=wl.Sum(), init=wl.Constant(1.0))
    keys = rng(0).permutation(20_000)  # 5 MiB of gradients
    grads, out = cluster.empty((20_000, 64)), cluster.empty((20_000, 64))
    grads[:] = keys[:, None]
    np.testing.assert_array_equal(table.push_pull(keys, grads, out=out), grads + 1)
    assert table.push_pull_async(keys, grads, out=out).wait() is out
    np.testing.assert_array_equal(out, 2 * grads + 1)
    np.testing.assert_array_equal(table.pull(keys), 2 * grads + 1)


# -- growth, deletion, export ----------------------------------------------------------------------------------------


def test_growth_keeps_every_value(cluster: wl.Cluster):
    table = cluster.table("t", 4, rule=wl.Assign())
    keys = np.unique(rng(0).integers(-(2**63), 2**63 - 1, MANY + 100))[:MANY]
    rng(1).shuffle(keys)
    done = 0
    while done < MANY:
        batch = keys[done : done + int(rng(done).integers(1, 30_000))]
        table.push(batch, rows_of(batch, 4))
        done += len(batch)
        early = keys[: done // 7 + 1]
        np.testing.assert_array_equal(table.pull(early, create=False), rows_of(early, 4))
    assert len(table) == MANY
    np.testing.assert_array_equal(table.pull(keys, create=False), rows_of(keys, 4))


def test_neighbouring_keys_grow_as_well_as_random_ones(cluster: wl.Cluster):
    table = cluster.table("t", 1, rule=wl.Assign())
    for start in range(0, 50_000, 5000):
        keys = np.arange(start, start + 5000)
        table.push(keys << 8, rows_of(keys, 1))  # the low bits of all are equal
    np.testing.assert_array_equal(table.pull(np.arange(50_000) << 8, create=False), rows_of(np.arange(50_000), 1))


def test_deletion_among_growth_keeps_the_others(cluster: wl.Cluster):
    table, there, random = cluster.table("t", 2, rule=wl.Assign()), set(), rng(3)
    for _ in range(30):
        batch = random.integers(0, 20_000, 3000)
        table.push(batch, rows_of(batch, 2))
        there |= set(batch.tolist())
        gone = random.integers(0, 20_000, 2500)
        assert table.delete(gone) == len(there & set(gone.tolist()))
        there -= set(gone.tolist())
        assert len(table) == len(there)
    keys = np.array(sorted(there))
    np.testing.assert_array_equal(table.pull(keys, create=False), rows_of(keys, 2))
    missing = np.setdiff1d(np.arange(20_000), keys)
    assert not table.pull(missing, create=False).any()


@pytest.mark.parametrize("rule", [wl.Adagrad(), wl.RowAdagrad(), wl.Adam(), wl.SGD(lr=0.1, momentum=0.9)], ids=str)
def test_a_deleted_row_starts_anew(cluster: wl.Cluster, rule: wl.Rule):
    table = cluster.table("t", 5, rule=rule, init=wl.Normal())
    grads = numbers(2, 5)
    start = table.pull([1, 2])
    first = table.push_pull([1, 2], grads)
    table.push([1, 2], grads)
    assert table.delete([1]) == 1
    assert len(table) == 1
    np.testing.assert_array_equal(table.pull([1]), start[:1])
    np.testing.assert_array_equal(table.push_pull([1], grads[:1]), first[:1])  # weights and rule state
    assert (table.pull([2]) != first[1:]).any()


def test_delete_counts_rows_that_were_there_once(cluster: wl.Cluster):
    table = cluster.table("t", 1, rule=wl.Sum())
    table.pull([1, 2, 3])
    assert table.delete([3, 3, 9, 2]) == 2
    assert table.delete([3]) == 0
    assert len(table) == 1


def filled(cluster: wl.Cluster, keys: np.ndarray) -> wl.Table:
    table = cluster.table("t", 3, rule=wl.Assign())
    table.push(keys, rows_of(keys, 3))
    return table


KEYS = rng(11).permutation(3000) - 1500


@pytest.mark.parametrize("chunk_rows", [1, 7, 100, 2999, 3000, 3001, 10**6])
def test_export_is_bounded_complete_and_gives_each_row_once(cluster: wl.Cluster, chunk_rows: int):
    keys = KEYS[:200] if chunk_rows == 1 else KEYS
    chunks = list(filled(cluster, keys).export(chunk_rows=chunk_rows))
    assert all(0 < len(c.keys) <= chunk_rows for c in chunks)
    assert all(c.keys.dtype == np.uint64 for c in chunks)
    assert all(c.weights.shape == (len(c.keys), 3) for c in chunks)
    exported = np.concatenate([c.keys for c in chunks]).view(np.int64)
    assert sorted(exported.tolist()) == sorted(keys.tolist())
    np.testing.assert_array_equal(np.concatenate([c.weights for c in chunks]), rows_of(exported, 3))


def test_the_order_of_export_depends_on_the_keys_alone(cluster: wl.Cluster):
    def order(table: wl.Table, chunk_rows: int) -> list[int]:
        return [key for chunk in table.export(chunk_rows=chunk_rows) for key in chunk.keys.tolist()]

    first = order(filled(cluster, KEYS), 100)
    assert order(filled(cluster, KEYS), 77) == first
    with wl.connect(threads=1) as other:
        table = other.table("other", 1, rule=wl.Sum())
        for batch in np.array_split(np.sort(KEYS), 13):  # other batches, another table
            table.pull(batch)
        table.pull(np.arange(5000, 9000))
        table.delete(np.arange(5000, 9000))
        assert order(table, 512) == first


def test_export_while_rows_are_added_gives_the_old_ones_once(cluster: wl.Cluster):
    table, exported, added = filled(cluster, KEYS), [], 0
    for chunk in table.export(chunk_rows=200):
        exported += chunk.keys.view(np.int64).tolist()
        if added < 20_000:  # the index grows meanwhile
            more = np.arange(10_000 + added, 11_000 + added)
            table.push(more, rows_of(more, 3))
            added += 1000
    assert added == 20_000
    assert len(exported) == len(set(exported))
    assert set(KEYS.tolist()) <= set(exported)
    assert len(exported) < len(table)  # some came behind the walk


def test_export_while_rows_go_gives_those_that_stay_once(cluster: wl.Cluster):
    table, exported, gone = filled(cluster, KEYS), [], iter(np.array_split(KEYS[1500:], 10))
    deleted: set[int] = set()
    for chunk in table.export(chunk_rows=100):
        keys = chunk.keys.view(np.int64).tolist()
        assert not deleted & set(keys)
        exported += keys
        now = next(gone, np.array([], np.int64))
        deleted |= set(now.tolist())
        table.delete(now)
    assert len(deleted) == 1500
    assert len(exported) == len(set(exported))
    assert set(KEYS[:1500].tolist()) <= set(exported)


def test_export_is_lazy_and_checked_at_the_call(cluster: wl.Cluster):
    table = filled(cluster, KEYS)
    with pytest.raises(wl.InvalidArgument, match="chunk_rows must be at least 1, not 0"):
        table.export(chunk_rows=0)
    walk = table.export(chunk_rows=10)
    assert len(next(walk).keys) == 10
    cluster.close()
    with pytest.raises(wl.Closed):
        next(walk)
    with pytest.raises(wl.Closed):
        table.export()


def test_an_exported_chunk_is_the_callers(cluster: wl.Cluster):
    table = filled(cluster, KEYS[:100])
    chunk = next(table.export())
    before = chunk.weights.copy()
    table.push(KEYS[:100], np.zeros((100, 3), FLOAT32))
    np.testing.assert_array_equal(chunk.weights, before)
    chunk.weights[:] = 5
    assert not table.pull(KEYS[:100]).any()


# -- initialisers ----------------------------------------------------------------------------------------------------


def initial(connect: Connect, keys: Any, init: wl.Init, dim: int = 8, **options: Any) -> np.ndarray:
    with connect() as cluster:
        name = options.pop("name", "t")
        return cluster.table(name, dim, **{"rule": wl.Sum(), "init": init, **options}).pull(keys)


def test_initialisers_give_what_they_say(connect: Connect):
    keys = np.arange(20_000)
    assert not initial(connect, keys, wl.Zeros()).any()
    assert (initial(connect, keys, wl.Constant(0.1)) == FLOAT32(0.1)).all()
    uniform = initial(connect, keys, wl.Uniform(-1.0, 3.0))
    assert -1.0 <= uniform.min() < -0.99
    assert 2.99 < uniform.max() <= 3.0
    assert abs(uniform.mean() - 1.0) < 0.02
    assert abs(uniform.std() - 4 / 12**0.5) < 0.02
    normal = initial(connect, keys, wl.Normal(mean=2.0, std=0.5))
    z = (normal.astype(np.float64) - 2.0) / 0.5
    assert abs(z.mean()) < 0.0125  # five standard errors
    assert abs(z.std() - 1) < 0.009
    assert abs((z**3).mean()) < 0.05
    assert abs((z**4).mean() - 3) < 0.15
    for bound, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs((np.abs(z) < bound).mean() - share) < 0.006


@pytest.mark.parametrize("init", [wl.Uniform(-1, 1), wl.Normal()], ids=str)
def test_rows_and_columns_are_not_correlated(connect: Connect, init: wl.Init):
    values = initial(connect, np.arange(20_000), init)
    assert np.abs(np.corrcoef(values.T) - np.eye(8)).max() < 0.05
    for shift in (1, 2, 256):
        assert abs(np.corrcoef(values[shift:].ravel(), values[:-shift].ravel())[0, 1]) < 0.02
    assert len(np.unique(values, axis=0)) == 20_000


@pytest.mark.parametrize("init", [wl.Uniform(-1, 1), wl.Normal(std=0.1)], ids=str)
def test_an_initial_row_depends_on_seed_name_and_key_alone(connect: Connect, init: wl.Init):
    keys = np.arange(500) - 250
    here = initial(lambda: wl.connect(threads=1), keys, init, seed=3)
    np.testing.assert_array_equal(initial(connect, keys, init, seed=3), here)
    np.testing.assert_array_equal(initial(connect, keys[::-1], init, seed=3)[::-1], here)
    np.testing.assert_array_equal(initial(connect, keys, init, seed=3, rule=wl.Adam()), here)
    np.testing.assert_array_equal(initial(connect, keys.astype(np.int32), init, seed=3), here)
    np.testing.assert_array_equal(initial(connect, np.r_[keys, np.arange(9000, 12_000)], init, seed=3)[:500], here)
    np.testing.assert_array_equal(np.concatenate([initial(connect, [k], init, seed=3) for k in keys[:5]]), here[:5])
    assert (initial(connect, keys, init, seed=4) != here).mean() > 0.99
    assert (initial(connect, keys, init, seed=3, name="u") != here).mean() > 0.99
    assert (initial(connect, keys + 500, init, seed=3) != here).mean() > 0.99


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", None, True])
def test_a_seed_is_a_whole_number_of_64_bits(cluster: wl.Cluster, seed: Any):
    for make in (cluster.table, cluster.tensor):
        with pytest.raises(wl.InvalidArgument, match="seed must be a whole number"):
            make("t", 3, rule=wl.Sum(), seed=seed)
    cluster.table("largest", 3, rule=wl.Sum(), seed=2**64 - 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda bad: wl.Constant(bad),
        lambda bad: wl.Uniform(bad, 1.0),
        lambda bad: wl.Uniform(0.0, bad),
        lambda bad: wl.Normal(mean=bad),
        lambda bad: wl.Normal(std=bad),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "1", None, True])
def test_an_initialisers_numbers_are_finite(make: Any, bad: Any):
    with pytest.raises(wl.InvalidArgument, match="must be a finite number"):
        make(bad)


def test_an_initialisers_numbers_are_in_their_range(connect: Connect):
    with pytest.raises(wl.InvalidArgument, match="Uniform: low must not be above high"):
        wl.Uniform(1.0, 0.5)
    with pytest.raises(wl.InvalidArgument, match="Normal: std must be at least 0"):
        wl.Normal(std=-0.5)
    assert (initial(connect, [1, 2], wl.Uniform(0.5, 0.5)) == 0.5).all()
    assert (initial(connect, [1, 2], wl.Normal(mean=0.5, std=0.0)) == 0.5).all()


# -- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.embedded("looks at the memory of its own process")
def test_26_empty_tables_cost_at_most_16_mib():
    grown = check_python(
        """
        import gc, re
        import windlass as wl

        def anonymous_kib():
            gc.collect()
            with open("/proc/self/status") as status:
                return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1])

        cluster = wl.connect(threads=2)
        before = anonymous_kib()
        tables = [cluster.table(f"t{i}", 16, rule=wl.Adagrad()) for i in range(26)]
        assert [len(t) for t in tables] == [0] * 26
        print(anonymous_kib() - before)
        assert cluster.memory_bytes == 0
        """
    )
    assert 0 < int(grown) <= 16 << 10


@pytest.mark.parametrize("rule", [wl.SGD(lr=0.1), wl.Adagrad(), wl.RowAdagrad(), wl.Adam(), wl.Sum()], ids=str)
def test_a_fingerprint_does_not_depend_on_batches_or_order(connect: Connect, rule: wl.Rule):
    keys, seen = np.arange(300) * 7919, set()
    for cuts, order, how in ((1, 1, lambda: wl.connect(threads=1)), (1, 1, connect), (4, -1, connect), (7, 1, connect)):
        with how() as cluster:
            table = cluster.table("t", 5, rule=rule, init=wl.Normal())
            table.pull(keys[: 40 * cuts])  # a pull leaves no trace
            for step in range(3):
                grads = numbers(300, 5, seed=step)
                for part in np.array_split(np.arange(300)[::order], cuts):
                    table.push(keys[part], grads[part])
            seen.add(table.fingerprint())
    assert len(seen) == 1


def test_a_fingerprint_sees_weights_state_keys_and_name(cluster: wl.Cluster):
    seen = []
    for name, key, value, lr in (("a", 1, 1, 0.1), ("b", 1, 1, 0.1), ("c", 2, 1, 0.1), ("d", 1, 2, 0.1)):
        table = cluster.table(name, 2, rule=wl.Adagrad())
        seen.append(table.fingerprint())
        table.push([key], np.full((1, 2), value, FLOAT32), lr=lr)
        seen.append(table.fingerprint())
        table.push([key], np.full((1, 2), value, FLOAT32), lr=0.0)  # only the accumulator changes
        seen.append(table.fingerprint())
    assert len(set(seen)) == len(seen)
    table.delete([1])
    assert table.fingerprint() == seen[-3]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32])
def test_unique_can_sort_and_signs_count(dtype: Any):
    keys = rng(3).integers(-50, 50, 3000).astype(dtype)
    found, inverse = wl.unique(keys, sorted=True)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.int64), np.unique(keys.astype(np.int64)))
    np.testing.assert_array_equal(found[inverse], keys)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64])
@pytest.mark.parametrize("n", [0, 1, 10, 5000])
def test_unique_is_numpys_but_for_the_order(n: int, dtype: type):
    low, high = (0, 2**63) if dtype is np.uint64 else (-1000, 1000)
    keys = rng(n).integers(low, high, n).astype(dtype) % dtype(701)
    found, inverse = wl.unique(keys)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.sort(found), np.unique(keys))
    np.testing.assert_array_equal(found[inverse], keys)


def test_unique_keeps_the_whole_key():
    keys = np.array([2**64 - 1, 0, 2**63, 2**32, 2**64 - 1, 0], np.uint64)
    found, inverse = wl.unique(keys)
    assert len(found) == 4
    np.testing.assert_array_equal(found[inverse], keys)
    np.testing.assert_array_equal(wl.unique([-1, -1])[0], [-1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_unique_of_torch_is_torchs(dtype: torch.dtype):
    keys = torch.tensor([5, -3, 5, 9, -3], dtype=dtype)
    found, inverse = wl.unique(keys)
    assert found.dtype == dtype
    assert inverse.dtype == torch.int64
    assert torch.equal(found[inverse], keys)
    assert sorted(found.tolist()) == [-3, 5, 9]


def test_the_order_of_unique_depends_on_the_keys_alone():
    keys = rng(0).integers(0, 5000, 3000)
    found, _ = wl.unique(keys)
    again, _ = wl.unique(found.copy())
    np.testing.assert_array_equal(again, found)


def test_rows_of_one_number_take_a_list_of_numbers(cluster: wl.Cluster):
    table = cluster.table("counts", 1, rule=wl.Sum())
    table.push([1, 2, 1], np.ones(3)).wait()
    table.push([2], torch.ones(1)).wait()
    assert table.push_pull([1, 2, 3], [1.0, 1.0, 1.0]).tolist() == [[3], [3], [1]]
    with pytest.raises(wl.ShapeMismatch):
        table.push([1, 2], np.ones(3))
    with pytest.raises(wl.ShapeMismatch):
        cluster.table("pairs", 2, rule=wl.Sum()).push([1, 2], np.ones(4))


@pytest.mark.parametrize("keys", [[1.5], "a", None, 5, [[1, 2]], np.array([1], np.uint32), np.array([1], np.int16)])
def test_unique_refuses_what_is_no_list_of_keys(keys: Any):
    with pytest.raises((wl.ShapeMismatch, wl.InvalidArgument), match="unique, keys: expected"):
        wl.unique(keys)
