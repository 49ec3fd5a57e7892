"""``windlass bench embed``: modules over tables, beside what torch and others have for embeddings.

A call is a step of training: forward, backward, update. On the CPU the server is inside the process, one thread each,
but for the whole DLRM, which has all cores. Ids are Zipf's, exponent 1.05, and every row is there beforehand.

With ``device="cuda"`` DLRM is measured, and its tables alone: the network on the GPU and the tables on servers of this
host, without a cache, beside the same with all rows in the GPU's memory.
"""

import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

import windlass as wl
from windlass import _core
from windlass.bench import embed_peers as peers
from windlass.bench._figures import MEASURED, Suite
from windlass.bench._turns import Length, Side, in_turns, timed_over
from windlass.bench._work import BATCH, BATCHES
from windlass.bench.criteo import CARDINALITIES, FEATURES, NUMBERS, Criteo, zipf_ids
from windlass.bench.embed_peers import Step, have, trained
from windlass.testing import Servers

DIM, LR = 64, 1e-3
BAGS = ((1, 1.0), (10, 0.8))  # sizes, and the bar against fbgemm
FEATURE_BATCH = 8192
BATCH_SHORT, FEATURE_BATCH_SHORT = 5000, 256
DLRM_DIM = 16
FILL = 1 << 18  # rows in a push


def run(console: Console, rows: int, short: bool = False, device: str = "cpu") -> Suite:
    """All figures; `rows` in the tables, or in all tables together (the bars are for 5 million; with "cuda" there are
    Criteo's 33.8 million)."""
    detail = "cuda" if device == "cuda" else f"{rows / 1e6:g} M rows"
    suite = Suite("embed", console, MEASURED, short=short, detail=detail)
    if device == "cuda":
        on_a_gpu(suite, rows if short else sum(CARDINALITIES))
        return suite
    torch.set_num_threads(1)
    one_feature(suite, rows)
    beside_fbgemm(suite, rows)
    many_features(suite, rows)
    torch.set_num_threads(_core.cores())
    whole_model(suite, rows)
    return suite


def in_a_cycle(batches: list[Any], step: Step) -> Side:
    """A side that takes the batches one after the other."""
    return timed_over(itertools.cycle(batches), step)


def fill(cluster: wl.Cluster, table: Any, keys: Any, dim: int) -> None:
    """Makes the rows."""
    grads = np.zeros((FILL, dim), np.float32)
    for at in range(0, len(keys), FILL):
        some = keys[at : at + FILL]
        pushed = table.push(some, grads[: len(some)])
        cluster.tick()
        pushed.wait()


def drawn(suite: Suite, rows: int) -> list[Any]:
    """Batches of ids."""
    rng = np.random.default_rng(5)
    return [torch.from_numpy(zipf_ids(rng, rows, batch_of(suite))) for _ in range(batches_of(suite))]


def batches_of(suite: Suite) -> int:
    """How many are drawn."""
    return 2 if suite.short else BATCHES


def batch_of(suite: Suite) -> int:
    """Ids of one feature in a batch."""
    return BATCH_SHORT if suite.short else BATCH


def feature_batch_of(suite: Suite) -> int:
    """Samples of many features in a batch."""
    return FEATURE_BATCH_SHORT if suite.short else FEATURE_BATCH


# -- one feature -------------------------------------------------------------------------------------------------------


def one_feature(suite: Suite, rows: int) -> None:
    """Embedding against nn.Embedding(sparse=True) and torch's optimizers."""
    cases: tuple[tuple[str, wl.Rule, Callable[[Any], Any], float], ...] = (
        ("Adagrad", wl.Adagrad(lr=LR), lambda p: torch.optim.Adagrad(p, lr=LR), 3.0),
        ("SparseAdam", wl.Adam(lr=LR), lambda p: torch.optim.SparseAdam(p, lr=LR), 5.0),
    )
    batches, batch = [(ids,) for ids in drawn(suite, rows)], batch_of(suite)
    grad = torch.full((batch, DIM), 1e-3)
    for name, rule, optimizer, bar in cases:
        layer = nn.Embedding(rows, DIM, sparse=True)
        theirs = trained(layer, [optimizer(list(layer.parameters()))], grad)
        with wl.connect(threads=1) as cluster:
            ours = trained(*embedding(cluster, wl.torch.Embedding("one", DIM, rule=rule, cluster=cluster), rows), grad)
            mine, limit = in_turns(in_a_cycle(batches, ours), in_a_cycle(batches, theirs), length=suite.length)
            del ours
        title = f"Embedding {name}, dim {DIM}, 1 thread"
        against = f"nn.Embedding(sparse=True), {name}"
        suite.rate(title, batch / 1e6, "M rows/s", mine, limit, bar=bar, against=against)
        del layer, theirs


