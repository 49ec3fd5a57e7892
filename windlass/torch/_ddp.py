"""With DistributedDataParallel: AllReduce trains some parameters of a module, servers train the others."""

import os
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from windlass._errors import InvalidArgument
from windlass.launch import GROUP_LOST

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster
    from windlass.control.messages import View

_watched: "weakref.WeakSet[Cluster]" = weakref.WeakSet()
_left_to_servers = False


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
    global _left_to_servers
    _left_to_servers = True
    wrap = torch.nn.parallel.DistributedDataParallel
    wrap._set_params_and_buffers_to_ignore_for_model(module, [*before, *chosen])
    return module


def watch_group(cluster: "Cluster", *, hybrid: bool) -> None:
    """Where other parameters are torch.distributed's, this process ends when another worker is lost.

    A collective would wait for that worker until its own timeout, half an hour by default. With gloo a connection that
    breaks ends it sooner, but a worker that hangs breaks none. `windlass run` ends when a worker ends this way.
    """
    group = torch.distributed
    if not (hybrid or _left_to_servers) or cluster in _watched or cluster._attendance is None:
        return
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        _watched.add(cluster)
        cluster._attendance.loss_heard.append(_end)


def _end(before: "View", now: "View") -> None:
    if not torch.distributed.is_initialized():  # the group has done its work
        return
    there = {peer.index for peer in now.workers}
    lost = ", ".join(str(peer.index) for peer in before.workers if peer.index not in there)
    print(
        f"windlass: worker {lost} was lost, and torch.distributed would wait for it: this worker ends, too",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(GROUP_LOST)
