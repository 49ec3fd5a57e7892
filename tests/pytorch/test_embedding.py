"""Embedding and EmbeddingBag beside torch's, on the same rows: outputs, gradients, and what is refused."""

import contextlib
import copy
import gc
import io
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tables import DIM, ROWS, all_rows, gradient_of, ids, pair, rows
from torch.utils.checkpoint import checkpoint

import windlass as wl
from windlass._client import open_clusters
from windlass.testing import Servers
from windlass.torch import Embedding, EmbeddingBag, ServerOptimizer

embedded = pytest.mark.embedded("about the module, whatever its servers are")
BAGS = [
    {"mode": mode, "padding_idx": padding, "include_last_offset": last}
    for mode in ("sum", "mean", "max")
    for padding in (None, 3)
    for last in (False, True)
]


def compared(theirs: Any, ours: Any, *given: Any) -> None:
    """Outputs and gradients are torch's, bit for bit."""
    opt = ServerOptimizer(ours, cluster=ours._cluster)
    expected, seen = theirs(*given), ours(*given)
    assert torch.equal(seen, expected)
    if not seen.requires_grad:
        return
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
    (expected * weights).sum().backward()
    (seen * weights).sum().backward()
    assert torch.equal(gradient_of(ours), theirs.weight.grad)
    opt.zero_grad()


@pytest.mark.parametrize("padding", [None, 3, 0])
@pytest.mark.parametrize("shape", [(40,), (6, 7), (2, 3, 4), (), (0,), (0, 5)], ids=str)
def test_an_embedding_is_torchs(cluster: wl.Cluster, shape: tuple[int, ...], padding: int | None) -> None:
    compared(*pair(cluster, padding_idx=padding), ids(*shape, n=9))


@embedded
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_embedding_takes_gradients_by_frequency_and_narrow_ids(cluster: wl.Cluster, dtype: torch.dtype) -> None:
    compared(*pair(cluster, scale_grad_by_freq=True), ids(40, n=9).to(dtype))


@pytest.mark.parametrize("options", BAGS, ids=str)
def test_bags_with_offsets_are_torchs(cluster: wl.Cluster, options: dict[str, Any]) -> None:
    offsets = torch.tensor([0, 0, 3, 10, 10, 29, 40, 40])
    if not options["include_last_offset"]:
        offsets = offsets[:-1]
    compared(*pair(cluster, EmbeddingBag, **options), ids(40, n=9), offsets)


@embedded
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_equal_size_are_torchs(cluster: wl.Cluster, mode: Any, padding: int | None) -> None:
    compared(*pair(cluster, EmbeddingBag, mode=mode, padding_idx=padding), ids(9, 5, n=9))


@embedded
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    "given",
    [(ids(0), torch.tensor([0, 0, 0])), (ids(0), torch.zeros(0, dtype=torch.int64)), (ids(0, 4),)],
    ids=["empty bags", "no bags", "an empty batch"],
)
def test_bags_of_nothing_are_torchs(cluster: wl.Cluster, mode: Any, given: Any) -> None:
    compared(*pair(cluster, EmbeddingBag, mode=mode), *given)


@embedded
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 5])
def test_random_bags_have_torchs_bits(cluster: wl.Cluster, mode: Any, padding: int | None, seed: int) -> None:
    lengths = ids(60, n=8, seed=seed + 100)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
    compared(*pair(cluster, EmbeddingBag, mode=mode, padding_idx=padding), ids(int(lengths.sum()), seed=seed), offsets)


@embedded
@pytest.mark.parametrize("padding", [None, 3])
def test_weights_of_samples_are_torchs_and_so_are_their_gradients(cluster: wl.Cluster, padding: int | None) -> None:
    theirs, ours = pair(cluster, EmbeddingBag, mode="sum", padding_idx=padding)
    opt = ServerOptimizer(ours, cluster=cluster)
    one, other = (rows(1, 40, seed=3)[0].requires_grad_() for _ in range(2))
    offsets = torch.tensor([0, 3, 3, 20])
    expected, seen = theirs(ids(40, n=9), offsets, one), ours(ids(40, n=9), offsets, other)
    assert torch.equal(seen, expected)
    expected.square().sum().backward()
    seen.square().sum().backward()
    assert torch.equal(gradient_of(ours), theirs.weight.grad)
    limit = 1e-6 * float(one.grad.abs().max())
    torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=limit)
    opt.zero_grad()


