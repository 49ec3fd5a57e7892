"""ServerOptimizer with rules of the user's own."""

import own_rules
import pytest
import torch
from nets import assert_close, mlp, train, weights

import windlass as wl
from windlass.torch import ServerOptimizer


def test_a_function_is_the_rule_of_a_models_parameters(own: wl.Cluster) -> None:
    theirs, ours = mlp(), mlp()
    opt = ServerOptimizer(ours.parameters(), own_rules.heavy_ball(lr=0.1), cluster=own)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for lr in (0.1, 0.05):  # as a scheduler changes it
        opt.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = lr
        train(theirs, reference)
        train(ours, opt)
    assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)
    state = opt.state_dict()
    other = mlp()
    again = ServerOptimizer(other.parameters(), own_rules.heavy_ball(lr=0.1), name="again", cluster=own)
    again.load_state_dict(state)
    kept = again.state_dict()["state"]
    assert_close([kept[0]["momentum"]], [state["state"][0]["momentum"]], rtol=0, atol=0)


def test_rules_that_look_at_more_than_numbers_are_refused() -> None:
    for rule in (own_rules.by_norm(), own_rules.row_adagrad(), wl.TorchRule("Adam", lr=0.1)):
        with wl.connect() as cluster, pytest.raises(wl.InvalidArgument, match="looks at more than single numbers"):
            ServerOptimizer(mlp().parameters(), rule, cluster=cluster)
