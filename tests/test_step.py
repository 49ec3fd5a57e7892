"""Steps: what is pushed and pulled together, and what happens when something is wrong with it."""

from typing import Any

import numpy as np
import pytest
from helpers import Connect

import windlass as wl

FLOAT32 = np.float32


def ones(cluster: wl.Cluster, shape: Any, value: float = 1.0, dtype: object = FLOAT32) -> Any:
    array = cluster.empty(shape, dtype)
    array[...] = value
    return array


def test_tensors_and_tables_are_pushed_and_pulled_together_and_the_clock_moves_once(cluster: wl.Cluster):
    a = cluster.tensor("a", (300, 200), rule=wl.Sum())
    b = cluster.tensor("b", 10, rule=wl.SGD(lr=0.5))
    t = cluster.table("t", 8, rule=wl.Sum())
    keys = np.array([7, 3, 7, -1])
    with cluster.step() as s:
        assert s.push(a, np.full((300, 200), 2, FLOAT32)) is None
        of_a = s.pull(a)
        of_b = s.push_pull(b, ones(cluster, 10), lr=0.25)
        s.push(t, keys, np.ones((4, 8), FLOAT32))
        rows = s.pull(t, keys)
        assert cluster.clock == 0
    assert cluster.clock == 1
    assert (of_a == 2).all()
    assert (of_b == -0.25).all()
    assert (rows == np.array([2, 1, 2, 1])[:, None]).all()
    assert (a.pull() == 2).all()
    assert len(t) == 3


@pytest.mark.parametrize("registered", [True, False])
def test_lists_of_tensors(cluster: wl.Cluster, registered: bool):
    sizes = [1, 5, 300, 20_000, 0, 70_000] * 25  # more than may be under way at once
    tensors = [cluster.tensor(f"w{i}", n, rule=wl.SGD(lr=1.0)) for i, n in enumerate(sizes)]
    make = (lambda n: cluster.empty(n)) if registered else (lambda n: np.empty(n, FLOAT32))
    grads, outs = [make(n) for n in sizes], [make(n) for n in sizes]
    for i, g in enumerate(grads):
        g[:] = i
    for step in range(1, 4):
        with cluster.step() as s:
            assert s.push_pull(tensors, grads, out=outs) == outs
        assert all((out == -step * i).all() for i, out in enumerate(outs))
    with cluster.step() as s:
        s.push(tuple(tensors), grads)
        pulled = s.pull(tensors)
    assert all((out == -4 * i).all() for i, out in enumerate(pulled))
    assert cluster.clock == 4


def test_what_a_step_does_is_what_requests_of_their_own_do(connect: Connect):
    rng = np.random.default_rng(1)
    shapes = [(50, 40), (7,), (3, 3, 3), (1 << 16,), ()]
    grads = [[rng.standard_normal(shape).astype(FLOAT32) for shape in shapes] for _ in range(5)]
    prints = []
    for together in (True, False):
        with connect() as cluster:
            tensors = [cluster.tensor(f"w{i}", shape, rule=wl.Adam(lr=0.01)) for i, shape in enumerate(shapes)]
            for step in grads:
                if together:
                    with cluster.step() as s:
                        results = s.push_pull(tensors, step)
                else:
                    results = [w.push_pull(g) for w, g in zip(tensors, step, strict=True)]
            prints.append([w.fingerprint() for w in tensors])
            assert all((r == w.pull()).all() for r, w in zip(results, tensors, strict=True))
    assert prints[0] == prints[1]


def test_requests_of_one_step_follow_each_other(cluster: wl.Cluster):
    w = cluster.tensor("w", 100_000, rule=wl.Assign())
    t = cluster.table("t", 4, rule=wl.Assign())
    seen = []
    with cluster.step() as s:
        for i in range(20):
            s.push(w, np.full(100_000, i, FLOAT32))
            s.push(w[10:20], np.full(10, -i, FLOAT32))
            seen.append(s.pull(w))
            s.push(t, [i], np.full((1, 4), i, FLOAT32))
    for i, out in enumerate(seen):
        assert (out[10:20] == -i).all()
        assert (out[20:] == i).all()
    assert len(t) == 20


@pytest.mark.parametrize("dtype", ["float64", "int64", "float16"])
def test_dtypes(cluster: wl.Cluster, dtype: str):
    stored = "float32" if dtype == "float16" else dtype
    w = [cluster.tensor(f"w{i}", 1000, rule=wl.Sum(), dtype=stored) for i in range(3)]
    grads, outs = [np.full(1000, 3, dtype) for _ in w], [np.empty(1000, dtype) for _ in w]
    with cluster.step() as s:
        s.push_pull(w, grads, out=outs)
        like = s.pull(w[0], dtype=dtype)
    assert all((out == 3).all() for out in outs)
    assert like.dtype == dtype


def test_torch_tensors(cluster: wl.Cluster):
    torch = pytest.importorskip("torch")
    w = [cluster.tensor(f"w{i}", (10, 3), rule=wl.Sum()) for i in range(3)]
    out = [torch.empty(10, 3) for _ in w]
    with cluster.step() as s:
        s.push_pull(w, [torch.full((10, 3), float(i)) for i in range(3)], out=out)
        one = s.push_pull(w[0], torch.ones(3, 10).T)
    assert all(bool((out[i] == i).all()) for i in range(3))
    assert isinstance(one, torch.Tensor)
    assert bool((one == 1).all())


