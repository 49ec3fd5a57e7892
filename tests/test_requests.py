"""Requests under way: close, loans, ordinary arrays, timeouts, errors nobody looked at."""

import contextlib
import gc
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FLOAT32, SHARD, SHARED, Connect, every_call, held

import windlass as wl
from windlass import _core
from windlass.testing import Servers

BIG = 1 << 19  # float32 of 2 MiB: registered arrays of this size are used in place by another thread
TABLE_BYTES = 4 << 20  # one page of index and one of rows


# -- after close -----------------------------------------------------------------------------------------------------


def closed_calls(connect: Connect) -> dict[str, Any]:
    cluster = connect()
    tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    calls = every_call(cluster, tensor, table, cluster.empty((4, 2)))
    for call in calls.values():  # each is a call that works
        call()
    cluster.close()
    return calls


CALLS = list(closed_calls(wl.connect))


def test_every_public_method_is_among_the_calls():
    named = {name.split()[0] for name in CALLS}
    for kind in (wl.Cluster, wl.Tensor, wl.Table):
        methods = {
            f"{kind.__name__}.{name}"
            for name, member in inspect.getmembers(kind)
            if inspect.isfunction(member) and not name.startswith("_")
        }
        # abandon() has no server here to give up; after close() there is nothing left to call; data is
        # leased and saved by the scheduler, what is loaded comes from files, and what is reported or kept is for the
        # scheduler; servers here allow no functions.
        elsewhere = {
            "Cluster.close",
            "Cluster.abandon",
            "Cluster.lease",
            "Cluster.report",
            "Cluster.save",
            "Cluster.load",
            "Cluster.keep",
        }
        elsewhere |= {"Tensor.call", "Table.call"}
        assert methods - elsewhere <= named


def test_use_after_close_raises_closed(connect: Connect):
    for call in closed_calls(connect).values():
        with pytest.raises(wl.Closed, match="the cluster has been closed"):
            call()


def test_what_needs_no_server_works_after_close(connect: Connect):
    cluster = connect()
    tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    future = tensor.push(np.ones((4, 2), FLOAT32))
    cluster.close()
    assert future.wait() is None
    assert repr(cluster).endswith("rank 0 of 1, closed>")
    assert (tensor.shape, tensor.shards, table.dim, cluster.rank, cluster.world_size) == ((4, 2), 1, 2, 0, 1)
    assert repr(tensor)
    assert repr(table)


def test_close_can_be_called_again(connect: Connect):
    cluster = connect()
    cluster.close()
    cluster.close()
    with cluster:
        pass


def test_close_waits_for_requests_under_way(connect: Connect):
    cluster = connect()
    tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    released = threading.Event()
    with held(tensor) as release:
        future = tensor.push(np.ones(4, FLOAT32))
        threading.Timer(0.1, lambda: (released.set(), release())).start()
        cluster.close()
        assert released.is_set()
    assert future.wait(timeout=1) is None


def test_futures_are_done_when_close_returns(connect: Connect):
    for _ in range(50):
        cluster = connect()
        tensor = cluster.tensor("w", (4,), rule=wl.Sum())
        with held(tensor) as release:
            future = tensor.push(np.ones(4, FLOAT32))
            release()
            cluster.close()
            assert future.done()


@pytest.mark.embedded("on servers, requests end with their connections; tests/wire/test_remote.py has that")
def test_a_close_that_times_out_can_be_called_again():
    cluster = wl.connect(threads=2)
    tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    with held(tensor) as release:
        future = tensor.push(np.ones(4, FLOAT32))
        for _ in range(2):
            with pytest.raises(wl.Timeout, match="1 requests are still under way"):
                cluster.close(timeout=0.05)
        with pytest.raises(wl.Closed):
            tensor.pull()
        release()
        cluster.close()
    assert future.wait(timeout=1) is None


def test_the_end_of_a_with_block_closes(connect: Connect):
    with connect() as cluster:
        tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    with pytest.raises(wl.Closed):
        tensor.pull()


