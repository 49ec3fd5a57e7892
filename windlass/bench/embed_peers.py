"""What embeddings are measured against: torch's modules with its sparse optimizers, fbgemm's and TorchRec's tables.

A peer makes a function of a batch that is one step of training: forward, backward from a gradient of ones, update.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Step = Callable[[Any], None]  # with a batch, as the module takes it


def have(module: str) -> bool:
    """Whether a peer is installed."""
    return importlib.util.find_spec(module) is not None


def trained(module: Any, optimizers: Iterable[Any], grad: Any) -> Step:
    """A step of a module, ours or torch's, that ends with these optimizers."""
    optimizers = list(optimizers)

    def step(batch: Any) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        module(*batch).backward(grad)
        with warnings.catch_warnings(action="ignore"):  # torch's own, about its sparse tensors
            for optimizer in optimizers:
                optimizer.step()

    return step


class Stacked(nn.Module):  # type: ignore[misc]
    """A module per feature, bags of one: (batch, features) ids become (batch, features, dim)."""

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Any) -> Any:
        """Each feature's module is called by itself."""
        return torch.stack([layer(ids[:, i : i + 1]) for i, layer in enumerate(self.layers)], dim=1)


def torch_bags(counts: Iterable[int], dim: int) -> Stacked:
    """An nn.EmbeddingBag(sparse=True) for each feature."""
    return Stacked(nn.EmbeddingBag(count, dim, mode="sum", sparse=True) for count in counts)


def tbe(rows: int, dim: int, bag: int, ids: int, lr: float) -> Step:
    """fbgemm's SplitTableBatchedEmbeddingBags on the CPU with row-wise Adagrad in its backward pass: one table, bags of
    `bag`. A batch is (ids, offsets with the last)."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=lr,
        device=torch.device("cpu"),
    )
    return trained(layer, [], torch.full((ids // bag, dim), 1e-3))


def torchrec(features: Iterable[str], counts: Iterable[int], dim: int, batch: int, lr: float) -> Step:
    """TorchRec's FusedEmbeddingBagCollection on the CPU with row-wise Adagrad in its backward pass. (The plain
    EmbeddingBagCollection has gradients as large as its tables.) A batch is (ids,), (batch, features)."""
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    names = list(features)
    layer = FusedEmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=count, feature_names=[name])
            for name, count in zip(names, counts, strict=True)
        ],
        optimizer_type=RowWiseAdagrad,
        optimizer_kwargs={"lr": lr},
        device=torch.device("cpu"),
    )
    lengths = torch.ones(batch * len(names), dtype=torch.int64)
    grad = torch.full((batch, len(names) * dim), 1e-3)

    def step(batch: Any) -> None:
        (ids,) = batch
        layer(KeyedJaggedTensor(keys=names, values=ids.t().reshape(-1), lengths=lengths)).values().backward(grad)

    return step
