"""Tables in ServerOptimizer: rules beside torch's, groups, several workers, and what is an error."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from crew import Crew, at_once, together
from helpers import new_app
from nets import assert_close
from tables import DIM, ROWS, all_rows, ids, pair, rows

import windlass as wl
from windlass.testing import Servers
from windlass.torch import Embedding, EmbeddingBag, ServerOptimizer

embedded = pytest.mark.embedded("about the optimizer, whatever its servers are")
STEPS = 200


def drawn(step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and what their rows should be near."""
    batch = ids(24, seed=1000 * step + rank)
    return batch, rows(24, seed=1000 * step + rank + 7)


def loss_of(module: Any, step: int, rank: int = 0) -> torch.Tensor:
    batch, goal = drawn(step, rank)
    return (module(batch) - goal).square().mean()


@embedded
@pytest.mark.parametrize("given", [lambda emb: emb, lambda emb: [emb], lambda emb: [{"tables": [emb]}]])
def test_an_optimizer_is_of_the_cluster_of_its_tables_however_many_are_open(given: Any) -> None:
    with wl.connect() as mine, wl.connect():
        emb = Embedding("rows", 3, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=mine)
        opt = ServerOptimizer(given(emb))
        emb(torch.tensor([7])).sum().backward()
        opt.step()
        np.testing.assert_array_equal(mine.table("rows").pull([7]), [[-1] * 3])
        with pytest.raises(wl.InvalidArgument, match=r"\d+ open clusters; say which one"):
            ServerOptimizer([torch.nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        (wl.SGD(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
        (wl.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
    ids=["SGD", "Adagrad"],
)
def test_200_steps_are_those_of_torchs_optimizer(cluster: wl.Cluster, rule: wl.Rule, theirs: Any) -> None:
    one, other = pair(cluster, rule=rule)
    opts = (theirs(one.parameters()), ServerOptimizer(other, cluster=cluster))
    for step in range(STEPS):
        for module, opt in zip((one, other), opts, strict=True):
            loss_of(module, step).backward()
            opt.step()
            opt.zero_grad()
    torch.testing.assert_close(all_rows(other), one.weight.detach(), rtol=2e-5, atol=1e-6)


ORACLES: list[tuple[wl.Rule, Any]] = [
    (wl.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    (wl.AdamW(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    (wl.RMSProp(lr=0.01), lambda p: torch.optim.RMSprop(p, lr=0.01)),
    (wl.Adadelta(lr=1.0), lambda p: torch.optim.Adadelta(p, lr=1.0)),
    (wl.Adamax(lr=0.01), lambda p: torch.optim.Adamax(p, lr=0.01)),
    (wl.SGD(lr=0.1, momentum=0.9, weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
]


@embedded
@pytest.mark.parametrize(("rule", "theirs"), ORACLES, ids=[type(rule).__name__ for rule, _ in ORACLES])
def test_200_steps_of_other_rules_are_those_of_an_optimizer_for_each_row(
    cluster: wl.Cluster, rule: wl.Rule, theirs: Any
) -> None:
    """A row that a batch does not have is left alone: no decay, no momentum, no count."""
    one, other = pair(cluster, rule=rule)
    parts = [torch.nn.Parameter(row.clone()) for row in one.weight.detach()]
    opts = [theirs([part]) for part in parts]
    ours = ServerOptimizer(other, cluster=cluster)
    for step in range(STEPS):
        loss_of(other, step).backward()
        ours.step()
        ours.zero_grad()
        batch, goal = drawn(step)
        ((torch.stack(list(parts))[batch] - goal).square().mean()).backward()
        for key in set(batch.tolist()):
            opts[key].step()
        for part in parts:
            part.grad = None
    torch.testing.assert_close(all_rows(other), torch.stack(list(parts)).detach(), rtol=0, atol=1e-6)


class Model(torch.nn.Module):
    """Dense parameters and two tables."""

    def __init__(self, cluster: wl.Cluster, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = Embedding("one", DIM, cluster=cluster)
        self.bag = EmbeddingBag("two", DIM, mode="mean", cluster=cluster)
        self.head = torch.nn.Linear(DIM, DIM)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(batch) + self.bag(batch.view(-1, 1)))


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"delay": 1, "sync": "asp"}], ids=str)
def test_parameters_and_tables_train_together(cluster: wl.Cluster, options: dict[str, Any]) -> None:
    model = Model(cluster)
    opt = ServerOptimizer(model, wl.Adagrad(lr=0.1), cluster=cluster, **options)
    clock = cluster._session.clock
    losses = []
    for _ in range(30):
        loss = loss_of(model, 0)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    opt.finish()
    assert losses[-1] < 0.5 * losses[0]
    assert cluster._session.clock == clock + 30  # one close for each step
    assert len(model.emb.table) == len(model.bag.table) == len(set(drawn(0)[0].tolist()))


@embedded
def test_a_step_is_one_push_for_each_table_and_a_forward_one_pull(
    cluster: wl.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("pull", "push", "push_pull", "_join"):
        whole = getattr(wl.Table, name)

        def counted(self: Any, *given: Any, _whole: Any = whole, _name: str = name, **more: Any) -> Any:
            calls.append(f"{_name} {self.name}")
            return _whole(self, *given, **more)

        monkeypatch.setattr(wl.Table, name, counted)
    one = Embedding("shared", DIM, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=cluster)
    other = EmbeddingBag("shared", DIM, rule=wl.SGD(lr=1.0), init=wl.Zeros(), mode="sum", cluster=cluster)
    opt = ServerOptimizer(torch.nn.ModuleList([one, other]), cluster=cluster)
    (one(torch.tensor([1, 2])).sum() + other(torch.tensor([[1, 1]])).sum()).backward()
    opt.step()
    assert calls == ["pull shared", "pull shared", "_join shared"]
    expected = torch.tensor([[-3.0], [-1.0]]).expand(2, DIM)
    assert torch.equal(one(torch.tensor([1, 2])).detach(), expected)


@pytest.mark.parametrize("batches", [(24, 24), (24, 0)], ids=["equal", "one without ids"])
def test_two_workers_under_bsp_are_one_with_the_joined_batch(cluster: wl.Cluster, batches: tuple[int, int]) -> None:
    def work(worker: wl.Cluster) -> torch.Tensor:
        emb = Embedding("rows", DIM, rule=wl.Adagrad(lr=0.1), init=wl.Normal(std=1.0), cluster=worker)
        opt = ServerOptimizer(emb, cluster=worker)
        for step in range(20):
            batch, goal = drawn(step, worker.rank)
            n = batches[worker.rank]
            ((emb(batch[:n]) - goal[:n]).square().sum() / 24).backward()
            opt.step()
            opt.zero_grad()
        return emb(torch.arange(ROWS)).detach()

    one, other = together(cluster, 2, work)
    assert torch.equal(one, other)
    joined = Embedding("joined", DIM, rule=wl.Adagrad(lr=0.1), cluster=cluster)
    fresh = Embedding("rows", DIM, rule=wl.Adagrad(lr=0.1), init=wl.Normal(std=1.0), cluster=cluster)
    assert fresh.table.dim == DIM
    with wl.connect(threads=1) as alone:  # the same initial rows: they depend on the name and the key
        joined = Embedding("rows", DIM, rule=wl.Adagrad(lr=0.1), init=wl.Normal(std=1.0), cluster=alone)
        opt = ServerOptimizer(joined, cluster=alone)
        for step in range(20):
            for rank in range(2):
                batch, goal = drawn(step, rank)
                n = batches[rank]
                ((joined(batch[:n]) - goal[:n]).square().sum() / 24 / 2).backward()
            opt.step()
            opt.zero_grad()
        torch.testing.assert_close(one, joined(torch.arange(ROWS)).detach(), rtol=1e-6, atol=1e-7)


def test_one_and_two_servers_give_the_same_bits() -> None:
    def trained(servers: int) -> str:
        with Servers(servers) as some:

            def work(rank: int) -> Any:
                with wl.connect(servers=some.addresses, app=app, rank=rank, world_size=2) as worker:
                    model = Model(worker)
                    opt = ServerOptimizer(model, wl.Adam(lr=0.01), cluster=worker)
                    for step in range(8):
                        loss_of(model, step, rank).backward()
                        opt.step()
                        opt.zero_grad()
                    return worker.fingerprint()

            app = new_app()
            one, other = at_once(2, work)
            return str(one if one == other else (one, other))

    assert trained(1) == trained(2)


@embedded
def test_a_worker_that_never_calls_its_module_counts_in_the_mean(cluster: wl.Cluster) -> None:
    crew = Crew(cluster)

    def work(rank: int) -> None:
        emb = Embedding("rows", 2, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=crew.workers[rank])
        opt = ServerOptimizer(emb, cluster=crew.workers[rank])
        for _ in range(3):
            if rank == 0:
                emb(torch.tensor([5])).sum().backward()
            opt.step()
            opt.zero_grad()
        if rank == 0:
            assert torch.equal(emb(torch.tensor([5])).detach(), torch.full((1, 2), -1.5))

    crew.at_once(work)
    crew.leave()


@embedded
def test_a_weight_of_a_step_counts_for_tables(cluster: wl.Cluster) -> None:
    crew = Crew(cluster)
    found: list[Any] = [None, None]

    def work(rank: int) -> None:
        emb = Embedding("rows", 1, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=crew.workers[rank])
        opt = ServerOptimizer(emb, cluster=crew.workers[rank])
        (emb(torch.tensor([5])) * (1.0 + rank)).sum().backward()
        opt.step(weight=1.0 + 2 * rank)
        found[rank] = emb(torch.tensor([5])).item()

    crew.at_once(work)
    crew.leave()
    assert found == [-1.75, -1.75]  # (1 * 1 + 3 * 2) / 4


# -- groups ------------------------------------------------------------------------------------------------------------


@embedded
def test_each_table_is_a_group_with_its_own_numbers_and_schedulers_work(cluster: wl.Cluster) -> None:
    model = Model(cluster)
    model.bag._spec = model.bag._spec._replace(rule=wl.RowAdagrad(lr=0.5))
    opt = ServerOptimizer(model, wl.SGD(lr=0.25), cluster=cluster)
    assert [group.get("tables") for group in opt.param_groups] == [None, ["one"], ["two"]]
    assert [group["lr"] for group in opt.param_groups] == [0.25, 0.25, 0.5]
    assert [type(group["rule"]) for group in opt.param_groups] == [wl.SGD, wl.SGD, wl.RowAdagrad]
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    before = torch.zeros(DIM)
    for step in range(3):
        rate = 0.25 * 0.5**step
        before = model.emb(torch.tensor([7])).detach()
        model.emb(torch.tensor([7])).sum().backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        torch.testing.assert_close(model.emb(torch.tensor([7])).detach(), before - rate)


@embedded
def test_groups_can_name_tables_and_be_added_later(cluster: wl.Cluster) -> None:
    model = Model(cluster)
    opt = ServerOptimizer(
        [{"tables": [model.emb], "lr": 1.0}, {"params": model.head.parameters()}], wl.SGD(lr=0.5), cluster=cluster
    )
    opt.add_param_group({"tables": model.bag, "lr": 0.25, "rule": wl.Adagrad(lr=3.0)})
    assert [group.get("tables") for group in opt.param_groups] == [None, ["one"], ["two"]]
    assert [group["lr"] for group in opt.param_groups] == [0.5, 1.0, 0.25]
    before = model.emb(torch.tensor([7])).detach()
    model(torch.tensor([7])).sum().backward()
    opt.step()
    assert not torch.equal(model.emb(torch.tensor([7])), before)
    with pytest.raises(wl.InvalidArgument, match="is in two groups"):
        opt.add_param_group({"tables": model.emb})
    with pytest.raises(wl.InvalidArgument, match="either 'params' or 'tables'"):
        opt.add_param_group({"tables": model.emb, "params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(wl.InvalidArgument, match="are modules, not str"):
        opt.add_param_group({"tables": ["one"]})


@embedded
def test_saved_groups_of_tables_lie_apart_so_that_torch_can_load_the_rest(cluster: wl.Cluster) -> None:
    model = Model(cluster)
    opt = ServerOptimizer(model, wl.Adam(lr=0.01), cluster=cluster)
    loss_of(model, 0).backward()
    opt.step()
    opt.param_groups[1]["lr"] = 0.125
    saved = opt.state_dict()
    assert len(saved["param_groups"]) == 1
    assert [(one["tables"], one["lr"], one["rule"]) for one in saved["tables"]] == [
        (["one"], 0.125, "Adam"),
        (["two"], 0.01, "Adam"),
    ]
    theirs = torch.optim.Adam(model.head.named_parameters())
    theirs.load_state_dict({key: value for key, value in saved.items() if key != "tables"})
    opt.param_groups[1]["lr"] = 0.5
    opt.load_state_dict(saved)
    assert [group["lr"] for group in opt.param_groups] == [0.01, 0.125, 0.01]
    loss_of(model, 1).backward()
    opt.step()


@embedded
def test_modules_of_one_table_must_agree(cluster: wl.Cluster) -> None:
    first = Embedding("rows", DIM, rule=wl.SGD(lr=1.0), cluster=cluster)
    for options in ({"rule": wl.SGD(lr=2.0)}, {"init": wl.Zeros()}, {"seed": 3}, {"sync": "asp"}):
        other = Embedding("rows", DIM, cluster=cluster, **{"rule": wl.SGD(lr=1.0), **options})
        with pytest.raises(wl.InvalidArgument, match=rf"table 'rows'.*asks for {next(iter(options))}"):
            ServerOptimizer(torch.nn.ModuleList([first, other]), cluster=cluster)
    with pytest.raises(wl.InvalidArgument, match="asks for dim 3"):
        Embedding("rows", 3, cluster=cluster)(ids(2))


@embedded
def test_a_table_has_one_optimizer_the_newest(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", DIM, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=cluster)
    old = ServerOptimizer(emb, cluster=cluster, name="old")
    new = ServerOptimizer(emb, cluster=cluster, name="new")
    emb(torch.tensor([1])).sum().backward()
    with pytest.raises(wl.InvalidArgument, match=r"'old'.*table 'rows' belongs to ServerOptimizer 'new'"):
        old.step()
    new.step()
    assert torch.equal(emb(torch.tensor([1])).detach(), torch.full((1, DIM), -1.0))


@embedded
def test_iterations_that_others_close_are_an_error_under_bsp(cluster: wl.Cluster) -> None:
    """A worker that leaves one of two optimizers' steps out would push alone, and its update be twice as large."""
    crew = Crew(cluster)
    worker = crew.workers[0]
    emb = Embedding("rows", DIM, rule=wl.SGD(lr=1.0), cluster=worker)
    opt = ServerOptimizer(emb, cluster=worker)
    opt.step()
    worker.tick()
    with pytest.raises(wl.InvalidArgument, match="iterations were closed since its last step"):
        opt.step()
    crew.leave()


@embedded
def test_clipping_counts_each_key_once(cluster: wl.Cluster) -> None:
    theirs, ours = pair(cluster)
    head, other = torch.nn.Linear(DIM, 1), torch.nn.Linear(DIM, 1)
    other.load_state_dict(head.state_dict())
    sgd = torch.optim.SGD([*theirs.parameters(), *head.parameters()], lr=1.0)
    opt = ServerOptimizer(torch.nn.ModuleList([ours, other]), wl.SGD(lr=1.0), clip_norm=0.1, cluster=cluster)
    for step in range(4):
        for emb, lin in ((theirs, head), (ours, other)):
            for half in range(2):  # two lookups share keys
                lin(emb(ids(30, seed=2 * step + half))).square().sum().backward()
        torch.nn.utils.clip_grad_norm_([*theirs.parameters(), *head.parameters()], 0.1)
        sgd.step()
        sgd.zero_grad()
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(all_rows(ours), theirs.weight.detach(), rtol=2e-5, atol=1e-6)
    assert_close(other.parameters(), head.parameters())


@embedded
def test_a_scaler_of_gradients_is_refused_where_there_are_tables(cluster: wl.Cluster) -> None:
    model = Model(cluster)
    opt = ServerOptimizer(model, wl.SGD(lr=0.1), cluster=cluster)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(wl.InvalidArgument, match="GradScaler does not reach gradients of tables"):
        scaler.step(opt)


@embedded
def test_an_optimizer_checks_what_it_is_given(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", DIM, cluster=cluster)
    with pytest.raises(wl.InvalidArgument, match="expected a windlass rule"):
        ServerOptimizer(emb, cluster=cluster)
    with pytest.raises(wl.InvalidArgument, match="delay and overlap are for parameters"):
        ServerOptimizer(emb, wl.SGD(lr=1.0), delay=1, cluster=cluster)
    with pytest.raises(wl.InvalidArgument, match="at least one parameter or table"):
        ServerOptimizer(torch.nn.ReLU(), wl.SGD(lr=1.0), cluster=cluster)
    opt = ServerOptimizer([emb, torch.nn.Linear(2, 2)], wl.SGD(lr=1.0), cluster=cluster)
    assert "table 'rows'" in repr(opt).lower()
    assert opt.global_step == 0


@embedded
def test_lookups_from_several_threads_keep_their_rows(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", 64, rule=wl.SGD(lr=1.0), init=wl.Normal(std=1.0), cluster=cluster)
    opt = ServerOptimizer(emb, cluster=cluster)
    wrong: list[int] = []

    def look(seed: int) -> None:
        expected = emb.table.pull(np.arange(200) + 1000 * seed, create=False).copy()
        for _ in range(50):
            out = emb(torch.arange(200) + 1000 * seed)
            if not np.array_equal(out.detach().numpy(), expected):
                wrong.append(seed)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    opt.zero_grad()
