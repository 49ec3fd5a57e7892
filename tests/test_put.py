"""Snapshot and put: weights and rule state as they are kept, read and set."""

import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import SHARD, Connect, held, numbers

import windlass as wl

SHAPE = (5 * SHARD // 32, 16)  # three shards, the last of them half full
RULES = {
    "sgd": wl.SGD(lr=0.1, weight_decay=0.01),
    "momentum": wl.SGD(lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": wl.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": wl.Adagrad(lr=0.1, lr_decay=0.1),
    "row_adagrad": wl.RowAdagrad(lr=0.1),
    "adam": wl.Adam(lr=0.01),
    "adamw": wl.AdamW(lr=0.01, weight_decay=0.1),
    "sum": wl.Sum(),
    "assign": wl.Assign(),
    "max": wl.Max(),
    "average": wl.Average(),
    "rmsprop": wl.RMSProp(lr=0.01),
    "centered": wl.RMSProp(lr=0.01, momentum=0.9, centered=True),
    "adadelta": wl.Adadelta(),
    "adamax": wl.Adamax(lr=0.01),
    "nadam": wl.NAdam(lr=0.01),
    "lion": wl.Lion(lr=0.01),
    "ftrl": wl.FTRL(l1=0.5),
    "min": wl.Min(),
    "scheduled": wl.SGD(lr=0.1, schedule=wl.Schedule(warmup=3, decay="linear", updates=5)),
}
STATE = {
    "momentum": ["momentum_buffer"],
    "nesterov": ["momentum_buffer"],
    "adagrad": ["sum"],
    "row_adagrad": ["sum"],
    "adam": ["exp_avg", "exp_avg_sq"],
    "adamw": ["exp_avg", "exp_avg_sq"],
    "rmsprop": ["square_avg"],
    "centered": ["square_avg", "grad_avg", "momentum_buffer"],
    "adadelta": ["square_avg", "acc_delta"],
    "adamax": ["exp_avg", "exp_inf"],
    "nadam": ["exp_avg", "exp_avg_sq"],
    "lion": ["exp_avg"],
    "ftrl": ["z", "n"],
}


def train(w: wl.Tensor, first: int, steps: int = 5) -> None:
    for step in range(first, first + steps):
        w.push_pull(numbers(*w.shape, seed=step).astype(w.dtype))


@pytest.mark.parametrize("name", RULES)
def test_what_a_snapshot_has_goes_on_elsewhere_bit_by_bit(connect: Connect, name: str) -> None:
    with connect() as cluster, connect() as other:
        w = cluster.tensor("w", SHAPE, rule=RULES[name], init=wl.Normal(std=0.1))
        train(w, 0)
        s = w.snapshot()
        np.testing.assert_array_equal(s.weights, w.pull())
        assert s.updates.dtype == np.int64
        assert s.updates.tolist() == [5] * w.shards == [5, 5, 5]
        assert list(s.state) == STATE.get(name, [])
        for array in s.state.values():
            assert array.dtype == np.float32
            assert array.shape == (SHAPE[:1] if name == "row_adagrad" else SHAPE)
            assert array.any()
        copy = other.tensor("w", SHAPE, rule=RULES[name])
        copy.put(s.weights, state=s.state, updates=s.updates)
        assert copy.fingerprint() == w.fingerprint()
        train(w, 5)
        train(copy, 5)
        assert copy.fingerprint() == w.fingerprint()
        np.testing.assert_array_equal(s.updates, 5)  # it is a copy


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_other_dtypes_are_kept_as_they_are(cluster: wl.Cluster, dtype: type) -> None:
    w = cluster.tensor("w", 20_000, rule=wl.Sum(), dtype=dtype)
    value = np.arange(20_000).astype(dtype) * (2**40 + 1)
    w.put(value)
    w.push(np.ones(20_000, dtype))
    np.testing.assert_array_equal(w.snapshot().weights, value + 1)


def test_the_state_is_torchs(cluster: wl.Cluster) -> None:
    """Into a torch optimizer and back out."""
    weights, grads = numbers(50, seed=1), [numbers(50, seed=seed) for seed in range(6)]
    w = cluster.tensor("w", 50, rule=wl.Adam(lr=0.01))
    w.put(weights)
    for grad in grads[:3]:
        w.push(grad)
    s = w.snapshot()
    parameter = torch.nn.Parameter(torch.from_numpy(s.weights.copy()))
    optimizer = torch.optim.Adam([parameter], lr=0.01)
    state = {key: torch.from_numpy(value.copy()) for key, value in s.state.items()}
    optimizer.state[parameter] = {**state, "step": torch.tensor(float(s.updates[0]))}
    for grad in grads[3:]:
        parameter.grad = torch.from_numpy(grad)
        optimizer.step()
        w.push(grad)
    np.testing.assert_allclose(w.pull(), parameter.detach().numpy(), rtol=1e-5, atol=1e-6)
    ours, theirs = w.snapshot().state, optimizer.state[parameter]
    for key in ours:
        np.testing.assert_allclose(ours[key], theirs[key].numpy(), rtol=1e-5, atol=1e-8)


def test_what_is_not_given_stays(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", SHAPE, rule=wl.Adam(lr=0.01))
    train(w, 0)
    before = w.snapshot()
    w.put(np.ones(SHAPE, np.float32))
    w.put(state={"exp_avg_sq": np.full(SHAPE, 2, np.float32)})
    w.put(updates=7)
    after = w.snapshot()
    assert (after.weights == 1).all()
    assert (after.state["exp_avg_sq"] == 2).all()
    np.testing.assert_array_equal(after.state["exp_avg"], before.state["exp_avg"])
    assert after.updates.tolist() == [7, 7, 7]
    w.put(updates=[1, 2, 3])
    assert w.snapshot().updates.tolist() == [1, 2, 3]
    w.put()
    assert w.snapshot().updates.tolist() == [1, 2, 3]


def test_a_put_is_newer(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", SHAPE, rule=wl.Sum())
    _, version, _ = w.pull_newer()
    assert not w.pull_newer(version).changed
    w.put(np.full(SHAPE, 3, np.float32))
    seen = w.pull_newer(version)
    assert seen.changed
    assert (seen.value == 3).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_may_be_torchs_or_short(cluster: wl.Cluster, dtype: str) -> None:
    w = cluster.tensor("w", (4, 3), rule=wl.Sum())
    given = torch.arange(12).reshape(3, 4).t().to(getattr(torch, dtype))  # not contiguous either
    w.put(given)
    np.testing.assert_array_equal(w.pull(), given.float().numpy())
    array = numbers(4, 3).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    w.put(array)
    np.testing.assert_array_equal(w.pull(), array.astype(np.float32))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)], ids=str)
def test_small_shapes(cluster: wl.Cluster, shape: tuple[int, ...]) -> None:
    w = cluster.tensor("w", shape, rule=wl.Adam(lr=0.1))
    w.put(np.full(shape, 2, np.float32), updates=3)
    s = w.snapshot()
    assert s.weights.shape == s.state["exp_avg"].shape == shape
    assert (s.weights == 2).all()
    assert s.updates.tolist() == [3] * w.shards


def test_puts_and_pushes_of_a_worker_are_in_their_order(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", SHAPE, rule=wl.Sum())
    ones, futures = np.ones(SHAPE, np.float32), []
    for i in range(8):
        futures += [w.push(ones) for _ in range(5)]
        w.put(np.full(SHAPE, 100 * i, np.float32))
        futures += [w.push(ones) for _ in range(i)]
    assert (w.pull() == 707).all()
    for future in futures:
        future.wait()


def test_puts_while_others_push_keep_all_sequences_right(connect: Connect) -> None:
    with connect() as cluster:
        workers = [cluster.worker(rank, 3) for rank in range(3)]
        tensors = [w.tensor("w", SHAPE, rule=wl.Sum()) for w in workers]
        ones, end = np.ones(SHAPE, np.float32), threading.Event()
        pushed = [0, 0]

        def push(rank: int) -> None:
            while not end.is_set():
                tensors[rank].push(ones).wait()
                pushed[rank] += 1

        threads = [threading.Thread(target=push, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        try:
            for i in range(20):
                tensors[2].put(np.full(SHAPE, 10_000 * i, np.float32))
                assert tensors[2].pull().min() >= 10_000 * i
        finally:
            end.set()
            for thread in threads:
                thread.join(60)
        assert min(pushed) > 0
        tensors[2].put(np.zeros(SHAPE, np.float32))
        for tensor in tensors:
            tensor.push(ones).wait()
        assert (tensors[0].pull() == 3).all()
        for worker in workers:
            worker.close()


def test_a_put_that_times_out_says_so(cluster: wl.Cluster) -> None:
    """It goes on, with a copy of what it was given."""
    w = cluster.tensor("w", 100, rule=wl.Sum())
    w.push(np.ones(100, np.float32)).wait()
    with held(w):
        with pytest.raises(wl.Timeout, match="put of tensor 'w': not done in time"):
            w.put(np.full(100, 5, np.float32), timeout=0.2)
        with pytest.raises(wl.Timeout, match="snapshot of tensor 'w'"):
            w.snapshot(timeout=0.2)
    w.push(np.ones(100, np.float32))
    assert (w.pull() == 6).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weights": np.zeros((3, 4), np.float32)}, wl.ShapeMismatch, r"weights: expected float32 of shape \(4, 3\)"),
        ({"weights": np.zeros((4, 3), np.int64)}, wl.InvalidArgument, "weights: expected dtype float32.* saw int64"),
        ({"weights": [["a"]]}, wl.InvalidArgument, "weights"),
        ({"state": {"momentum": np.zeros((4, 3))}}, wl.InvalidArgument, "no state 'momentum'; it has 'exp_avg'"),
        ({"state": {"exp_avg": np.zeros(4, np.float32)}}, wl.ShapeMismatch, "state 'exp_avg': expected float32"),
        ({"updates": -1}, wl.InvalidArgument, "updates: expected 0 to"),
        ({"updates": 2**63}, wl.InvalidArgument, "updates: expected 0 to"),
        ({"updates": [1, 2]}, wl.ShapeMismatch, "expected a whole number or 1 of them"),
        ({"updates": 1.5}, wl.ShapeMismatch, "expected a whole number"),
        ({"weights": np.full((4, 3), np.nan, np.float32)}, wl.NonFinite, "the weights have NaN or infinity"),
        ({"state": {"exp_avg": np.full((4, 3), np.inf, np.float32)}}, wl.NonFinite, "the state has NaN"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    cluster: wl.Cluster, arguments: dict, error: type[Exception], message: str
) -> None:
    w = cluster.tensor("w", (4, 3), rule=wl.Adam(lr=0.1), reject_nonfinite=True)
    train(w, 0)
    before = w.fingerprint()
    with pytest.raises(error, match=message) as raised:
        w.put(**arguments)
    assert "put of tensor 'w'" in str(raised.value)
    assert w.fingerprint() == before


def test_rows_cannot_be_put_and_closed_clusters_say_so(connect: Connect) -> None:
    with connect() as cluster:
        w = cluster.tensor("w", (4, 3), rule=wl.SGD(lr=0.1))
        with pytest.raises(wl.InvalidArgument, match="put of tensor 'w': expected the whole tensor, saw 2 of its rows"):
            w[:2].put(np.zeros((2, 3), np.float32))
        with pytest.raises(wl.InvalidArgument, match="snapshot of tensor 'w'"):
            w[[0, 1]].snapshot()
        with pytest.raises(wl.InvalidArgument, match="has no state 'sum'; it has none"):
            w.put(state={"sum": np.zeros((4, 3), np.float32)})
    with pytest.raises(wl.Closed):
        w.put(np.zeros((4, 3), np.float32))
    with pytest.raises(wl.Closed):
        w.snapshot()
