"""A push that some shards refuse: the error lists what was not applied, and a retry of that doubles nothing."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import own_rules
import pytest
from helpers import FLOAT32, PATIENCE_S, SHARD

import windlass as wl
from windlass.testing import Servers
from windlass.testing.cluster import until

SHARDS = 6
SIZE = SHARDS * SHARD - 5
LARGE = [1, 4]  # the shards that refuse
ROW = 40


def gradient(of: Callable[[int], Any]) -> Any:
    """Ones, and something too large in some shards. `of`: gives an array."""
    grad = of(SIZE)
    grad[:] = 1
    for shard in LARGE:
        grad[shard * SHARD + 7] = 100
    return grad


def expected(*, whole: bool) -> np.ndarray:
    weights = gradient(lambda n: np.empty(n, FLOAT32))
    for shard in [] if whole else LARGE:
        weights[shard * SHARD : (shard + 1) * SHARD] = 0
    return weights


@pytest.mark.parametrize("registered", [True, False])
def test_a_push_to_a_tensor_lists_the_ranges_that_were_refused_and_a_retry_fills_them(
    own: wl.Cluster, registered: bool
):
    w = own.tensor("w", SIZE, rule=own_rules.fussy())
    grad = gradient(own.empty if registered else lambda n: np.empty(n, FLOAT32))
    with pytest.raises(wl.FunctionFailed, match="not applied to 2 of 6 shards") as refused:
        w.push(grad).wait()
    (entry,) = refused.value.not_applied
    assert (entry.name, entry.keys, entry.positions) == ("w", None, None)
    assert entry.ranges == [(s * SHARD, (s + 1) * SHARD) for s in LARGE]
    assert (w.pull() == expected(whole=False)).all()
    with pytest.raises(wl.FunctionFailed) as again:
        w.push(grad, only=entry).wait()
    assert again.value.not_applied[0].ranges == entry.ranges
    w.push(grad, only=again.value.not_applied[0], most=1000).wait()
    assert (w.pull() == expected(whole=True)).all()


@pytest.mark.parametrize("rows", [slice(100, 2400), [5, 2000, 5, 1, 420, 421]], ids=["range", "list"])
def test_a_push_of_rows_likewise(own: wl.Cluster, rows: Any):
    w = own.tensor("w", (SHARDS * SHARD // ROW, ROW), rule=own_rules.fussy())
    n = len(range(w.shape[0])[rows]) if isinstance(rows, slice) else len(rows)
    grad = np.ones((n, ROW), FLOAT32)
    grad[-1, 3] = 100
    with pytest.raises(wl.FunctionFailed) as refused:
        w[rows].push(grad).wait()
    (entry,) = refused.value.not_applied
    assert entry.ranges
    w[rows].push(grad, only=entry, most=1000).wait()
    whole = np.zeros(w.shape, FLOAT32)
    np.add.at(whole, rows if isinstance(rows, list) else np.arange(w.shape[0])[rows], grad)
    assert (w.pull() == whole).all()


def test_a_push_to_a_table_lists_the_keys_that_were_refused_and_where_they_were(own: wl.Cluster):
    table = own.table("t", 3, rule=own_rules.fussy())
    keys = np.arange(5000, dtype=np.int64) * 7 - 11
    grads = np.ones((5000, 3), FLOAT32)
    grads[[17, 1000]] = 50
    with pytest.raises(wl.FunctionFailed, match=r"not applied to [12] of 256 shards") as refused:
        table.push(keys, grads).wait()
    (entry,) = refused.value.not_applied
    assert entry.ranges is None
    assert {17, 1000} <= set(entry.positions.tolist())
    assert (entry.keys == keys[entry.positions].astype(np.uint64)).all()
    rest = np.setdiff1d(np.arange(5000), entry.positions)
    assert (table.pull(keys[rest]) == grads[rest]).all()
    assert (table.pull(keys[entry.positions]) == 0).all()
    table.push(keys[entry.positions], grads[entry.positions], most=1000).wait()
    assert (table.pull(keys) == grads).all()
    table.push(keys, grads, only=entry, most=1000).wait()  # the same by its shards: again
    assert (table.pull(keys[entry.positions]) == 2 * grads[entry.positions]).all()
    assert (table.pull(keys[rest]) == grads[rest]).all()


def test_a_step_lists_what_each_of_its_pushes_was_refused(own: wl.Cluster):
    w, plain = own.tensor("w", SIZE, rule=own_rules.fussy()), own.tensor("plain", SIZE, rule=wl.Sum())
    table = own.table("t", 3, rule=own_rules.fussy())
    grad, keys = gradient(lambda n: np.empty(n, FLOAT32)), np.arange(1000)
    grads = np.ones((1000, 3), FLOAT32)
    grads[3] = 20
    pushes = [(w, (grad,)), (plain, (grad,)), (table, (keys, grads))]

    def run() -> None:
        with own.step() as step:
            for to, arrays in pushes:
                step.push(to, *arrays)

    with pytest.raises(wl.FunctionFailed) as refused:
        run()
    assert [(entry.request, entry.name) for entry in refused.value.not_applied] == [(0, "w"), (2, "t")]
    with own.step() as step:
        for entry in refused.value.not_applied:
            to, arrays = pushes[entry.request]
            step.push(to, *arrays, only=entry, most=1000)
    assert (w.pull() == expected(whole=True)).all()
    assert (plain.pull() == grad).all()
    assert (table.pull(keys) == grads).all()


def test_the_error_of_a_dropped_future_lists_it_too(own: wl.Cluster):
    w = own.tensor("w", SIZE, rule=own_rules.fussy())
    grad = gradient(lambda n: np.empty(n, FLOAT32))
    future = w.push(grad)
    until(future.done, "it has ended", PATIENCE_S)
    del future
    with pytest.raises(wl.FunctionFailed, match="whose future was dropped") as refused:
        w.pull()
    w.push(grad, only=refused.value.not_applied[0], most=1000).wait()
    assert (w.pull() == expected(whole=True)).all()


def test_rows_that_found_no_memory_are_listed_and_a_retry_doubles_none(transport: str):
    """Both servers are nearly full; what was there before is deleted to make room."""
    keys, old = np.arange(20_000), np.arange(30_000) + (1 << 40)
    with contextlib.ExitStack() as stack:
        if transport == "embedded":
            cluster = stack.enter_context(wl.connect(threads=1, memory_bytes_max=12 << 20))
        else:
            servers = stack.enter_context(Servers(2, kind=transport, threads=1, memory_bytes_max=8 << 20))
            cluster = stack.enter_context(servers.connect())
        table = cluster.table("t", 64, rule=wl.Sum())
        table.push(old, np.zeros((30_000, 64), FLOAT32)).wait()
        with pytest.raises(wl.ResourceExhausted, match=r"not applied to \d+ of 256 shards") as refused:
            table.push(keys, np.ones((20_000, 64), FLOAT32)).wait()
        (entry,) = refused.value.not_applied
        assert 0 < len(entry.keys) < 20_000
        applied = np.setdiff1d(keys, entry.keys)
        assert (table.pull(applied, create=False) == 1).all()
        assert (table.pull(entry.keys, create=False) == 0).all()
        table.delete(old)
        table.push(keys, np.ones((20_000, 64), FLOAT32), only=entry).wait()
        assert (table.pull(keys, create=False) == 1).all()


def test_only_is_for_the_object_that_refused(own: wl.Cluster):
    w, other = (own.tensor(name, SIZE, rule=own_rules.fussy()) for name in ("w", "other"))
    with pytest.raises(wl.FunctionFailed) as refused:
        w.push(gradient(lambda n: np.empty(n, FLOAT32))).wait()
    with pytest.raises(wl.InvalidArgument, match="only= is about 'w'"):
        other.push(np.ones(SIZE, FLOAT32), only=refused.value.not_applied[0])


def test_an_error_that_has_nothing_to_do_with_shards_lists_nothing(own: wl.Cluster):
    w = own.tensor("w", 5, rule=wl.Sum())
    with pytest.raises(wl.ShapeMismatch) as wrong:
        w.push(np.ones(6, FLOAT32))
    assert wrong.value.not_applied == []
