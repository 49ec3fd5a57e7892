"""What happens to those who do it wrong: a typed error, and nothing broken."""

import socket
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FLOAT32, SHARD, numbers

import windlass as wl

NOT_SENT = pytest.mark.embedded("the client refuses it before anything is sent, as it does for the cases without mark")


def mostly_here(cases: Iterable[str], *everywhere: str) -> list[Any]:
    """The cases as parameters; those that are not named only inside the process."""
    return [case if case in everywhere else pytest.param(case, marks=NOT_SENT) for case in cases]


# -- arrays of the wrong kind ----------------------------------------------------------------------------------------

REFUSALS = (wl.ShapeMismatch, wl.InvalidArgument)  # of shapes, and of dtypes
WRONG_GRADIENTS = {
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


@pytest.mark.parametrize("name", mostly_here(WRONG_GRADIENTS, "int64", "another row", "torch sparse"))
@pytest.mark.parametrize("verb", ["push", "push_pull", "push_pull_async"])
def test_a_gradient_of_another_kind_is_refused_and_nothing_applied(cluster: wl.Cluster, verb: str, name: str):
    tensor = cluster.tensor("w", (3, 2), rule=wl.Sum())
    table = cluster.table("t", 2, rule=wl.Sum())
    with pytest.raises(REFUSALS, match=r"tensor 'w'.*:"):
        getattr(tensor, verb)(WRONG_GRADIENTS[name])
    with pytest.raises(REFUSALS, match=r"table 't'.*:"):
        getattr(table, verb)([1, 2, 3], WRONG_GRADIENTS[name])
    assert not tensor.pull().any()
    assert len(table) == 0


@pytest.mark.parametrize("dtype", ["int8", "int64", "complex64", "bool"])
def test_an_error_about_a_dtype_says_which_are_accepted(cluster: wl.Cluster, dtype: str):
    tensor, table = cluster.tensor("w", (3, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    wrong = rf"expected dtype float32, float64, bfloat16 or float16, saw {dtype}"
    for gradient in (np.ones((3, 2), dtype), torch.ones(3, 2, dtype=getattr(torch, dtype))):
        with pytest.raises(wl.InvalidArgument, match=f"tensor 'w': {wrong}"):
            tensor.push(gradient)
        with pytest.raises(wl.InvalidArgument, match=f"table 't': {wrong}"):
            table.push([1, 2, 3], gradient)
    with pytest.raises(wl.InvalidArgument, match=f"tensor 'w', out: expected dtype .* saw {dtype}"):
        tensor.pull(out=np.ones((3, 2), dtype))


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


@pytest.mark.parametrize("name", mostly_here(WRONG_KEYS, "float64", "list of None"))
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
        with pytest.raises(REFUSALS, match=r"table 't', keys: |keys of table 't'"):
            call()
    assert len(table) == 0


@pytest.mark.parametrize("n", [1, 3])
def test_there_is_a_gradient_per_key(cluster: wl.Cluster, n: int):
    table = cluster.table("t", 2, rule=wl.Sum())
    with pytest.raises(wl.ShapeMismatch, match=rf"expected shape \(2, 2\), saw shape \({n}, 2\)$"):
        table.push([1, 2], np.ones((n, 2), FLOAT32))
    with pytest.raises(wl.ShapeMismatch, match=rf"expected shape \(2, 2\), saw shape \({n}, 2\)$"):
        table.pull([1, 2], out=np.ones((n, 2), FLOAT32))
    assert len(table) == 0


def test_an_error_about_a_shape_names_no_dtype_that_the_caller_did_not_give(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (2, 3), rule=wl.SGD(lr=0.1))
    with pytest.raises(wl.ShapeMismatch, match=r"gradient: expected shape \(2, 3\), saw shape \(3, 2\)$"):
        tensor.push(np.ones((3, 2)))  # float64, which is converted


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


@pytest.mark.parametrize("layout", mostly_here([n for n in LAYOUTS if n not in ("contiguous", "a subclass")], "spread"))
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


@pytest.mark.parametrize("name", mostly_here(WRONG_OUTPUTS, "read-only", "float64"))
@pytest.mark.parametrize("verb", ["pull", "pull_async", "push_pull", "push_pull_async"])
def test_an_out_of_another_kind_is_refused(cluster: wl.Cluster, verb: str, name: str):
    out = WRONG_OUTPUTS[name]
    tensor, table = cluster.tensor("w", (3, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    grads = [np.ones((3, 2), FLOAT32)] if "push" in verb else []
    with pytest.raises(REFUSALS, match="tensor 'w'"):
        getattr(tensor, verb)(*grads, out=out)
    with pytest.raises(REFUSALS, match="table 't'"):
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


@pytest.mark.parametrize("bad", [np.nan, *(pytest.param(bad, marks=NOT_SENT) for bad in (np.inf, -np.inf))])
@pytest.mark.parametrize("place", [0, SHARD, 3 * SHARD - 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("verb", ["push", "push_pull", "push_pull_async"])
def test_a_refused_number_changes_no_shard(cluster: wl.Cluster, verb: str, dtype: str, place: int, bad: float):
    tensor = cluster.tensor("w", (3 * SHARD,), rule=wl.Adam(), init=wl.Normal(), reject_nonfinite=True)
    assert tensor.shards == 3
    before, version = tensor.fingerprint(), tensor.pull_newer().version
    grad = torch.ones(3 * SHARD).to(getattr(torch, dtype))
    grad[place] = bad
    with pytest.raises(wl.NonFinite, match="tensor 'w': the gradient has NaN or infinity; nothing was applied"):
        getattr(tensor, verb)(grad)
    assert tensor.fingerprint() == before
    assert not tensor.pull_newer(version).changed
    grad[place] = 1
    getattr(tensor, verb)(grad)
    assert tensor.pull_newer(version).changed


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
    "name",
    [
        "",
        "a" * 257,
        "ä" * 129,
        pytest.param("app/w", marks=pytest.mark.embedded("has no apps; on servers it names another app's object")),
        "/",
        "/w",
        "app/",
        "a/b/c",
        "a\nb",
        "a\0b",
        "\ud800",
        b"w",
        5,
        None,
        ("w",),
    ],
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


@pytest.mark.parametrize("weight", [0, *(pytest.param(w, marks=NOT_SENT) for w in (-1, np.nan, np.inf, "1", None, 1j))])
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


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_of_several_processes_of_mpirun_or_srun_does_not_train_alone(
    variable: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_NTASKS", "8")  # a batch script's own shell has it, too
    wl.connect(threads=1).close()
    monkeypatch.setenv(variable, "3")
    with pytest.raises(
        wl.InvalidArgument, match=rf"{variable}=3 .* 3 trainings .*`windlass join .*WORLD_SIZE=1 to mean it"
    ):
        wl.connect()
    monkeypatch.setenv("WORLD_SIZE", "1")
    wl.connect(threads=1).close()


def test_variables_of_a_kubernetes_service_are_no_settings(monkeypatch: pytest.MonkeyPatch):
    for variable in (
        "WINDLASS_SERVICE_HOST",
        "WINDLASS_SERVICE_PORT",
        "WINDLASS_SERVICE_PORT_CONTROL",
        "WINDLASS_PORT",
        "WINDLASS_PORT_7164_TCP",
        "WINDLASS_PORT_7164_TCP_ADDR",
        "WINDLASS_SCHEDULER_SERVICE_HOST",
        "WINDLASS_SCHEDULER_PORT_7164_TCP_PROTO",
    ):
        monkeypatch.setenv(variable, "tcp://10.0.0.1:7164")
    wl.connect(threads=1).close()
    monkeypatch.setenv("WINDLASS_SERVICE_HOSTS", "1")
    with pytest.raises(wl.InvalidArgument, match="WINDLASS_SERVICE_HOSTS: there is no such setting"):
        wl.connect()


def test_an_address_where_nobody_is_says_so_within_the_timeout(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("WINDLASS_ADDRESS", address)
        with pytest.raises(wl.ServerLost, match=f"connect to {address}: Connection refused"):
            wl.connect(timeout=0.3)


def test_a_variable_that_is_mistyped_is_not_another_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_ADDRES", "tcp://127.0.0.1:7164")
    with pytest.raises(wl.InvalidArgument, match=r"WINDLASS_ADDRES: there is no such setting; did you mean WINDLASS_A"):
        wl.connect()
