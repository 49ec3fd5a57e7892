"""Parameters on a GPU: the same steps, with copies beside the computation."""

from typing import Any

import pytest
import torch
from crew import together
from nets import STEPS, assert_close, batch, loss_of, mlp, train_joined, weights

import windlass as wl
from windlass.torch import ServerOptimizer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.embedded("about copies from and to the device"),
]
WAYS: list[dict[str, Any]] = [{}, {"overlap": True, "bucket_bytes": 1 << 16}]


def on_device(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(step, rank)
    return x.cuda(), y.cuda()


def train_there(model: Any, opt: Any, rank: int = 0) -> list[torch.Tensor]:
    for step in range(STEPS):
        x, y = on_device(step, rank)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.finish()
    return [w.cpu() for w in weights(model)]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["module", "parameters"])
def test_two_workers_do_the_steps_of_the_joined_batch(
    cluster: wl.Cluster, options: dict[str, Any], whole: bool
) -> None:
    rule = wl.SGD(lr=0.1, momentum=0.9)

    def work(worker: wl.Cluster) -> list[torch.Tensor]:
        model = mlp().cuda()
        params = model if whole else model.parameters()
        return train_there(model, ServerOptimizer(params, rule, cluster=worker, **options), worker.rank)

    one, other = together(cluster, 2, work)
    joined = mlp()
    train_joined(joined, torch.optim.SGD(joined.parameters(), lr=0.1, momentum=0.9), 2)
    assert_close(one, other, rtol=0, atol=0)
    assert_close(one, weights(joined), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(cluster: wl.Cluster, dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.ones(1000, dtype=dtype, device="cuda"))
    opt = ServerOptimizer([param], wl.SGD(lr=2.0**-12), cluster=cluster)
    for _ in range(64):
        param.grad = torch.ones_like(param)
        opt.step()
    assert torch.equal(param.detach().cpu(), torch.full((1000,), 1 - 64 * 2.0**-12, dtype=dtype))


def test_a_delay(cluster: wl.Cluster) -> None:
    param = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    opt = ServerOptimizer([param], wl.SGD(lr=1.0), delay=2, cluster=cluster)
    for step in range(20):
        (param * float(step)).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.finish()
    assert torch.equal(param.detach().cpu(), torch.full((1 << 20,), -190.0))


def test_memory_is_page_locked_and_clipping_state_and_changes_work(cluster: wl.Cluster) -> None:
    theirs, ours = mlp(), mlp().cuda()
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9)
    opt = ServerOptimizer(ours.parameters(), wl.SGD(lr=0.5, momentum=0.9), clip_norm=0.1, cluster=cluster)
    assert all(memory.part(0, 16).is_pinned() for memory in (opt._flats[0].weights, *opt._flats[0].grads))
    for step in range(STEPS):
        loss_of(theirs, step).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        sgd.step()
        sgd.zero_grad()
    got = train_there(ours, opt)
    assert_close(got, weights(theirs), rtol=1e-3, atol=1e-4)
    opt.load_state_dict(opt.state_dict())
    assert_close([w.cpu() for w in weights(ours)], got, rtol=0, atol=0)
    ours.load_state_dict(theirs.state_dict())
    opt.put_weights()
    assert_close([w.cpu() for w in weights(ours)], weights(theirs), rtol=0, atol=0)


def test_cpu_and_device_in_one_optimizer(cluster: wl.Cluster) -> None:
    model = mlp()
    model[2].cuda()
    begin = weights(model)
    opt = ServerOptimizer(model.parameters(), wl.SGD(lr=1.0), cluster=cluster)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    assert_close([w.cpu() for w in weights(model)], [b.cpu() - 1 for b in begin])
