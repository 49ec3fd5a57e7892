"""Windlass for PyTorch: parameters and embedding tables of a module on servers, data that is leased to workers.

opt = windlass.torch.ServerOptimizer(model, windlass.SGD(lr=0.1))
for x, y in windlass.torch.leased(dataset, batch_size=128):
    ...
"""

from windlass._extras import need_torch

need_torch("windlass.torch")  # before a file of ours that imports it says less

from windlass.torch._data import LeasedLoader, LeasedSampler, leased  # noqa: E402
from windlass.torch._ddp import leave_to_servers  # noqa: E402
from windlass.torch._embedding import Embedding, EmbeddingBag  # noqa: E402
from windlass.torch._embeddings import EmbeddingBags, Embeddings, FoundFeatures  # noqa: E402
from windlass.torch._found import Found  # noqa: E402
from windlass.torch._optimizer import ServerOptimizer  # noqa: E402
from windlass.torch._training_state import TrainingState, training_state  # noqa: E402

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBags",
    "Embeddings",
    "Found",
    "FoundFeatures",
    "LeasedLoader",
    "LeasedSampler",
    "ServerOptimizer",
    "TrainingState",
    "leased",
    "leave_to_servers",
    "training_state",
]
