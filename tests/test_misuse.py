"""What happens to those who do it wrong: a typed error, and nothing broken."""

import gc
import inspect
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FLOAT32, SHARD, every_call, held, numbers

import windlass as wl
from windlass import _core

BIG = 1 << 19  # float32 of 2 MiB: registered arrays of this size are used in place by another thread
TABLE_BYTES = 4 << 20  # one page of index and one of rows


# -- arrays of the wrong kind ----------------------------------------------------------------------------------------

WRONG_GRADIENTS = {
    "float64": np.ones((3, 2)),
    "int64": np.ones((3, 2), np.int64),
    "int32": np.ones((3, 2), np.int32),
    "uint8": np.ones((3, 2), np.uint8),
    "uint16": np.ones((3, 2), np.uint16),
    "bool": np.ones((3, 2), bool),
    "complex64": np.ones((3, 2), np.complex64),
    "longdouble": np.ones((3, 2), np.longdouble),
    "object": np.ones((3, 2), object),
    "text": np.full((3, 2), "1"),
    "dates": np.zeros((3, 2), "datetime64[s]"),
    "records": np.zeros((3, 2), [("a", "f4")]),
    "torch float64": torch.ones(3, 2, dtype=torch.float64),
    "torch uint16": torch.ones(3, 2, dtype=torch.int32).to(torch.uint16),
    "torch bool": torch.ones(3, 2, dtype=torch.bool),
    "torch complex64": torch.ones(3, 2, dtype=torch.complex64),
    "torch sparse": torch.ones(3, 2).to_sparse(),
    "torch meta": torch.ones(3, 2, device="meta"),
    "one dimension": np.ones(6, FLOAT32),
    "another row": np.ones((3, 3), FLOAT32),
    "too many rows": np.ones((4, 2), FLOAT32),
    "transposed": np.ones((2, 3), FLOAT32),
    "three dimensions": np.ones((3, 2, 1), FLOAT32),
    "ten dimensions": np.ones((3, 2) + (1,) * 8, FLOAT32),
    "scalar": FLOAT32(1),
    "number": 1.0,
    "None": None,
    "string": "gradient",
    "list of text": [["a", "b"]] * 3,
    "list of complex": [[1j, 2j]] * 3,
    "ragged list": [[1.0, 2.0], [3.0]],
    "list of wrong shape": [1.0, 2.0, 3.0],
    "dictionary": {"a": 1},
    "set": {1.0},
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
@pytest.mark.parametrize("verb", ["push", "push_pull", "push_pull_async"])
def test_a_gradient_of_another_kind_is_refused_and_nothing_applied(cluster: wl.Cluster, verb: str, name: str):
    tensor = cluster.tensor("w", (3, 2), rule=wl.Sum())
    table = cluster.table("t", 2, rule=wl.Sum())
    with pytest.raises(wl.ShapeMismatch, match=r"tensor 'w'.*:"):
        getattr(tensor, verb)(WRONG_GRADIENTS[name])
    with pytest.raises(wl.ShapeMismatch, match=r"table 't'.*:"):
        getattr(table, verb)([1, 2, 3], WRONG_GRADIENTS[name])
    assert not tensor.pull().any()
    assert len(table) == 0


WRONG_KEYS = {
    "float64": np.ones(2),
    "int16": np.ones(2, np.int16),
    "uint32": np.ones(2, np.uint32),
    "bool": np.ones(2, bool),
    "text": np.array(["a", "b"]),
    "complex": np.ones(2, complex),
    "two dimensions": np.ones((1, 2), np.int64),
    "number": 1,
    "None": None,
    "string": "keys",
    "list of floats": [1.0, 2.0],
    "list of None": [None, 1],
    "ragged list": [[1], [1, 2]],
    "too large": [2**64, 1],
    "both signs": [-1, 2**64 - 1],
    "dictionary": {1: 2},
    "torch float32": torch.ones(2),
    "torch int16": torch.ones(2, dtype=torch.int16),
    "torch uint16": torch.ones(2, dtype=torch.int32).to(torch.uint16),
    "torch two dimensions": torch.ones((1, 2), dtype=torch.int64),
    "torch sparse": torch.ones(2, dtype=torch.int64).to_sparse(),
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_keys_of_another_kind_are_refused_by_every_call(cluster: wl.Cluster, name: str):
    table, keys, grads = cluster.table("t", 2, rule=wl.Sum()), WRONG_KEYS[name], np.ones((2, 2), FLOAT32)
    calls: list[Any] = [
        lambda: table.pull(keys),
        lambda: table.pull(keys, create=False),
        lambda: table.pull_async(keys),
        lambda: table.push(keys, grads),
        lambda: table.push_pull(keys, grads),
        lambda: table.push_pull_async(keys, grads),
        lambda: table.delete(keys),
    ]
    for call in calls:
        with pytest.raises(wl.ShapeMismatch, match=r"table 't', keys: |keys of table 't'"):
            call()
    assert len(table) == 0


@pytest.mark.parametrize("n", [1, 3])
def test_there_is_a_gradient_per_key(cluster: wl.Cluster, n: int):
    table = cluster.table("t", 2, rule=wl.Sum())
    with pytest.raises(wl.ShapeMismatch, match=rf"expected .* of shape \(2, 2\), saw float32 of shape \({n}, 2\)"):
        table.push([1, 2], np.ones((n, 2), FLOAT32))
    with pytest.raises(wl.ShapeMismatch, match=rf"expected .* of shape \(2, 2\), saw float32 of shape \({n}, 2\)"):
        table.pull([1, 2], out=np.ones((n, 2), FLOAT32))
    assert len(table) == 0


# -- layouts ---------------------------------------------------------------------------------------------------------


def layouts(values: np.ndarray) -> dict[str, Any]:
    """The same numbers in memory of other layouts."""
    rows, columns = values.shape
    unaligned = np.frombuffer(b"\0" + values.tobytes(), np.uint8)[1:].view(FLOAT32).reshape(values.shape)
    spread = np.zeros((rows * 2, columns * 3), FLOAT32)[::2, ::3]
    spread[:] = values
    return {
        "contiguous": values,
        "in Fortran's order": np.asfortranarray(values),
        "spread": spread,
        "backwards": values[::-1, ::-1].copy()[::-1, ::-1],
        "unaligned": unaligned,
        "big-endian": values.astype(">f4"),
        "torch transposed": torch.from_numpy(values.T.copy()).T,
        "torch spread": torch.from_numpy(np.repeat(values, 2, axis=1))[:, ::2],
        "a subclass": values.view(np.memmap),
    }


LAYOUTS = list(layouts(np.zeros((3, 2), FLOAT32)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_layout_are_read(cluster: wl.Cluster, layout: str):
    values = numbers(3, 2)
    grad = layouts(values)[layout]
    tensor, table = cluster.tensor("w", (3, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    tensor.push(grad)
    table.push([1, 2, 3], grad)
    np.testing.assert_array_equal(tensor.pull(), values)
    np.testing.assert_array_equal(table.pull([1, 2, 3]), values)
    np.testing.assert_array_equal(np.asarray(tensor.push_pull_async(grad).wait()), values * 2)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("contiguous", "a subclass")])
@pytest.mark.parametrize("verb", ["pull", "pull_async", "push_pull", "push_pull_async"])
def test_an_out_that_cannot_be_written_in_place_is_refused(cluster: wl.Cluster, verb: str, layout: str):
    out = layouts(np.full((3, 2), 5, FLOAT32))[layout]
    tensor, table = cluster.tensor("w", (3, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    grads = [np.ones((3, 2), FLOAT32)] if "push" in verb else []
    with pytest.raises(wl.ShapeMismatch, match=r"tensor 'w'.*(contiguous|aligned|read-only)"):
        getattr(tensor, verb)(*grads, out=out)
    with pytest.raises(wl.ShapeMismatch, match=r"table 't'.*(contiguous|aligned|read-only)"):
        getattr(table, verb)([1, 2, 3], *grads, out=out)
    assert (np.asarray(out) == 5).all()
    assert not tensor.pull().any()
    assert len(table) == 0


def read_only() -> np.ndarray:
    array = np.full((3, 2), 5, FLOAT32)
    array.flags.writeable = False
    return array


WRONG_OUTPUTS = {
    "read-only": read_only(),
    "broadcast": np.broadcast_to(FLOAT32(5), (3, 2)),
    "list": [[5.0, 5.0]] * 3,
    "tuple": ((5.0, 5.0),) * 3,
    "string": "out",
    "number": 5.0,
    "float64": np.full((3, 2), 5.0),
    "int32": np.full((3, 2), 5, np.int32),
    "uint16": np.full((3, 2), 5, np.uint16),
    "complex64": np.full((3, 2), 5, np.complex64),
    "longdouble": np.full((3, 2), 5, np.longdouble),
    "object": np.full((3, 2), 5, object),
    "another shape": np.full((2, 3), 5, FLOAT32),
    "one dimension": np.full(6, 5, FLOAT32),
    "torch float64": torch.full((3, 2), 5, dtype=torch.float64),
    "torch uint16": torch.full((3, 2), 5, dtype=torch.int32).to(torch.uint16),
    "torch expanded": torch.tensor(5.0).expand(3, 2),
    "torch meta": torch.empty((3, 2), device="meta"),
}


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
@pytest.mark.parametrize("verb", ["pull", "pull_async", "push_pull", "push_pull_async"])
def test_an_out_of_another_kind_is_refused(cluster: wl.Cluster, verb: str, name: str):
    out = WRONG_OUTPUTS[name]
    tensor, table = cluster.tensor("w", (3, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    grads = [np.ones((3, 2), FLOAT32)] if "push" in verb else []
    with pytest.raises(wl.ShapeMismatch, match="tensor 'w'"):
        getattr(tensor, verb)(*grads, out=out)
    with pytest.raises(wl.ShapeMismatch, match="table 't'"):
        getattr(table, verb)([1, 2, 3], *grads, out=out)
    assert not tensor.pull().any()
    assert len(table) == 0


def test_out_and_dtype_must_agree(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3,), rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match="out is float32, but dtype=float16"):
        tensor.pull(out=np.ones(3, FLOAT32), dtype="float16")
    with pytest.raises(wl.ShapeMismatch, match="saw list"):
        tensor.pull(out=[1, 2, 3], dtype="float32")
    assert not tensor.pull(out=np.ones(3, FLOAT32), dtype=torch.float32).any()


@pytest.mark.parametrize("dtype", ["int32", "complex64", "text", np.uint8, torch.uint16, object])
def test_a_dtype_nothing_can_be_pulled_as_is_refused(cluster: wl.Cluster, dtype: Any):
    with pytest.raises(wl.InvalidArgument, match="dtype must be one of"):
        cluster.tensor("w", (3,), rule=wl.Sum()).pull(dtype=dtype)
    with pytest.raises(wl.InvalidArgument, match="dtype must be one of"):
        cluster.table("t", 3, rule=wl.Sum()).pull([1], dtype=dtype)
    with pytest.raises(wl.InvalidArgument, match="dtype must be one of"):
        cluster.empty(3, dtype)


# -- NaN and infinity ------------------------------------------------------------------------------------------------

NOT_FINITE = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_nan_and_infinity_pass_unless_refused(cluster: wl.Cluster, bad: float):
    tensor, table = cluster.tensor("w", (2,), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    tensor.push(np.array([1, bad], FLOAT32))
    table.push([7], np.array([[1, bad]], FLOAT32))
    np.testing.assert_array_equal(tensor.pull(), np.array([1, bad], FLOAT32))
    np.testing.assert_array_equal(table.pull([7]), np.array([[1, bad]], FLOAT32))


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("place", [0, SHARD, 3 * SHARD - 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("verb", ["push", "push_pull", "push_pull_async"])
def test_a_refused_number_changes_no_shard(cluster: wl.Cluster, verb: str, dtype: str, place: int, bad: float):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Adam(), init=wl.Normal(), reject_nonfinite=True)
    assert tensor.shards == 3
    before, version = tensor.fingerprint(), tensor.pull(newer_than=0).version
    grad = torch.ones(3 * SHARD).to(getattr(torch, dtype))
    grad[place] = bad
    with pytest.raises(wl.NonFinite, match="tensor 'w': the gradient has NaN or infinity; nothing was applied"):
        getattr(tensor, verb)(grad)
    assert tensor.fingerprint() == before
    assert not tensor.pull(newer_than=version).changed
    grad[place] = 1
    getattr(tensor, verb)(grad)
    assert tensor.pull(newer_than=version).changed


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_refused_number_makes_no_row(cluster: wl.Cluster, bad: float):
    table = cluster.table("t", 3, rule=wl.Sum(), reject_nonfinite=True)
    table.push([0], np.ones((1, 3), FLOAT32))
    grads = np.ones((500, 3), FLOAT32)
    grads[499, 2] = bad
    for call in (table.push, table.push_pull, table.push_pull_async):
        with pytest.raises(wl.NonFinite, match="table 't': the gradients have NaN or infinity; nothing was applied"):
            call(np.arange(500), grads)
    assert len(table) == 1
    assert table.pull([0]).tolist() == [[1, 1, 1]]


def test_wide_dtypes_refuse_nan_too_and_integers_have_none(cluster: wl.Cluster):
    wide = cluster.tensor("w", (2,), rule=wl.Max(), dtype="float64", reject_nonfinite=True)
    with pytest.raises(wl.NonFinite):
        wide.push(np.array([1, np.nan]))
    assert not wide.pull().any()
    whole = cluster.tensor("v", (2,), rule=wl.Sum(), dtype="int64", reject_nonfinite=True)
    bits = np.array([np.nan, np.inf]).view(np.int64)  # only looks like it
    np.testing.assert_array_equal(whole.push_pull(bits), bits)


@pytest.mark.parametrize("large", [FLOAT32(3.4e38), FLOAT32(-3.4e38), FLOAT32(1e-45)])
def test_the_largest_and_smallest_numbers_are_finite(cluster: wl.Cluster, large: FLOAT32):
    tensor = cluster.tensor("w", (2,), rule=wl.Assign(), reject_nonfinite=True)
    tensor.push(np.array([large, -0.0], FLOAT32))
    assert tensor.pull()[0] == large


# -- names, rules, arguments -----------------------------------------------------------------------------------------


def test_a_name_is_a_tensors_or_a_tables(cluster: wl.Cluster):
    cluster.tensor("w", (3,), rule=wl.Sum())
    cluster.table("t", 3, rule=wl.Sum())
    with pytest.raises(wl.SpecMismatch, match=r"there: tensor\(.*\n  asked: table\("):
        cluster.table("w", 3, rule=wl.Sum())
    with pytest.raises(wl.SpecMismatch, match=r"there: table\(.*\n  asked: tensor\("):
        cluster.tensor("t", (3,), rule=wl.Sum())


@pytest.mark.parametrize(
    "name", ["", "a" * 257, "ä" * 129, "app/w", "/", "a\nb", "a\0b", "\ud800", b"w", 5, None, ("w",)]
)
def test_a_bad_name_is_refused(cluster: wl.Cluster, name: Any):
    with pytest.raises(wl.InvalidArgument, match="name"):
        cluster.tensor(name, (3,), rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match="name"):
        cluster.table(name, 3, rule=wl.Sum())


@pytest.mark.parametrize("name", ["w", "a" * 256, "ä" * 128, "layer.0.weight", "with blanks", "重み", "a'b\"c\\"])
def test_other_names_are_fine(cluster: wl.Cluster, name: str):
    cluster.tensor(name, (3,), rule=wl.Sum()).push(np.ones(3, FLOAT32))
    assert cluster.tensor(name, (3,), rule=wl.Sum()).pull().tolist() == [1, 1, 1]


@pytest.mark.parametrize("rule", [None, "SGD", wl.SGD, 0.1, torch.optim.SGD])
def test_a_rule_is_a_windlass_rule(cluster: wl.Cluster, rule: Any):
    for make in (cluster.tensor, cluster.table):
        with pytest.raises(wl.InvalidArgument, match="'w': rule must be a windlass rule"):
            make("w", 3, rule=rule)


@pytest.mark.parametrize("init", ["zeros", wl.Normal, 0.0, np.zeros(3)])
def test_an_initialiser_is_a_windlass_initialiser(cluster: wl.Cluster, init: Any):
    for make in (cluster.tensor, cluster.table):
        with pytest.raises(wl.InvalidArgument, match="'w': init must be a windlass initialiser"):
            make("w", 3, rule=wl.Sum(), init=init)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "1", None, 1j])
def test_a_weight_is_a_finite_number_above_zero(cluster: wl.Cluster, weight: Any):
    tensor, table = cluster.tensor("w", (1, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    grad = np.ones((1, 2), FLOAT32)
    for verb in ("push", "push_pull", "push_pull_async"):
        with pytest.raises(wl.InvalidArgument, match="tensor 'w': weight must be a finite number above 0"):
            getattr(tensor, verb)(grad, weight=weight)
        with pytest.raises(wl.InvalidArgument, match="table 't': weight must be a finite number above 0"):
            getattr(table, verb)([1], grad, weight=weight)
    assert not tensor.pull().any()
    assert len(table) == 0


@pytest.mark.parametrize("weight", [1, 32, 0.5, np.int64(32), np.float32(0.5)])
def test_a_weight_may_be_any_real_number(cluster: wl.Cluster, weight: Any):
    tensor = cluster.tensor("w", (2,), rule=wl.Sum())
    tensor.push(np.ones(2, FLOAT32), weight=weight)
    assert tensor.pull().tolist() == [1, 1]  # every push is an update of its own


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan")])
@pytest.mark.parametrize("verb", ["pull", "push_pull", "fingerprint"])
def test_a_bad_timeout_is_refused_before_anything_happens(cluster: wl.Cluster, verb: str, timeout: float):
    tensor, table = cluster.tensor("w", (1, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    grad = [np.ones((1, 2), FLOAT32)] if "push" in verb else []
    keys = [[1]] if verb != "fingerprint" else []
    with pytest.raises(wl.InvalidArgument, match="timeout must be at least 0"):
        getattr(tensor, verb)(*grad, timeout=timeout)
    with pytest.raises(wl.InvalidArgument, match="timeout must be at least 0"):
        getattr(table, verb)(*keys, *grad, timeout=timeout)
    assert not tensor.pull().any()
    assert len(table) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0},
        {"threads": 257},
        {"threads": -1},
        {"threads": 1.5},
        {"threads": "2"},
        {"threads": True},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"memory_bytes_max": -1},
        {"memory_bytes_max": 1.5},
        {"memory_bytes_max": 2**64},
    ],
    ids=str,
)
def test_connect_refuses_what_cannot_be(options: Any):
    with pytest.raises(wl.InvalidArgument, match=f"connect: {next(iter(options))} must be"):
        wl.connect(**options)


@pytest.mark.parametrize("shape", [-1, (2, -1), 2.5, (2.5,), "abc", None, True])
def test_empty_refuses_a_shape_that_cannot_be(cluster: wl.Cluster, shape: Any):
    with pytest.raises(wl.InvalidArgument, match="empty: shape must be whole numbers"):
        cluster.empty(shape)


def test_empty_refuses_what_no_machine_has(cluster: wl.Cluster):
    with pytest.raises((wl.InvalidArgument, wl.ResourceExhausted), match="empty"):
        cluster.empty(2**46)
    with pytest.raises((wl.InvalidArgument, wl.ResourceExhausted), match="empty"):
        cluster.empty((2**40, 2**40))


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (0, 0), (2, 2), (0.5, 2), ("0", 1), (0, 2**32)])
def test_a_worker_is_in_its_world(cluster: wl.Cluster, rank: Any, world_size: Any):
    with pytest.raises(wl.InvalidArgument, match=f"rank {rank!r} is not in a world of {world_size!r}"):
        cluster.worker(rank, world_size)


def test_world_size_without_an_address_names_windlass_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(wl.InvalidArgument, match=r"WORLD_SIZE=2 .*`windlass run`"):
        wl.connect()
    for alone in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", alone)
        wl.connect(threads=1).close()


def test_an_address_says_that_there_is_no_network_yet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_ADDRESS", "localhost:7164")
    with pytest.raises(wl.InvalidArgument, match=r"WINDLASS_ADDRESS=localhost:7164 .*unset it"):
        wl.connect()


# -- after close -----------------------------------------------------------------------------------------------------


def closed_calls() -> dict[str, Any]:
    cluster = wl.connect(threads=1)
    tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    calls = every_call(cluster, tensor, table, cluster.empty((4, 2)))
    for call in calls.values():  # each is a call that works
        call()
    cluster.close()
    return calls


def test_every_public_method_is_among_the_calls():
    named = {name.split()[0] for name in closed_calls()}
    for kind in (wl.Cluster, wl.Tensor, wl.Table):
        methods = {
            f"{kind.__name__}.{name}"
            for name, member in vars(kind).items()
            if inspect.isfunction(member) and not name.startswith("_")
        }
        assert methods - {"Cluster.close"} <= named


@pytest.mark.parametrize("name", list(closed_calls()))
def test_use_after_close_raises_closed(name: str):
    with pytest.raises(wl.Closed, match="the cluster has been closed"):
        closed_calls()[name]()


def test_what_needs_no_server_works_after_close():
    cluster = wl.connect(threads=1)
    tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    future = tensor.push(np.ones((4, 2), FLOAT32))
    cluster.close()
    assert future.wait() is None
    assert repr(cluster) == "<Cluster, embedded, rank 0 of 1, closed>"
    assert (tensor.shape, tensor.shards, table.dim, cluster.rank, cluster.world_size) == ((4, 2), 1, 2, 0, 1)
    assert repr(tensor)
    assert repr(table)


def test_close_can_be_called_again():
    cluster = wl.connect(threads=1)
    cluster.close()
    cluster.close()
    with cluster:
        pass


def test_close_waits_for_requests_under_way():
    cluster = wl.connect(threads=2)
    tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    released = threading.Event()
    with held(tensor) as (hold,):
        future = tensor.push(np.ones(4, FLOAT32))
        threading.Timer(0.1, lambda: (released.set(), hold.release())).start()
        cluster.close()
        assert released.is_set()
    assert future.wait(timeout=1) is None


def test_futures_are_done_when_close_returns():
    for _ in range(50):
        cluster = wl.connect(threads=2)
        tensor = cluster.tensor("w", (4,), rule=wl.Sum())
        with held(tensor) as (hold,):
            future = tensor.push(np.ones(4, FLOAT32))
            hold.release()
            cluster.close()
            assert future.done()


def test_a_close_that_times_out_can_be_called_again():
    cluster = wl.connect(threads=2)
    tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    with held(tensor) as (hold,):
        future = tensor.push(np.ones(4, FLOAT32))
        for _ in range(2):
            with pytest.raises(wl.Timeout, match="1 requests are still under way"):
                cluster.close(timeout=0.05)
        with pytest.raises(wl.Closed):
            tensor.pull()
        hold.release()
        cluster.close()
    assert future.wait(timeout=1) is None


def test_the_end_of_a_with_block_closes():
    with wl.connect(threads=1) as cluster:
        tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    with pytest.raises(wl.Closed):
        tensor.pull()


def test_an_error_in_a_with_block_closes_and_passes():
    cluster = wl.connect(threads=1)
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
            lambda: tensor.pull(newer_than=0, timeout=seconds),
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


def test_the_clusters_timeout_is_the_default():
    with wl.connect(threads=1, timeout=0.1) as cluster:
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


def full_table(cluster: wl.Cluster) -> wl.Table:
    """A table without memory for more rows."""
    table = cluster.table("t", 256, rule=wl.Sum())
    for start in range(0, 1 << 20, 512):
        try:
            table.push(np.arange(start, start + 512), np.zeros((512, 256), FLOAT32)).wait()
        except wl.ResourceExhausted:
            return table
    pytest.fail("memory_bytes_max did not stop the table")


def drop_an_error(table: wl.Table) -> None:
    keys = np.arange(1 << 40, (1 << 40) + 4096)
    table.push(keys, np.ones((4096, 256), FLOAT32))
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
def test_the_error_of_a_dropped_future_is_raised_once_by_the_next_call(name: str):
    call = NEXT_CALLS[name]
    with wl.connect(threads=1, memory_bytes_max=TABLE_BYTES) as cluster:
        table = full_table(cluster)
        clock = cluster.clock
        drop_an_error(table)
        with pytest.raises(wl.ResourceExhausted, match=DROPPED):
            call(cluster, table)
        assert cluster.clock == clock
        if not cluster._engine.closed:
            call(cluster, table)


def test_other_objects_do_not_raise_the_error_of_a_dropped_future():
    with wl.connect(threads=1, memory_bytes_max=TABLE_BYTES) as cluster:
        tensor, table = cluster.tensor("w", (4,), rule=wl.Sum()), full_table(cluster)
        drop_an_error(table)
        tensor.push(np.ones(4, FLOAT32)).wait()
        assert tensor.pull().tolist() == [1, 1, 1, 1]
        with pytest.raises(wl.ResourceExhausted, match=DROPPED):
            cluster.tick()


def test_several_dropped_errors_are_counted():
    cluster = wl.connect(threads=1, memory_bytes_max=TABLE_BYTES)
    table = full_table(cluster)
    with held(table, 3):  # they fail after they were dropped
        for i in range(1, 4):
            keys = np.arange(i << 40, (i << 40) + 4096)
            table.push(keys, np.ones((4096, 256), FLOAT32))
    with pytest.raises(wl.ResourceExhausted, match="from 3 earlier requests, the first of them"):
        cluster.close()  # waits for all three


def test_an_error_that_was_seen_is_not_raised_again():
    with wl.connect(threads=1, memory_bytes_max=TABLE_BYTES) as cluster:
        table = full_table(cluster)
        future = table.push(np.arange(1 << 40, (1 << 40) + 4096), np.ones((4096, 256), FLOAT32))
        for _ in range(2):
            with pytest.raises(wl.ResourceExhausted):
                future.wait()
        del future
        gc.collect()
        cluster.tick()
        len(table)


def test_close_raises_the_error_of_its_own_worker():
    cluster = wl.connect(threads=1, memory_bytes_max=TABLE_BYTES)
    worker = cluster.worker(1, 2)
    table = full_table(worker)
    drop_an_error(table)
    cluster.close()  # not this worker's
    with pytest.raises(wl.ResourceExhausted, match=DROPPED):
        worker.close()
    worker.close()


def test_a_push_that_cannot_grow_the_table_leaves_its_shard_as_it_was():
    with wl.connect(threads=1, memory_bytes_max=TABLE_BYTES) as cluster:
        table = full_table(cluster)
        before = len(table)
        keys = next(table.export(1)).keys  # one row that is there; its shard is full
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
        with pytest.raises(wl.ResourceExhausted, match="tensor 'w'"):
            cluster.tensor("w", (1 << 20,), rule=wl.Sum())


# -- the hold that these tests use -----------------------------------------------------------------------------------


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
