"""delay=k: a worker goes on with weights that are up to k of its own steps old."""

import pytest
import torch
from crew import together
from nets import STEPS, assert_close, loss_of, mlp, normed, same, train, weights

import windlass as wl
from windlass.torch import ServerOptimizer
from windlass.torch._exchange import Late

embedded = pytest.mark.embedded("about the optimizer, whatever its servers are")


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_every_gradient_counts_once(cluster: wl.Cluster, delay: int, sync: str) -> None:
    def work(worker: wl.Cluster) -> torch.Tensor:
        param = torch.nn.Parameter(torch.zeros(30_000))
        opt = ServerOptimizer([param], wl.SGD(lr=1.0), sync=sync, delay=delay, cluster=worker)
        for step in range(20):
            (param * float(step)).sum().backward()
            opt.step()
            opt.zero_grad()
        opt.finish()
        worker.tick()
        got = param.detach().clone()
        if sync == "asp":
            got = torch.from_numpy(opt._flats[0].tensor.pull())
        worker.close()
        return got

    one, other = together(cluster, 2, work)
    if sync == "bsp":
        assert torch.equal(one, torch.full((30_000,), -190.0))
        assert torch.equal(one, other)
    else:
        assert min(float(one.min()), float(other.min())) == -380.0  # the last to look sees all


@embedded
def test_without_a_delay_it_is_the_plain_path(cluster: wl.Cluster) -> None:
    theirs, ours = mlp(), mlp()
    train(theirs, ServerOptimizer(theirs.parameters(), wl.SGD(lr=0.1), cluster=cluster))
    train(ours, ServerOptimizer(ours.parameters(), wl.SGD(lr=0.1), delay=0, cluster=cluster))
    assert same(weights(ours), weights(theirs))


@embedded
def test_weights_are_at_most_so_many_steps_old(cluster: wl.Cluster) -> None:
    """Each gradient is told apart by its size; what is missing in the weights is what is under way."""
    param = torch.nn.Parameter(torch.zeros(1 << 20))
    opt = ServerOptimizer([param], wl.SGD(lr=1.0), delay=2, cluster=cluster)
    for step in range(12):
        param.grad = torch.full_like(param, float(2**step))
        opt.step()
        assert isinstance(opt._exchange, Late)
        assert len(opt._exchange._under_way) <= 2
        seen = int(-param.detach()[0])
        missing = 2 ** (step + 1) - 1 - seen
        assert missing in (0, 2**step, 2**step + 2 ** (step - 1) if step else 0)
    opt.finish()
    assert torch.equal(param.detach(), torch.full_like(param, 1.0 - 2.0**12))


@embedded
@pytest.mark.parametrize("to_none", [True, False])
def test_learns_with_a_delay(cluster: wl.Cluster, to_none: bool) -> None:
    model = mlp()
    opt = ServerOptimizer(model, wl.SGD(lr=0.05), delay=2, cluster=cluster)
    before = loss_of(model, 0).item()
    for _ in range(2 * STEPS):
        loss_of(model, 0).backward()
        opt.step()
        opt.zero_grad(set_to_none=to_none)
    opt.finish()
    assert loss_of(model, 0).item() < 0.8 * before


@embedded
def test_a_statistic_that_comes_late_keeps_what_came_since(cluster: wl.Cluster) -> None:
    theirs, ours = normed(), normed()
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.0))
    opt = ServerOptimizer(ours, wl.SGD(lr=0.0), delay=2, cluster=cluster)
    train(ours, opt)
    opt.finish()
    assert_close([ours[1].running_mean, ours[1].running_var], [theirs[1].running_mean, theirs[1].running_var])
