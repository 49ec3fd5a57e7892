"""Options of any rule hold for rules of the user's own."""

from typing import Any

import numpy as np
import own_rules
import pytest
import torch
from helpers import numbers

import windlass as wl

OPTIONS: dict[str, Any] = {
    "clip_value": 0.5,
    "clip_weights": (-0.4, 0.3),
    "schedule": wl.Schedule(warmup=3, decay="linear", updates=5, end=0.1),
}


@pytest.fixture
def cluster(own: wl.Cluster) -> wl.Cluster:
    return own


@pytest.mark.parametrize("where", ["tensor", "table"])
def test_a_function_has_bounds_and_schedules_as_our_rules_have(cluster: wl.Cluster, where: str) -> None:
    both = []
    for name, rule in (("own", own_rules.heavy_ball), ("native", wl.SGD)):
        more = {} if name == "own" else {"momentum": 0.9}
        made = rule(lr=0.1, **more, **OPTIONS)
        if where == "tensor":
            tensor = cluster.tensor(name, (300, 8), rule=made)
            both.append([tensor.push_pull(numbers(300, 8, seed=step)) for step in range(10)])
        else:
            table = cluster.table(name, 8, rule=made)
            both.append([table.push_pull(np.arange(300), numbers(300, 8, seed=step)) for step in range(10)])
    for ours, native in zip(*both, strict=True):
        np.testing.assert_allclose(ours, native, rtol=1e-5, atol=1e-6)
        assert ours.min() >= np.float32(-0.4)
        assert ours.max() <= np.float32(0.3)
    assert both[0][-1].max() == np.float32(0.3)


def test_an_optimizer_of_torch_has_them_too(cluster: wl.Cluster) -> None:
    ours = cluster.tensor("ours", (50, 8), rule=wl.TorchRule(torch.optim.Adam, lr=0.05, **OPTIONS))
    native = cluster.tensor("native", (50, 8), rule=wl.Adam(lr=0.05, **OPTIONS))
    for step in range(10):
        grad = numbers(50, 8, seed=step)
        np.testing.assert_allclose(ours.push_pull(grad), native.push_pull(grad), rtol=1e-4, atol=1e-5)


def test_the_options_of_a_rule_of_ones_own_are_compared_and_shown(cluster: wl.Cluster) -> None:
    cluster.tensor("w", (3,), rule=own_rules.heavy_ball(lr=0.1, clip_value=0.5))
    with pytest.raises(wl.SpecMismatch, match=r"rule 'own_rules:heavy_ball'\(clip_value=0\.5\)"):
        cluster.tensor("w", (3,), rule=own_rules.heavy_ball(lr=0.1))


def test_without_lr_there_is_no_schedule() -> None:
    with pytest.raises(wl.InvalidArgument, match="centred: expected no schedule, since it has no step size"):
        own_rules.centred(schedule=wl.Schedule(warmup=5))
    with pytest.raises(wl.InvalidArgument, match="TorchRule: clip_value must be"):
        wl.TorchRule(torch.optim.Adam, lr=0.1, clip_value=-1)


def test_a_parameter_cannot_be_called_as_an_option_is() -> None:
    with pytest.raises(wl.InvalidArgument, match="schedule is an option of every rule, and cannot be a parameter"):
        wl.rule(lambda w, g, schedule: None)
