"""Tensors: named dense arrays on the servers."""

import os
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import FLOAT32, PATIENCE_S, SHARD, Connect, check_python, held, numbers, rng

import windlass as wl

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RULES = {
    "SGD": wl.SGD(lr=0.1, weight_decay=0.01),
    "SGD momentum": wl.SGD(lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": wl.Adagrad(lr=0.1, lr_decay=0.1),
    "RowAdagrad": wl.RowAdagrad(lr=0.1),
    "Adam": wl.Adam(),
    "AdamW": wl.AdamW(),
    "Sum": wl.Sum(),
    "Assign": wl.Assign(),
    "Max": wl.Max(),
    "Min": wl.Min(),
    "RMSProp": wl.RMSProp(momentum=0.9, centered=True),
    "Adadelta": wl.Adadelta(),
    "Adamax": wl.Adamax(),
    "NAdam": wl.NAdam(),
    "Lion": wl.Lion(),
    "FTRL": wl.FTRL(),
}
COUNTING = {
    "SGD momentum",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
}  # their step depends on how often a shard was updated


# -- create and open -------------------------------------------------------------------------------------------------


def test_a_name_opens_what_was_created(cluster: wl.Cluster):
    first = cluster.tensor("w", (3, SHARD), rule=wl.Sum())
    first.push(np.ones((3, SHARD), FLOAT32))
    second = cluster.tensor("w", (3, SHARD), rule=wl.Sum())
    np.testing.assert_array_equal(second.pull(), np.ones((3, SHARD)))


def test_clusters_have_their_own_names(connect: Connect):
    with connect() as cluster, connect() as other:  # on servers: apps
        cluster.tensor("w", (3,), rule=wl.Sum()).push(np.ones(3, FLOAT32))
        assert not other.tensor("w", (3,), rule=wl.Sum()).pull().any()


def test_hyperparameters_are_no_part_of_the_spec(cluster: wl.Cluster):
    cluster.tensor("w", (3,), rule=wl.SGD(lr=0.1))
    again = cluster.tensor("w", (3,), rule=wl.SGD(lr=0.5, weight_decay=0.1))
    again.push(np.ones(3, FLOAT32))
    np.testing.assert_array_equal(again.pull(), np.full(3, -0.5, FLOAT32))


SPEC: dict[str, Any] = {"shape": (3, 2), "rule": wl.Adagrad(), "init": wl.Normal(std=0.5), "seed": 1}


@pytest.mark.parametrize(
    ("change", "there", "asked"),
    [
        ({"shape": (2, 3)}, "shape=(3, 2)", "shape=(2, 3)"),
        ({"shape": (6,)}, "shape=(3, 2)", "shape=(6,)"),
        ({"rule": wl.Adam()}, "rule=Adagrad", "rule=Adam"),
        ({"rule": wl.Adagrad(initial_accumulator_value=0.5)}, "rule=Adagrad", "initial_accumulator_value=0.5"),
        ({"init": wl.Normal(std=0.25)}, "std=0.5", "std=0.25"),
        ({"init": wl.Zeros()}, "std=0.5", "Zeros()"),
        ({"seed": 2}, "seed=1", "seed=2"),
        ({"reject_nonfinite": True}, "reject_nonfinite=False", "reject_nonfinite=True"),
        ({"rule": wl.Sum(), "dtype": np.float64, "init": None}, "dtype=float32", "dtype=float64"),
    ],
)
def test_another_spec_is_refused_and_both_are_shown(cluster: wl.Cluster, change: Any, there: str, asked: str):
    cluster.tensor("w", **SPEC)
    with pytest.raises(wl.SpecMismatch) as caught:
        cluster.tensor("w", **{**SPEC, **change})
    first, there_line, asked_line = str(caught.value).splitlines()
    assert "'w'" in first
    assert there_line.startswith("  there: ")
    assert there in there_line
    assert asked_line.startswith("  asked: ")
    assert asked in asked_line


def test_specs_that_differ_in_a_small_number_look_different(cluster: wl.Cluster):
    cluster.tensor("w", (3,), rule=wl.Sum(), init=wl.Normal(std=1e-8))
    with pytest.raises(wl.SpecMismatch) as caught:
        cluster.tensor("w", (3,), rule=wl.Sum(), init=wl.Normal(std=2e-8))
    _, there, asked = str(caught.value).splitlines()
    assert there.removeprefix("  there: ") != asked.removeprefix("  asked: ")


def test_momentum_is_part_of_the_spec(cluster: wl.Cluster):
    cluster.tensor("w", (3,), rule=wl.SGD(lr=0.1))
    with pytest.raises(wl.SpecMismatch, match="SGD with momentum"):
        cluster.tensor("w", (3,), rule=wl.SGD(lr=0.1, momentum=0.9))


@pytest.mark.parametrize("rule", [wl.SGD(lr=0.1), wl.Adagrad(), wl.RowAdagrad(), wl.Adam()])
@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_optimizers_work_on_float32_only(cluster: wl.Cluster, rule: wl.Rule, dtype: type):
    with pytest.raises(wl.InvalidArgument, match=r"works on float32.*Sum, Max, Min and Assign take any dtype"):
        cluster.tensor("w", (3,), rule=rule, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.uint8, np.complex64, "bfloat16", "text", torch.float16])
def test_a_dtype_that_cannot_be_kept_is_refused(cluster: wl.Cluster, dtype: Any):
    with pytest.raises(wl.InvalidArgument, match="tensor 'w': dtype must be"):
        cluster.tensor("w", (3,), rule=wl.Sum(), dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float64, "float64", np.dtype("float64"), torch.float64, float])
