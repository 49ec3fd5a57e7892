"""Rows that are put into a table, and exported with their state: what one table has goes on in another."""

import threading
from typing import Any

import numpy as np
import own_rules
import pytest
import torch
from helpers import Connect, held, numbers, rng
from test_put import RULES, STATE

import windlass as wl
from windlass.testing import Servers

DIM = 6
KEYS = np.unique(rng(1).integers(-(2**63), 2**63 - 1, 3000))
# A schedule depends on the updates of a shard, which belong to no row.
ROW_RULES = {name: rule for name, rule in RULES.items() if name != "scheduled"}
OWN_RULES = {
    "heavy_ball": own_rules.heavy_ball(lr=0.1),
    "adam": own_rules.adam(lr=0.01),
    "row_adagrad": own_rules.row_adagrad(lr=0.1),
    "towards_start": own_rules.towards_start(),
}


def train(table: wl.Table, seed: int, steps: int = 4) -> None:
    for step in range(steps):
        some = rng(seed + step).choice(KEYS, len(KEYS) // 2)
        table.push(some, numbers(len(some), DIM, seed=seed + step)).wait()


def copied(table: wl.Table, to: wl.Table, chunk_rows: int = 700) -> None:
    for chunk in table.export(chunk_rows=chunk_rows, state=True):
        to.put(*chunk)


def check_copy(table: wl.Table, copy: wl.Table) -> None:
    train(table, 0)
    table.pull(KEYS)  # makes rows that nothing has updated
    copied(table, copy)
    assert copy.fingerprint() == table.fingerprint()
    np.testing.assert_array_equal(copy.pull(KEYS, create=False), table.pull(KEYS))
    train(table, 100)
    train(copy, 100)
    assert copy.fingerprint() == table.fingerprint()


# -- what goes on elsewhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROW_RULES)
def test_what_an_export_with_state_has_goes_on_elsewhere_bit_by_bit(connect: Connect, name: str) -> None:
    init = wl.Normal(std=0.1)
    with connect() as cluster, connect() as other:
        table = cluster.table("t", DIM, rule=ROW_RULES[name], init=init, seed=3)
        check_copy(table, other.table("t", DIM, rule=ROW_RULES[name], init=init, seed=3))
        chunk = next(table.export(state=True))
        n = len(chunk.keys)
        assert list(chunk.state) == STATE.get(name, [])
        for array in chunk.state.values():
            assert array.dtype == np.float32
            assert array.shape == ((n,) if name == "row_adagrad" else (n, DIM))
            assert array.any()
        assert chunk.updates.dtype == np.int64
        assert chunk.updates.shape == (n,)
        assert chunk.updates.min() >= 1


@pytest.mark.parametrize("name", OWN_RULES)
def test_so_does_what_rules_of_ones_own_keep(own: wl.Cluster, name: str) -> None:
    table = own.table("t", DIM, rule=OWN_RULES[name], init=wl.Normal(std=0.1))
    train(table, 0)
    chunks = list(table.export(chunk_rows=500, state=True))
    own.delete("t")
    again = own.table("t", DIM, rule=OWN_RULES[name], init=wl.Normal(std=0.1))
    with wl.connect(threads=2) as elsewhere:
        copy = elsewhere.table("t", DIM, rule=OWN_RULES[name], init=wl.Normal(std=0.1))
        for chunk in chunks:
            again.put(*chunk)
            copy.put(*chunk)
        train(again, 100)
        train(copy, 100)
        assert again.fingerprint() == copy.fingerprint()


def test_the_number_of_servers_does_not_matter() -> None:
    """From one server inside the process to three elsewhere, and from there to another one."""
    rule = wl.Adam(lr=0.01)
    with (
        Servers(3, kind="unix") as servers,
        servers.connect() as three,
        wl.connect(threads=2) as first,
        wl.connect(threads=2) as last,
    ):
        check_copy(first.table("t", DIM, rule=rule), three.table("t", DIM, rule=rule))
        check_copy(three.table("t", DIM, rule=rule), last.table("t", DIM, rule=rule))


def test_rows_that_were_only_read_are_left_out(cluster: wl.Cluster) -> None:
    table = cluster.table("t", 2, rule=wl.Adam(), init=wl.Constant(1.0))
    table.pull([1, 2, 3])
    assert list(table.export(state=True)) == []
    assert len(next(table.export()).keys) == 3
    table.put([2], np.full((1, 2), 5, np.float32))
    (chunk,) = table.export(state=True)
    assert (chunk.keys.tolist(), chunk.updates.tolist()) == ([2], [0])
    assert chunk.weights.tolist() == [[5, 5]]


def test_a_condition_chooses_rows_with_their_state(cluster: wl.Cluster) -> None:
    table = cluster.table("t", 2, rule=wl.Adagrad())
    table.put(np.arange(1000), np.repeat(np.arange(1000, dtype=np.float32), 2).reshape(-1, 2), updates=np.arange(1000))
    chunks = list(table.export(chunk_rows=7, where=(wl.row[0] >= 100) & (wl.row[0] < 150), state=True))
    assert max(len(chunk.keys) for chunk in chunks) <= 7
    keys = np.concatenate([chunk.keys for chunk in chunks])
    assert sorted(keys.tolist()) == list(range(100, 150))
    np.testing.assert_array_equal(np.concatenate([chunk.updates for chunk in chunks]), keys.astype(np.int64))
    np.testing.assert_array_equal(np.concatenate([chunk.weights for chunk in chunks])[:, 0], keys.astype(np.float32))


# -- what a put sets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "row_adagrad"])
def test_without_state_a_row_starts_like_a_fresh_one(cluster: wl.Cluster, name: str) -> None:
    """Also where it was trained before: then its old state is gone."""
    fresh = cluster.table("fresh", DIM, rule=RULES[name], init=wl.Constant(0.5))
    table = cluster.table("t", DIM, rule=RULES[name])
    table.push(KEYS[:50], numbers(50, DIM)).wait()
    table.put(KEYS[:100], np.full((100, DIM), 0.5, np.float32))
    for seed in range(3):
        for each in (fresh, table):
            each.push(KEYS[:100], numbers(100, DIM, seed=seed)).wait()
    np.testing.assert_array_equal(table.pull(KEYS[:100]), fresh.pull(KEYS[:100]))


def test_the_last_of_a_repeated_key_counts(cluster: wl.Cluster) -> None:
    table = cluster.table("t", 2, rule=wl.Sum())
    keys = rng(4).integers(0, 300, 5000)
    rows = np.stack([np.arange(5000), keys], axis=1).astype(np.float32)
    table.put(keys, rows)
    last = {int(key): i for i, key in enumerate(keys)}
    known = np.array(sorted(last))
    assert len(table) == len(known)
    np.testing.assert_array_equal(table.pull(known)[:, 0], [last[key] for key in known.tolist()])


def test_more_rows_than_fit_into_a_portion_are_put(cluster: wl.Cluster) -> None:
    """A portion is 32 MiB; the last row of a key that is in several of them counts."""
    table = cluster.table("t", 256, rule=wl.Sum())
    keys = np.arange(80_000)
    keys[-1] = 0
    rows = np.broadcast_to(np.arange(80_000, dtype=np.float32)[:, None], (80_000, 256))
    table.put(keys, rows)
    assert len(table) == 79_999
    assert table.pull([0, 1, 70_000])[:, 5].tolist() == [79_999, 1, 70_000]


def test_put_rows_count_in_the_fingerprint(cluster: wl.Cluster) -> None:
    table = cluster.table("t", 2, rule=wl.Sum())
    table.pull([7])
    empty = table.fingerprint()
    table.put([7], np.zeros((1, 2), np.float32))  # what it had
    put = table.fingerprint()
    assert put != empty
    table.put([7], np.zeros((1, 2), np.float32))
    assert table.fingerprint() == put
    table.delete([7])
    assert table.fingerprint() == empty


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_may_be_torchs_or_short(cluster: wl.Cluster, dtype: str) -> None:
    table = cluster.table("t", 3, rule=wl.Sum())
    given = torch.arange(12).reshape(3, 4).t().to(getattr(torch, dtype))
    table.put(torch.arange(4), given)
    np.testing.assert_array_equal(table.pull(np.arange(4)), given.float().numpy())


def test_rows_of_one_number_may_be_put_as_a_list_of_numbers(cluster: wl.Cluster) -> None:
    table = cluster.table("t", 1, rule=wl.Adam())
    table.put([1, 2, 3], [0.5, 1.0, 1.5], {"exp_avg": np.array([2.0, 4.0, 8.0])})
    (chunk,) = table.export(state=True)
    order = np.argsort(chunk.keys)
    assert chunk.weights[order].tolist() == [[0.5], [1.0], [1.5]]
    assert chunk.state["exp_avg"][order].tolist() == [[2], [4], [8]]
    with pytest.raises(wl.ShapeMismatch, match=r"weights: expected float32 of shape \(3, 1\), saw .* \(2, 1\)"):
        table.put([1, 2, 3], [0.5, 1.0])


def test_nothing_is_put_where_nothing_is_given(cluster: wl.Cluster) -> None:
    table = cluster.table("t", 3, rule=wl.Adam())
    table.put([], np.zeros((0, 3), np.float32), {"exp_avg": np.zeros((0, 3))}, 5)
    assert len(table) == 0


def test_puts_and_pushes_of_a_worker_are_in_their_order(cluster: wl.Cluster) -> None:
    table, futures = cluster.table("t", 2, rule=wl.Sum()), []
    keys, ones = np.arange(500), np.ones((500, 2), np.float32)
    for i in range(8):
        futures += [table.push(keys, ones) for _ in range(5)]
        table.put(keys, np.full((500, 2), 100 * i, np.float32))
        futures += [table.push(keys, ones) for _ in range(i)]
    assert (table.pull(keys) == 707).all()
    for future in futures:
        future.wait()


def test_under_bsp_a_put_closes_nothing_and_waits_for_nobody(connect: Connect) -> None:
    """A push that waits for its update is applied to the new rows."""
    with connect(sync="bsp") as cluster:
        workers = [cluster.worker(rank, 2) for rank in range(2)]
        tables = [worker.table("t", 2, rule=wl.Sum()) for worker in workers]
        ones = np.ones((1, 2), np.float32)
        pushed = tables[0].push([1], ones)
        tables[1].put([1], 10 * ones)
        assert [worker.clock for worker in workers] == [0, 0]
        assert tables[1].pull([1]).tolist() == [[10, 10]]
        for worker in workers:
            worker.tick()
        pushed.wait()
        assert tables[1].pull([1]).tolist() == [[11, 11]]
        for worker in workers:
            worker.close()


def test_puts_beside_pushes_of_others_lose_none(connect: Connect) -> None:
    with connect() as cluster:
        workers = [cluster.worker(rank, 2) for rank in range(2)]
        tables = [worker.table("t", 2, rule=wl.Sum()) for worker in workers]
        mine, others, ones = np.arange(2000), np.arange(2000, 4000), np.ones((2000, 2), np.float32)

        def push() -> None:
            for _ in range(30):
                tables[0].push(mine, ones).wait()

        thread = threading.Thread(target=push)
        thread.start()
        for i in range(30):
            tables[1].put(others, i * ones)
        thread.join()
        assert (tables[1].pull(mine) == 30).all()
        assert (tables[0].pull(others) == 29).all()
        for worker in workers:
            worker.close()


# -- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weights": np.zeros((3, 4), np.float32)}, wl.ShapeMismatch, r"weights: expected float32 of shape \(3, 3\)"),
        ({"weights": np.zeros((3, 3), np.int64)}, wl.InvalidArgument, "weights: expected dtype float32.* saw int64"),
        ({"keys": [1.5, 2, 3]}, wl.InvalidArgument, "keys: expected dtype"),
        ({"keys": [[1, 2, 3]]}, wl.ShapeMismatch, "expected keys in one dimension"),
        ({"state": {"momentum": np.zeros((3, 3))}}, wl.InvalidArgument, "no state 'momentum'; it has 'exp_avg'"),
        ({"state": {"exp_avg": np.zeros(3, np.float32)}}, wl.ShapeMismatch, "state 'exp_avg': expected float32"),
        ({"updates": -1}, wl.InvalidArgument, "updates: expected 0 to 2"),
        ({"updates": [1, 2**32, 3]}, wl.InvalidArgument, f"updates: expected 0 to .*saw {2**32}"),
        ({"updates": [1, 2]}, wl.ShapeMismatch, "expected a whole number or 3 of them"),
        ({"updates": 1.5}, wl.ShapeMismatch, "expected a whole number"),
        ({"weights": np.full((3, 3), np.nan, np.float32)}, wl.NonFinite, "the weights have NaN or infinity"),
        ({"state": {"exp_avg": np.full((3, 3), np.inf, np.float32)}}, wl.NonFinite, "the state has NaN"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    cluster: wl.Cluster, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = cluster.table("t", 3, rule=wl.Adam(), reject_nonfinite=True)
    table.push([1, 2, 3], numbers(3, 3)).wait()
    before = table.fingerprint()
    with pytest.raises(error, match=message) as raised:
        table.put(**{"keys": [1, 2, 3], "weights": np.zeros((3, 3), np.float32), **arguments})
    assert "put of table 't'" in str(raised.value)
    assert table.fingerprint() == before


def test_a_put_that_times_out_says_so_and_goes_on(cluster: wl.Cluster) -> None:
    table = cluster.table("t", 2, rule=wl.Sum())
    keys = np.arange(2000)
    table.push(keys, np.ones((2000, 2), np.float32)).wait()
    with held(table), pytest.raises(wl.Timeout, match="put of table 't': not done in time"):
        table.put(keys, np.full((2000, 2), 5, np.float32), timeout=0.2)
    table.push(keys, np.ones((2000, 2), np.float32)).wait()
    assert (table.pull(keys) == 6).all()


@pytest.mark.embedded("limits the memory of the server inside the process")
def test_without_memory_a_put_says_how_far_it_came() -> None:
    with wl.connect(threads=2, memory_bytes_max=64 << 20) as cluster:
        table = cluster.table("t", 256, rule=wl.Sum())
        rows = np.ones((100_000, 256), np.float32)
        with pytest.raises(wl.ResourceExhausted, match=r"the first \d+ of 100000 rows were put"):
            table.put(np.arange(100_000), rows)
        assert 32_000 < len(table) < 100_000


def test_a_closed_cluster_says_so(connect: Connect) -> None:
    with connect() as cluster:
        table = cluster.table("t", 2, rule=wl.Sum())
    with pytest.raises(wl.Closed):
        table.put([1], np.zeros((1, 2), np.float32))
