"""Overlap sends gradients during the backward pass; under BSP every bit is that of the plain path."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crew import together
from nets import STEPS, assert_close, batch, loss_of, mlp, normed, same, train, weights

import windlass as wl
from windlass.torch import ServerOptimizer
from windlass.torch._overlap import Overlap

SMALL = 1 << 16  # bytes: several buckets
embedded = pytest.mark.embedded("about the optimizer, whatever its servers are")


def run(cluster: wl.Cluster, of: Any, rule: wl.Rule, steps: int = STEPS, **options: Any) -> list[torch.Tensor]:
    """Two workers; the weights of the first."""

    def work(worker: wl.Cluster) -> list[torch.Tensor]:
        model = mlp()
        opt = ServerOptimizer(of(model), rule, cluster=worker, **options)
        train(model, opt, steps, worker.rank)
        opt.finish()
        worker.close()
        return weights(model)

    one, other = together(cluster, 2, work)
    assert same(one, other)
    return one


@pytest.mark.parametrize("of", [lambda m: m.parameters(), lambda m: m], ids=["parameters", "module"])
@pytest.mark.parametrize("rule", [wl.SGD(lr=0.1, momentum=0.9), wl.Adam(lr=0.01)], ids=["momentum", "adam"])
def test_bits_are_those_of_the_plain_path(cluster: wl.Cluster, of: Any, rule: wl.Rule) -> None:
    plain = run(cluster, lambda m: m.parameters(), rule, name="plain")
    assert same(run(cluster, of, rule, name="overlap", overlap=True, bucket_bytes=SMALL), plain)
    assert same(run(cluster, of, rule, name="one bucket", overlap=True), plain)


@embedded
def test_buckets_are_whole_shards_and_cover_everything(cluster: wl.Cluster) -> None:
    opt = ServerOptimizer(mlp().parameters(), wl.SGD(lr=0.1), overlap=True, bucket_bytes=SMALL, cluster=cluster)
    assert isinstance(opt._exchange, Overlap)
    buckets = sorted(opt._exchange._buckets, key=lambda b: b.begin)
    assert len(buckets) > 3
    assert buckets[0].begin == 0
    assert buckets[-1].end == opt._flats[0].n
    per_shard = opt._flats[0].tensor.shard_elements
    for one, after in itertools.pairwise(buckets):
        assert one.end == after.begin
        assert one.end % per_shard == 0
        assert one.priority > after.priority


@embedded
def test_gradients_leave_before_the_backward_pass_is_over(cluster: wl.Cluster) -> None:
    model = mlp()
    opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), overlap=True, bucket_bytes=SMALL, cluster=cluster)
    seen: list[int] = []
    assert isinstance(opt._exchange, Overlap)
    buckets = opt._exchange._buckets
    model[0].weight.register_hook(lambda grad: seen.append(sum(bucket.sent for bucket in buckets)))
    loss_of(model, 0).backward()
    assert 0 < seen[0] < len(buckets)
    before = weights(model)
    opt.step()
    assert not same(weights(model), before)


@embedded
def test_parameters_do_not_change_before_the_step(cluster: wl.Cluster) -> None:
    model = mlp()
    opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), overlap=True, bucket_bytes=SMALL, cluster=cluster)
    before = weights(model)
    loss_of(model, 0).backward()
    assert same(weights(model), before)
    opt.step()
    assert not same(weights(model), before)


@embedded
def test_a_module_waits_for_its_own_weights_alone(cluster: wl.Cluster) -> None:
    model = mlp()
    opt = ServerOptimizer(model, wl.SGD(lr=0.1), overlap=True, bucket_bytes=SMALL, cluster=cluster)
    train(model, opt, 1)
    assert isinstance(opt._exchange, Overlap)
    assert any(bucket.futures for bucket in opt._exchange._buckets)
    model[0](batch(0)[0])
    waiting = [bucket for bucket in opt._exchange._buckets if bucket.futures]
    last = opt._flats[0].segments[-1]
    assert any(last in bucket.segments for bucket in waiting)
    expected = mlp()
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1), 1)
    assert_close([model.state_dict()[key] for key in model.state_dict()], expected.state_dict().values())


@embedded
def test_a_gradient_that_was_sent_may_not_be_changed(cluster: wl.Cluster) -> None:
    model = mlp()
    opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), overlap=True, bucket_bytes=SMALL, cluster=cluster)
    loss_of(model, 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(wl.InvalidArgument, match=r"gradient of '0.0' was changed after it had been sent.*clip_norm="):
        opt.step()


@embedded
def test_a_second_backward_pass_needs_no_sync(cluster: wl.Cluster) -> None:
    model = mlp()
    opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), overlap=True, cluster=cluster)
    loss_of(model, 0).backward()
    with pytest.raises(wl.InvalidArgument, match=r"was sent by an earlier backward pass.*no_sync"):
        loss_of(model, 1).backward()
    assert repr(opt)


@embedded
def test_weights_used_outside_of_their_module_are_noticed(cluster: wl.Cluster) -> None:
    model = mlp()
    opt = ServerOptimizer(model, wl.SGD(lr=0.1), overlap=True, bucket_bytes=SMALL, cluster=cluster)
    train(model, opt, 1)
    x, y = batch(1)
    hidden = F.relu(model[2](F.relu(model[0](x))))
    loss = F.cross_entropy(F.linear(hidden, model[4].weight, model[4].bias), y)
    with pytest.raises(wl.InvalidArgument, match="was used before its new weights had come"):
        loss.backward()


@embedded
def test_attention_reads_the_weights_of_its_parts(cluster: wl.Cluster) -> None:
    def made() -> torch.nn.TransformerEncoderLayer:
        torch.manual_seed(0)
        return torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def steps(model: Any, opt: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for _ in range(5):
            model(torch.randn(2, 3, 16)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        return [t.clone() for t in model.state_dict().values()]

    theirs, ours = made(), made()
    opt = ServerOptimizer(ours, wl.SGD(lr=0.01), overlap=True, bucket_bytes=SMALL, cluster=cluster)
    assert_close(steps(ours, opt), steps(theirs, torch.optim.SGD(theirs.parameters(), lr=0.01)))


@embedded
def test_buffers_and_evaluation_see_the_last_step(cluster: wl.Cluster) -> None:
    theirs, ours = normed(), normed()
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    train(ours, ServerOptimizer(ours, wl.SGD(lr=0.1), overlap=True, cluster=cluster))
    theirs.eval()
    ours.eval()
    assert_close([ours(batch(0)[0])], [theirs(batch(0)[0])])


@pytest.mark.parametrize("sync", ["asp", "ssp:1"])
def test_other_policies_overlap_too(cluster: wl.Cluster, sync: str) -> None:
    """With a fixed gradient every order of updates comes to the same sum."""

    begin = torch.randn(1000, 50)

    def work(worker: wl.Cluster) -> None:
        model = torch.nn.Linear(50, 1000, bias=False)
        model.weight.data.copy_(begin)
        opt = ServerOptimizer(
            model.parameters(), wl.SGD(lr=1.0), sync=sync, overlap=True, bucket_bytes=SMALL, cluster=worker
        )
        x = torch.ones(1, 50)
        for _ in range(10):
            model(x).sum().backward()
            opt.step()
        worker.tick()

    together(cluster, 2, work)
    model = torch.nn.Linear(50, 1000, bias=False)
    ServerOptimizer(model.parameters(), wl.SGD(lr=1.0), sync=sync, name="optimizer", cluster=cluster.worker(0, 1))
    torch.testing.assert_close(model.weight.detach(), begin - 20)