def test_a_dtype_can_be_said_in_many_ways(cluster: wl.Cluster, dtype: Any):
    tensor = cluster.tensor("w", (3,), rule=wl.Sum(), dtype=dtype)
    assert tensor.dtype == "float64"
    assert tensor.pull().dtype == np.float64


def test_random_initialisers_are_for_float32(cluster: wl.Cluster):
    with pytest.raises(wl.InvalidArgument, match="starts with Zeros or Constant"):
        cluster.tensor("w", (3,), rule=wl.Sum(), dtype=np.float64, init=wl.Normal())


@pytest.mark.parametrize("value", [1.5, 1e300, 2**53 + 1, -(2**64)])
def test_an_int64_tensor_starts_with_a_number_it_can_hold(cluster: wl.Cluster, value: float):
    with pytest.raises(wl.InvalidArgument, match="int64"):
        cluster.tensor("w", (3,), rule=wl.Sum(), dtype=np.int64, init=wl.Constant(value))


@pytest.mark.parametrize("value", [0, -(2**63), 2**62, -7.0])
def test_an_int64_tensor_starts_with_exactly_its_constant(cluster: wl.Cluster, value: float):
    tensor = cluster.tensor("w", (3,), rule=wl.Sum(), dtype=np.int64, init=wl.Constant(value))
    assert tensor.pull().tolist() == [value] * 3


@pytest.mark.parametrize("shape", [-1, (2, -1), (2.0,), (True, 2), "abc", None, (None,), 1.5, [[2]]])
def test_a_shape_that_cannot_be_is_refused(cluster: wl.Cluster, shape: Any):
    with pytest.raises(wl.InvalidArgument, match="tensor 'w': shape must be whole numbers"):
        cluster.tensor("w", shape, rule=wl.Sum())


def test_eight_dimensions_are_the_most(cluster: wl.Cluster):
    shape = (1, 2, 1, 2, 1, 2, 1, 3)
    tensor = cluster.tensor("w", shape, rule=wl.Sum())
    grad = numbers(*shape)
    np.testing.assert_array_equal(tensor.push_pull(grad), grad)
    with pytest.raises(wl.InvalidArgument, match="at most 8 dimensions, not 9"):
        cluster.tensor("v", (1,) * 9, rule=wl.Sum())


@pytest.mark.parametrize("shape", [(2**40 + 1,), (2**20, 2**21), (2**32, 2**32)])
def test_a_tensor_has_at_most_2_to_the_40_elements(cluster: wl.Cluster, shape: tuple[int, ...]):
    with pytest.raises(wl.InvalidArgument, match=r"more than 2\^40 elements"):
        cluster.tensor("w", shape, rule=wl.Sum())


@pytest.mark.embedded("looks at memory_bytes; tests/wire/test_remote.py has servers with a limit")
def test_memory_has_the_limit_that_was_asked_for():
    with wl.connect(threads=1, memory_bytes_max=1 << 20) as small:
        with pytest.raises(wl.ResourceExhausted, match=r"tensor 'w'.*memory_bytes_max=1048576"):
            small.tensor("w", (1 << 20,), rule=wl.Sum())
        assert small.memory_bytes == 0
        small.tensor("w", (1 << 17,), rule=wl.Sum())  # the refusal left neither name nor memory behind
        assert 1 << 19 <= small.memory_bytes <= 1 << 20


def test_a_tensor_that_no_machine_has_room_for_is_refused_when_it_is_made(cluster: wl.Cluster):
    with pytest.raises(wl.ResourceExhausted, match=r"tensor 'w': wanted \d+ bytes more, has \d+ of memory") as caught:
        cluster.tensor("w", 2**40, rule=wl.Sum())  # 4 TiB
    wanted, has, of = map(int, re.findall(r"\d+", str(caught.value))[-3:])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert wanted >= 2**41
    assert has < of < machine
    assert cluster.tensor("w", 4, rule=wl.Sum()).pull().tolist() == [0] * 4


def test_a_tensor_says_what_it_is(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3, 2), rule=wl.SGD(lr=0.5), seed=3)
    assert (tensor.name, tensor.shape, tensor.dtype, tensor.seed, len(tensor)) == ("w", (3, 2), "float32", 3, 3)
    assert tensor.rule == wl.SGD(lr=0.5)
    assert tensor.init == wl.Zeros()
    assert "'w'" in repr(tensor)
    assert "(3, 2)" in repr(tensor)
    assert (tensor[1:].shape, len(tensor[1:])) == ((2, 2), 2)
    assert "rows" in repr(tensor[1:])


@pytest.mark.parametrize(
    ("shape", "shards"),
    [((0,), 0), ((), 1), ((SHARD,), 1), ((SHARD + 1,), 2), ((3 * SHARD,), 3), ((3, SHARD), 3), ((2, 3 * SHARD), 2)],
)
def test_small_tensors_are_cut_into_shards_of_64_kib_between_rows(cluster: wl.Cluster, shape: Any, shards: int):
    assert cluster.tensor("w", shape, rule=wl.Sum()).shards == shards


# -- initial values --------------------------------------------------------------------------------------------------


def test_initial_values_are_what_was_asked_for(cluster: wl.Cluster):
    n = 200_000
    assert not cluster.tensor("zeros", n, rule=wl.Sum()).pull().any()
    assert (cluster.tensor("constant", n, rule=wl.Sum(), init=wl.Constant(0.1)).pull() == FLOAT32(0.1)).all()
    uniform = cluster.tensor("uniform", n, rule=wl.Sum(), init=wl.Uniform(-1.0, 3.0)).pull()
    assert -1.0 <= uniform.min() < -0.99
    assert 2.99 < uniform.max() <= 3.0
    assert abs(uniform.mean() - 1.0) < 0.02
    normal = cluster.tensor("normal", n, rule=wl.Sum(), init=wl.Normal(mean=2.0, std=0.5)).pull()
    assert abs(normal.mean() - 2.0) < 0.006
    assert abs(normal.std() - 0.5) < 0.005
    assert abs((np.abs(normal - 2.0) < 0.5).mean() - 0.6827) < 0.006
    assert len(np.unique(normal)) > n * 0.9


