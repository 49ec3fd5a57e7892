"""Windlass for PyTorch: parameters of a module on servers, data that is leased to workers.

opt = windlass.torch.ServerOptimizer(model.parameters(), windlass.SGD(lr=0.1))
for x, y in windlass.torch.leased(dataset, batch_size=128):
    ...
"""

from windlass.torch._data import LeasedLoader, LeasedSampler, leased
from windlass.torch._ddp import leave_to_servers
from windlass.torch._optimizer import ServerOptimizer

__all__ = ["LeasedLoader", "LeasedSampler", "ServerOptimizer", "leased", "leave_to_servers"]