def test_an_ordinary_input_is_free_when_the_call_returns(cluster: wl.Cluster):
    w = cluster.tensor("w", 5000, rule=wl.Sum())
    t = cluster.table("t", 4, rule=wl.Sum())
    grad, keys, rows = np.ones(5000, FLOAT32), np.arange(5), np.ones((5, 4), FLOAT32)
    with cluster.step() as s:
        s.push(w, grad)
        s.push(t, keys, rows)
        grad[:], keys[:], rows[:] = 9, 9, 9
    assert (w.pull() == 1).all()
    assert (t.pull(np.arange(5), create=False) == 1).all()
    assert len(t) == 5


def test_a_block_that_raises_sends_nothing(cluster: wl.Cluster):
    w = cluster.tensor("w", 10, rule=wl.Sum())

    def step() -> None:
        with cluster.step() as s:
            s.push(w, np.ones(10, FLOAT32))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert cluster.clock == 0
    assert (w.pull() == 0).all()


def test_an_empty_step_ticks(cluster: wl.Cluster):
    with cluster.step():
        pass
    assert cluster.clock == 1


def test_wrong_arrays_are_refused_where_they_are_given(cluster: wl.Cluster):
    w = cluster.tensor("w", (4, 5), rule=wl.Sum())
    t = cluster.table("t", 4, rule=wl.Sum())
    grad = np.ones((4, 5), FLOAT32)
    with cluster.step() as s:
        with pytest.raises(wl.ShapeMismatch, match=r"push of tensor 'w', gradient: expected .*\(4, 5\)"):
            s.push(w, np.ones((5, 4), FLOAT32))
        with pytest.raises(wl.ShapeMismatch, match="'w', out"):
            s.pull([w], out=[np.empty(3, FLOAT32)])
        with pytest.raises(wl.InvalidArgument, match="push of tensor 'w' in a step: expected a gradient, saw 2"):
            s.push(w, grad, grad)
        with pytest.raises(wl.InvalidArgument, match="pull of table 't' in a step: expected keys, saw 0"):
            s.pull(t)
        with pytest.raises(wl.InvalidArgument, match="expected keys and a gradient per key, saw 1"):
            s.push(t, [1])
        with pytest.raises(wl.InvalidArgument, match="push of 2 tensors in a step: expected as many gradients, saw 1"):
            s.push([w, w], [grad])
        with pytest.raises(wl.InvalidArgument, match="expected as many outs, saw 3"):
            s.pull([w], out=[grad] * 3)
        with pytest.raises(wl.InvalidArgument, match="expected tensors, saw 3"):
            s.push([w, 3], [grad, grad])
        with pytest.raises(wl.InvalidArgument, match="create=False is for tables"):
            s.pull(w, create=False)
        with pytest.raises(wl.InvalidArgument, match="weight"):
            s.push([w], [grad], weight=0)
        with pytest.raises(wl.InvalidArgument, match="momentum"):
            s.push([w], [grad], momentum=0.5)
    assert (w.pull() == 1).all()  # of [w, 3] the first was in order
    assert cluster.clock == 1


def test_a_step_is_used_inside_its_block_and_by_its_own_worker(cluster: wl.Cluster):
    w = cluster.tensor("w", 4, rule=wl.Sum())
    with cluster.step() as s:
        pass
    for late in (s, cluster.step()):
        with pytest.raises(wl.InvalidArgument, match="the step is not open"):
            late.push(w, np.ones(4, FLOAT32))
    with cluster.worker(1, 2) as other, other.step() as s:
        with pytest.raises(wl.InvalidArgument, match="another worker's"):
            s.push(w, np.ones(4, FLOAT32))
        with pytest.raises(wl.InvalidArgument, match="another worker's"):
            s.push([w], [np.ones(4, FLOAT32)])


def test_what_a_server_refuses_is_raised_when_the_rest_is_done_and_the_clock_stays(cluster: wl.Cluster):
    good = cluster.tensor("good", 100_000, rule=wl.Sum())
    picky = cluster.tensor("picky", 100_000, rule=wl.Sum(), reject_nonfinite=True)
    bad = ones(cluster, 100_000)

    def step() -> None:
        with cluster.step() as s:
            s.push(good, np.ones(100_000, FLOAT32))
            s.push(picky, bad)
            bad[77] = np.nan  # a registered array is the step's, and this is what comes of it
            s.push(good, np.ones(100_000, FLOAT32))

    with pytest.raises(wl.NonFinite, match="'picky'"):
        step()
    assert cluster.clock == 0
    assert (picky.pull() == 0).all()
    cluster.tick()  # nothing is left over


def test_arrays_that_are_on_loan_or_overlap_are_refused(connect: Connect):
    with connect() as cluster:
        w, v = (cluster.tensor(name, 200_000, rule=wl.Sum()) for name in "wv")
        flat = ones(cluster, 300_000)
        with pytest.raises(wl.InvalidArgument, match="overlap"), cluster.step() as s:
            s.push_pull(w, flat[:200_000], out=flat[100_000:])
        with cluster.step() as s:  # the same gradient twice is nobody's harm
            s.push(w, flat[:200_000])
            s.push(v, flat[:200_000])
        assert (w.pull() == 1).all()
        assert (v.pull() == 1).all()


def test_a_closed_cluster_has_no_steps(connect: Connect):
    cluster = connect()
    w = cluster.tensor("w", 4, rule=wl.Sum())
    s = cluster.step()
    s.__enter__()
    cluster.close()
    with pytest.raises(wl.Closed):
        s.push(w, np.ones(4, FLOAT32))
    with pytest.raises(wl.Closed):
        cluster.step().__enter__()