def embedding(cluster: wl.Cluster, module: Any, rows: int) -> tuple[Any, list[Any]]:
    """A module of ours with all of its rows, and its optimizer."""
    optimizer = wl.torch.ServerOptimizer(module, cluster=cluster)
    fill(cluster, module.table, np.arange(rows), DIM)
    return module, [optimizer]


def beside_fbgemm(suite: Suite, rows: int) -> None:
    """EmbeddingBag with row-wise Adagrad against fbgemm's table."""
    if not have("fbgemm_gpu"):
        suite.note("fbgemm's TBE: not measured, it is not installed (pip install fbgemm-gpu-cpu)")
    batch = batch_of(suite)
    for bag, bar in BAGS:
        ids = [some[: batch // bag * bag] for some in drawn(suite, rows)]
        offsets = torch.arange(0, batch + 1, bag)
        grad = torch.full((batch // bag, DIM), 1e-3)
        with wl.connect(threads=1) as cluster:
            module = wl.torch.EmbeddingBag(
                "bags", DIM, mode="sum", rule=wl.RowAdagrad(lr=LR), include_last_offset=True, cluster=cluster
            )
            ours = trained(*embedding(cluster, module, rows), grad)
            batches = [(some, offsets) for some in ids]
            sides = [in_a_cycle(batches, ours)]
            if have("fbgemm_gpu"):
                sides.append(in_a_cycle(batches, peers.tbe(rows, DIM, bag, batch, LR)))
            mine, *limit = in_turns(*sides, length=suite.length)
            del ours, module
        title = f"EmbeddingBag RowAdagrad, bags of {bag}, dim {DIM}, 1 thread"
        against = f"fbgemm TBE, bags of {bag}" if limit else ""
        suite.rate(title, batch / 1e6, "M rows/s", mine, *limit, bar=bar, against=against)


# -- many features -----------------------------------------------------------------------------------------------------


def many_features(suite: Suite, rows: int) -> None:
    """26 features in one module, and in 26, against 26 nn.EmbeddingBag; row-wise Adagrad beside TorchRec."""
    criteo = Criteo(rows)
    counts, batch = criteo.cardinalities, feature_batch_of(suite)
    batches = [(torch.from_numpy(criteo.batch(i, batch).ids),) for i in range(batches_of(suite))]
    grad = torch.full((batch, len(FEATURES), DIM), 1e-3)
    amount = batch * len(FEATURES) / 1e6

    def together(rule: wl.Rule, cluster: wl.Cluster) -> Side:
        module = wl.torch.EmbeddingBags(FEATURES, DIM, table="many", rule=rule, cluster=cluster)
        optimizer = wl.torch.ServerOptimizer(module, cluster=cluster)
        for i, count in enumerate(counts):
            fill(cluster, module.table, np.arange(count) + (i << 56), DIM)
        return in_a_cycle(batches, trained(module, [optimizer], grad))

    def apart(rule: wl.Rule, cluster: wl.Cluster) -> Side:
        modules = [wl.torch.EmbeddingBag(name, DIM, mode="sum", rule=rule, cluster=cluster) for name in FEATURES]
        stacked = peers.Stacked(modules)
        optimizer = wl.torch.ServerOptimizer(stacked, cluster=cluster)
        for module, count in zip(modules, counts, strict=True):
            fill(cluster, module.table, np.arange(count), DIM)
        return in_a_cycle(batches, trained(stacked, [optimizer], grad))

    layers = peers.torch_bags(counts, DIM)
    theirs = in_a_cycle(batches, trained(layers, [torch.optim.Adagrad(layers.parameters(), lr=LR)], grad))
    for title, make, bar in (("one EmbeddingBags", together, 2.0), ("26 EmbeddingBag", apart, 1.0)):
        with wl.connect(threads=1) as cluster:
            mine, limit = in_turns(make(wl.Adagrad(lr=LR), cluster), theirs, length=suite.length)
        name = f"26 features, {title}, Adagrad, dim {DIM}, 1 thread"
        suite.rate(name, amount, "M rows/s", mine, limit, bar=bar, against="26 nn.EmbeddingBag(sparse=True), Adagrad")
    del layers, theirs
    if not (have("torchrec") and have("fbgemm_gpu")):
        suite.note("TorchRec: not measured, it is not installed (pip install torchrec fbgemm-gpu-cpu)")
        return
    with wl.connect(threads=1) as cluster:
        fused = in_a_cycle(batches, peers.torchrec(FEATURES, counts, DIM, batch, LR))
        mine, limit = in_turns(together(wl.RowAdagrad(lr=LR), cluster), fused, length=suite.length)
    name = f"26 features, one EmbeddingBags, RowAdagrad, dim {DIM}, 1 thread"
    suite.rate(name, amount, "M rows/s", mine, limit, against="TorchRec FusedEmbeddingBagCollection")


# -- the whole model ---------------------------------------------------------------------------------------------------


def dlrm(suite: Suite) -> Any:
    """The class of apps/dlrm, which is in the source tree; None where there is none."""
    folder = pathlib.Path(wl.__file__).parents[1] / "apps" / "dlrm"
    if not (folder / "model.py").is_file():
        suite.note("DLRM: not measured, the model is in the source tree (apps/dlrm)")
        return None
    sys.path.insert(0, str(folder))
    from model import DLRM  # type: ignore[import-not-found]

    return DLRM


def whole_model(suite: Suite, rows: int) -> None:
    """DLRM with its tables and its network on the server inside, against torch's modules and Adagrad."""
    if (make := dlrm(suite)) is None:
        return
    criteo, batch = Criteo(rows), feature_batch_of(suite)
    batches = [tuple(map(torch.from_numpy, criteo.batch(i, batch))) for i in range(batches_of(suite))]
    with wl.connect() as cluster:
        tables = wl.torch.EmbeddingBags(FEATURES, DLRM_DIM, table="dlrm", rule=wl.Adagrad(lr=LR), cluster=cluster)
        ours = make(tables, NUMBERS, len(FEATURES), DLRM_DIM)
        optimizer = wl.torch.ServerOptimizer(ours, wl.Adagrad(lr=LR), cluster=cluster)
        for i, count in enumerate(criteo.cardinalities):
            fill(cluster, tables.table, np.arange(count) + (i << 56), DLRM_DIM)
        theirs = make(peers.torch_bags(criteo.cardinalities, DLRM_DIM), NUMBERS, len(FEATURES), DLRM_DIM)
        of_torch = torch.optim.Adagrad(theirs.parameters(), lr=LR)
        mine, limit = in_turns(
            in_a_cycle(batches, of_loss(ours, [optimizer])),
            in_a_cycle(batches, of_loss(theirs, [of_torch])),
            length=suite.length,
        )
        del optimizer
    suite.rate(
        f"DLRM, Adagrad, dim {DLRM_DIM}, batch {batch:,}",
        batch,
        "samples/s",
        mine,
        limit,
        bar=1.0,
        against="26 nn.EmbeddingBag(sparse=True), Adagrad",
    )


def of_loss(model: Any, optimizers: list[Any]) -> Step:
    """A step of a model of clicks: numbers, ids, labels."""

    def loss(numbers: Any, ids: Any, labels: Any) -> Any:
        return nn.functional.binary_cross_entropy_with_logits(model(numbers, ids), labels)

    return trained(loss, optimizers, None)


# -- on a GPU ----------------------------------------------------------------------------------------------------------

GPU_BATCHES = ((8_192, 32), (65_536, 12))  # sizes, and how many are drawn
GPU_LENGTH = Length(rounds=3, calls=10, seconds=0.2, seconds_max=1.0)  # a call has many steps
GPU_MLP = {"bottom": (512, 256), "top": (512, 256)}
GPU_STEPS = 10  # that a call makes, before it waits for the GPU
CORES_OF_A_SERVER = 8
GPU_RULES: tuple[tuple[str, wl.Rule, Callable[[Any], Any]], ...] = (
    ("SGD", wl.SGD(lr=LR), lambda p: torch.optim.SGD(p, lr=LR)),
    ("Adagrad", wl.Adagrad(lr=LR), lambda p: torch.optim.Adagrad(p, lr=LR)),
)


class Joined(nn.Module):  # type: ignore[misc]
    """The tables of all features behind each other in one nn.EmbeddingBag(sparse=True): the fastest that torch has."""

    def __init__(self, counts: list[int], dim: int, device: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(sum(counts), dim, mode="sum", sparse=True, device=device)
        self.register_buffer("first", torch.tensor([0, *counts[:-1]], device=device).cumsum(0))
        self.dim = dim

    def forward(self, ids: Any) -> Any:
        """(batch, features) ids become (batch, features, dim)."""
        return self.bag((ids + self.first).view(-1, 1)).view(*ids.shape, self.dim)


def on_a_gpu(suite: Suite, rows: int, device: str = "cuda") -> None:
    """Step times of DLRM and of its tables alone, with SGD and Adagrad."""
    if device == "cuda" and not torch.cuda.is_available():
        raise wl.InvalidArgument("windlass bench embed --device cuda: torch finds no CUDA device here")
    if (make := dlrm(suite)) is None:
        return
    torch.set_float32_matmul_precision("high")
    criteo = Criteo(rows)
    servers = max(1, _core.cores() // CORES_OF_A_SERVER)
    gpu = torch.cuda.get_device_name() if device == "cuda" else device
    suite.note(f"{gpu}, torch {torch.__version__}, {servers} servers, {rows:,} rows")
    for size, count in GPU_BATCHES:
        batches = [on_device(criteo, i, size, device) for i in range(2 if suite.short else count)]
        for name, rule, optimizer in GPU_RULES:
            with Servers(servers, kind="unix") as there, there.connect(transport="arena") as cluster:
                tables = wl.torch.EmbeddingBags(FEATURES, DIM, table="dlrm", rule=rule, cluster=cluster).to(device)
                ours = make(tables, NUMBERS, len(FEATURES), DIM, **GPU_MLP).to(device)
                of_tables = wl.torch.ServerOptimizer(tables, cluster=cluster)
                joined = Joined(criteo.cardinalities, DIM, device)
                theirs = make(joined, NUMBERS, len(FEATURES), DIM, **GPU_MLP).to(device)
                every_row(batches, tables, of_tables)
                whole = (
                    of_loss(ours, [optimizer(ours.parameters()), of_tables]),
                    of_loss(theirs, [optimizer(theirs.parameters())]),
                )
                measure(suite, f"DLRM, {name}", size, batches, whole)
                grad = torch.full((size, len(FEATURES), DIM), 1e-3, device=device)
                alone = (
                    trained(tables, [of_tables], grad),
                    trained(joined, [optimizer(joined.parameters())], grad),
                )
                measure(suite, f"tables alone, {name}", size, [(batch[1],) for batch in batches], alone)
                del tables, ours, of_tables, joined, theirs, whole, alone
            if device == "cuda":
                torch.cuda.empty_cache()


def measure(suite: Suite, title: str, size: int, batches: list[Any], steps: tuple[Step, Step]) -> None:
    """Ours beside theirs: the time of a step, of many that follow each other."""
    sides = [in_a_cycle(in_tens(batches), ten_steps(step)) for step in steps]
    found = [
        times.shared_by(GPU_STEPS) for times in in_turns(*sides, length=suite.length if suite.short else GPU_LENGTH)
    ]
    name = f"{title}, dim {DIM}, batch {size:,}, tables on servers of the host"
    suite.latency(name, "ms", *found, against="nn.EmbeddingBag(sparse=True), rows on the device")


def on_device(criteo: Criteo, number: int, size: int, device: str) -> tuple[Any, ...]:
    """A batch in the memory of the device."""
    return tuple(torch.from_numpy(array).to(device) for array in criteo.batch(number, size))


def every_row(batches: list[Any], tables: Any, optimizer: Any) -> None:
    """Makes the rows of the batches, each by a gradient of zeros."""
    for batch in batches:
        (tables(batch[1]).sum() * 0).backward()
        optimizer.step()


def in_tens(batches: list[Any]) -> list[list[Any]]:
    """So many batches for each call."""
    cycle: Iterator[Any] = itertools.cycle(batches)
    return [[next(cycle) for _ in range(GPU_STEPS)] for _ in range(len(batches))]


def ten_steps(step: Step) -> Step:
    """Many steps, and the end of what the GPU has to do."""

    def steps(batches: list[Any]) -> None:
        for batch in batches:
            step(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return steps
