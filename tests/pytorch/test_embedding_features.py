"""EmbeddingBags and Embeddings: many features in one table, beside a module of torch's for each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tables import DIM, ids, rows

import windlass as wl
from windlass.torch import EmbeddingBags, Embeddings, ServerOptimizer

embedded = pytest.mark.embedded("about the module, whatever its servers are")
NAMES = ("user", "item", "tags")
N, BATCH = 30, 12


class Jagged:
    """What a KeyedJaggedTensor of TorchRec's offers."""

    def __init__(self, columns: dict[str, tuple[torch.Tensor, torch.Tensor]], weights: Any = None, **more: Any) -> None:
        self._columns, self._weights, self._more = columns, weights, more

    def keys(self) -> list[str]:
        return list(self._columns)

    def values(self) -> torch.Tensor:
        return torch.cat([values for values, _ in self._columns.values()])

    def lengths(self) -> torch.Tensor:
        return torch.cat([lengths for _, lengths in self._columns.values()])

    def weights_or_none(self) -> Any:
        return self._weights

    def stride(self) -> int:
        return BATCH

    def variable_stride_per_key(self) -> bool:
        return bool(self._more.get("varies"))


def made(cluster: wl.Cluster, kind: Any = EmbeddingBags, features: Any = NAMES, **options: Any) -> tuple[Any, Any]:
    """Ours, with an optimizer, over the rows of torch's."""
    ours = kind(features, DIM, table="ctr", rule=wl.SGD(lr=1.0), cluster=cluster, **options)
    opt = ServerOptimizer(ours, cluster=cluster)
    for i, name in enumerate(ours.features):
        ours.from_torch(name, rows(N, seed=i))
    return ours, opt


def theirs(mode: Any = "sum", padding: int | None = None) -> torch.nn.ModuleDict:
    found = torch.nn.ModuleDict()
    for i, name in enumerate(NAMES):
        one = mode[name] if isinstance(mode, dict) else mode
        found[name] = torch.nn.EmbeddingBag(N, DIM, mode=one, padding_idx=padding)
        with torch.no_grad():
            found[name].weight.copy_(rows(N, seed=i))
    return found


def lengths(name: str) -> torch.Tensor:
    return ids(BATCH, n=5, seed=len(name))


