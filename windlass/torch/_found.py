"""What a batch of ids becomes: its distinct keys with their rows, and where each id's row is among them.

    ids        17 42 17  9
    keys        9 17 42          each once, ascending as signed numbers
    rows       (3, dim)          pulled from the table: a leaf of the graph
    inverse     1  2  1  0       rows[inverse] is what torch would have looked up

Keys are in order because torch's own backward passes sort what they are given: over ids in order they make the same
sums, bit for bit, as over the rows of an nn.Embedding.
"""

import sys
from typing import Any, NamedTuple

import numpy as np
import torch

from windlass import _core
from windlass._errors import InvalidArgument

_IDS = (torch.int64, torch.int32, torch.uint64)


class Found(NamedTuple):
    """The rows of a batch of ids; made by ``find()`` of a module, and taken by its ``forward()`` in place of ids."""

    rows: Any  #: (n, dim) of float32: a leaf whose gradient goes to the servers in the optimizer's step
    inverse: Any  #: int64 in the shape of the ids: the place of each id's row
    keys: Any  #: (n,) of int64 on the CPU: whose row each is
    padding: int | None  #: the place of the padding row, which is zero and not trained


def check_ids(ids: Any, what: str) -> Any:
    """Ids as int64, the same bits. Raises for what is no tensor of ids, and where no batch is at hand."""
    if not isinstance(ids, torch.Tensor):
        raise InvalidArgument(f"{what}: expected ids as a torch tensor, not {type(ids).__name__}")
    if ids.dtype not in _IDS:
        raise InvalidArgument(f"{what}: expected ids of int64, int32 or uint64, saw {ids.dtype}")
    if not is_concrete(ids):
        raise InvalidArgument(
            f"{what}: rows come from servers, for ids that are known: this cannot be traced, exported or mapped; look "
            "them up first, found = module.find(ids), and trace what takes `found`"
        )
    if ids.dtype is torch.uint64:
        return ids.detach().view(torch.int64)
    return ids.detach().to(torch.int64)


def is_concrete(ids: Any) -> bool:
    """Whether its numbers can be read: not under torch.jit.trace, torch.export, vmap, or on the meta device."""
    if ids.device.type == "meta" or torch.jit.is_tracing() or torch.compiler.is_exporting():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(ids):
        return False
    return type(ids) in (torch.Tensor, torch.nn.Parameter) or not hasattr(ids, "fake_mode")


def mark_dynamic(rows: Any) -> None:
    """Tells a compiler, where there is one, that the next batch has another number of rows: one graph does for all."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.maybe_mark_dynamic(rows, 0)


def distinct(ids: Any) -> tuple["np.ndarray[Any, Any]", Any]:
    """Of int64 ids in one dimension: each once, ascending, as numpy's; and the place of each, where the ids are."""
    if ids.device.type == "cpu":
        keys, inverse = _core.unique(ids.contiguous(), True)
        return keys.view(np.int64), torch.from_numpy(inverse)
    found, inverse = torch.unique(ids, sorted=True, return_inverse=True)
    return found.cpu().numpy(), inverse