def test_an_error_in_a_with_block_closes_and_passes(connect: Connect):
    cluster = connect()
    tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match="row 9 of 4"), cluster:
        tensor[[9]].pull()
    with pytest.raises(wl.Closed):
        tensor.pull()


# -- borrowed arrays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, BIG], ids=["small", "2 MiB"])
def test_a_borrowed_array_used_again_raises_buffer_in_use(cluster: wl.Cluster, n: int):
    tensor = cluster.tensor("w", (n,), rule=wl.Sum())
    other = cluster.tensor("v", (n // 2,), rule=wl.Sum())
    grad, out = cluster.empty(n), cluster.empty(n)
    grad[:] = 1
    with held(tensor):
        future = tensor.push_pull_async(grad, out=out)
        for borrowed in (grad, out):
            for call in (tensor.push, tensor.push_pull, tensor.push_pull_async):
                with pytest.raises(wl.BufferInUse, match=r"tensor 'w'.*wait for that one's future first"):
                    call(borrowed)
            with pytest.raises(wl.BufferInUse):
                tensor.pull(out=borrowed)
            with pytest.raises(wl.BufferInUse, match="tensor 'v'"):  # a part of it, and another tensor
                other.push(borrowed[n // 4 : n // 4 + n // 2])
            with pytest.raises(wl.BufferInUse):
                tensor.push(torch.from_numpy(borrowed))
    assert future.wait() is out
    assert (out == 1).all()
    for _ in range(2):  # and works again, as often as one likes
        tensor.push_pull_async(grad, out=out).wait()
    assert (out == 3).all()
    assert tensor.push_pull(out, out=grad) is grad
    assert (grad == 6).all()
    other.push(grad[: n // 2])


def test_tables_borrow_as_tensors_do(cluster: wl.Cluster):
    table = cluster.table("t", 64, rule=wl.Sum())
    keys, n = np.arange(8192), 8192
    grads, out = cluster.empty((n, 64)), cluster.empty((n, 64))
    grads[:] = 1
    with held(table, 5):
        future = table.push_pull_async(keys, grads, out=out)
        keys[:] = 0  # keys are copied, whatever they are
        with pytest.raises(wl.BufferInUse, match="table 't'"):
            table.push(keys, grads)
        with pytest.raises(wl.BufferInUse, match="table 't'"):
            table.pull(keys, out=out)
        assert not future.done()
    future.wait()
    assert (out == 1).all()
    assert len(table) == n
    table.push(np.arange(n), grads).wait()


def test_a_refused_request_borrows_nothing(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (64,), rule=wl.Sum())
    grad, out = cluster.empty(64), cluster.empty(64)
    with held(tensor):
        future = tensor.push(grad)
        with pytest.raises(wl.BufferInUse):
            tensor.push_pull_async(out, out=grad)
        with pytest.raises(wl.ShapeMismatch):
            tensor.push_pull_async(out, out=np.empty(3, FLOAT32))
        tensor.push(out)  # is still free
    future.wait()


# -- ordinary arrays are free at once --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 3 * SHARD, BIG])
@pytest.mark.parametrize("rows", ["all", "range", "list", "repeated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_ordinary_gradient_is_free_when_push_returns(cluster: wl.Cluster, dtype: str, rows: str, n: int):
    tensor = cluster.tensor("w", (n,), rule=wl.Sum())
    views = {
        "all": tensor,
        "range": tensor[: n - 1],
        "list": tensor[np.arange(n)[::-1]],
        "repeated": tensor[np.r_[np.arange(n - 1), 0]],
    }
    view = views[rows]
    grad = torch.ones(len(view), dtype=getattr(torch, dtype))
    with held(tensor, *range(tensor.shards)):
        future = view.push(grad)
        assert not future.done()
        grad.fill_(100)
    future.wait()
    expected = np.ones(n, FLOAT32)
    expected[-1] = 0 if rows in ("range", "repeated") else 1
    expected[0] = 2 if rows == "repeated" else 1
    np.testing.assert_array_equal(tensor.pull(), expected)


def test_ordinary_gradients_and_keys_of_a_table_are_free_when_push_returns(cluster: wl.Cluster):
    table = cluster.table("t", 4, rule=wl.Sum())
    keys, grads = np.arange(2000) % 1500, np.ones((2000, 4), FLOAT32)
    with held(table, 0, 100, 255):
        future = table.push(keys, grads)
        assert not future.done()
        keys[:] = 0
        grads[:] = 100
    future.wait()
    got = table.pull(np.arange(1500))
    assert (got[:500] == 2).all()
    assert (got[500:] == 1).all()


def test_an_ordinary_gradient_of_push_pull_async_is_free_at_once(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum())
    grad, out = np.ones(3 * SHARD, FLOAT32), np.zeros(3 * SHARD, FLOAT32)
    with held(tensor, 1):
        future = tensor.push_pull_async(grad, out=out)
        grad[:] = 100
        assert not out.any()
    future.wait()
    assert (out == 1).all()


# -- time ------------------------------------------------------------------------------------------------------------


def timed(call: Any) -> float:
    """How long a call takes to raise Timeout."""
    start = time.monotonic()
    with pytest.raises(wl.Timeout, match="not done in time"):
        call()
    return time.monotonic() - start


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_every_call_that_waits_raises_timeout_in_time(cluster: wl.Cluster, seconds: float):
    tensor, table = cluster.tensor("w", (3, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    grad, keys = np.ones((3, 2), FLOAT32), np.arange(1000)
    rows = np.ones((1000, 2), FLOAT32)
    table.push(keys, rows)
    with held(tensor), held(table, 9):
        calls: list[Any] = [
            lambda: tensor.pull(timeout=seconds),
            lambda: tensor.pull_newer(timeout=seconds),
            lambda: tensor.push_pull(grad, timeout=seconds),
            lambda: tensor.push(grad).wait(seconds),
            lambda: tensor.push(grad, timeout=seconds).wait(),
            lambda: tensor.pull_async(timeout=seconds).wait(),
            lambda: tensor.push_pull_async(grad).wait(timeout=seconds),
            lambda: tensor.fingerprint(timeout=seconds),
            lambda: table.pull(keys, timeout=seconds),
            lambda: table.push_pull(keys, rows, timeout=seconds),
            lambda: table.push(keys, rows).wait(seconds),
            lambda: table.delete(keys[:0:-1], timeout=seconds),
            lambda: list(table.export(timeout=seconds)),
            lambda: table.fingerprint(timeout=seconds),
            lambda: cluster.fingerprint(timeout=seconds),
        ]
        for call in calls:
            assert seconds <= timed(call) < seconds + 1


def test_the_clusters_timeout_is_the_default(connect: Connect):
    with connect(timeout=20.0) as cluster:  # connecting and opening have it, too
        cluster._timeout = 0.1
        tensor, table = cluster.tensor("w", (3,), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
        with held(tensor), held(table):
            for call in (tensor.pull, tensor.push([1, 1, 1]).wait, lambda: len(table)):
                assert 0.1 <= timed(call) < 1.1
        assert tensor.pull().tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["ordinary", "registered"])
@pytest.mark.parametrize("n", [64, BIG])
def test_a_push_goes_on_after_a_timeout_and_can_be_waited_for_again(cluster: wl.Cluster, n: int, kind: str):
    tensor = cluster.tensor("w", (n,), rule=wl.Sum())
    grad = cluster.empty(n) if kind == "registered" else np.empty(n, FLOAT32)
    grad[:] = 1
    with held(tensor):
        future = tensor.push(grad)
        for _ in range(2):
            with pytest.raises(wl.Timeout, match="it goes on and can be waited for again"):
                future.wait(0.02)
        if kind == "registered":  # a timeout does not end the loan
            with pytest.raises(wl.BufferInUse):
                tensor.push(grad)
    assert future.wait() is None
    assert future.wait() is None
    assert (tensor.pull() == 1).all()


def test_a_push_whose_future_timed_out_and_was_dropped_goes_on(cluster: wl.Cluster):
    tensor, table = cluster.tensor("w", (4,), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    with held(tensor), held(table, *range(256)):
        timed(lambda: tensor.push(np.ones(4, FLOAT32)).wait(0.01))
        timed(lambda: table.push([1, 2], np.ones((2, 2), FLOAT32)).wait(0.01))
    assert (tensor.pull() == 1).all()
    assert (table.pull([1, 2]) == 1).all()


@pytest.mark.parametrize("what", ["tensor", "table"])
def test_after_a_timeout_nobody_touches_the_callers_ordinary_arrays(cluster: wl.Cluster, what: str):
    tensor, table = cluster.tensor("w", (2, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    grad, out = np.ones((2, 2), FLOAT32), np.full((2, 2), 5, FLOAT32)
    thing, keys = (tensor, []) if what == "tensor" else (table, [[1, 2]])
    with held(thing, *range(1 if what == "tensor" else 256)):
        for verb, grads in (("pull", []), ("push_pull", [grad])):
            with pytest.raises(wl.Timeout):
                getattr(thing, verb)(*keys, *grads, out=out, timeout=0.01)
    thing.pull(*keys)  # after everything that was queued
    assert (out == 5).all()


def test_a_registered_out_stays_on_loan_after_a_timeout(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (64,), rule=wl.Sum(), init=wl.Constant(3.0))
    out = cluster.empty(64)
    out[:] = 0
    with held(tensor):
        with pytest.raises(wl.Timeout):
            tensor.pull(out=out, timeout=0.01)
        with pytest.raises(wl.BufferInUse):
            tensor.push(out)
    tensor.pull()
    assert (out == 3).all()
    tensor.push(out).wait()


@pytest.mark.embedded("with servers, all shards are held; tests/wire/test_remote.py stops one of two")
def test_other_shards_go_on_while_one_is_busy(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum())
    with held(tensor, 1):
        blocked = tensor.push(np.ones(3 * SHARD, FLOAT32))
        assert (tensor[:SHARD].pull(timeout=5) == 1).all()
        tensor[2 * SHARD :].push(np.ones(SHARD, FLOAT32)).wait(5)
        assert not blocked.done()
    blocked.wait()
    assert tensor.pull().sum() == 4 * SHARD


# -- errors nobody looked at -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_pair_of() -> Iterator[Callable[[str], Servers]]:
    """Gives the two servers of a socket kind that have little memory. All tests here share their one table."""
    with contextlib.ExitStack() as stack:

        def get(kind: str) -> Servers:
            if (name := f"small {kind}") not in SHARED:
                pair = Servers(2, kind=kind, threads=1, memory_bytes_max=TABLE_BYTES)
                SHARED[name] = stack.enter_context(pair)
                with pair.connect() as first:
                    first.tensor("w", (4,), rule=wl.Sum())  # while there is room
            return SHARED[name]

        yield get


@pytest.fixture
def small(transport: str, small_pair_of: Callable[[str], Servers]) -> wl.Cluster:
    """A cluster with little memory. The test closes it."""
    if transport == "embedded":
        return wl.connect(threads=1, memory_bytes_max=TABLE_BYTES)
    return small_pair_of(transport).connect()


def full_table(cluster: wl.Cluster) -> wl.Table:
    """A table without memory for more rows, on none of its servers."""
    table = cluster.table("t", 256, rule=wl.Sum())
    for start in range(0, 1 << 20, 512):
        before = len(table)
        try:
            table.push(np.arange(start, start + 512), np.zeros((512, 256), FLOAT32)).wait()
        except wl.ResourceExhausted:
            if len(table) == before:  # not even in part
                return table
    pytest.fail("memory_bytes_max did not stop the table")


def drop_an_error(table: wl.Table) -> None:
    keys = np.arange(1 << 40, (1 << 40) + 4096)
    future = table.push(keys, np.ones((4096, 256), FLOAT32))
    deadline = time.monotonic() + 10
    while not future.done() and time.monotonic() < deadline:  # so that the very next call knows of it
        time.sleep(0.001)
    del future
    gc.collect()


DROPPED = "table 't' cannot grow.*memory_bytes_max=.*whose future was dropped"


NEXT_CALLS: dict[str, Any] = {
    "pull": lambda cluster, table: table.pull([1]),
    "pull_async": lambda cluster, table: table.pull_async([1]),
    "push": lambda cluster, table: table.push([1], np.ones((1, 256), FLOAT32)),
    "push_pull": lambda cluster, table: table.push_pull([1], np.ones((1, 256), FLOAT32)),
    "delete": lambda cluster, table: table.delete([1]),
    "len": lambda cluster, table: len(table),
    "fingerprint": lambda cluster, table: table.fingerprint(),
    "export": lambda cluster, table: list(table.export()),
    "cluster.fingerprint": lambda cluster, table: cluster.fingerprint(),
    "tick": lambda cluster, table: cluster.tick(),
    "close": lambda cluster, table: cluster.close(),
    "opened again": lambda cluster, table: cluster.table("t", 256, rule=wl.Sum()).pull([1]),
}


@pytest.mark.parametrize("name", NEXT_CALLS)
def test_the_error_of_a_dropped_future_is_raised_once_by_the_next_call(small: wl.Cluster, name: str):
    call = NEXT_CALLS[name]
    with small as cluster:
        table = full_table(cluster)
        clock = cluster.clock
        drop_an_error(table)
        with pytest.raises(wl.ResourceExhausted, match=DROPPED):
            call(cluster, table)
        assert cluster.clock == clock
        if not cluster._engine.closed:
            call(cluster, table)


def test_other_objects_do_not_raise_the_error_of_a_dropped_future(small: wl.Cluster):
    with small as cluster:
        tensor, table = cluster.tensor("w", (4,), rule=wl.Sum()), full_table(cluster)
        drop_an_error(table)
        tensor.push(np.ones(4, FLOAT32)).wait()
        assert tensor.pull().tolist() == [1, 1, 1, 1]
        with pytest.raises(wl.ResourceExhausted, match=DROPPED):
            cluster.tick()


def test_several_dropped_errors_are_counted(small: wl.Cluster):
    table = full_table(small)
    with held(table, 3):  # they fail after they were dropped
        for i in range(1, 4):
            keys = np.arange(i << 40, (i << 40) + 4096)
            table.push(keys, np.ones((4096, 256), FLOAT32))
    with pytest.raises(wl.ResourceExhausted, match="from 3 earlier requests, the first of them"):
        small.close()  # waits for all three


def test_an_error_that_was_seen_is_not_raised_again(small: wl.Cluster):
    with small as cluster:
        table = full_table(cluster)
        future = table.push(np.arange(1 << 40, (1 << 40) + 4096), np.ones((4096, 256), FLOAT32))
        for _ in range(2):
            with pytest.raises(wl.ResourceExhausted):
                future.wait()
        del future
        gc.collect()
        cluster.tick()
        len(table)


def test_close_raises_the_error_of_its_own_worker(small: wl.Cluster):
    worker = small.worker(1, 2)
    table = full_table(worker)
    drop_an_error(table)
    small.close()  # not this worker's
    with pytest.raises(wl.ResourceExhausted, match=DROPPED):
        worker.close()
    worker.close()


def test_a_push_that_cannot_grow_the_table_leaves_its_shard_as_it_was(small: wl.Cluster):
    with small as cluster:
        table = full_table(cluster)
        before = len(table)
        keys = next(table.export(chunk_rows=1)).keys  # one row that is there; its shard is full
        start = table.pull(keys)
        shard_mates = np.arange(1 << 41, (1 << 41) + 100_000)
        grads = np.ones((len(shard_mates) + 1, 256), FLOAT32)
        future = table.push(np.r_[keys.view(np.int64), shard_mates], grads)
        with pytest.raises(wl.ResourceExhausted):
            future.wait()
        np.testing.assert_array_equal(table.pull(keys), start)
        assert len(table) >= before
        table.push(keys, np.ones((1, 256), FLOAT32)).wait()  # rows that are there can still be trained
        np.testing.assert_array_equal(table.pull(keys), start + 1)
        with pytest.raises(wl.ResourceExhausted, match="tensor 'large'"):
            cluster.tensor("large", (1 << 20,), rule=wl.Sum())


# -- taken back ------------------------------------------------------------------------------------------------------


@pytest.mark.embedded("what has gone to a server cannot be taken back; tests/wire/test_remote.py has the rest")
def test_a_push_that_waits_for_busy_shards_can_be_taken_back(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3, SHARD), rule=wl.Sum())
    grad = cluster.empty((3, SHARD))
    grad[:] = 1
    with held(tensor, 0, 1, 2):
        future = tensor.push(grad)
        assert future.cancel() is True
    for _ in range(2):
        with pytest.raises(wl.Cancelled, match="push of tensor 'w': cancelled"):
            future.wait()
    assert future.cancel() is True  # as before
    assert not tensor.pull().any()
    tensor.push(grad).wait()  # the loan has ended, and later pushes are applied
    assert (tensor.pull() == 1).all()


@pytest.mark.embedded("what has gone to a server cannot be taken back; tests/wire/test_remote.py has the rest")
def test_a_shard_that_has_its_part_of_a_push_keeps_it(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3, SHARD), rule=wl.Sum())
    with held(tensor, 1):
        future = tensor.push(np.ones((3, SHARD), FLOAT32))
        assert (tensor[[0, 2]].pull() == 1).all()
        assert future.cancel() is False  # not all of it
    with pytest.raises(wl.Cancelled):
        future.wait()
    assert tensor.pull()[:, 0].tolist() == [1, 0, 1]


def test_what_is_done_cannot_be_taken_back(cluster: wl.Cluster):
    tensor, table = cluster.tensor("w", (3, SHARD), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    for future in (tensor.push(np.ones((3, SHARD), FLOAT32)), table.push(range(9), np.ones((9, 2), FLOAT32))):
        future.wait()
        assert future.cancel() is False
        assert future.wait() is None
    assert (tensor.pull() == 1).all()


# -- the hold that these tests use -----------------------------------------------------------------------------------


@pytest.mark.embedded("holds a shard's turn from inside the process")
def test_a_held_shard_that_does_not_exist_is_refused(cluster: wl.Cluster):
    tensor, table = cluster.tensor("w", (4,), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument):
        _core.hold_tensor(tensor._core, 1)
    with pytest.raises(wl.InvalidArgument):
        _core.hold_table(table._core, 256)


def test_a_push_pull_that_times_out_is_applied_to_every_shard_all_the_same(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum())
    grad, out = np.ones(3 * SHARD, FLOAT32), np.full(3 * SHARD, -1, FLOAT32)
    with held(tensor, 1):
        with pytest.raises(wl.Timeout, match="the push goes on"):
            tensor.push_pull(grad, out=out, timeout=0.05)
        grad[:] = 100  # the caller's again, and so is out
        out[:] = -2
    np.testing.assert_array_equal(tensor.pull(), np.ones(3 * SHARD, FLOAT32))
    assert (out == -2).all()


def test_a_table_push_pull_that_times_out_is_applied_to_every_row_all_the_same(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Sum())
    keys = np.arange(1000)
    grads, out = np.ones((1000, 2), FLOAT32), np.full((1000, 2), -1, FLOAT32)
    with held(table, 7):
        with pytest.raises(wl.Timeout, match="the push goes on"):
            table.push_pull(keys, grads, out=out, timeout=0.05)
        grads[:] = 100
        out[:] = -2
    np.testing.assert_array_equal(table.pull(keys), np.ones((1000, 2), FLOAT32))
    assert (out == -2).all()


def test_pushes_of_ordinary_arrays_to_a_busy_shard_cannot_pile_up(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (1 << 18,), rule=wl.Sum())  # 1 MiB a push, 64 MiB may wait
    grad = np.ones(1 << 18, FLOAT32)
    with held(tensor, 0):
        futures = [tensor.push(grad, timeout=0.2) for _ in range(64)]
        with pytest.raises(wl.Timeout, match="not begun"):
            tensor.push(grad, timeout=0.2)
    for future in futures:
        future.wait()
    assert tensor.pull()[0] == 64
