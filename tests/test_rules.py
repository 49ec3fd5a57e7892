"""Rules: each is the torch.optim rule of the same name, on tensors and on table rows."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers import SHARD, numbers, rng

import windlass as wl

torch.set_num_threads(1)  # on arrays this small, more would only wait for each other

STEPS = 200
CLOSE = {"rtol": 2e-5, "atol": 1e-6}
DTYPES = [np.float32, np.float64, np.int64]

SGD, ADAGRAD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW
RMSPROP, ADADELTA, ADAMAX, NADAM = torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam


class Formula:
    """What torch does not have, by its formulas in numpy, behind the calls that the tests make of torch.optim."""

    def __init__(self, params: list[torch.nn.Parameter], foreach: bool, **options: Any) -> None:
        self.param = params[0]
        self.param_groups = [{"betas": (0.9, 0.99), "weight_decay": 0.0, "beta": 1.0, "l1": 0.0, "l2": 0.0} | options]
        self.m, self.n = (np.zeros(self.param.shape, self.dtype) for _ in range(2))
        self.w = self.param.detach().numpy().astype(self.dtype)

    def step(self) -> None:
        self.update(self.param.grad.numpy().astype(self.dtype), self.param_groups[0])
        self.param.data = torch.from_numpy(self.w.astype(np.float32))


class LionFormula(Formula):
    dtype = np.float32  # a sum near zero has the sign that float32 gives it

    def update(self, g: np.ndarray, o: dict[str, Any]) -> None:
        (b1, b2), lr, f = o["betas"], o["lr"], np.float32
        c = f(b1) * self.m + f(1 - b1) * g
        self.w = self.w * f(1 - lr * o["weight_decay"]) - f(lr) * np.sign(c)
        self.m = f(b2) * self.m + f(1 - b2) * g


class FTRLFormula(Formula):
    dtype = np.float64

    def update(self, g: np.ndarray, o: dict[str, Any]) -> None:
        sigma = (np.sqrt(self.n + g * g) - np.sqrt(self.n)) / o["lr"]
        self.m += g - sigma * self.w
        self.n += g * g
        w = -(self.m - np.sign(self.m) * o["l1"]) / ((o["beta"] + np.sqrt(self.n)) / o["lr"] + o["l2"])
        self.w = np.where(np.abs(self.m) <= o["l1"], 0.0, w)


# Learning rates that keep weights around 1: beyond, float32 itself is coarser than the tolerance.
OPTIMIZERS = {
    "SGD": (wl.SGD(lr=0.1), SGD, {"lr": 0.1}),
    "SGD weight_decay": (wl.SGD(lr=0.1, weight_decay=0.02), SGD, {"lr": 0.1, "weight_decay": 0.02}),
    "SGD momentum": (wl.SGD(lr=0.01, momentum=0.9), SGD, {"lr": 0.01, "momentum": 0.9}),
    "SGD dampening": (
        wl.SGD(lr=0.01, momentum=0.9, dampening=0.3, weight_decay=0.01),
        SGD,
        {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    ),
    "SGD nesterov": (
        wl.SGD(lr=0.01, momentum=0.8, weight_decay=0.01, nesterov=True),
        SGD,
        {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
    ),
    "Adagrad": (wl.Adagrad(lr=0.1), ADAGRAD, {"lr": 0.1}),
    "Adagrad lr_decay": (wl.Adagrad(lr=0.1, lr_decay=0.05), ADAGRAD, {"lr": 0.1, "lr_decay": 0.05}),
    "Adagrad weight_decay": (wl.Adagrad(lr=0.1, weight_decay=0.02), ADAGRAD, {"lr": 0.1, "weight_decay": 0.02}),
    "Adagrad initial_accumulator_value": (
        wl.Adagrad(lr=0.1, initial_accumulator_value=0.5, eps=1e-3),
        ADAGRAD,
        {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3},
    ),
    "Adam": (wl.Adam(lr=0.01), ADAM, {"lr": 0.01}),
    "Adam weight_decay": (
        wl.Adam(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.05),
        ADAM,
        {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.05},
    ),
    "AdamW": (wl.AdamW(lr=0.01, weight_decay=0.1), ADAMW, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSProp": (wl.RMSProp(lr=0.001), RMSPROP, {"lr": 0.001}),
    "RMSProp momentum": (
        wl.RMSProp(lr=0.0005, alpha=0.9, eps=1e-6, weight_decay=0.02, momentum=0.9),
        RMSPROP,
        {"lr": 0.0005, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.02, "momentum": 0.9},
    ),
    "RMSProp centered": (wl.RMSProp(lr=0.001, centered=True), RMSPROP, {"lr": 0.001, "centered": True}),
    "RMSProp centered momentum": (
        wl.RMSProp(lr=0.0005, centered=True, momentum=0.8, weight_decay=0.01),
        RMSPROP,
        {"lr": 0.0005, "centered": True, "momentum": 0.8, "weight_decay": 0.01},
    ),
    "Adadelta": (wl.Adadelta(), ADADELTA, {}),
    "Adadelta weight_decay": (
        wl.Adadelta(lr=0.5, rho=0.8, eps=1e-5, weight_decay=0.02),
        ADADELTA,
        {"lr": 0.5, "rho": 0.8, "eps": 1e-5, "weight_decay": 0.02},
    ),
    "Adamax": (wl.Adamax(lr=0.01), ADAMAX, {"lr": 0.01}),
    "Adamax weight_decay": (
        wl.Adamax(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.05),
        ADAMAX,
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.05},
    ),
    "NAdam": (wl.NAdam(lr=0.01), NADAM, {"lr": 0.01}),
    "NAdam weight_decay": (
        wl.NAdam(lr=0.01, beta1=0.95, beta2=0.99, eps=1e-6, weight_decay=0.05, momentum_decay=0.05),
        NADAM,
        {"lr": 0.01, "betas": (0.95, 0.99), "eps": 1e-6, "weight_decay": 0.05, "momentum_decay": 0.05},
    ),
    "NAdam decoupled": (
        wl.NAdam(lr=0.01, weight_decay=0.1, momentum_decay=0.0, decoupled_weight_decay=True),
        NADAM,
        {"lr": 0.01, "weight_decay": 0.1, "momentum_decay": 0.0, "decoupled_weight_decay": True},
    ),
    "Lion": (wl.Lion(lr=0.01), LionFormula, {"lr": 0.01}),
    "Lion weight_decay": (
        wl.Lion(lr=0.01, beta1=0.95, beta2=0.98, weight_decay=0.1),
        LionFormula,
        {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.1},
    ),
    "FTRL": (wl.FTRL(), FTRLFormula, {"lr": 0.1}),
    "FTRL l1 l2": (
        wl.FTRL(lr=0.1, beta=0.5, l1=3.0, l2=2.0),
        FTRLFormula,
        {"lr": 0.1, "beta": 0.5, "l1": 3.0, "l2": 2.0},
    ),
}


class Torch:
    """A torch optimizer over one parameter."""

    def __init__(self, start: np.ndarray, kind: Any, options: dict[str, Any]) -> None:
        self.parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
        self.optimizer = kind([self.parameter], foreach=False, **options)

    def step(self, grad: np.ndarray, **changes: Any) -> None:
        self.optimizer.param_groups[0].update(changes)
        self.parameter.grad = torch.from_numpy(grad)
        self.optimizer.step()

    @property
    def weights(self) -> np.ndarray:
        return self.parameter.detach().numpy()


# With servers the same code runs on the same numbers: these show that state, counts and hyperparameters are kept there.
REMOTE = {"SGD nesterov", "Adagrad lr_decay", "Adam weight_decay", "RMSProp centered momentum", "NAdam weight_decay"}
HERE = pytest.mark.embedded("the arithmetic is the same with servers, where a few rules stand for all")


@pytest.mark.parametrize("where", ["a tensor of two shards", "rows of 5", "rows of 16"])
@pytest.mark.parametrize("name", [name if name in REMOTE else pytest.param(name, marks=HERE) for name in OPTIMIZERS])
def test_a_rule_equals_torchs_of_the_same_name_after_200_steps(cluster: wl.Cluster, name: str, where: str):
    rule, kind, options = OPTIMIZERS[name]
    random = rng(len(name))
    if where.startswith("a tensor"):
        tensor = cluster.tensor("w", (300, 67), rule=rule, init=wl.Normal())
        assert tensor.shards == 2
        peer = Torch(tensor.pull(), kind, options)
        for _ in range(STEPS):
            grad = random.standard_normal((300, 67), dtype=np.float32)
            tensor.push(grad)
            peer.step(grad)
        np.testing.assert_allclose(tensor.pull(), peer.weights, **CLOSE)
        return
    # Row r is touched in every (r + 1)st step: it must be where torch is after as many steps.
    dim, keys = int(where.split()[-1]), np.arange(9) * 1_000_003 - 4
    table = cluster.table("rows", dim, rule=rule, init=wl.Normal())
    peers = [Torch(row, kind, options) for row in table.pull(keys)]
    for step in range(STEPS):
        touched = [r for r in range(len(keys)) if step % (r + 1) == 0]
        random.shuffle(touched)
        grads = random.standard_normal((len(touched), dim), dtype=np.float32)
        table.push(keys[touched], grads)
        for r, grad in zip(touched, grads, strict=True):
            peers[r].step(grad)
    np.testing.assert_allclose(table.pull(keys), [p.weights for p in peers], **CLOSE)


@pytest.mark.parametrize("dim", [1, 5, 16, 32, 33, 64, 128])
def test_row_adagrad_follows_its_formula(cluster: wl.Cluster, dim: int):
    rule = wl.RowAdagrad(lr=0.1, initial_accumulator_value=0.25, eps=1e-6)
    random, rows = rng(dim), 6
    table = cluster.table("rows", dim, rule=rule, init=wl.Normal())
    tensor = cluster.tensor("w", (rows, dim), rule=rule, init=wl.Normal())
    for thing, push in (
        (lambda: table.pull(range(rows)), table.push),
        (tensor.pull, lambda touched, grads: tensor[touched].push(grads)),
    ):
        weights, sums = thing().astype(np.float64), np.full(rows, 0.25)
        for step in range(STEPS):
            touched = [r for r in range(rows) if step % (r + 1) == 0]
            grads = random.standard_normal((len(touched), dim), dtype=np.float32)
            push(touched, grads)
            for r, g in zip(touched, grads.astype(np.float64), strict=True):
                sums[r] += np.mean(g * g)
                weights[r] -= 0.1 * g / (np.sqrt(sums[r]) + 1e-6)
        np.testing.assert_allclose(thing(), weights, **CLOSE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rule", "expected"), [(wl.Sum(), np.add), (wl.Max(), np.maximum), (wl.Min(), np.minimum), (wl.Assign(), None)]
)
def test_sum_max_min_and_assign_are_numpys(cluster: wl.Cluster, rule: wl.Rule, expected: Any, dtype: type):
    shape = (5, SHARD // 2 + 37)  # a shard per row
    tensor = cluster.tensor("w", shape, rule=rule, dtype=dtype, init=wl.Constant(-3))
    weights, random = np.full(shape, -3, dtype), rng(1)
    for _ in range(5):
        pushed = (random.standard_normal(shape) * 100).astype(dtype)
        weights = pushed if expected is None else expected(weights, pushed)
        got = tensor.push_pull(pushed)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, weights)


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_wide_dtypes_keep_all_their_bits(cluster: wl.Cluster, dtype: type):
    tensor = cluster.tensor("w", (2,), rule=wl.Sum(), dtype=dtype)
    big = 2**53 if dtype is np.float64 else 2**62
    tensor.push(np.array([big - 1, 1], dtype))
    tensor.push(np.array([-1, 2], dtype))
    np.testing.assert_array_equal(tensor.pull(), np.array([big - 2, 3], dtype))


def test_an_int64_sum_wraps_around(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (1,), rule=wl.Sum(), dtype=np.int64)
    tensor.push(np.array([2**63 - 1]))
    tensor.push(np.array([1]))
    assert tensor.pull()[0] == -(2**63)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rule", "sign"), [(wl.Max(), 1), (wl.Min(), -1)])
def test_nan_wins_in_max_and_min(cluster: wl.Cluster, rule: wl.Rule, sign: int, dtype: type):
    tensor = cluster.tensor("w", (3,), rule=rule, dtype=dtype)
    tensor.push(sign * np.array([np.nan, 1, -1], dtype))
    tensor.push(sign * np.array([1, np.nan, -2], dtype))
    np.testing.assert_array_equal(tensor.pull(), np.array([np.nan, np.nan, 0], dtype))


def test_ftrl_makes_weights_that_matter_little_exactly_zero(cluster: wl.Cluster):
    w = cluster.tensor("w", (1000,), rule=wl.FTRL(l1=10.0))
    matters = np.arange(1000) % 10 == 0
    for step in range(100):
        w.push(0.1 * numbers(1000, seed=step) + matters.astype(np.float32))
    np.testing.assert_array_equal(w.pull() != 0, matters)
    np.testing.assert_array_equal(w.pull() < 0, matters)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (wl.Sum(), [1 + 2 + 4, 8]),
        (wl.Max(), [4, 8]),
        (wl.Min(), [-4, -8]),
        (wl.Assign(), [2, 8]),
        (wl.Average(), [np.float32(7) / 3, 8]),
        (wl.SGD(lr=1.0), [-7, -8]),
        (wl.Adagrad(lr=1.0, eps=0.0), [-1, -1]),  # one update by 7: 7 / sqrt(49)
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_repeats_in_one_push_are_one_update(cluster: wl.Cluster, rule: wl.Rule, expected: list[float], wide: bool):
    dim = 16 if wide else 3
    sign = -1 if isinstance(rule, wl.Min) else 1  # weights start at 0
    grads = sign * np.repeat(np.array([[1], [8], [4], [2]], np.float32), dim, axis=1)
    table = cluster.table("rows", dim, rule=rule)
    table.push([7, 9, 7, 7], grads)
    np.testing.assert_array_equal(table.pull([7, 9])[:, 0], expected)
    tensor = cluster.tensor("w", (10, dim), rule=rule)
    tensor[[7, 9, 7, 7]].push(grads)
    np.testing.assert_array_equal(tensor[[7, 9]].pull()[:, 0], expected)


# -- hyperparameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_learning_rate_of_a_push_counts_for_that_push(cluster: wl.Cluster, name: str):
    rule, kind, options = OPTIMIZERS[name]
    tensor = cluster.tensor("w", (9, 7), rule=rule, init=wl.Normal())
    table = cluster.table("rows", 7, rule=rule, init=wl.Normal())
    keys = np.arange(9)
    on_tensor, on_rows = Torch(tensor.pull(), kind, options), Torch(table.pull(keys), kind, options)
    for step in range(20):
        grad, lr = numbers(9, 7, seed=step), 0.1 / (1 + step)
        tensor.push(grad, lr=lr)
        table.push(keys, grad, lr=lr)
        on_tensor.step(grad, lr=lr)
        on_rows.step(grad, lr=lr)
    np.testing.assert_allclose(tensor.pull(), on_tensor.weights, **CLOSE)
    np.testing.assert_allclose(table.pull(keys), on_rows.weights, **CLOSE)
    assert tensor.rule == rule  # the default is what it was


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("SGD", {"weight_decay": 0.3}, {"weight_decay": 0.3}),
        ("SGD momentum", {"momentum": 0.5}, {"momentum": 0.5}),
        ("SGD momentum", {"dampening": 0.5}, {"dampening": 0.5}),
        ("SGD momentum", {"nesterov": True}, {"nesterov": True}),
        ("Adagrad", {"lr_decay": 0.5}, {"lr_decay": 0.5}),
        ("Adagrad", {"eps": 0.1, "weight_decay": 0.1}, {"eps": 0.1, "weight_decay": 0.1}),
        ("Adam", {"beta1": 0.5, "beta2": 0.6}, {"betas": (0.5, 0.6)}),
        ("Adam", {"eps": 0.1, "weight_decay": 0.1}, {"eps": 0.1, "weight_decay": 0.1}),
        ("AdamW", {"weight_decay": 0.5}, {"weight_decay": 0.5}),
        ("RMSProp", {"alpha": 0.5, "eps": 0.1, "weight_decay": 0.1}, {"alpha": 0.5, "eps": 0.1, "weight_decay": 0.1}),
        ("RMSProp momentum", {"momentum": 0.5}, {"momentum": 0.5}),
        ("Adadelta", {"rho": 0.5, "eps": 0.1, "weight_decay": 0.1}, {"rho": 0.5, "eps": 0.1, "weight_decay": 0.1}),
        ("Adamax", {"beta1": 0.5, "beta2": 0.6}, {"betas": (0.5, 0.6)}),
        ("Adamax", {"eps": 0.1, "weight_decay": 0.1}, {"eps": 0.1, "weight_decay": 0.1}),
        (
            "NAdam",
            {"beta2": 0.6, "eps": 0.1, "weight_decay": 0.1},
            {"betas": (0.9, 0.6), "eps": 0.1, "weight_decay": 0.1},
        ),
        ("NAdam weight_decay", {"decoupled_weight_decay": True}, {"decoupled_weight_decay": True}),
        ("Lion", {"beta1": 0.5, "beta2": 0.6, "weight_decay": 0.1}, {"betas": (0.5, 0.6), "weight_decay": 0.1}),
        ("FTRL", {"l1": 0.5, "l2": 0.1, "beta": 2.0}, {"l1": 0.5, "l2": 0.1, "beta": 2.0}),
    ],
)
def test_every_hyperparameter_travels_with_its_push(cluster: wl.Cluster, name: str, ours: Any, theirs: Any):
    rule, kind, options = OPTIMIZERS[name]
    tensor = cluster.tensor("w", (9, 7), rule=rule, init=wl.Normal())
    peer = Torch(tensor.pull(), kind, options)
    usual = {k: peer.optimizer.param_groups[0][k] for k in theirs}
    for step in range(6):
        grad, changed = numbers(9, 7, seed=step), step % 2 == 1
        tensor.push(grad, **(ours if changed else {}))
        peer.step(grad, **(theirs if changed else usual))
    np.testing.assert_allclose(tensor.pull(), peer.weights, **CLOSE)


NUMBERS = {
    wl.SGD: ["lr", "momentum", "dampening", "weight_decay"],
    wl.Adagrad: ["lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"],
    wl.RowAdagrad: ["lr", "initial_accumulator_value", "eps"],
    wl.Adam: ["lr", "beta1", "beta2", "eps", "weight_decay"],
    wl.AdamW: ["lr", "beta1", "beta2", "eps", "weight_decay"],
    wl.RMSProp: ["lr", "alpha", "eps", "weight_decay", "momentum"],
    wl.Adadelta: ["lr", "rho", "eps", "weight_decay"],
    wl.Adamax: ["lr", "beta1", "beta2", "eps", "weight_decay"],
    wl.NAdam: ["lr", "beta1", "beta2", "eps", "weight_decay", "momentum_decay"],
    wl.Lion: ["lr", "beta1", "beta2", "weight_decay"],
    wl.FTRL: ["lr", "beta", "l1", "l2"],
}
WRONG = [float("nan"), float("inf"), -0.5, "0.1", None, True, 1j, [0.1]]
REFUSED = [
    (kind, name, value)
    for kind, names in NUMBERS.items()
    for name in names
    for value in WRONG
    if not (name == "dampening" and value == -0.5)  # torch allows any dampening
]


@pytest.mark.parametrize(("kind", "name", "value"), REFUSED)
def test_a_hyperparameter_outside_its_range_is_refused_by_name(kind: Any, name: str, value: Any):
    with pytest.raises(wl.InvalidArgument, match=rf"{kind.__name__}: {name} must be .*, not "):
        kind(**{"lr": 0.1, name: value})


@pytest.mark.parametrize("kind", [wl.Adam, wl.AdamW, wl.Adamax, wl.NAdam, wl.Lion])
@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_a_beta_is_below_one(kind: Any, name: str):
    with pytest.raises(wl.InvalidArgument, match=f"{name} must be at least 0 and below 1, not 1.0"):
        kind(**{name: 1.0})


@pytest.mark.parametrize(("kind", "name"), [(wl.RMSProp, "alpha"), (wl.Adadelta, "rho")])
def test_a_share_is_at_most_one(kind: Any, name: str):
    kind(**{name: 1.0})
    with pytest.raises(wl.InvalidArgument, match=f"{name} must be at least 0 and at most 1, not 1.5"):
        kind(**{name: 1.5})


def test_the_step_size_of_ftrl_is_above_zero():
    with pytest.raises(wl.InvalidArgument, match=r"FTRL: lr must be above 0, not 0\.0"):
        wl.FTRL(lr=0.0)


@pytest.mark.parametrize("value", [0.5, 1, None, "yes"])
def test_nesterov_is_true_or_false(value: Any):
    with pytest.raises(wl.InvalidArgument, match="nesterov must be True or False"):
        wl.SGD(lr=0.1, momentum=0.9, nesterov=value)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_and_no_dampening(options: Any):
    with pytest.raises(wl.InvalidArgument, match="nesterov needs a momentum and no dampening"):
        wl.SGD(lr=0.1, nesterov=True, **options)


@pytest.mark.parametrize("number", [1, np.float32(0.5), np.float64(0.5), np.int64(1)])
def test_a_hyperparameter_may_be_any_real_number(cluster: wl.Cluster, number: Any):
    tensor = cluster.tensor("w", (1,), rule=wl.SGD(lr=number))
    tensor.push(np.ones(1, np.float32))
    tensor.push(np.ones(1, np.float32), lr=number)
    assert tensor.pull()[0] == -2 * float(number)


def push_of(cluster: wl.Cluster, where: str, rule: wl.Rule) -> tuple[Any, Any]:
    """A push and a pull of one row of four zeros."""
    if where == "tensor":
        tensor = cluster.tensor("w", (1, 4), rule=rule)
        return lambda **hyper: tensor.push(np.ones((1, 4), np.float32), **hyper), tensor.pull
    table = cluster.table("rows", 4, rule=rule)
    return lambda **hyper: table.push([1], np.ones((1, 4), np.float32), **hyper), lambda: table.pull([1])


@pytest.mark.parametrize("where", ["tensor", "table"])
def test_an_unknown_hyperparameter_is_refused_with_those_there_are(cluster: wl.Cluster, where: str):
    push, pull = push_of(cluster, where, wl.Adagrad())
    with pytest.raises(wl.InvalidArgument) as caught:
        push(learning_rate=0.1)
    assert "Adagrad has no hyperparameter 'learning_rate'" in str(caught.value)
    assert "eps, lr, lr_decay, staleness, weight_decay" in str(caught.value)
    assert not pull().any()


@pytest.mark.parametrize("where", ["tensor", "table"])
def test_a_fixed_number_is_refused_with_those_that_travel(cluster: wl.Cluster, where: str):
    push, pull = push_of(cluster, where, wl.Adagrad())
    with pytest.raises(wl.InvalidArgument) as caught:
        push(initial_accumulator_value=0.1)
    assert "initial_accumulator_value is fixed at creation" in str(caught.value)
    assert "eps, lr, lr_decay, staleness, weight_decay" in str(caught.value)
    assert not pull().any()


@pytest.mark.parametrize("rule", [wl.Sum(), wl.Assign(), wl.Max(), wl.Min(), wl.Average()])
def test_rules_without_hyperparameters_say_so(cluster: wl.Cluster, rule: wl.Rule):
    push, pull = push_of(cluster, "tensor", rule)
    with pytest.raises(wl.InvalidArgument, match="has no hyperparameter 'lr'; it has: none"):
        push(lr=0.1)
    assert not pull().any()


@pytest.mark.parametrize("where", ["tensor", "table"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), "0.1", None, True])
def test_a_bad_hyperparameter_of_a_push_applies_nothing(cluster: wl.Cluster, where: str, value: Any):
    push, pull = push_of(cluster, where, wl.SGD(lr=0.1))
    with pytest.raises(wl.InvalidArgument, match="lr must be"):
        push(lr=value)
    assert not pull().any()


@pytest.mark.parametrize(
    ("rule", "momentum"),
    [
        (wl.SGD(lr=0.1), 0.9),
        (wl.SGD(lr=0.1, momentum=0.9), 0.0),
        (wl.RMSProp(), 0.9),
        (wl.RMSProp(momentum=0.9), 0.0),
    ],
    ids=["without", "with", "RMSProp without", "RMSProp with"],
)
def test_momentum_cannot_come_or_go_with_a_push(cluster: wl.Cluster, rule: wl.Rule, momentum: float):
    push, pull = push_of(cluster, "tensor", rule)
    with pytest.raises(wl.InvalidArgument, match="momentum would change what is kept on the server"):
        push(momentum=momentum)
    assert not pull().any()
