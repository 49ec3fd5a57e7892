"""Torch out: where torch goes in, where torch's dtype is asked for, and everywhere with ``connect(arrays="torch")``."""

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from crew import together
from helpers import Connect, check_python

import windlass as wl

SHAPE = (6, 4)
KEYS = np.array([3, 2**63 + 5, 1], np.uint64)


def results(cluster: wl.Cluster) -> dict[str, Callable[[], Any]]:
    """Every call that returns new arrays, by name; none of them is given an array."""
    w, t = cluster.tensor("w", SHAPE, rule=wl.Adam()), cluster.table("t", 4, rule=wl.Sum())
    w.push_pull(np.ones(SHAPE))
    t.push(KEYS[:1], np.ones((1, 4))).wait()

    def step(method: str, *arguments: Any) -> Any:
        with cluster.step() as s:
            return getattr(s, method)(*arguments)

    def delayed() -> list[Any]:
        with w.delayed(1) as d:
            return [d.weights, d.push_pull(np.zeros(SHAPE)), d.finish()]

    def local() -> Any:
        with cluster.local({"a": torch.ones(3), "b": torch.ones(2)}, every=1, outer=wl.Average(), name="l") as avg:
            return list(avg.centre().values())

    snapshot = w.snapshot()
    return {
        "pull": w.pull,
        "pull of rows": w[1:3].pull,
        "pull_async": lambda: w.pull_async().wait(),
        "pull_newer": lambda: w.pull_newer().value,
        "push_pull": lambda: w.push_pull([[0.0] * 4] * 6),
        "push_pull_async": lambda: w.push_pull_async(np.zeros(SHAPE)).wait(),
        "delayed": delayed,
        "snapshot": lambda: [snapshot.weights, *snapshot.state.values(), snapshot.updates],
        "pull in a step": lambda: step("pull", w),
        "pull of several in a step": lambda: step("pull", [w, w]),
        "push_pull in a step": lambda: step("push_pull", w, np.zeros(SHAPE)),
        "table pull": lambda: t.pull(KEYS),
        "table pull_async": lambda: t.pull_async(KEYS).wait(),
        "table push_pull": lambda: t.push_pull(KEYS, np.ones((3, 4))),
        "table push_pull_async": lambda: t.push_pull_async(KEYS, np.ones((3, 4))).wait(),
        "ahead": lambda: [rows for _, rows in t.ahead([KEYS, KEYS])],
        "table pull in a step": lambda: step("pull", t, KEYS),
        "table push_pull in a step": lambda: step("push_pull", t, KEYS, np.ones((3, 4))),
        "export": lambda: [array for chunk in t.export() for array in chunk],
        "keys": lambda: list(t.keys()),
        "top_k": lambda: list(w.top_k(2)),
        "histogram": lambda: list(w.histogram()),
        "empty": lambda: cluster.empty(3),
        "slots": lambda: cluster.slots(3).next(),
        "lease": lambda: list(cluster.lease(10, 4)),
        "local": local,
        "all_reduce": lambda: cluster.all_reduce([1.0, 2.0]),
    }


def is_torch(result: Any) -> bool:
    """Whether all arrays of a result are; raises where some are and some are not."""
    (kind,) = {isinstance(x, torch.Tensor) for x in (result if isinstance(result, (list, tuple)) else [result])}
    return kind


def test_every_call_of_a_torch_cluster_returns_torch(connect: Connect) -> None:
    with connect(arrays="torch") as cluster:
        kinds = {name: is_torch(call()) for name, call in results(cluster).items()}
    assert [name for name, torchs in kinds.items() if not torchs] == []


def test_elsewhere_numpy_comes_out_where_no_torch_goes_in(connect: Connect) -> None:
    with connect() as cluster:
        kinds = {name: is_torch(call()) for name, call in results(cluster).items()}
    assert [name for name, torchs in kinds.items() if torchs] == ["local"]  # its arrays were torch's


def test_further_workers_have_the_arrays_of_their_cluster(connect: Connect) -> None:
    with connect(arrays="torch") as cluster:
        pulls = together(cluster, 2, lambda worker: worker.tensor("w", 3, rule=wl.Sum()).pull())
    assert all(map(is_torch, pulls))


