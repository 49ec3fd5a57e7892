"""state_dict() carries what lives on the servers, in torch's own form."""

import io
from typing import Any

import pytest
import torch
from crew import together
from nets import assert_close, mlp, same, train, weights
from test_optimizer import IDS, RULES

import windlass as wl
from windlass.torch import ServerOptimizer

embedded = pytest.mark.embedded("about the optimizer, whatever its servers are")


@pytest.mark.parametrize(("rule", "kind", "options"), RULES, ids=IDS)
def test_training_goes_on_from_a_saved_state(cluster: wl.Cluster, rule: wl.Rule, kind: Any, options: Any) -> None:
    one = mlp()
    opt = ServerOptimizer(one.parameters(), rule, cluster=cluster)
    train(one, opt, 5)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    train(one, opt, 5, first=5)
    file.seek(0)
    other = mlp(seed=9)
    again = ServerOptimizer(other.parameters(), rule, cluster=cluster)
    again.load_state_dict(torch.load(file, weights_only=True))
    train(other, again, 5, first=5)
    assert same(weights(one), weights(other))


@embedded
@pytest.mark.parametrize(("rule", "kind", "options"), RULES, ids=IDS)
def test_states_go_between_torch_and_us(cluster: wl.Cluster, rule: wl.Rule, kind: Any, options: Any) -> None:
    theirs, ours = mlp(), mlp()
    sgd, opt = kind(theirs.parameters(), **options), ServerOptimizer(ours.parameters(), rule, cluster=cluster)
    train(theirs, sgd, 5)
    train(ours, opt, 5)
    from_us, from_them = mlp(), mlp()
    from_us.load_state_dict(ours.state_dict())
    resumed = kind(from_us.parameters(), **options)
    resumed.load_state_dict(opt.state_dict())
    train(from_us, resumed, 5, first=5)
    from_them.load_state_dict(theirs.state_dict())
    taken = ServerOptimizer(from_them.parameters(), rule, cluster=cluster)
    taken.load_state_dict(sgd.state_dict())
    train(from_them, taken, 5, first=5)
    train(theirs, sgd, 5, first=5)
    assert_close(weights(from_us), weights(theirs))
    assert_close(weights(from_them), weights(theirs))


def test_the_lowest_rank_writes(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> list[torch.Tensor]:
        model = mlp()
        opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1, momentum=0.9), cluster=worker)
        train(model, opt, 3, worker.rank)
        state = opt.state_dict()
        for entry in state["state"].values():
            entry["weight"] += worker.rank  # the others' are not used
        train(model, opt, 3, worker.rank, first=3)
        before = weights(model)
        opt.load_state_dict(state)
        train(model, opt, 3, worker.rank, first=3)
        worker.close()
        assert same(weights(model), before)
        return weights(model)

    one, other = together(cluster, 2, work)
    assert same(one, other)


@embedded
def test_half_precision_keeps_its_masters(cluster: wl.Cluster) -> None:
    param = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    opt = ServerOptimizer([param], wl.SGD(lr=2.0**-12), cluster=cluster)
    param.grad = torch.ones_like(param)
    opt.step()
    state = opt.state_dict()
    assert torch.equal(state["state"][0]["weight"], torch.full((100,), 1 - 2.0**-12))
    other = torch.nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    again = ServerOptimizer([other], wl.SGD(lr=2.0**-12), cluster=cluster)
    again.load_state_dict(state)
    assert torch.equal(again.state_dict()["state"][0]["weight"], state["state"][0]["weight"])


@embedded
def test_a_scheduler_survives(cluster: wl.Cluster) -> None:
    model = mlp()
    opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), cluster=cluster)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    train(model, opt, 1)
    scheduler.step()
    state = opt.state_dict()
    opt.param_groups[0]["lr"] = 1.0
    opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.05
    before = weights(model)
    train(model, opt, 1)
    reference = mlp()
    for p, w in zip(reference.parameters(), before, strict=True):
        p.data.copy_(w)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.05), 1)
    assert_close(weights(model), weights(reference))


@embedded
def test_states_that_do_not_fit_are_refused(cluster: wl.Cluster) -> None:
    opt = ServerOptimizer(mlp().parameters(), wl.Adam(), cluster=cluster)
    other = ServerOptimizer(mlp().parameters(), wl.SGD(lr=0.1), cluster=cluster)
    with pytest.raises(wl.InvalidArgument, match="the state is of SGD, not of Adam"):
        opt.load_state_dict(other.state_dict())
    state = opt.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(wl.InvalidArgument, match=r"exp_avg of '0.0' has shape \(3,\), expected \(300, 20\)"):
        opt.load_state_dict(state)