def ragged(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    counts = lengths(name)
    return ids(int(counts.sum()), n=N, seed=17 + len(name)), counts.cumsum(0) - counts


def compared(ours: Any, opt: Any, batch: Any, modules: Any, calls: dict[str, tuple[Any, ...]]) -> None:
    """Output and gradients are those of torch's modules, feature by feature."""
    seen, expected = ours(batch), torch.stack([modules[name](*calls[name]) for name in NAMES], dim=1)
    assert seen.shape == (BATCH, 3, DIM)
    assert torch.equal(seen, expected)
    factors = torch.randn(seen.shape, generator=torch.Generator().manual_seed(1))
    (seen * factors).sum().backward()
    (expected * factors).sum().backward()
    opt.step()
    for i, name in enumerate(NAMES):
        grad = modules[name].weight.grad
        after = ours.to_torch(name, np.arange(N)).weight.detach()
        begun = rows(N, seed=i)
        limit = 1e-6 * float(grad.abs().max()) + 2e-7 * float(after.abs().max())
        used = torch.ones(N, dtype=torch.bool)
        if ours.padding_idx is not None:
            used[ours.padding_idx] = False
        torch.testing.assert_close(after[used], (begun - grad)[used], rtol=0, atol=limit)


BATCHES: dict[str, Callable[[], tuple[Any, dict[str, tuple[Any, ...]]]]] = {
    "an id each": lambda: (
        {name: ids(BATCH, n=N, seed=i) for i, name in enumerate(NAMES)},
        {name: (ids(BATCH, n=N, seed=i)[:, None],) for i, name in enumerate(NAMES)},
    ),
    "a matrix": lambda: (
        torch.stack([ids(BATCH, n=N, seed=i) for i in range(3)], 1).to(torch.int32),
        {name: (ids(BATCH, n=N, seed=i)[:, None],) for i, name in enumerate(NAMES)},
    ),
    "bags of equal size": lambda: (
        torch.stack([ids(BATCH, 4, n=N, seed=i) for i in range(3)], 1),
        {name: (ids(BATCH, 4, n=N, seed=i),) for i, name in enumerate(NAMES)},
    ),
    "all forms": lambda: (
        {"user": ids(BATCH, n=N), "item": ids(BATCH, 3, n=N), "tags": ragged("tags"), "more": None},
        {"user": (ids(BATCH, n=N)[:, None],), "item": (ids(BATCH, 3, n=N),), "tags": ragged("tags")},
    ),
    "offsets": lambda: ({name: ragged(name) for name in NAMES}, {name: ragged(name) for name in NAMES}),
    "a KeyedJaggedTensor": lambda: (
        Jagged({name: (ragged(name)[0], lengths(name)) for name in ("tags", "other", "user", "item")}),
        {name: ragged(name) for name in NAMES},
    ),
}


@pytest.mark.parametrize("mode", ["sum", "mean", "max", {"user": "mean", "item": "sum", "tags": "max"}], ids=str)
@pytest.mark.parametrize("form", BATCHES)
def test_bags_of_many_features_are_torchs_for_each(cluster: wl.Cluster, form: str, mode: Any) -> None:
    batch, calls = BATCHES[form]()
    compared(*made(cluster, mode=mode), batch, theirs(mode), calls)


@embedded
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", BATCHES)
def test_padding_is_left_out_of_every_feature(cluster: wl.Cluster, form: str, mode: Any) -> None:
    batch, calls = BATCHES[form]()
    ours, opt = made(cluster, mode=mode, padding_idx=2)
    assert len(ours.table) == 3 * (N - 1)
    compared(ours, opt, batch, theirs(mode, 2), calls)
    assert len(ours.table) == 3 * (N - 1)


@embedded
def test_weights_of_samples_count(cluster: wl.Cluster) -> None:
    values, offsets = ragged("tags")
    weights = torch.rand(len(values), generator=torch.Generator().manual_seed(0))
    batch = {"user": ids(BATCH, n=N), "item": ids(BATCH, 3, n=N), "tags": (values, offsets, weights)}
    calls = {"user": (ids(BATCH, n=N)[:, None],), "item": (ids(BATCH, 3, n=N),), "tags": (values, offsets, weights)}
    compared(*made(cluster), batch, theirs(), calls)
    jagged = Jagged(
        {name: (ragged(name)[0], lengths(name)) for name in NAMES},
        torch.cat([torch.rand(int(lengths(n).sum())) for n in NAMES]),
    )
    ours = EmbeddingBags(NAMES, DIM, table="ctr", mode="mean", rule=wl.SGD(lr=1.0), cluster=cluster)
    with pytest.raises(wl.InvalidArgument, match="weights of ids go with mode='sum', not 'mean'"):
        ours(jagged)


def test_features_with_one_number_share_rows(cluster: wl.Cluster) -> None:
    shared = {"item": 0, "clicked": 0, "user": 7}
    ours, opt = made(cluster, features=shared)
    batch = {"item": torch.tensor([4]), "clicked": torch.tensor([4]), "user": torch.tensor([4])}
    before = ours(batch).detach()
    assert torch.equal(before[0, 0], before[0, 1])
    ours(batch).sum().backward()
    opt.step()
    assert torch.equal(ours(batch).detach(), before - torch.tensor([2.0, 2.0, 1.0])[None, :, None])


def test_unpooled_rows_of_many_features(cluster: wl.Cluster) -> None:
    ours, opt = made(cluster, Embeddings)
    batch = {"user": ids(BATCH, n=N), "item": ids(BATCH, 3, n=N), "tags": ids(2, 3, 4, n=N)}
    seen = ours(batch)
    for i, name in enumerate(NAMES):
        assert torch.equal(seen[name], rows(N, seed=i)[batch[name]])
    matrix = torch.stack([batch["user"]] * 3, 1)
    assert torch.equal(ours(matrix), torch.stack([rows(N, seed=i)[batch["user"]] for i in range(3)], 1))
    deep = torch.stack([batch["item"]] * 3, 1)
    assert torch.equal(ours(deep), torch.stack([rows(N, seed=i)[batch["item"]] for i in range(3)], 1))
    even = ours({name: ids(BATCH, n=N) for name in NAMES})
    assert torch.equal(even["item"], rows(N, seed=1)[ids(BATCH, n=N)])
    jagged = Jagged({name: (ragged(name)[0], lengths(name)) for name in NAMES})
    assert torch.equal(ours(jagged)["tags"], rows(N, seed=2)[ragged("tags")[0]])
    sum(part.sum() for part in seen.values()).backward()
    opt.step()
    counts = torch.bincount(batch["item"].reshape(-1), minlength=N)[:, None]
    torch.testing.assert_close(ours.to_torch("item", np.arange(N)).weight.detach(), rows(N, seed=1) - counts)


@embedded
def test_a_batch_without_samples_has_no_rows(cluster: wl.Cluster) -> None:
    ours, opt = made(cluster)
    assert ours(torch.zeros((0, 3), dtype=torch.int64)).shape == (0, 3, DIM)
    none = torch.zeros(0, dtype=torch.int64)
    out = ours({"user": none, "item": none.view(0, 4), "tags": (none, none)})
    assert out.shape == (0, 3, DIM)
    out.sum().backward()
    opt.step()
    empty = ours({name: (none, torch.zeros(BATCH, dtype=torch.int64)) for name in NAMES})
    assert torch.equal(empty.detach(), torch.zeros(BATCH, 3, DIM))


@pytest.mark.parametrize("wrong", [2**56, -1, 2**63 - 1])
def test_ids_that_leave_no_room_for_the_feature_are_refused(cluster: wl.Cluster, wrong: int) -> None:
    ours, _ = made(cluster)
    message = rf"'item': features share a table, so ids must be from 0 to 2\*\*56 - 1, saw {wrong}; fold=True"
    with pytest.raises(wl.InvalidArgument, match=message):
        ours({"user": ids(2), "item": torch.tensor([1, wrong]), "tags": ids(2, 2)})
    with pytest.raises(wl.InvalidArgument, match="ids must be from 0"):
        ours(torch.tensor([[1, wrong, 2]]))
    folding = EmbeddingBags(NAMES, DIM, table="folded", rule=wl.SGD(lr=1.0), fold=True, cluster=cluster)
    found = folding.find(torch.tensor([[1, wrong, wrong], [1, wrong, wrong - 1]]))
    assert len(found.keys) == 4


@embedded
def test_256_features_have_different_rows(cluster: wl.Cluster) -> None:
    many = EmbeddingBags([f"f{i}" for i in range(256)], 2, table="wide", rule=wl.SGD(lr=1.0), cluster=cluster)
    found = many.find(torch.full((1, 256), 2**56 - 1))
    assert len(found.keys) == 256
    assert torch.equal(found.keys, found.keys.sort().values)
    with pytest.raises(wl.InvalidArgument, match="numbers from 0 to 255, not 'f256': 256"):
        EmbeddingBags([f"f{i}" for i in range(257)], 2, table="wider")
    with pytest.raises(wl.InvalidArgument, match="numbers from 0 to 254"):
        EmbeddingBags([f"f{i}" for i in range(256)], 2, table="wider", padding_idx=0)


def test_a_table_keeps_the_numbers_of_its_features(cluster: wl.Cluster) -> None:
    def opened(features: Any) -> Any:
        with torch.no_grad():
            one = EmbeddingBags(features, DIM, table="ctr", rule=wl.SGD(lr=1.0), cluster=cluster)
            return one(torch.zeros((1, len(features)), dtype=torch.int64))

    opened(["user", "item"])
    opened(["user", "item", "tags"])
    opened({"tags": 2, "user": 0})
    opened({"user": 0, "item": 1, "clicked": 1})
    with pytest.raises(wl.InvalidArgument, match="number 0 is 'item' here, and another feature"):
        opened(["item", "user"])


@embedded
def test_a_batch_is_checked(cluster: wl.Cluster) -> None:
    ours, _ = made(cluster)
    good = {"user": ids(2), "item": ids(2), "tags": ids(2)}
    wrong: list[tuple[Any, str]] = [
        ({"user": ids(2), "item": ids(2)}, "the batch lacks 'tags'"),
        ({**good, "tags": ids(3)}, "batches of different sizes: {'user': 2, 'item': 2, 'tags': 3}"),
        ({**good, "tags": ids(2).float()}, "feature 'tags': expected ids of int64"),
        ({**good, "tags": (ids(4),)}, "not a tuple of 1"),
        ({**good, "tags": (ids(4), torch.tensor([1, 2]))}, "the first offset must be 0, not 1"),
        ({**good, "tags": (ids(4), torch.tensor([0, 2]), torch.ones(3))}, r"a weight per id, \(4,\), saw \(3,\)"),
        ({**good, "tags": ids(2, 2, 2)}, r"\(batch,\) or \(batch, bag\), saw \(2, 2, 2\)"),
        (ids(4, 2), r"expected ids of shape \(batch, 3\)"),
        (Jagged({"user": (ids(4), ids(BATCH))}), "the batch lacks 'item', 'tags'"),
        (Jagged({name: (ids(4), ids(BATCH)) for name in NAMES}, varies=True), "batches of different sizes"),
        (3, "expected ids by feature"),
    ]
    for batch, message in wrong:
        with pytest.raises(wl.InvalidArgument, match=message):
            ours(batch)


@embedded
def test_features_and_modes_are_checked() -> None:
    for features, message in (
        ("user", "expected a list of features"),
        (["a", "a"], "named twice"),
        ([], "at least one feature"),
        ({"a": -1}, "not 'a': -1"),
    ):
        with pytest.raises(wl.InvalidArgument, match=message):
            EmbeddingBags(features, 3, table="t")
    with pytest.raises(wl.InvalidArgument, match="mode must be one of"):
        EmbeddingBags(["a", "b"], 3, table="t", mode={"a": "sum"})


@embedded
def test_what_was_found_makes_a_whole_graph(cluster: wl.Cluster) -> None:
    torch._dynamo.reset()
    ours, opt = made(cluster, mode="mean")
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(lambda found: ours(found).sum(), backend=backend, fullgraph=True)
    for seed in range(4):
        compiled(ours.find(torch.randint(0, 3 + 9 * seed, (BATCH, 3)))).backward()
        opt.step()
    assert len(seen) == 1
    torch._dynamo.reset()