@pytest.mark.parametrize("key", [2**56 + 1, 2**63 - 1, -1, -(2**63)])
def test_ids_are_any_64_bits(cluster: wl.Cluster, key: int) -> None:
    emb = Embedding("rows", 3, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=cluster)
    opt = ServerOptimizer(emb)
    emb(torch.tensor([key, 5, key])).sum().backward()
    opt.step()
    np.testing.assert_array_equal(emb.table.pull(np.array([key, 5]), create=False), [[-2] * 3, [-1] * 3])
    assert torch.equal(emb(torch.tensor([key])).detach(), torch.full((1, 3), -2.0))


@embedded
def test_what_are_no_ids_is_refused(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", 3, rule=wl.SGD(lr=1.0), cluster=cluster)
    with pytest.raises(
        wl.InvalidArgument, match=r"Embedding 'rows': expected ids of int64, int32 or uint64, saw torch.float32"
    ):
        emb(torch.ones(3))
    with pytest.raises(wl.InvalidArgument, match="expected ids as a torch tensor, not list"):
        emb([1, 2])


@embedded
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 1.0}, "there is no max_norm="),
        ({"sparse": True}, "gradients are those of the batch's rows"),
        ({"num_embeddings": 10}, "no vocabulary"),
        ({"padding_idx": 0.5}, "padding_idx must be a 64-bit id"),
        ({"dtype": torch.int8}, "dtype must be float32, bfloat16 or float16"),
        ({"rule": 3}, "rule must be a windlass rule"),
        ({"init": 3}, "init must be a windlass initialiser"),
        ({"sync": "never"}, "never"),
    ],
    ids=str,
)
def test_a_module_checks_what_it_is_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(wl.InvalidArgument, match=message):
        Embedding("rows", 3, **options)


@embedded
def test_a_module_checks_names_and_sizes() -> None:
    for name, dim in (("", 3), (3, 3), ("rows", 0), ("rows", 1.5)):
        with pytest.raises(wl.InvalidArgument, match=r"the table's name|dim must be"):
            Embedding(name, dim)
    with pytest.raises(wl.InvalidArgument, match="mode must be one of sum, mean, max"):
        EmbeddingBag("rows", 3, mode="median")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'vocabulary'"):
        Embedding("rows", 3, vocabulary=3)


@embedded
def test_a_key_repeated_4096_times_has_the_right_gradient_under_bfloat16(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", 4, rule=wl.SGD(lr=1.0), init=wl.Zeros(), dtype=torch.bfloat16, cluster=cluster)
    opt = ServerOptimizer(emb)
    out = emb(torch.full((4096,), 9))
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    opt.step()
    np.testing.assert_array_equal(emb.table.pull([9]), [[-4096.0] * 4])
    assert torch.equal(emb(torch.tensor([9])).detach(), torch.full((1, 4), -4096.0, dtype=torch.bfloat16))


@embedded
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_a_module_can_be_of_another_dtype(cluster: wl.Cluster, kind: Any, dtype: torch.dtype) -> None:
    module = torch.nn.ModuleList([kind("rows", DIM, rule=wl.SGD(lr=1.0), cluster=cluster)]).to(dtype)
    opt = ServerOptimizer(module, cluster=cluster)
    out = module[0](ids(6, 2))
    assert out.dtype is dtype
    out.sum().backward()
    opt.step()
    assert module.float()[0](ids(6, 2)).dtype is torch.float32


@embedded
def test_automatic_mixed_precision_trains(cluster: wl.Cluster) -> None:
    model = torch.nn.Sequential(
        Embedding("rows", DIM, init=wl.Normal(std=1.0), cluster=cluster), torch.nn.Linear(DIM, 1)
    )
    opt = ServerOptimizer(model, wl.SGD(lr=0.1), cluster=cluster)
    losses = []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(ids(64)) - 1).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


