"""Torch and fbgemm beside us, in the same run, where they are installed."""

import importlib.util
import warnings
from typing import Any

import numpy as np

import windlass as wl
from windlass.bench._figures import Suite, interleave, seconds_of

BATCH = 100_000
DIM = 64


def have(module: str) -> bool:
    """Whether a peer is installed."""
    return importlib.util.find_spec(module) is not None


def unique(suite: Suite) -> None:
    """A million keys, Zipf 1.05 over 10 million, and their inverse."""
    if not have("torch"):
        return
    import torch

    torch.set_num_threads(1)
    rng = np.random.default_rng(3)
    weights = np.arange(1, 10_000_001, dtype=np.float64) ** -1.05
    keys = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(1_000_000)).astype(np.int64)
    keys = keys * 0x9E3779B97F4A7C1 & 0x7FFFFFFFFFFFFFFF
    tensor = torch.from_numpy(keys)
    mine, best = interleave(
        lambda: seconds_of(lambda: wl.unique(keys)),
        lambda: seconds_of(lambda: torch.unique(tensor, return_inverse=True)),
        9,
    )
    suite.rate("unique with inverse, Zipf 1.05", 1 / mine, 1 / best, "M keys/s", bar=1.0, against="torch.unique")


def _batches(rows: int) -> Any:
    rng = np.random.default_rng(5)
    while True:
        yield rng.choice(rows, BATCH, replace=False, shuffle=True).astype(np.int64)


def _ours(rows: int, rule: wl.Rule) -> tuple[wl.Cluster, Any]:
    """A step on one of our tables: pull a batch and push its gradient, in registered arrays."""
    cluster = wl.connect(threads=1)
    table = cluster.table("t", DIM, rule=rule, init=wl.Normal(std=0.01))
    out, grads = cluster.empty((BATCH, DIM)), cluster.empty((BATCH, DIM))
    grads[:] = 1e-3
    ids = np.arange(rows, dtype=np.int64)
    for at in range(0, rows, BATCH):
        batch = ids[at : at + BATCH]
        table.push(batch, grads[: len(batch)]).wait()
    batches = _batches(rows)

    def step() -> float:
        batch = next(batches)

        def work() -> None:
            table.pull(batch, out=out)
            table.push(batch, grads).wait()

        return seconds_of(work)

    return cluster, step


def embedding(suite: Suite, rows: int) -> None:
    """pull + push against forward + backward + step of nn.Embedding(sparse=True)."""
    if not have("torch"):
        return
    import torch

    torch.set_num_threads(1)
    cases: tuple[tuple[str, wl.Rule, Any, float], ...] = (
        ("Adam", wl.Adam(lr=1e-3), lambda p: torch.optim.SparseAdam(p, lr=1e-3), 5.0),
        ("Adagrad", wl.Adagrad(lr=1e-3), lambda p: torch.optim.Adagrad(p, lr=1e-3), 3.0),
    )
    for name, rule, make, bar in cases:
        layer = torch.nn.Embedding(rows, DIM, sparse=True)
        optimizer = make(list(layer.parameters()))
        batches = _batches(rows)
        ones = torch.full((BATCH, DIM), 1e-3)

        def peer(layer: Any = layer, optimizer: Any = optimizer, batches: Any = batches, ones: Any = ones) -> float:
            ids = torch.from_numpy(next(batches))

            def work() -> None:
                optimizer.zero_grad(set_to_none=True)
                layer(ids).backward(ones)
                with warnings.catch_warnings(action="ignore"):  # torch's own, about its sparse tensors
                    optimizer.step()

            return seconds_of(work)

        peer()  # makes its state
        cluster, step = _ours(rows, rule)
        with cluster:
            mine, best = interleave(step, peer, 5)
        suite.rate(
            f"pull + push {name}, dim {DIM}, 1 thread",
            BATCH / mine / 1e6,
            BATCH / best / 1e6,
            "M rows/s",
            bar=bar,
            against="nn.Embedding(sparse=True)",
        )
        del layer, optimizer, peer


def fbgemm(suite: Suite, rows: int) -> None:
    """pull + push against fbgemm's CPU table with fused row-wise Adagrad, bags of 1."""
    if not have("torch") or not have("fbgemm_gpu"):
        return
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.set_num_threads(1)
    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=1e-3,
        device=torch.device("cpu"),
    )
    batches = _batches(rows)
    offsets = torch.arange(BATCH + 1, dtype=torch.int64)
    ones = torch.full((BATCH, DIM), 1e-3)

    def peer() -> float:
        ids = torch.from_numpy(next(batches))
        return seconds_of(lambda: layer(ids, offsets).backward(ones))

    peer()
    cluster, step = _ours(rows, wl.RowAdagrad(lr=1e-3))
    with cluster:
        mine, best = interleave(step, peer, 9)
    suite.rate(
        f"pull + push RowAdagrad, dim {DIM}, 1 thread",
        BATCH / mine / 1e6,
        BATCH / best / 1e6,
        "M rows/s",
        bar=1.0,
        against="fbgemm, bags of 1",
    )