def test_initial_values_depend_on_seed_name_and_place_alone(cluster: wl.Cluster):
    def start(cluster: wl.Cluster, name: str, shape: tuple[int, ...], **options: Any) -> np.ndarray:
        return cluster.tensor(name, shape, **{"rule": wl.Sum(), "init": wl.Normal(), **options}).pull()

    here = start(cluster, "w", (4, SHARD), seed=5)
    with wl.connect(threads=1) as other:
        np.testing.assert_array_equal(start(other, "w", (4, SHARD), seed=5, rule=wl.Adam()), here)
    with wl.connect(threads=1) as other:
        np.testing.assert_array_equal(start(other, "w", (SHARD // 2, 8), seed=5).ravel(), here.ravel())
    with wl.connect(threads=1) as other:
        assert (start(other, "w", (4, SHARD), seed=6) != here).mean() > 0.99
    assert (start(cluster, "v", (4, SHARD), seed=5) != here).mean() > 0.99
    assert len(np.unique(here)) > here.size * 0.9  # shards do not repeat each other


# -- push and pull ---------------------------------------------------------------------------------------------------

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (3 * SHARD + 5,), (5, SHARD + 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("verb", ["push and pull", "push_pull", "push_pull_async", "push_async and pull_async"])
def test_what_is_pushed_is_in_the_next_pull(cluster: wl.Cluster, shape: tuple[int, ...], verb: str):
    tensor, expected = cluster.tensor("w", shape, rule=wl.Sum()), np.zeros(shape, FLOAT32)
    for step in range(3):
        grad = rng(step).integers(-9, 9, shape).astype(FLOAT32)
        expected = expected + grad
        if verb == "push and pull":
            assert tensor.push(grad).wait() is None
            got = tensor.pull()
        elif verb == "push_pull":
            got = tensor.push_pull(grad)
        elif verb == "push_pull_async":
            got = tensor.push_pull_async(grad).wait()
        else:
            tensor.push_async(grad)
            got = tensor.pull_async().wait()
        assert (type(got), got.dtype, got.shape) == (np.ndarray, np.float32, shape)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("verb", ["pull", "push_pull", "pull_async", "push_pull_async"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "registered"])
def test_out_is_filled_and_returned(cluster: wl.Cluster, verb: str, kind: str):
    shape = (3, SHARD)
    tensor = cluster.tensor("w", shape, rule=wl.Sum(), init=wl.Normal())
    start, grad = tensor.pull(), numbers(*shape)
    out: Any = cluster.empty(shape) if kind == "registered" else np.empty(shape, FLOAT32)
    out = torch.from_numpy(out) if kind == "torch" else out
    got = getattr(tensor, verb)(*([grad] if "push" in verb else []), out=out)
    got = got.wait() if "async" in verb else got
    assert got is out
    np.testing.assert_array_equal(np.asarray(out), start + grad if "push" in verb else start)


def test_an_ordinary_out_is_written_by_the_first_wait_and_never_again(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum(), init=wl.Constant(1.0))
    out = np.zeros(3 * SHARD, FLOAT32)
    future = tensor.pull_async(out=out)
    assert not out.any()
    future.wait()
    assert (out == 1).all()
    out[:] = 5
    assert future.wait() is out
    assert (out == 5).all()


def test_a_gradient_may_be_its_own_out(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (5, SHARD), rule=wl.Sum(), init=wl.Constant(1.0))
    grad = numbers(5, SHARD)
    expected = grad + 1
    assert tensor.push_pull(grad, out=grad) is grad
    np.testing.assert_array_equal(grad, expected)


def test_arrays_of_one_request_must_not_overlap(cluster: wl.Cluster):
    tensor, memory = cluster.tensor("w", (8,), rule=wl.Sum()), np.ones(12, FLOAT32)
    with pytest.raises(wl.InvalidArgument, match="overlap"):
        tensor.push_pull(memory[:8], out=memory[4:])
    assert not tensor.pull().any()


def test_futures_say_how_far_they_are(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3,), rule=wl.Sum())
    with held(tensor):
        future = tensor.push(np.ones(3, FLOAT32))
        assert not future.done()
        assert repr(future) == "<Future, under way>"
    future.wait()
    assert future.done()
    assert repr(future) == "<Future, done>"


def test_pushes_of_one_worker_are_applied_in_order(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Assign())
    with held(tensor, 1):
        futures = [tensor.push(np.full(3 * SHARD, i, FLOAT32)) for i in range(20)]
    futures[-1].wait()
    assert (tensor.pull() == 19).all()


def test_large_requests_run_on_several_threads(cluster: wl.Cluster):
    rows = 1024  # 4 MiB: above what is done by the caller alone
    tensor = cluster.tensor("w", (rows, 1024), rule=wl.Sum())
    grad, out = cluster.empty((rows, 1024)), cluster.empty((rows, 1024))
    grad[:] = numbers(rows, 1024)
    for i in range(1, 4):
        np.testing.assert_allclose(tensor.push_pull(grad, out=out), grad * i, rtol=1e-6)
    for i in range(4, 7):
        assert tensor.push_pull_async(grad, out=out).wait() is out
        np.testing.assert_allclose(out, grad * i, rtol=1e-6)


# -- dtypes ----------------------------------------------------------------------------------------------------------


def special_numbers() -> np.ndarray:
    """Every half of the bits of a float32, with the other half in the middle of two neighbours and beside it."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate([high | low for low in (0x0000, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xF000)]).view(FLOAT32)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_a_pull_rounds_to_nearest_even(cluster: wl.Cluster, dtype: np.dtype):
    values = special_numbers()
    tensor = cluster.tensor("w", values.shape, rule=wl.Assign())
    tensor.push(values)
    got = tensor.pull(dtype=dtype)
    assert got.dtype == dtype
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got.astype(FLOAT32), values.astype(dtype).astype(FLOAT32))


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_every_short_number_travels_both_ways(cluster: wl.Cluster, dtype: np.dtype):
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    tensor = cluster.tensor("w", values.shape, rule=wl.Assign())
    got = tensor.push_pull(values, dtype=dtype)
    number = ~np.isnan(values.astype(FLOAT32))
    np.testing.assert_array_equal(got.view(np.uint16)[number], values.view(np.uint16)[number])
    assert np.isnan(got[~number].astype(FLOAT32)).all()
    np.testing.assert_array_equal(tensor.pull(), values.astype(FLOAT32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_in_torch_out(cluster: wl.Cluster, dtype: str):
    kind, shape = getattr(torch, dtype), (3, SHARD)
    tensor = cluster.tensor("w", shape, rule=wl.Sum())
    grad = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(0)).to(kind)
    for got in (tensor.push_pull(grad), tensor.push_pull_async(grad).wait()):
        assert isinstance(got, torch.Tensor)
        assert got.dtype == torch.float32  # what is kept; the gradient's precision is no wish for the answer's
    assert torch.equal(got, grad.float() * 2)
    out = torch.zeros(shape, dtype=kind)
    assert tensor.pull(out=out) is out
    assert torch.equal(out, grad * 2)
    out.zero_()
    assert tensor.pull_async(out=out).wait() is out
    assert torch.equal(out, grad * 2)
    assert tensor.push_pull(grad, dtype=kind).dtype == kind


def test_pull_gives_numpy_unless_out_or_dtype_is_torchs(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3,), rule=wl.Sum())
    assert type(tensor.pull()) is np.ndarray
    assert tensor.pull(dtype="bfloat16").dtype == BFLOAT16
    assert tensor.pull(dtype=torch.bfloat16).dtype == torch.bfloat16
    assert type(tensor.push_pull(np.ones(3, FLOAT32))) is np.ndarray
    assert isinstance(tensor.pull(out=torch.empty(3)), torch.Tensor)


def test_tensors_that_require_grad_are_read_and_written(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3,), rule=wl.Sum())
    parameter = torch.nn.Parameter(torch.arange(3.0))
    tensor.push(parameter)
    tensor.push(parameter * 2)  # not a leaf
    got = tensor.push_pull(parameter, out=parameter)
    assert got is parameter
    assert parameter.tolist() == [0, 4, 8]
    assert parameter.requires_grad
    tensor.pull_async(out=parameter).wait()
    assert parameter.tolist() == [0, 4, 8]


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_wide_tensors_take_and_give_their_own_dtype(cluster: wl.Cluster, dtype: type):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum(), dtype=dtype)
    assert tensor.shards == 6
    grad = np.arange(3 * SHARD).astype(dtype)
    out = np.empty_like(grad)
    assert tensor.push_pull(grad, out=out) is out
    np.testing.assert_array_equal(out, grad)
    assert torch.equal(tensor.push_pull(torch.from_numpy(grad)), torch.from_numpy(grad * 2))
    for wrong in {np.float64: (np.int64, np.int32), np.int64: (np.float32, np.int16)}[dtype]:
        with pytest.raises(wl.InvalidArgument, match=f"saw {np.dtype(wrong).name}"):
            tensor.push(grad.astype(wrong))
    with pytest.raises(wl.InvalidArgument, match=r"out: expected dtype .* saw float32"):
        tensor.pull(out=grad.astype(np.float32))


@pytest.mark.parametrize(("stored", "given"), [("float32", "float64"), ("float64", "float16"), ("int64", "int32")])
def test_arrays_of_an_objects_own_kind_are_converted(cluster: wl.Cluster, stored: str, given: str):
    tensor = cluster.tensor("w", (3,), rule=wl.Sum(), dtype=stored)
    grad = np.array([1, -2, 3], given)
    tensor.push(grad)
    tensor.push(torch.from_numpy(grad))
    tensor[0:2].push(grad[0:2])
    assert tensor.pull().dtype == stored
    assert tensor.pull().tolist() == [3, -6, 6]


def test_float64_gradients_train_like_float32_ones(cluster: wl.Cluster):
    grad = np.linspace(-1, 1, 6).reshape(3, 2)  # of numpy's default dtype

    def trained(name: str, grad: Any) -> list[Any]:
        tensor = cluster.tensor(f"{name} tensor", (3, 2), rule=wl.SGD(lr=0.1))
        table = cluster.table(f"{name} table", 2, rule=wl.SGD(lr=0.1))
        tensor.push(grad)
        table.push([1, 2, 3], grad)
        return [tensor.pull(), table.pull([1, 2, 3])]

    np.testing.assert_array_equal(trained("wide", grad), trained("narrow", grad.astype(np.float32)))


def test_lists_and_numbers_take_the_tensors_dtype(cluster: wl.Cluster):
    for dtype in ("float32", "float64", "int64"):
        tensor = cluster.tensor(dtype, (3,), rule=wl.Sum(), dtype=dtype)
        tensor.push([1, 2, 3])
        tensor.push((1, 0, True))
        assert tensor.pull().tolist() == [2, 2, 4]
    scalar = cluster.tensor("scalar", (), rule=wl.Sum())
    assert scalar.push_pull(1.5) == 1.5
    assert scalar.push_pull(2).shape == ()
    with pytest.raises(wl.InvalidArgument, match="saw float64"):
        cluster.tensor("int64", (3,), rule=wl.Sum(), dtype="int64").push([0.5, 1, 2])


# -- rows ------------------------------------------------------------------------------------------------------------

RANGES = [slice(None), slice(2, 7), slice(-3, None), slice(0, 0), slice(5, 2), slice(7, 100), slice(9, 10)]


@pytest.mark.parametrize("row", [(), (3,), (SHARD // 2 + 1,)], ids=["1-D", "short rows", "long rows"])
@pytest.mark.parametrize("rows", RANGES, ids=str)
def test_a_range_of_rows_is_numpys_slice(cluster: wl.Cluster, rows: slice, row: tuple[int, ...]):
    tensor = cluster.tensor("w", (10, *row), rule=wl.Sum(), init=wl.Normal())
    expected = tensor.pull()
    np.testing.assert_array_equal(tensor[rows].pull(), expected[rows])
    grad = numbers(*expected[rows].shape)
    tensor[rows].push(grad)
    expected[rows] += grad
    np.testing.assert_array_equal(tensor.pull(), expected)
    np.testing.assert_array_equal(tensor[rows].push_pull(grad), expected[rows] + grad)


LISTS = [[3], [0, 9, 4], [-1, 0, -10], [2, 2, -8, 5, 2], [], np.array([1, 3], np.uint8), range(2, 5)]


@pytest.mark.parametrize("row", [(), (3,), (SHARD // 2 + 1,)], ids=["1-D", "short rows", "long rows"])
@pytest.mark.parametrize("rows", LISTS, ids=str)
def test_a_list_of_rows_is_numpys_index(cluster: wl.Cluster, rows: Any, row: tuple[int, ...]):
    tensor = cluster.tensor("w", (10, *row), rule=wl.Sum(), init=wl.Uniform(-9, 9))
    tensor.push(np.round(tensor.pull()) - tensor.pull())  # whole numbers: sums are exact in any order
    expected, index = tensor.pull(), np.asarray(rows, np.int64)
    np.testing.assert_array_equal(tensor[rows].pull(), expected[index])
    grad = np.round(numbers(len(index), *row) * 9)
    np.add.at(expected, index, grad)
    tensor[rows].push(grad)
    np.testing.assert_array_equal(tensor.pull(), expected)
    np.add.at(expected, index, grad)
    np.testing.assert_array_equal(tensor[rows].push_pull(grad), expected[index])
    np.testing.assert_array_equal(tensor[torch.from_numpy(index)].pull(), expected[index])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [(wl.Sum(), [5, 7, 5]), (wl.Max(), [4, 7, 4]), (wl.Min(), [-4, -7, -4]), (wl.Assign(), [1, 7, 1])],
    ids=str,
)
def test_repeated_rows_are_combined_in_order(cluster: wl.Cluster, dtype: type, rule: wl.Rule, expected: list[int]):
    tensor = cluster.tensor("w", (4, SHARD), rule=rule, dtype=dtype)
    sign = -1 if isinstance(rule, wl.Min) else 1  # weights start at 0
    grad = np.repeat(np.array([[4], [7], [1]], dtype) * sign, SHARD, axis=1)
    got = tensor[[2, 1, -2]].push_pull(grad)
    np.testing.assert_array_equal(got, np.repeat(np.array(expected, dtype)[:, None], SHARD, axis=1))
    assert not tensor[[0, 3]].pull().any()


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_repeated_rows_are_added_in_float32(cluster: wl.Cluster, dtype: np.dtype):
    tensor = cluster.tensor("w", (4, 1), rule=wl.Sum())
    tensor[[2, 2]].push(np.array([[2048], [1]], dtype))  # 2049 is no number of either short type
    assert tensor.pull().ravel().tolist() == [0, 0, 2049, 0]


def test_the_list_of_rows_is_copied(cluster: wl.Cluster):
    tensor, rows = cluster.tensor("w", (4,), rule=wl.Sum()), np.array([0, 1])
    view = tensor[rows]
    rows[:] = 3
    view.push([1.0, 2.0])
    assert tensor.pull().tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize("rows", [[4], [-5], [0, 99], np.array([2**64 - 1], np.uint64)], ids=str)
def test_rows_that_are_not_there_are_named(cluster: wl.Cluster, rows: Any):
    tensor = cluster.tensor("w", (4, 2), rule=wl.Sum())
    wrong = next(int(r) for r in rows if not -4 <= int(r) < 4)
    with pytest.raises(wl.InvalidArgument, match=rf"tensor 'w'.*row {wrong} of 4"):
        tensor[rows].pull()


@pytest.mark.parametrize(
    "rows", [1, 1.5, [1.5], "a", None, ..., [True, False, True, True], [[1, 2]], [[1], [1, 2]], (slice(2), 1)], ids=str
)
def test_what_is_no_list_of_rows_is_refused(cluster: wl.Cluster, rows: Any):
    tensor = cluster.tensor("w", (4, 2), rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match="rows are a slice or a list of integers"):
        tensor[rows]


def test_two_indices_are_not_taken_for_a_list_of_rows(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (4, 2), rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match=r"tensor 'w': .*not \(1, 2\); for rows \[1, 2\] use t\[\[1, 2\]\]"):
        tensor[1, 2]
    assert tensor[[1, 2]].pull().shape == (2, 2)
    with pytest.raises(wl.InvalidArgument, match="columns cannot be chosen"):
        tensor[:, 1]


def test_rows_have_step_one_and_no_rows_themselves(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (4, 2), rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match="step 1, not 2"):
        tensor[::2]
    with pytest.raises(wl.InvalidArgument, match="step 1, not -1"):
        tensor[::-1]
    with pytest.raises(wl.InvalidArgument, match="rows of rows"):
        tensor[1:][1:]


@pytest.mark.parametrize("verb", ["pull_async", "push_pull_async", "push"])
def test_rows_have_futures_too(cluster: wl.Cluster, verb: str):
    tensor, out = cluster.tensor("w", (6, SHARD), rule=wl.Sum()), np.zeros((2, SHARD), FLOAT32)
    view, grad = tensor[[4, 1]], numbers(2, SHARD)
    if verb == "push":
        view.push(grad).wait()
        view.pull(out=out)
    elif verb == "pull_async":
        view.push(grad)
        view.pull_async(out=out).wait()
    else:
        view.push_pull_async(grad, out=out).wait()
    np.testing.assert_array_equal(out, grad)
    np.testing.assert_array_equal(tensor[[1, 4]].pull(), grad[::-1])


# -- scalars and nothing ---------------------------------------------------------------------------------------------


def test_a_scalar_is_a_tensor(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (), rule=wl.SGD(lr=0.5), init=wl.Constant(1.0))
    assert (tensor.shape, tensor.shards) == ((), 1)
    for grad in (np.float32(2), np.array(2, FLOAT32), torch.tensor(2.0), 2.0):
        before = tensor.pull()
        got = tensor.push_pull(grad)
        assert got.shape == ()
        assert float(got) == before - 1
    with pytest.raises(TypeError, match="no len"):
        len(tensor)
    with pytest.raises(wl.InvalidArgument, match="a scalar has no rows"):
        tensor[0:1]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("rule", [wl.Sum(), wl.Adam(), wl.RowAdagrad()], ids=str)
def test_a_tensor_may_have_no_elements(cluster: wl.Cluster, shape: tuple[int, ...], rule: wl.Rule):
    tensor, grad = cluster.tensor("w", shape, rule=rule, init=wl.Normal()), np.zeros(shape, FLOAT32)
    assert tensor.shards == 0
    assert tensor.push(grad).wait() is None
    assert tensor.pull().shape == shape
    assert tensor.push_pull(grad).shape == shape
    assert tensor.push_pull_async(grad, out=grad).wait() is grad
    assert tensor.pull(dtype="bfloat16").shape == shape
    assert tensor.pull(out=torch.empty(shape)).shape == shape
    assert tensor.pull_newer().changed is False
    assert tensor[0:0].pull().shape == (0, *shape[1:])
    assert tensor[[]].push_pull(np.zeros((0, *shape[1:]), FLOAT32)).shape == (0, *shape[1:])
    assert len(tensor.fingerprint()) == 16


@pytest.mark.parametrize("rows", ["0:2", "[2, 0, 2]", "1:3"])
def test_rows_without_elements_can_be_selected(here: dict[str, str], rows: str):
    check_python(
        f"""
        import resource
        import numpy as np
        import windlass as wl
        from helpers import connect_here

        cluster = connect_here()
        rows = cluster.tensor("w", (3, 0), rule=wl.Sum())[{rows}]
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))  # what never ends must not take the machine along
        assert rows.pull().shape == rows.shape
        assert rows.push_pull(np.zeros(rows.shape, np.float32)).shape == rows.shape
        """,
        timeout=PATIENCE_S,
        **here,
    )


# -- versions --------------------------------------------------------------------------------------------------------


def test_only_changed_shards_travel(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum(), init=wl.Constant(1.0))
    out = np.zeros(3 * SHARD, FLOAT32)
    first = tensor.pull_newer(out=out)
    assert first.changed is True
    assert first.value is out
    assert (out == 1).all()

    tensor[SHARD : 2 * SHARD].push(np.ones(SHARD, FLOAT32))
    out[:] = -7  # what does not travel is not written
    second = tensor.pull_newer(first.version, out=out)
    assert second.changed is True
    assert second.value is out
    assert (out[:SHARD] == -7).all()
    assert (out[SHARD : 2 * SHARD] == 2).all()
    assert (out[2 * SHARD :] == -7).all()

    out[:] = -8
    third = tensor.pull_newer(second.version, out=out)
    assert third.changed is False
    assert third.value is out
    assert (out == -8).all()
    assert third.version == second.version != first.version


def test_without_out_a_newer_pull_is_whole_or_nothing(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum(), init=wl.Constant(1.0))
    first = tensor.pull_newer()
    assert (first.value == 1).all()
    assert tensor.pull_newer(first.version) == (None, first.version, False)
    tensor[:1].push([1.0])
    second = tensor.pull_newer(first.version)
    assert second.changed
    assert second.value[0] == 2
    assert (second.value[1:] == 1).all()
    assert tensor.pull_newer(second.version).changed is False


@pytest.mark.parametrize("push", ["push", "push_pull", "rows", "listed rows"])
def test_every_kind_of_push_makes_a_new_version(cluster: wl.Cluster, push: str):
    tensor, grad = cluster.tensor("w", (4,), rule=wl.Sum()), np.ones(4, FLOAT32)
    version = tensor.pull_newer().version
    pushes: dict[str, Any] = {
        "push": lambda: tensor.push(grad),
        "push_pull": lambda: tensor.push_pull(grad),
        "rows": lambda: tensor[1:2].push([1.0]),
        "listed rows": lambda: tensor[[3, 3]].push([1.0, 1.0]),
    }
    pushes[push]()
    assert tensor.pull_newer(version).changed


def test_a_pull_makes_no_new_version(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    version = tensor.pull_newer().version
    tensor.pull()
    tensor.fingerprint()
    assert tensor.pull_newer(version) == (None, version, False)


def test_versions_of_rows(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum())
    rows = tensor[0:10]
    version = rows.pull_newer().version
    tensor[2 * SHARD :].push(np.ones(SHARD, FLOAT32))
    assert rows.pull_newer(version).changed is False  # another shard
    tensor[5:6].push([1.0])
    got = rows.pull_newer(version, dtype="float16")
    assert got.changed
    assert got.value.dtype == np.float16
    assert got.value.tolist() == [0] * 5 + [1] + [0] * 4


def test_versions_are_values(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    one, two = tensor.pull_newer().version, tensor.pull_newer().version
    assert one == two
    assert hash(one) == hash(two)
    tensor.push(np.ones(4, FLOAT32))
    three = tensor.pull_newer(one).version
    assert three != one
    assert repr(three) == "<Version of 1 shards, 1 updates>"


@pytest.mark.parametrize("version", [0, 1, -1, "new", 0.0, False, [0]])
def test_what_is_no_version_is_refused(cluster: wl.Cluster, version: Any):
    tensor = cluster.tensor("w", (4,), rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match="pull_newer of tensor 'w': expected a version from an earlier"):
        tensor.pull_newer(version)


def test_shards_that_were_not_pulled_are_newer_than_a_version_of_some_rows(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Sum(), init=wl.Constant(5))
    version = tensor[:SHARD].pull_newer().version
    out = np.zeros(3 * SHARD, FLOAT32)
    pulled = tensor.pull_newer(version, out=out)
    assert pulled.changed
    assert not out[:SHARD].any()  # seen before
    assert (out[SHARD:] == 5).all()


def test_the_version_of_another_tensor_is_refused(cluster: wl.Cluster):
    small = cluster.tensor("s", (4,), rule=wl.Sum())
    for name, shape in (("large", 3 * SHARD), ("alike", 4)):
        version = cluster.tensor(name, shape, rule=wl.Sum()).pull_newer().version
        with pytest.raises(wl.InvalidArgument, match=f"tensor 's': it is a version of tensor '{name}'"):
            small.pull_newer(version)


# -- registered arrays -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [5, (2, 3), (), (0, 4)], ids=str)
def test_empty_gives_a_registered_array(cluster: wl.Cluster, shape: Any, dtype: str):
    array = cluster.empty(shape, dtype)
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert array.dtype == (BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
    assert array.flags.c_contiguous
    assert array.flags.writeable


def test_registered_arrays_are_told_from_ordinary_ones(cluster: wl.Cluster):
    registered = cluster._engine.registered
    array = cluster.empty((4, 4))
    assert registered(array)
    assert registered(array[1:3])
    assert registered(torch.from_numpy(array))
    assert not registered(np.empty((4, 4), FLOAT32))
    with wl.connect(threads=1) as other:
        assert not other._engine.registered(array)


def test_registered_arrays_do_not_share_memory(cluster: wl.Cluster):
    arrays = [cluster.empty(1000) for _ in range(20)]
    for i, array in enumerate(arrays):
        array[:] = i
    for i, array in enumerate(arrays):
        assert (array == i).all()


@pytest.mark.embedded("a socket takes what it can at once; tests/wire/test_remote.py looks at what it leaves")
@pytest.mark.parametrize("n", [64, 1 << 19], ids=["small", "2 MiB"])
def test_registered_arrays_are_used_in_place(cluster: wl.Cluster, n: int):
    tensor = cluster.tensor("w", (n,), rule=wl.Sum())
    grad, out = cluster.empty(n), cluster.empty(n)
    with held(tensor):
        grad[:] = 1
        future = tensor.push_pull_async(grad, out=out)
        grad[:] = 2  # the caller breaks the rules of the loan; it shows that nothing was copied
    assert future.wait() is out
    assert out[0] == 2


def test_a_registered_array_outlives_its_cluster(connect: Connect):
    cluster = connect()
    array = cluster.empty(100_000)
    cluster.close()
    del cluster
    array[:] = 3
    assert array.sum() == 300_000


def test_a_registered_array_that_is_let_go_is_kept_for_its_request(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (1 << 19,), rule=wl.Sum())
    with held(tensor):
        grad = cluster.empty(1 << 19)
        grad[:] = 1
        future = tensor.push(grad)
        del grad
        others = [cluster.empty(1 << 19) for _ in range(3)]  # would be the same memory if it were free
        for other in others:
            other[:] = 100
    future.wait()
    assert (tensor.pull() == 1).all()


# -- fingerprints ----------------------------------------------------------------------------------------------------


def trained(connect: Connect, rule: wl.Rule, cuts: list[slice], **how: Any) -> str:
    """The fingerprint after three pushes, each cut into these ranges of rows."""
    with connect() as cluster:
        tensor = cluster.tensor(how.get("name", "w"), (3, SHARD), rule=rule, init=wl.Normal())
        for step in range(3):
            grad = numbers(3, SHARD, seed=step).astype(BFLOAT16).astype(how.get("dtype", FLOAT32))
            for rows in cuts:
                if how.get("blocking"):
                    tensor[rows].push_pull(grad[rows])
                else:
                    tensor[rows].push(grad[rows])
        return tensor.fingerprint()


@pytest.mark.parametrize("name", RULES)
def test_a_fingerprint_does_not_depend_on_how_pushes_are_cut_by_shard(connect: Connect, name: str):
    whole = trained(lambda: wl.connect(threads=1), RULES[name], [slice(None)], blocking=True)
    assert trained(connect, RULES[name], [slice(None)]) == whole
    assert trained(connect, RULES[name], [slice(2, 3), slice(0, 2)]) == whole
    assert trained(connect, RULES[name], [slice(None)], blocking=True) == whole
    assert trained(connect, RULES[name], [slice(None)], dtype=BFLOAT16) == whole


@pytest.mark.parametrize("name", [name for name in RULES if name not in COUNTING])
def test_equal_contents_have_equal_fingerprints_however_pushes_are_cut(connect: Connect, name: str):
    results = []
    for cuts in ([slice(None)], [slice(0, 1), slice(1, 30)], [slice(7, 30), slice(0, 7)]):
        with connect() as cluster:
            tensor = cluster.tensor("w", (30, 3), rule=RULES[name], init=wl.Normal())
            for step in range(3):
                for rows in cuts:
                    tensor[rows].push(numbers(30, 3, seed=step)[rows])
            results.append((tensor.fingerprint(), tensor.pull().tobytes()))
    assert len(set(results)) == 1


@pytest.mark.parametrize("name", sorted(COUNTING))
def test_rules_that_count_do_so_per_shard(connect: Connect, name: str):
    weights = []
    for cuts in ([slice(None)], [slice(0, 15), slice(15, 30)]):
        with connect() as cluster:
            tensor = cluster.tensor("w", (30, 3), rule=RULES[name], init=wl.Normal())
            for step in range(3):
                for rows in cuts:
                    tensor[rows].push(numbers(30, 3, seed=step)[rows])
            weights.append(tensor.pull())
    assert (weights[0] != weights[1]).any()


def test_a_fingerprint_sees_weights_state_and_name(connect: Connect):
    plain = trained(connect, wl.Adam(), [slice(None)])
    assert trained(connect, wl.Adam(), [slice(None)]) == plain
    assert trained(connect, wl.Adam(), [slice(None)], name="v") != plain
    assert trained(connect, wl.Adam(lr=0.002), [slice(None)]) != plain
    with connect() as cluster:
        tensor = cluster.tensor("w", (30,), rule=wl.Adam())
        before = tensor.fingerprint()
        tensor.push(numbers(30), lr=0.0)
        assert not tensor.pull().any()  # only the moments have changed
        assert tensor.fingerprint() != before
        values = cluster.tensor("values", (30,), rule=wl.Assign())
        ones = np.ones(30, FLOAT32)
        values.push(ones)
        before = values.fingerprint()
        ones[17] = np.nextafter(FLOAT32(1), FLOAT32(2))
        values.push(ones)
        assert values.fingerprint() != before


@pytest.mark.embedded("servers are shared by all tests; tests/wire/test_remote.py has some of its own")
def test_a_clusters_fingerprint_is_that_of_all_its_objects():
    def fingerprint(order: list[str], changed: str = "") -> str:
        with wl.connect(threads=1) as cluster:
            for name in order:
                cluster.tensor(name, (5,), rule=wl.Sum()).push(np.full(5, 2 if name == changed else 1, FLOAT32))
            cluster.table("t", 2, rule=wl.Sum()).push([1], np.full((1, 2), 2 if changed == "t" else 1, FLOAT32))
            return cluster.fingerprint()

    plain = fingerprint(["a", "b"])
    assert fingerprint(["b", "a"]) == plain
    assert len({plain, fingerprint(["a"]), *(fingerprint(["a", "b"], name) for name in "abt")}) == 5


# -- large -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("rule", "dtype"), [(wl.Sum(), np.int64), (wl.SGD(lr=1.0), np.float32)], ids=["int64", "SGD"])
def test_a_tensor_above_2_to_the_31_elements_works_by_row_ranges(connect: Connect, rule: wl.Rule, dtype: type):
    row = 1024
    rows = 2**31 // row + 77
    sign = -1 if isinstance(rule, wl.SGD) else 1
    with connect() as cluster:
        tensor = cluster.tensor("w", (rows, row), rule=rule, dtype=dtype)
        # The rows around 2^31 bytes, 2^32 bytes, 2^31 elements, and the two ends.
        size = np.dtype(dtype).itemsize
        places = sorted({0, 2**31 // size // row, 2**32 // size // row, 2**31 // row, rows - 3})
        for i, place in enumerate(places, start=1):
            begin, end = max(place - 3, 0), min(place + 3, rows)
            tensor[begin:end].push(np.full((end - begin, row), i, dtype)).wait()
        for i, place in enumerate(places, start=1):
            begin, end = max(place - 3, 0), min(place + 3, rows)
            around = tensor[max(begin - 1, 0) : end + 1].pull()
            assert (around == sign * i).all(axis=1).sum() == end - begin
            assert (around == 0).all(axis=1).sum() == len(around) - (end - begin)
            assert (tensor[[end - 1, begin]].push_pull(np.zeros((2, row), dtype)) == sign * i).all()
        with pytest.raises(wl.InvalidArgument, match=f"row {rows} of {rows}"):
            tensor[[rows]].pull()


@pytest.mark.long
def test_a_tensor_above_2_to_the_31_bytes_is_pushed_and_pulled_whole(connect: Connect):
    n = 2**29 + 12_345
    with connect() as cluster:
        tensor = cluster.tensor("w", (n,), rule=wl.Sum())
        grad = cluster.empty(n)
        grad[:] = 1
        grad[2**29 - 1 :] = np.arange(n - 2**29 + 1)
        got = tensor.push_pull(grad, out=grad)
        assert (got[: 2**29 - 1] == 1).all()
        np.testing.assert_array_equal(got[2**29 - 1 :], np.arange(n - 2**29 + 1))
        short = tensor.pull(dtype="float16")
        assert short[2**29] == 1
        assert short[-1] == np.float16(n - 2**29)