# -- what the graph may do ---------------------------------------------------------------------------------------------


def square(module: Any, batch: torch.Tensor) -> torch.Tensor:
    return module(batch).square().sum()


def two(cluster: wl.Cluster) -> tuple[Any, Any, ServerOptimizer]:
    theirs, ours = pair(cluster)
    return theirs, ours, ServerOptimizer(ours, cluster=cluster)


@embedded
def test_zero_grad_between_forward_and_backward_loses_nothing(cluster: wl.Cluster) -> None:
    theirs, ours, opt = two(cluster)
    for module, zero in ((theirs, theirs.zero_grad), (ours, opt.zero_grad)):
        loss = square(module, ids(20))
        zero()
        loss.backward()
    assert torch.equal(gradient_of(ours), theirs.weight.grad)


@embedded
def test_zero_grad_drops_what_is_pending(cluster: wl.Cluster) -> None:
    _, ours, opt = two(cluster)
    before = all_rows(ours)
    square(ours, ids(20)).backward()
    opt.zero_grad()
    opt.step()
    assert torch.equal(all_rows(ours), before)


@embedded
def test_a_graph_that_is_kept_adds_up(cluster: wl.Cluster) -> None:
    theirs, ours, _opt = two(cluster)
    for module in (theirs, ours):
        loss = square(module, ids(20))
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(gradient_of(ours), theirs.weight.grad)


@embedded
def test_a_step_between_two_backward_passes_of_a_graph(cluster: wl.Cluster) -> None:
    _, ours, opt = two(cluster)
    before = all_rows(ours)
    loss = ours(torch.tensor([1])).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        opt.step()
    assert torch.equal(all_rows(ours)[1], before[1] - 1 - 1)


@embedded
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_give_one_gradient(cluster: wl.Cluster, reentrant: bool) -> None:
    theirs, ours, _opt = two(cluster)
    for module in (theirs, ours):
        scale = torch.ones(1, requires_grad=True)  # what a reentrant checkpoint needs

        def part(x: torch.Tensor, module: Any = module) -> torch.Tensor:
            return (module(ids(20)) * x).square().sum()

        checkpoint(part, scale, use_reentrant=reentrant).backward()
    torch.testing.assert_close(gradient_of(ours), theirs.weight.grad)