def test_the_numbers_are_the_same(connect: Connect) -> None:
    with connect(arrays="torch") as cluster:
        w, t = cluster.tensor("w", SHAPE, rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
        assert torch.equal(w.push_pull(torch.ones(SHAPE)), torch.ones(SHAPE))
        assert w.pull(dtype="bfloat16").dtype == torch.bfloat16
        assert w.pull(dtype=np.float16).dtype == torch.float16
        t.push(KEYS, np.arange(6.0).reshape(3, 2)).wait()
        (chunk,) = t.export()
        assert (chunk.keys.dtype, chunk.weights.dtype) == (torch.int64, torch.float32)
        back = t.pull(chunk.keys)  # keys are bit patterns: as int64 they are the same keys
        assert torch.equal(back, chunk.weights)
        assert sorted(k % 2**64 for k in chunk.keys.tolist()) == sorted(KEYS.tolist())
        assert len(t) == 3
        snapshot = w.snapshot()
        w.put(snapshot.weights * 2, updates=snapshot.updates)
        assert torch.equal(w.pull(), 2 * torch.ones(SHAPE))
        assert torch.equal(w[w.top_k(1).keys].pull(), torch.full((1, 4), 2.0))


def test_a_dtype_of_torchs_asks_for_torch(cluster: wl.Cluster) -> None:
    w, t = cluster.tensor("w", SHAPE, rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
    for got in (
        w.pull(dtype=torch.float32),
        w.pull_async(dtype=torch.float16).wait(),
        w.push_pull(np.zeros(SHAPE), dtype=torch.bfloat16),
        t.pull(KEYS, dtype=torch.float32),
        t.push_pull(np.array([1, 2]), np.zeros((2, 2)), dtype=torch.float32),
        cluster.empty(3, torch.float32),
    ):
        assert isinstance(got, torch.Tensor)
    assert w.pull(dtype=torch.bfloat16).dtype == torch.bfloat16
    assert isinstance(w.pull(dtype=np.float32), np.ndarray)


def test_torch_gradients_of_listed_keys_give_torch_rows(cluster: wl.Cluster) -> None:
    t = cluster.table("t", 2, rule=wl.Sum())
    assert torch.equal(t.push_pull([1, 2], torch.ones(2, 2)), torch.ones(2, 2))


def test_a_registered_array_of_torchs_is_used_in_place(connect: Connect) -> None:
    with connect(arrays="torch") as cluster:
        w = cluster.tensor("w", 1000, rule=wl.Sum())
        grad, out = cluster.empty(1000), cluster.empty(1000)
        assert cluster._engine.registered(grad)
        grad.fill_(3)
        assert w.push_pull(grad, out=out) is out
        assert torch.equal(out, grad)


def test_local_steps_change_torch_tensors_in_place(cluster: wl.Cluster) -> None:
    w, b = torch.zeros(3, requires_grad=True), torch.zeros(2, dtype=torch.float64)
    with cluster.local([w, b], every=1, outer=wl.SGD(lr=0.5)) as avg:
        with torch.no_grad():
            w += 2
        b += 4
        avg.step()
        assert w.tolist() == [1, 1, 1]
        assert b.tolist() == [2, 2]
        centre = avg.centre()
    assert torch.equal(centre[0], w.detach())
    with pytest.raises(wl.ShapeMismatch, match=r"'other': expected float32 or float64, saw bfloat16"):
        cluster.local(torch.zeros(3, dtype=torch.bfloat16), every=1, outer=wl.Average(), name="other")


def test_there_are_two_kinds_of_arrays() -> None:
    with pytest.raises(wl.InvalidArgument, match='arrays must be "numpy" or "torch", not \'jax\''):
        wl.connect(arrays="jax")  # type: ignore[arg-type]


def test_without_torch_the_error_says_what_to_install() -> None:
    said = check_python("""
        import sys
        sys.modules["torch"] = None
        import windlass as wl
        try:
            wl.connect(arrays="torch")
        except ImportError as error:
            print(error)
    """)
    assert said == "connect: arrays=\"torch\" needs torch: pip install 'windlass[torch]'\n"


def test_arrays_are_known_while_another_thread_is_importing_torch(monkeypatch: pytest.MonkeyPatch):
    from windlass._objects import arrays

    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # as far as it is by then
    assert not arrays.is_torch([1.0])
    assert not arrays.is_torch_dtype(np.dtype(np.float32))
