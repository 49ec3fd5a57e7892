"""The guide's L-BFGS, written with vector operations, finds what scipy's finds."""

from typing import Any

import numpy as np
import pytest
from test_guides import GUIDES, examples

import windlass as wl

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """What the guide defines in its second and third example: direction() and lbfgs()."""
    space: dict[str, Any] = {}
    for line, block in examples(GUIDES / "vectors.md")[1:3]:
        exec(compile("\n" * line + block, "vectors.md", "exec"), space)
    return space


class Logistic:
    """Full-batch logistic regression: the mean loss with a penalty, and its gradient."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, l2: float) -> None:
        self.features = np.hstack([features, np.ones((len(features), 1))])
        self.signs, self.l2 = np.where(labels, 1.0, -1.0), l2
        self.size = self.features.shape[1]

    def __call__(self, w: np.ndarray) -> tuple[float, np.ndarray]:
        margins = self.signs * (self.features @ w)
        value = np.logaddexp(0, -margins).mean() + self.l2 / 2 * (w @ w)
        return float(value), self.features.T @ (-self.signs / (1 + np.exp(margins))) / len(margins) + self.l2 * w


def problem(name: str) -> Logistic:
    from sklearn.datasets import load_breast_cancer, load_digits  # here: whoever collects tests need not wait for them

    if name == "cancer":
        features, labels = load_breast_cancer(return_X_y=True)
        return Logistic((features - features.mean(0)) / features.std(0), labels, 1e-3)
    features, labels = load_digits(return_X_y=True)  # is it an even number?
    return Logistic(features / 16, labels % 2 == 0, 1e-4)


@pytest.mark.parametrize("name", ["cancer", "digits"])
def test_it_finds_the_loss_that_scipy_finds_in_as_many_steps(cluster: wl.Cluster, guide: Any, name: str) -> None:
    from scipy.optimize import minimize

    loss = problem(name)
    theirs = minimize(
        loss,
        np.zeros(loss.size),
        jac=True,
        method="L-BFGS-B",
        options={"maxcor": 10, "gtol": TOLERANCE, "ftol": 1e-15, "maxiter": 1000},
    )
    w = cluster.tensor("w", loss.size, rule=wl.Assign(), dtype="float64")
    value, steps = guide["lbfgs"](cluster, w, loss, memory=10, tolerance=TOLERANCE, steps=1000)
    print(f"{name}: {value} after {steps} steps; scipy {theirs.fun} after {theirs.nit}")
    assert value == pytest.approx(theirs.fun, rel=1e-6)
    assert value == loss(w.pull())[0]
    assert theirs.nit / 1.5 <= steps <= 1.5 * theirs.nit
    assert abs(loss(w.pull())[1]).max() <= TOLERANCE


def test_the_direction_is_that_of_the_dense_formula(cluster: wl.Cluster, guide: Any) -> None:
    """The two loops against the product of matrices that they stand for."""
    rng = np.random.default_rng(7)
    n, memory = 12, 4
    hessian = (lambda a: a @ a.T + np.eye(n))(rng.standard_normal((n, n)))
    d = cluster.tensor("d", n, rule=wl.Assign(), dtype="float64")
    g = cluster.tensor("g", like=d)
    gradient = rng.standard_normal(n)
    g.put(gradient)
    history, pairs = [], []
    for i in range(memory):
        s = rng.standard_normal(n)
        pairs.append((s, hessian @ s))
        history.append(tuple(cluster.tensor(f"{name}{i}", like=d) for name in "sy"))
        for tensor, array in zip(history[-1], pairs[-1], strict=True):
            tensor.put(array)
    s, y = pairs[-1]
    inverse = np.eye(n) * (s @ y) / (y @ y)
    for s, y in pairs:
        v = np.eye(n) - np.outer(y, s) / (s @ y)
        inverse = v.T @ inverse @ v + np.outer(s, s) / (s @ y)
    guide["direction"](d, g, history)
    np.testing.assert_allclose(d.pull(), -inverse @ gradient, rtol=1e-10)


def test_every_transport_goes_the_same_way_to_the_bit(cluster: wl.Cluster, guide: Any) -> None:
    loss = problem("cancer")
    with wl.connect(threads=1) as alone:
        results = []
        for where in (cluster, alone):
            w = where.tensor("w", loss.size, rule=wl.Assign(), dtype="float64")
            results.append((guide["lbfgs"](where, w, loss), w.pull().tobytes()))
    assert results[0] == results[1]
