"""Torch and fbgemm beside us, in the same run, where they are installed."""

import functools
import importlib.util
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

import windlass as wl
from windlass.bench._figures import Suite
from windlass.bench._turns import Side, in_turns, timed, timed_over
from windlass.bench._work import BATCH, BATCHES

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
    ours, limit = in_turns(
        timed(lambda: wl.unique(keys)),
        timed(lambda: torch.unique(tensor, return_inverse=True)),
        length=suite.length,
    )
    suite.rate("unique with inverse, Zipf 1.05", 1, "M keys/s", ours, limit, bar=1.0, against="torch.unique")


def _batches(rows: int) -> Iterator[Any]:
    return itertools.cycle(_drawn(rows))


@functools.cache
def _drawn(rows: int) -> list[Any]:
    rng = np.random.default_rng(5)
    return [rng.choice(rows, BATCH, replace=False, shuffle=True).astype(np.int64) for _ in range(BATCHES)]


def _ours(rows: int, rule: wl.Rule) -> tuple[wl.Cluster, Side]:
    """A step on one of our tables: pull a batch and push its gradient, in registered arrays."""
    cluster = wl.connect(threads=1)
    table = cluster.table("t", DIM, rule=rule, init=wl.Normal(std=0.01))
    out, grads = cluster.empty((BATCH, DIM)), cluster.empty((BATCH, DIM))
    grads[:] = 1e-3
    ids = np.arange(rows, dtype=np.int64)
    for at in range(0, rows, BATCH):
        batch = ids[at : at + BATCH]
        table.push(batch, grads[: len(batch)]).wait()

    def step(batch: Any) -> None:
        table.pull(batch, out=out)
        table.push(batch, grads).wait()

    return cluster, timed_over(_batches(rows), step)


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
        ones = torch.full((BATCH, DIM), 1e-3)

        def peer(batch: Any, layer: Any = layer, optimizer: Any = optimizer, ones: Any = ones) -> None:
            optimizer.zero_grad(set_to_none=True)
            layer(torch.from_numpy(batch)).backward(ones)
            with warnings.catch_warnings(action="ignore"):  # torch's own, about its sparse tensors
                optimizer.step()

        cluster, step = _ours(rows, rule)
        with cluster:
            ours, limit = in_turns(step, timed_over(_batches(rows), peer), length=suite.length)
        suite.rate(
            f"pull + push {name}, dim {DIM}, 1 thread",
            BATCH / 1e6,
            "M rows/s",
            ours,
            limit,
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
    offsets = torch.arange(BATCH + 1, dtype=torch.int64)
    ones = torch.full((BATCH, DIM), 1e-3)
    peer = timed_over(_batches(rows), lambda batch: layer(torch.from_numpy(batch), offsets).backward(ones))
    cluster, step = _ours(rows, wl.RowAdagrad(lr=1e-3))
    with cluster:
        ours, limit = in_turns(step, peer, length=suite.length)
    suite.rate(
        f"pull + push RowAdagrad, dim {DIM}, 1 thread",
        BATCH / 1e6,
        "M rows/s",
        ours,
        limit,
        bar=1.0,
        against="fbgemm, bags of 1",
    )
