"""ServerOptimizer is an optimizer of torch: the same steps as torch.optim's, with the parameters on servers."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crew import together
from helpers import PATIENCE_S, Connect
from nets import STEPS, assert_close, batch, loss_of, mlp, normed, same, train, train_joined, weights

import windlass as wl
from windlass.torch import ServerOptimizer

RULES: list[tuple[wl.Rule, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (wl.SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    (wl.SGD(lr=0.1, momentum=0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (
        wl.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    (wl.Adam(lr=0.01, beta1=0.8), torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.999)}),
    (wl.AdamW(lr=0.01, weight_decay=0.1), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (wl.Adagrad(lr=0.05), torch.optim.Adagrad, {"lr": 0.05}),
    (wl.RMSProp(lr=0.001), torch.optim.RMSprop, {"lr": 0.001}),
    (
        wl.RMSProp(lr=0.001, momentum=0.9, centered=True, eps=1e-4),  # gradients near zero make the most of rounding
        torch.optim.RMSprop,
        {"lr": 0.001, "momentum": 0.9, "centered": True, "eps": 1e-4},
    ),
    (wl.Adadelta(lr=0.5), torch.optim.Adadelta, {"lr": 0.5}),
    (wl.Adamax(lr=0.01, beta1=0.8), torch.optim.Adamax, {"lr": 0.01, "betas": (0.8, 0.999)}),
    (
        wl.NAdam(lr=0.005, beta2=0.99, eps=1e-6, weight_decay=0.1, decoupled_weight_decay=True),
        torch.optim.NAdam,
        {"lr": 0.005, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
]
IDS = ["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "centered", "adadelta", "adamax", "nadam"]
embedded = pytest.mark.embedded("about the optimizer, whatever its servers are")


@pytest.mark.parametrize(("rule", "kind", "options"), RULES, ids=IDS)
def test_one_worker_does_the_steps_of_torch(cluster: wl.Cluster, rule: wl.Rule, kind: Any, options: Any) -> None:
    theirs, ours = mlp(), mlp()
    train(theirs, kind(theirs.parameters(), **options))
    train(ours, ServerOptimizer(ours.parameters(), rule, cluster=cluster))
    assert_close(weights(ours), weights(theirs))


@embedded
@pytest.mark.parametrize(("rule", "kind", "options"), RULES, ids=IDS)
def test_an_instance_of_torch_becomes_the_rule(cluster: wl.Cluster, rule: wl.Rule, kind: Any, options: Any) -> None:
    model = mlp()
    opt = ServerOptimizer(kind(model.named_parameters(), **options), cluster=cluster)
    assert opt.param_groups[0]["rule"] == rule
    assert opt.param_groups[0]["param_names"][0] == "0.weight"


@pytest.mark.parametrize("sync", ["bsp", "ssp:0"])
def test_two_workers_start_alike_and_bsp_is_the_joined_batch(cluster: wl.Cluster, sync: str) -> None:
    def work(worker: wl.Cluster) -> list[torch.Tensor]:
        model = models[worker.rank]
        opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1, momentum=0.9), sync=sync, cluster=worker)
        if sync == "bsp":  # else the other may have pushed something already
            assert same(weights(model), first)
        train(model, opt, rank=worker.rank)
        worker.close()
        return weights(model)

    models = [mlp(seed=1), mlp(seed=2)]
    first = weights(models[0])
    one, other = together(cluster, 2, work)
    if sync == "bsp":
        assert same(one, other)
        joined = mlp(seed=1)
        train_joined(joined, torch.optim.SGD(joined.parameters(), lr=0.1, momentum=0.9), 2)
        assert_close(one, weights(joined), rtol=1e-4, atol=1e-5)


@embedded
def test_groups_have_rules_and_numbers_of_their_own(cluster: wl.Cluster) -> None:
    theirs, ours = mlp(), mlp()
    adam = torch.optim.Adam(theirs[0].parameters(), lr=0.01)
    sgd = torch.optim.SGD([{"params": theirs[2].parameters(), "lr": 0.2}, {"params": theirs[4].parameters()}], lr=0.1)
    opt = ServerOptimizer(
        [
            {"params": ours[0].parameters(), "rule": wl.Adam(lr=0.01)},
            {"params": ours[2].parameters(), "lr": 0.2},
            {"params": ours[4].parameters()},
        ],
        wl.SGD(lr=0.1),
        cluster=cluster,
    )
    for step in range(STEPS):
        for model in (theirs, ours):
            model.zero_grad()
            loss_of(model, step).backward()
        adam.step()
        sgd.step()
        opt.step()
    assert_close(weights(ours), weights(theirs))


@embedded
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_a_group_may_be_added_later(cluster: wl.Cluster, options: dict[str, Any]) -> None:
    theirs, ours = mlp(), mlp()
    opts: list[Any] = [torch.optim.SGD(theirs[4].parameters(), lr=0.1)]
    opts.append(ServerOptimizer(ours[4].parameters(), wl.SGD(lr=0.1), cluster=cluster, **options))
    for model, opt in zip((theirs, ours), opts, strict=True):
        train(model, opt, 4)
        model.zero_grad()
        opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
        train(model, opt, 4, first=4)
    assert_close(weights(ours), weights(theirs))


@embedded
@pytest.mark.parametrize("adam", [False, True])
def test_schedulers_of_torch_work(cluster: wl.Cluster, adam: bool) -> None:
    theirs, ours = mlp(), mlp()
    kind: Any = torch.optim.Adam if adam else torch.optim.SGD
    pairs: list[tuple[Any, Any]] = [
        (theirs, kind(theirs.parameters(), lr=0.01, **({} if adam else {"momentum": 0.9}))),
        (
            ours,
            ServerOptimizer(
                ours.parameters(), wl.Adam(lr=0.01) if adam else wl.SGD(lr=0.01, momentum=0.9), cluster=cluster
            ),
        ),
    ]
    for model, opt in pairs:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.01 if adam else 0.1, total_steps=STEPS)
        for step in range(STEPS):
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()
            if step < STEPS - 1:
                scheduler.step()
    assert_close(weights(ours), weights(theirs))


@embedded
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"delay": 0}], ids=str)
def test_zero_grad_in_both_forms_and_unused_parameters_are_as_in_torch(
    cluster: wl.Cluster, to_none: bool, options: dict[str, Any]
) -> None:
    """With momentum and decay: a gradient of zeros moves a parameter, no gradient does not."""

    def run(model: Any, opt: Any) -> None:
        for step in range(STEPS):
            x, y = batch(step)
            hidden = F.relu(model[0](x))
            if step % 3 == 0:
                hidden = F.relu(model[2](hidden))  # elsewhere it is not used
            F.cross_entropy(model[4](hidden), y).backward()
            opt.step()
            opt.zero_grad(set_to_none=to_none)

    theirs, ours = mlp(), mlp()
    run(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    rule = wl.SGD(lr=0.1, momentum=0.9, weight_decay=0.1)
    run(ours, ServerOptimizer(ours.parameters(), rule, cluster=cluster, **options))
    assert_close(weights(ours), weights(theirs))


def test_a_parameter_that_one_worker_does_not_use_gets_half_of_the_others_gradient(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> list[torch.Tensor]:
        model = mlp()
        opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), cluster=worker)
        for step in range(3):
            x, y = batch(step)
            hidden = F.relu(model[0](x))
            if worker.rank == 1:
                hidden = F.relu(model[2](hidden))
            F.cross_entropy(model[4](hidden), y).backward()
            opt.step()
            opt.zero_grad()
        worker.close()
        return weights(model)

    one, other = together(cluster, 2, work)
    assert same(one, other)
    joined = mlp()
    opt = torch.optim.SGD(joined.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch(step)
        for uses in (False, True):
            hidden = F.relu(joined[0](x))
            hidden = F.relu(joined[2](hidden)) if uses else hidden
            (F.cross_entropy(joined[4](hidden), y) / 2).backward()
        opt.step()
        opt.zero_grad()
    assert_close(one, weights(joined))


@embedded
def test_frozen_parameters_stay_and_may_be_trained_later(cluster: wl.Cluster) -> None:
    theirs, ours = mlp(), mlp()
    for model in (theirs, ours):
        model[0].requires_grad_(False)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.01)
    opt = ServerOptimizer(ours.parameters(), wl.Adam(lr=0.01), cluster=cluster)
    for model, one in ((theirs, adam), (ours, opt)):
        train(model, one, 5)
        model[0].requires_grad_(True)
        train(model, one, 5, first=5)
    assert_close(weights(ours), weights(theirs))


@embedded
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_gradients_accumulate(cluster: wl.Cluster, options: dict[str, Any]) -> None:
    theirs, ours = mlp(), mlp()
    train_joined(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 3)
    opt = ServerOptimizer(ours.parameters(), wl.SGD(lr=0.1), cluster=cluster, **options)
    for step in range(STEPS):
        with opt.no_sync():
            for part in (0, 1):
                (loss_of(ours, step, part) / 3).backward()
        (loss_of(ours, step, 2) / 3).backward()
        opt.step()
        opt.zero_grad()
    assert_close(weights(ours), weights(theirs))
    with opt.no_sync(), pytest.raises(wl.InvalidArgument, match=r"step\(\) inside no_sync\(\)"):
        opt.step()


@embedded
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_clip_norm_is_torchs_clipping(cluster: wl.Cluster, options: dict[str, Any]) -> None:
    theirs, ours, by_hand = mlp(), mlp(), mlp()
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for step in range(STEPS):
        loss_of(theirs, step).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        sgd.step()
        sgd.zero_grad()
    train(ours, ServerOptimizer(ours.parameters(), wl.SGD(lr=0.5), clip_norm=0.1, cluster=cluster, **options))
    assert_close(weights(ours), weights(theirs))
    if options:
        return
    opt = ServerOptimizer(by_hand.parameters(), wl.SGD(lr=0.5), cluster=cluster)
    for step in range(STEPS):
        loss_of(by_hand, step).backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
    assert_close(weights(by_hand), weights(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_has_masters_of_float32(cluster: wl.Cluster, dtype: torch.dtype) -> None:
    """Steps far below what the parameters can show add up on the servers."""
    param = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    opt = ServerOptimizer([param], wl.SGD(lr=2.0**-12), cluster=cluster)
    for _ in range(64):
        param.grad = torch.ones_like(param)
        opt.step()
    assert torch.equal(param.detach(), torch.full_like(param, 1 - 64 * 2.0**-12))
    alone = torch.ones(1000, dtype=dtype)
    for _ in range(64):
        alone -= 2.0**-12
    assert not torch.equal(alone, param.detach())


@embedded
def test_mixed_dtypes_and_odd_shapes(cluster: wl.Cluster) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 1, 5), (7,), (2, 0, 3)]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    params += [torch.nn.Parameter(torch.randn(5, 3).bfloat16())]
    expected = [p.detach().clone() - 0.5 for p in params]
    opt = ServerOptimizer(params, wl.SGD(lr=0.5), cluster=cluster)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert_close([p.detach() for p in params], expected, rtol=1e-2, atol=1e-6)


@embedded
def test_channels_last_and_tied_weights(cluster: wl.Cluster) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.one = torch.nn.Linear(8, 8, bias=False)
            self.two = torch.nn.Linear(8, 8, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(F.relu(self.one(self.conv(x).mean((2, 3)))))

    def made() -> Tied:
        torch.manual_seed(3)
        return Tied()

    theirs, ours = made(), made()
    strides = ours.conv.weight.stride()
    opt = ServerOptimizer(ours.parameters(), wl.SGD(lr=0.1), cluster=cluster)
    for model, one in ((theirs, torch.optim.SGD(theirs.parameters(), lr=0.1)), (ours, opt)):
        torch.manual_seed(4)
        for _ in range(5):
            one.zero_grad()
            model(torch.randn(4, 3, 8, 8)).square().sum().backward()
            one.step()
    assert ours.conv.weight.stride() == strides
    assert ours.one.weight is ours.two.weight
    assert_close(weights(ours), weights(theirs))


@embedded
def test_closures_and_steps_without_gradients(cluster: wl.Cluster) -> None:
    theirs, ours = mlp(), mlp()
    opt = ServerOptimizer(ours.parameters(), wl.SGD(lr=0.1), cluster=cluster)
    for model, one in ((theirs, torch.optim.SGD(theirs.parameters(), lr=0.1)), (ours, opt)):

        def closure(model: Any = model, one: Any = one) -> torch.Tensor:
            one.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        losses = [one.step(closure).item() for _ in range(4)]
        assert losses[-1] < losses[0]
    assert_close(weights(ours), weights(theirs))
    before = weights(ours)
    opt.zero_grad()
    opt.step()
    assert same(weights(ours), before)


def test_two_optimizers_in_one_script(cluster: wl.Cluster) -> None:
    """A game of two players, each with an optimizer, in two workers."""

    def work(worker: wl.Cluster) -> list[torch.Tensor]:
        maker, judge = mlp(seed=1), mlp(seed=2)
        makers = ServerOptimizer(maker.parameters(), wl.Adam(lr=0.01), cluster=worker)
        judges = ServerOptimizer(judge.parameters(), wl.SGD(lr=0.01), cluster=worker)
        return play(maker, judge, makers, judges, [worker.rank])

    def play(maker: Any, judge: Any, makers: Any, judges: Any, ranks: list[int]) -> list[torch.Tensor]:
        for step in range(6):
            for opt, sign in ((judges, 1.0), (makers, -1.0)):
                judges.zero_grad()
                makers.zero_grad()
                for rank in ranks:
                    x, _ = batch(step, rank)
                    made = F.pad(maker(x), (0, 10))
                    (sign * (judge(made).mean() - judge(x).mean()) / len(ranks)).backward()
                opt.step()
        return weights(maker) + weights(judge)

    one, other = together(cluster, 2, work)
    assert same(one, other)
    maker, judge = mlp(seed=1), mlp(seed=2)
    adam, sgd = torch.optim.Adam(maker.parameters(), lr=0.01), torch.optim.SGD(judge.parameters(), lr=0.01)
    assert_close(one, play(maker, judge, adam, sgd, [0, 1]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_buffers_of_a_module_are_averaged(cluster: wl.Cluster, sync: str) -> None:
    def work(worker: wl.Cluster) -> list[torch.Tensor]:
        model = normed()
        opt = ServerOptimizer(model, wl.SGD(lr=0.0), sync=sync, cluster=worker)
        train(model, opt, 1, worker.rank)
        worker.close()
        return [model[1].running_mean.clone(), model[1].running_var.clone(), model[1].num_batches_tracked.clone()]

    one, other = together(cluster, 2, work)
    alone = []
    for rank in range(2):
        model = normed()
        model(batch(0, rank)[0])
        alone.append([model[1].running_mean, model[1].running_var])
    assert one[2] == other[2] == 1
    if sync == "bsp":
        assert same(one, other)
        assert_close(one[:2], [(a + b) / 2 for a, b in zip(*alone, strict=True)])
    else:
        assert all(torch.isfinite(t).all() for t in one[:2] + other[:2])


@embedded
def test_weights_of_workers_count(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> torch.Tensor:
        param = torch.nn.Parameter(torch.zeros(4))
        opt = ServerOptimizer([param], wl.SGD(lr=1.0), cluster=worker)
        param.grad = torch.full_like(param, float(worker.rank))
        opt.step(weight=1 + 2 * worker.rank)
        worker.close()
        return param.detach().clone()

    for got in together(cluster, 2, work):
        assert torch.equal(got, torch.full((4,), -0.75))


# -- what users do beside it -------------------------------------------------------------------------------------------


@embedded
def test_another_storage_is_adopted_again(cluster: wl.Cluster) -> None:
    theirs, ours = mlp(), mlp()
    opt = ServerOptimizer(ours.parameters(), wl.SGD(lr=0.1), cluster=cluster)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(STEPS):
        train(theirs, sgd, 1, first=step)
        train(ours, opt, 1, first=step)
        ours[0].weight.data = ours[0].weight.data.clone()
    assert_close(weights(ours), weights(theirs))
    ours[0].weight.data = ours[0].weight.data + 1
    with pytest.raises(wl.InvalidArgument, match=r"'0.0' has another storage and other values .* put_weights\(\)"):
        train(ours, opt, 1)


def test_changed_weights_are_noticed_and_can_be_put(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> list[torch.Tensor]:
        model = mlp()
        opt = ServerOptimizer(model.named_parameters(), wl.SGD(lr=0.1), cluster=worker)
        train(model, opt, 2, worker.rank)
        model.load_state_dict(mlp(seed=7 + worker.rank).state_dict())
        loss_of(model, 0).backward()
        with pytest.raises(wl.InvalidArgument, match=r"'0.weight' was changed in place .* call put_weights\(\)"):
            opt.step()
        opt.zero_grad()
        opt.put_weights()
        put = weights(model)
        train(model, opt, 2, worker.rank)
        worker.close()
        return put

    one, other = together(cluster, 2, work)
    assert same(one, other)
    assert same(one, weights(mlp(seed=7)))


@embedded
def test_a_graph_that_is_kept_over_a_step_is_noticed_by_torch(cluster: wl.Cluster) -> None:
    model = mlp()
    opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), cluster=cluster)
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@embedded
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda c: ServerOptimizer([], wl.SGD(lr=0.1), cluster=c), "expected at least one parameter"),
        (lambda c: ServerOptimizer(3, wl.SGD(lr=0.1), cluster=c), "expected parameters, groups or a module, not int"),
        (lambda c: ServerOptimizer(mlp().parameters(), cluster=c), "expected a windlass rule .* not None"),
        (lambda c: ServerOptimizer(mlp().parameters(), 0.1, cluster=c), "expected a windlass rule .* not 0.1"),
        (lambda c: ServerOptimizer(mlp().double().parameters(), wl.SGD(lr=1), cluster=c), "float64; expected float32"),
        (
            lambda c: ServerOptimizer(torch.optim.SGD(mlp().parameters(), lr=1), wl.SGD(lr=1), cluster=c),
            "either a rule, or the instance",
        ),
        (lambda c: ServerOptimizer(torch.optim.Rprop(mlp().parameters()), cluster=c), "Rprop is none of those"),
        (
            lambda c: ServerOptimizer(torch.optim.Adam(mlp().parameters(), amsgrad=True), cluster=c),
            "no Adam with amsgrad=True",
        ),
        (lambda c: ServerOptimizer(mlp(), wl.SGD(lr=1), delay=-1, cluster=c), "delay must be a whole number"),
        (lambda c: ServerOptimizer(mlp(), wl.SGD(lr=1), delay=1, overlap=True, cluster=c), "either overlap"),
        (lambda c: ServerOptimizer(mlp(), wl.SGD(lr=1), clip_norm=0, cluster=c), "clip_norm must be a number above 0"),
        (lambda c: ServerOptimizer(mlp(), wl.SGD(lr=1), name="a/b", cluster=c), "text without '/'"),
        (lambda c: ServerOptimizer(mlp(), wl.SGD(lr=1), sync="bps", cluster=c), "did you mean bsp"),
        (lambda c: ServerOptimizer(torch.nn.LazyLinear(3), wl.SGD(lr=1), cluster=c), "has no shape yet"),
    ],
)
def test_wrong_arguments_say_so(cluster: wl.Cluster, wrong: Any, message: str) -> None:
    with pytest.raises(wl.InvalidArgument, match=message):
        wrong(cluster)


@embedded
def test_sparse_gradients_are_refused(cluster: wl.Cluster) -> None:
    table = torch.nn.Embedding(10, 4, sparse=True)
    opt = ServerOptimizer(table.named_parameters(), wl.SGD(lr=0.1), cluster=cluster)
    with pytest.raises(wl.InvalidArgument, match="gradient of 'weight' is sparse"):
        table(torch.tensor([1])).sum().backward()
    assert "optimizer" in repr(opt)


def test_workers_with_other_models_notice(connect: Connect) -> None:
    """The one whose model is not there waits no longer than its timeout."""

    def work(worker: wl.Cluster) -> str:
        model = mlp(width=300) if worker.rank == 0 else mlp(width=300)[2:]
        try:
            ServerOptimizer(model.named_parameters(), wl.SGD(lr=0.1), cluster=worker)
        except wl.WindlassError as error:
            return str(error)
        finally:
            worker.close()
        return ""

    with connect(timeout=3.0) as cluster:
        errors = together(cluster, 2, work)
    assert any("exists with another spec" in error or "other arrays than" in error for error in errors)


def test_without_an_address_torchruns_world_names_windlass_run() -> None:
    script = (
        "import torch, windlass as wl\n"
        "from windlass.torch import ServerOptimizer\n"
        "ServerOptimizer([torch.nn.Parameter(torch.ones(3))], wl.SGD(lr=0.1))\n"
    )
    environment = {"WORLD_SIZE": "2", "RANK": "0", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "start the script with `windlass run`" in done.stderr


@pytest.mark.parametrize(
    ("chosen", "given", "expected"),
    [
        (None, None, wl.BSP()),
        ("ssp:3", None, wl.SSP(3)),
        ("asp", None, wl.ASP()),
        ("ssp:3", "bsp:1", wl.BSP(1)),
    ],
)
def test_the_clusters_policy_is_the_optimizers_unless_it_has_its_own(
    chosen: str | None, given: str | None, expected: wl.Sync
):
    with wl.connect(sync=chosen) as cluster:
        model = torch.nn.Linear(2, 1)
        opt = wl.torch.ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), cluster=cluster, sync=given)
        assert f", {expected}, " in repr(opt)
        assert cluster.sync == (wl.SSP(3) if chosen == "ssp:3" else wl.ASP())
