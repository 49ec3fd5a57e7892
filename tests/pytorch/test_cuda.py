"""Parameters on a GPU: the same steps, with copies beside the computation."""

import os
import signal
from typing import Any

import pytest
import torch
from crew import together
from nets import STEPS, assert_close, batch, loss_of, mlp, train_joined, weights

import windlass as wl
from windlass.testing import Servers
from windlass.torch import ServerOptimizer
from windlass.torch._device import Fetch
from windlass.torch._flat import Memory

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


def pages_of_the_device_and_ours(cluster: wl.Cluster, stopped: int) -> tuple[Any, Any]:
    """What a GPU writes and reads of an array whose server was given up before, and while, it was copied."""
    n = 1 << 20
    memory = Memory(cluster, n, torch.float32, locked=True)
    w = cluster.tensor("w", (n // 2,), rule=wl.Sum())
    grad, out = memory.part(0, n // 2), memory.part(n // 2, n)
    w.push_pull(grad, out=out)
    device = torch.full((n,), 3.0, device="cuda")
    stream = torch.cuda.Stream()

    def copy() -> Any:
        with torch.cuda.stream(stream):
            memory.part(0, n).copy_(device, non_blocking=True)
            return stream.record_event()

    os.kill(stopped, signal.SIGSTOP)
    future = w.push_pull_async(grad, out=out)
    early = Fetch(memory, copy)
    cluster.abandon(0)
    with pytest.raises(wl.ServerLost):
        future.wait(timeout=20)
    early.synchronize()
    fetched = memory.part(0, n).clone()
    memory.part(0, n).fill_(5.0)
    memory.settle()
    there = memory.part(0, n).to("cuda", non_blocking=True).cpu()
    return fetched, there


@pytest.mark.parametrize("settles", [True, False])
def test_a_device_knows_fresh_pages(monkeypatch: pytest.MonkeyPatch, settles: bool) -> None:
    if not settles:  # what happens without
        monkeypatch.setattr(Memory, "settle", lambda self: 0)
    with Servers(1, kind="unix") as servers:
        try:
            cluster = wl.connect(servers=servers.addresses, transport="arena", timeout=20)
            fetched, there = pages_of_the_device_and_ours(cluster, servers.pids[0])
        finally:
            os.kill(servers.pids[0], signal.SIGCONT)
    assert bool((fetched == 3).all() and (there == 5).all()) == settles
