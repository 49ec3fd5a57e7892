"""Tables of modules on a GPU: the same numbers, through page-locked memory."""

import os
import signal
from typing import Any

import pytest
import torch
from crew import together
from tables import DIM, ROWS, all_rows, gradient_of, ids, pair, rows

import windlass as wl
from windlass.testing import Servers
from windlass.torch import Embedding, EmbeddingBag, EmbeddingBags, ServerOptimizer
from windlass.torch._flat import Memory

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.embedded("about copies from and to the device"),
]


@pytest.mark.parametrize("there", [True, False], ids=["ids on the device", "ids on the host"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_outputs_and_gradients_are_torchs(cluster: wl.Cluster, kind: Any, padding: int | None, there: bool) -> None:
    theirs, ours = pair(cluster, kind, padding_idx=padding)
    theirs, ours = theirs.cuda(), ours.cuda()
    opt = ServerOptimizer(ours, cluster=cluster)
    for seed in range(6):
        batch = ids(40, 5, n=9 + 20 * (seed % 3), seed=seed)
        expected, seen = theirs(batch.cuda()), ours(batch.cuda() if there else batch)
        assert seen.is_cuda
        torch.testing.assert_close(seen, expected)
        theirs.zero_grad()
        expected.square().sum().backward()
        seen.square().sum().backward()
        torch.testing.assert_close(grads_on_host(ours), theirs.weight.grad.cpu(), rtol=1e-5, atol=1e-5)
        opt.zero_grad()


def grads_on_host(ours: Any) -> torch.Tensor:
    pending = ours._open()._pending
    pending[:] = [piece._replace(grad=piece.grad.cpu()) for piece in pending]
    return gradient_of(ours)


def test_steps_are_those_of_torch(cluster: wl.Cluster) -> None:
    theirs, ours = pair(cluster, rule=wl.Adagrad(lr=0.1))
    ours = ours.cuda()
    sgd, opt = torch.optim.Adagrad(theirs.parameters(), lr=0.1), ServerOptimizer(ours, cluster=cluster)
    for step in range(50):
        batch, goal = ids(200 + 40 * step, seed=step), rows(200 + 40 * step, seed=step)
        (theirs(batch) - goal).square().mean().backward()
        (ours(batch.cuda()) - goal.cuda()).square().mean().backward()
        for one in (sgd, opt):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(all_rows(ours), theirs.weight.detach(), rtol=1e-4, atol=1e-5)


def test_many_features_and_dense_parameters_train_in_two_workers(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> torch.Tensor:
        torch.manual_seed(0)
        many = EmbeddingBags(["a", "b"], DIM, table="ctr", init=wl.Normal(std=1.0), cluster=worker)
        model = torch.nn.Sequential(many, torch.nn.Flatten(), torch.nn.Linear(2 * DIM, 1)).cuda()
        opt = ServerOptimizer(model, wl.Adagrad(lr=0.1), clip_norm=1.0, cluster=worker)
        losses = []
        for _ in range(30):
            loss = (model(ids(64, 2, seed=worker.rank).cuda()) - 1).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]
        return many(torch.arange(ROWS)[:, None].expand(ROWS, 2)).detach().cpu()

    one, other = together(cluster, 2, work)
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_travels(cluster: wl.Cluster, dtype: torch.dtype) -> None:
    emb = Embedding("rows", DIM, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=cluster).cuda().to(dtype)
    opt = ServerOptimizer(emb, cluster=cluster)
    out = emb(torch.full((4096,), 9, device="cuda"))
    assert out.dtype is dtype
    out.sum().backward()
    opt.step()
    assert torch.equal(all_rows(emb, 10)[9], torch.full((DIM,), -4096.0))


def test_rows_travel_through_page_locked_memory_that_is_used_again(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", 64, rule=wl.SGD(lr=1.0), cluster=cluster).cuda()
    opt = ServerOptimizer(emb, cluster=cluster)

    def step(n: int) -> None:
        emb(torch.arange(n, device="cuda")).sum().backward()
        opt.step()
        opt.zero_grad()

    step(10_000)
    stagings = list(emb._open()._staging.values())
    assert len(stagings) == 2  # one for rows, one for gradients
    memories = [staging._memory for staging in stagings]
    assert all(memory is not None and memory.part(0, 16).is_pinned() for memory in memories)
    for n in (500, 9_000, 10_000):
        step(n)
    assert [staging._memory for staging in stagings] == memories
    step(50_000)
    assert all(staging._memory.part(0, 16).is_pinned() for staging in stagings)


def test_rows_are_right_while_the_device_is_behind(cluster: wl.Cluster) -> None:
    """The memory is written again only when the device has read it."""
    emb = Embedding("rows", 64, rule=wl.SGD(lr=1.0), init=wl.Normal(std=1.0), trainable=False, cluster=cluster).cuda()
    batches = [torch.arange(4000) + 4000 * i for i in range(8)]
    expected = [emb.table.pull(batch.numpy(), create=False).copy() for batch in batches]
    torch.cuda._sleep(200_000_000)
    seen = [emb(batch) for batch in batches]
    for a, b in zip(seen, expected, strict=True):
        assert torch.equal(a.cpu(), torch.from_numpy(b))


@pytest.mark.parametrize("settles", [True, False])
def test_a_device_reads_fresh_pages_after_a_server_was_given_up(monkeypatch: pytest.MonkeyPatch, settles: bool) -> None:
    """Memory that a server could write gets fresh pages when it is given up."""
    if not settles:  # what happens without
        monkeypatch.setattr(Memory, "settle", lambda self: 0)
    with Servers(1, kind="unix") as lost:
        try:
            there = wl.connect(servers=lost.addresses, transport="arena", timeout=20)
            emb = Embedding("rows", 64, rule=wl.SGD(lr=1.0), init=wl.Constant(1.0), cluster=there).cuda()
            batch = torch.arange(4000)
            with torch.no_grad():
                assert torch.equal(emb(batch).cpu(), torch.ones(4000, 64))
            staging = next(iter(emb._open()._staging.values()))
            os.kill(lost.pids[0], signal.SIGSTOP)
            future = emb.table.pull_async(batch.numpy(), out=staging._memory.part(0, 4000 * 64).view(4000, 64))
            there.abandon(0)
            with pytest.raises(wl.ServerLost):
                future.wait(timeout=20)
            seen = staging.to_device(4000, lambda host: host.fill_(5.0)).cpu()
        finally:
            os.kill(lost.pids[0], signal.SIGCONT)
    assert bool((seen == 5).all()) == settles


def test_a_device_of_another_number_is_kept(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", DIM, rule=wl.SGD(lr=1.0), cluster=cluster)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    assert emb.to(device)(ids(4)).device == device
