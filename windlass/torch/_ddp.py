"""With DistributedDataParallel: AllReduce trains some parameters of a module, servers train the others."""

from collections.abc import Iterable
from typing import Any

import torch

from windlass._errors import InvalidArgument


def leave_to_servers(module: Any, params: Iterable[Any]) -> Any:
    """Leaves these parameters of a module to a ServerOptimizer: DistributedDataParallel ignores them.

    Call it before the module is wrapped. Returns the module. ::

        model = wl.torch.leave_to_servers(model, model.embedding.parameters())
        ddp = DistributedDataParallel(model)
        servers = wl.torch.ServerOptimizer(model.embedding.parameters(), wl.Adagrad(lr=0.05))
        rest = torch.optim.SGD(model.head.parameters(), lr=0.1)
    """
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise InvalidArgument(f"leave_to_servers: expected a module before it is wrapped, not {type(module).__name__}")
    names = {param: name for name, param in module.named_parameters(remove_duplicate=False)}
    chosen = []
    for param in params:
        if param not in names:
            raise InvalidArgument(f"leave_to_servers: a parameter of shape {tuple(param.shape)} is not in the module")
        chosen.append(names[param])
    before = list(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
    wrap = torch.nn.parallel.DistributedDataParallel
    wrap._set_params_and_buffers_to_ignore_for_model(module, [*before, *chosen])
    return module