@embedded
def test_a_gradient_of_a_gradient_reaches_the_rows(cluster: wl.Cluster) -> None:
    theirs, ours, _opt = two(cluster)
    x = torch.ones(1, requires_grad=True)
    for module in (theirs, ours):
        loss = (module(ids(20)) * x).pow(3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        first.square().sum().backward()
    torch.testing.assert_close(gradient_of(ours), theirs.weight.grad)


@embedded
def test_gradients_of_several_lookups_add_up_and_take_bounded_memory(cluster: wl.Cluster) -> None:
    theirs, ours, _opt = two(cluster)
    for seed in range(30):
        for module in (theirs, ours):
            square(module, ids(20, seed=seed)).backward()
        assert sum(len(piece.keys) for piece in ours._open()._pending) <= 2 * ROWS + 20
    torch.testing.assert_close(gradient_of(ours), theirs.weight.grad)


@embedded
def test_torch_can_be_asked_for_the_gradient_of_found_rows(cluster: wl.Cluster) -> None:
    _, ours, _opt = two(cluster)
    found = ours.find(ids(20))
    (grad,) = torch.autograd.grad(square(ours, found), found.rows)
    assert grad.shape == found.rows.shape
    assert not ours._open()._pending


@embedded
def test_a_penalty_on_the_rows_at_hand_counts(cluster: wl.Cluster) -> None:
    _, ours, opt = two(cluster)
    before = all_rows(ours)
    found = ours.find(torch.tensor([4, 4, 7]))
    assert found.keys.tolist() == [4, 7]
    assert found.inverse.tolist() == [0, 0, 1]
    (ours(found).sum() + 0.5 * found.rows.square().sum()).backward()
    opt.step()
    torch.testing.assert_close(all_rows(ours)[4], torch.full((DIM,), -2.0))
    torch.testing.assert_close(all_rows(ours)[7], torch.full((DIM,), -1.0))
    assert torch.equal(all_rows(ours)[5], before[5])


@embedded
def test_a_backward_pass_without_an_optimizer_raises_and_names_it(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", 3, rule=wl.SGD(lr=1.0), cluster=cluster)
    with pytest.raises(wl.InvalidArgument, match=r"table 'rows'.*ServerOptimizer\(model, rule\)"):
        emb(ids(4)).sum().backward()


@embedded
def test_a_module_without_a_rule_says_so(cluster: wl.Cluster) -> None:
    with pytest.raises(wl.InvalidArgument, match="Give the module a rule"):
        Embedding("rows", 3, cluster=cluster)(ids(4))


def test_lookups_that_nothing_follows_leave_nothing_behind(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", 64, rule=wl.SGD(lr=1.0), cluster=cluster)
    _opt = ServerOptimizer(emb, cluster=cluster)
    for seed in range(10):
        emb(ids(500, n=10_000, seed=seed))
    gc.collect()
    objects, memory = len(gc.get_objects()), arrays_of(emb)
    for seed in range(1000):
        emb(ids(500, n=10_000, seed=seed))
    gc.collect()
    assert len(gc.get_objects()) < objects + 100
    assert arrays_of(emb) == memory
    assert len(emb.table) == 0


def arrays_of(emb: Any) -> list[int]:
    return [len(array) for pool in emb._open()._pools.values() for array in pool._arrays]


@embedded
def test_rows_that_somebody_has_are_not_written_again(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", 64, rule=wl.SGD(lr=1.0), init=wl.Normal(std=1.0), cluster=cluster)
    _opt = ServerOptimizer(emb, cluster=cluster)
    kept = [emb.find(torch.arange(500) + 1000 * i).rows for i in range(8)]
    copies = [rows.detach().clone() for rows in kept]
    with torch.inference_mode():
        kept.append(emb.find(torch.arange(500)).rows)
    for i in range(20):
        emb(torch.arange(500) + 1000 * i)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=False))


@pytest.mark.parametrize("way", ["eval", "no_grad", "inference_mode"])
def test_evaluation_makes_no_rows(cluster: wl.Cluster, way: str) -> None:
    emb = Embedding("rows", 3, rule=wl.SGD(lr=1.0), init=wl.Constant(2.0), cluster=cluster)
    if way == "eval":
        emb.eval()(ids(20))
    else:
        with getattr(torch, way)():
            out = emb(ids(20))
            assert not out.requires_grad
            assert torch.equal(out, torch.full((20, 3), 2.0))
    assert len(emb.table) == 0


@embedded
def test_fine_tuning_in_eval_mode_trains(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", 3, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=cluster).eval()
    opt = ServerOptimizer(emb, cluster=cluster)
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    assert torch.equal(emb(torch.tensor([1])).detach(), torch.full((1, 3), -1.0))


@embedded
def test_a_frozen_module_needs_no_optimizer_and_can_be_trained_again(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", 3, rule=wl.SGD(lr=1.0), init=wl.Zeros(), trainable=False, cluster=cluster)
    assert not emb(ids(4)).requires_grad
    opt = ServerOptimizer(emb, cluster=cluster)
    assert emb.requires_grad_() is emb
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    assert torch.equal(emb(torch.tensor([1])).detach(), torch.full((1, 3), -1.0))
    assert not emb.requires_grad_(False)(ids(4)).requires_grad
    assert "trainable=False" in repr(emb)


def test_a_dead_server_in_forward_is_a_lost_one() -> None:
    with Servers(1) as servers:
        cluster = wl.connect(servers=servers.addresses)
        emb = Embedding("rows", 64, rule=wl.SGD(lr=1.0), cluster=cluster)
        emb(ids(4))
        servers.kill(0)
        cluster.abandon(0)
        with pytest.raises(wl.ServerLost):
            emb(ids(400))
        with contextlib.suppress(wl.WindlassError):
            cluster.close(timeout=5)


# -- copies, and rows from and to torch --------------------------------------------------------------------------------


@embedded
def test_copies_are_modules_of_the_same_table(cluster: wl.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy uses the only open cluster; tests before this one may have left some whose servers or scheduler are gone.
    monkeypatch.setattr(open_clusters, "_open", weakref.WeakSet([cluster]))
    emb = Embedding("rows", 3, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=cluster)
    opt = ServerOptimizer(emb, cluster=cluster)
    copies = [copy.deepcopy(emb), copy.deepcopy(torch.nn.Sequential(emb))[0]]
    stream = io.BytesIO()
    torch.save(emb, stream)
    stream.seek(0)
    copies.append(torch.load(stream, weights_only=False))
    for i, one in enumerate(copies, 1):
        one(torch.tensor([1])).sum().backward()
        opt.step()
        assert torch.equal(emb(torch.tensor([1])).detach(), torch.full((1, 3), -float(i)))


def test_saved_state_says_where_the_rows_are(cluster: wl.Cluster) -> None:
    model = torch.nn.Sequential(Embedding("rows", DIM, rule=wl.SGD(lr=1.0), cluster=cluster), torch.nn.Linear(DIM, 1))
    state = model.state_dict()
    assert list(state) == ["1.weight", "1.bias"]
    assert state._metadata["0"]["table"] == "rows"
    model.load_state_dict(state)
    whole = {**state, "0.weight": rows()}
    told = r"'0.weight': the rows of Embedding 'rows' are on the servers; put these there with its from_torch"
    with pytest.warns(UserWarning, match=told), pytest.raises(RuntimeError, match=r'Unexpected key.*"0.weight"'):
        model.load_state_dict(whole)
    with pytest.warns(UserWarning, match=told):
        missing, unexpected = model.load_state_dict(whole, strict=False)
    assert (missing, unexpected) == ([], ["0.weight"])


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_rows_come_from_torch_and_go_there(cluster: wl.Cluster, kind: Any) -> None:
    theirs, ours = pair(cluster, kind, padding_idx=3)
    again = ours.to_torch(torch.arange(ROWS))
    assert type(again) is type(theirs)
    assert torch.equal(again.weight, theirs.weight)
    assert again.padding_idx == 3
    assert len(ours.table) == ROWS - 1
    ours.from_torch(rows(2), keys=[2**60, 7])
    assert torch.equal(ours.to_torch([7, 2**60]).weight.detach(), rows(2)[[1, 0]])
    with pytest.raises(wl.InvalidArgument, match="expected a layer or a matrix with rows of 8"):
        ours.from_torch(rows(2, 5))
    with pytest.raises(wl.InvalidArgument, match="expected a key for each of 2 rows"):
        ours.from_torch(rows(2), keys=[1])


@embedded
def test_a_pretrained_module_begins_with_its_rows_and_is_frozen(cluster: wl.Cluster) -> None:
    emb = Embedding.from_pretrained(rows(), "rows", rule=wl.SGD(lr=1.0), cluster=cluster)
    assert torch.equal(emb(ids(20)), rows()[ids(20)])
    assert not emb(ids(20)).requires_grad
    tuned = EmbeddingBag.from_pretrained(rows(), "tuned", freeze=False, mode="sum", cluster=cluster)
    opt = ServerOptimizer(tuned, wl.SGD(lr=1.0), cluster=cluster)
    tuned(torch.tensor([[1, 2]])).sum().backward()
    opt.step()
    assert torch.equal(all_rows(tuned)[1], rows()[1] - 1)
    later = EmbeddingBag.from_pretrained(rows(), "tuned", mode="sum", cluster=cluster)
    assert torch.equal(later(torch.tensor([[1]])).detach()[0], rows()[1] - 1)
    with pytest.raises(wl.InvalidArgument, match="expected a matrix"):
        Embedding.from_pretrained(3, "other", cluster=cluster)


# -- torch.compile and others ------------------------------------------------------------------------------------------


class Scored(torch.nn.Module):
    def __init__(self, emb: Any) -> None:
        super().__init__()
        self.emb = emb
        self.before = torch.nn.Linear(DIM, DIM)
        self.after = torch.nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        return self.after(self.before(x) + self.emb(batch))


@pytest.fixture
def graphs() -> Any:
    """The graphs that a compiler was given, and a backend that counts them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    yield seen, backend
    torch._dynamo.reset()


@embedded
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, where a graph breaks at a hook
@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_a_compiled_model_has_one_break_for_a_lookup_and_none_for_what_was_found(
    cluster: wl.Cluster, graphs: Any, kind: Any
) -> None:
    seen, backend = graphs
    model = Scored(kind("rows", DIM, rule=wl.SGD(lr=0.1), cluster=cluster))
    opt = ServerOptimizer(model, wl.SGD(lr=0.1), cluster=cluster)
    shape = (16,) if kind is Embedding else (16, 2)
    compiled = torch.compile(model, backend=backend)
    for seed in range(4):
        compiled(torch.ones(16, DIM), ids(*shape, n=4 + 10 * seed, seed=seed)).sum().backward()
        opt.step()
    assert len(seen) == 2  # before it and behind it
    del seen[:]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed in range(4):
        found = model.emb.find(ids(*shape, n=4 + 10 * seed, seed=seed))
        compiled(torch.ones(16, DIM), found).sum().backward()
        assert model.emb._open()._pending
        opt.step()
    assert len(seen) == 1


@embedded
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, where a graph breaks at a hook
def test_a_step_in_a_compiled_function_runs_as_ever(cluster: wl.Cluster, graphs: Any) -> None:
    _, backend = graphs
    emb = Embedding("rows", DIM, rule=wl.SGD(lr=1.0), init=wl.Zeros(), cluster=cluster)
    opt = ServerOptimizer(emb, cluster=cluster)

    @torch.compile(backend=backend)  # type: ignore[untyped-decorator]
    def train(batch: torch.Tensor) -> None:
        emb(batch).sum().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(3):
        train(torch.tensor([1]))
    assert torch.equal(emb(torch.tensor([1])).detach(), torch.full((1, DIM), -3.0))


@embedded
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_what_needs_no_batch_is_refused_and_told_of_find(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", DIM, rule=wl.SGD(lr=1.0), trainable=False, cluster=cluster)
    attempts = [
        lambda: torch.jit.trace(emb, ids(3)),
        lambda: torch.export.export(emb, (ids(3),), strict=False),
        lambda: torch.func.vmap(emb)(ids(3, 2)),
        lambda: emb(ids(3).to("meta")),
    ]
    for attempt in attempts:
        with pytest.raises(wl.InvalidArgument, match=r"found = module.find\(ids\)"):
            attempt()
    replica = emb._replicate_for_data_parallel()
    with pytest.raises(wl.InvalidArgument, match="DataParallel"):
        replica(ids(3))


@embedded
def test_what_was_found_can_be_exported(cluster: wl.Cluster) -> None:
    emb = Embedding("rows", DIM, rule=wl.SGD(lr=1.0), trainable=False, cluster=cluster)

    class Head(torch.nn.Module):
        def forward(self, rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
            return rows[inverse].sum(1)

    found = emb.find(ids(3, 2))
    exported = torch.export.export(Head(), (found.rows, found.inverse))
    assert torch.equal(exported.module()(found.rows, found.inverse), emb(ids(3, 2)).sum(1))
