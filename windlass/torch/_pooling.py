"""Pooling: what torch does with rows that were found, in the quickest way that gives its bits.

On the CPU two of torch's backward passes take several times as long as what they do. Selecting rows by number is what
F.embedding does, and its backward adds the same numbers in the same order. Sums of bags go back in one pass of the
core, straight into registered memory. Torch adds up a row's gradients in the order that its sort leaves equal ids in;
where its bits are promised, the core is given the order of the same sort.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from windlass import _core
from windlass.torch._found import Found


def rows_at(rows: Any, places: Any) -> Any:
    """A row for each place, as F.embedding: places.shape + (dim,)."""
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return F.embedding(places, rows)  # on a GPU its sums do not depend on the order in which threads come
    if places.dim() == 1:
        return rows.index_select(0, places)
    return rows.index_select(0, places.reshape(-1)).view(*places.shape, rows.shape[1])


class _Sum(torch.autograd.Function):  # type: ignore[misc]
    """F.embedding_bag of mode "sum", whose backward is the core's."""

    @staticmethod
    def forward(
        ctx: Any, rows: Any, places: Any, offsets: Any, padding: int | None, room: Any, in_torchs_order: bool
    ) -> Any:
        ctx.save_for_backward(places, offsets)
        ctx.n, ctx.room, ctx.in_torchs_order = len(rows), room, in_torchs_order
        return F.embedding_bag(places, rows, offsets, mode="sum", padding_idx=padding)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        places, offsets = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient may follow
            ends = torch.cat([offsets[1:], offsets.new_tensor([len(places)])])
            of_ids = grad.repeat_interleave(ends - offsets, dim=0)
            made = grad.new_zeros((ctx.n, grad.shape[1])).index_add(0, places, of_ids)
        else:
            made = ctx.room(ctx.n).zero_()
            order = places.sort()[1].numpy() if ctx.in_torchs_order else None
            _core.add_bags(places.numpy(), offsets.numpy(), grad.contiguous().numpy(), made.numpy(), order)
        return made, None, None, None, None, None


def sums(
    found: Found, offsets: Any, room: Callable[[int], Any], *, include_last: bool = False, in_torchs_order: bool = True
) -> Any:
    """The sums of bags of ids. None: there is no quicker way than torch's, or torch says better what is wrong.

    room: gives memory for so many rows.
    in_torchs_order: gradients have torch's last bits, too, for the price of a sort.
    """
    rows, places = found.rows, found.inverse
    if rows.device.type != "cpu" or not rows.requires_grad or torch.compiler.is_compiling():
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(rows):
        return None
    if places.dim() == 2 and offsets is None:
        offsets = torch.arange(0, places.numel(), max(places.shape[1], 1))
        if len(offsets) != len(places):
            return None
        places = places.reshape(-1)
    elif places.dim() != 1 or not isinstance(offsets, torch.Tensor) or offsets.dim() != 1:
        return None
    elif include_last:
        if len(offsets) == 0 or offsets[-1] != len(places):
            return None
        offsets = offsets[:-1]
    offsets = offsets.to(places).contiguous()
    # A first offset that is not 0, and ids without a bag, are torch's to refuse or to ignore.
    if len(offsets) == 0 or offsets[0] != 0 or bool((offsets.diff() < 0).any()) or offsets[-1] > len(places):
        return None
    if found.padding is None and len(offsets) == len(places) and bool((offsets.diff() == 1).all()):
        return rows_at(rows, places)
    return _Sum.apply(rows, places, offsets, found.padding, room, in_torchs_order)
