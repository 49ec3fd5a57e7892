"""Pooling: what torch does with rows that were found, in the quickest way that gives its bits.

    forward    rows -> a row for each id, or the sum of each bag
    backward   gradients -> of each row the sum of its ids', straight into registered memory

On the CPU torch's backward passes take several times as long as what they do, so these are the core's. For a bag torch
adds up a row's gradients in the order that its sort leaves equal ids in: that of the ids where it sorts by radix, else
none that could be told in advance; there, where its bits are promised, the core is given the order of the same sort.
Whatever follows or transforms a program, as torch.compile and torch.func do, gets torch's own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from windlass import _core
from windlass.torch._found import Found

RADIX_FROM = 32768  # ids; torch sorts so many by radix, which keeps equal ones in order
LARGE = 1 << 21  # numbers; fresh memory for so many costs more than what is written to it

Room = Callable[[int], Any]  # gives memory for so many rows


def is_plain(rows: Any) -> bool:
    """Whether rows are numbers on the CPU that the core can read now."""
    return (
        not torch.compiler.is_compiling()
        and type(rows) is torch.Tensor
        and rows.device.type == "cpu"
        and rows.dtype is torch.float32
        and rows.is_contiguous()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch.autograd.forward_ad._current_level < 0
    )


def rows_at(rows: Any, places: Any, room: Room | None = None, output: Room | None = None, sorts: bool = False) -> Any:
    """A row for each place, as F.embedding: places.shape + (dim,).

    room, output: memory for gradients of rows, and for what is returned.
    sorts: gradients are added up in the order of torch's sort, as those of bags are.
    """
    if rows.requires_grad and is_plain(rows):
        return _Rows.apply(rows, places.reshape(-1), room, output, sorts).view(*places.shape, rows.shape[1])
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return F.embedding(places, rows)  # on a GPU its sums do not depend on the order in which threads come
    return rows.index_select(0, places.reshape(-1)).view(*places.shape, rows.shape[1])


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    """A row for each place in one dimension."""

    @staticmethod
    def forward(ctx: Any, rows: Any, places: Any, room: Room | None, output: Room | None, sorts: bool) -> Any:
        ctx.save_for_backward(places)
        ctx.n, ctx.room, ctx.sorts = len(rows), room, sorts
        if output is None or len(places) * rows.shape[1] < LARGE:
            out = torch.empty((len(places), rows.shape[1]))
        else:
            out = output(len(places))
        _core.gather_rows(rows.detach().numpy(), places.numpy(), out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (places,) = ctx.saved_tensors
        order = places.sort()[1].numpy() if ctx.sorts else None
        return _gradients(grad, places, None, ctx.n, ctx.room, order), None, None, None, None


class _Sums(torch.autograd.Function):  # type: ignore[misc]
    """F.embedding_bag of mode "sum"."""

    @staticmethod
    def forward(
        ctx: Any, rows: Any, places: Any, offsets: Any, padding: int | None, room: Room, in_torchs_order: bool
    ) -> Any:
        ctx.save_for_backward(places, offsets)
        ctx.n, ctx.room, ctx.sorts = len(rows), room, in_torchs_order and len(places) < RADIX_FROM
        return F.embedding_bag(places, rows, offsets, mode="sum", padding_idx=padding)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        places, offsets = ctx.saved_tensors
        order = places.sort()[1].numpy() if ctx.sorts else None
        return _gradients(grad, places, offsets, ctx.n, ctx.room, order), None, None, None, None, None


def _gradients(grad: Any, places: Any, offsets: Any, n: int, room: Room | None, order: Any) -> Any:
    """Of `n` rows. offsets: of bags, which have a gradient each; without them every place has."""
    if torch.is_grad_enabled():  # a gradient of this gradient may follow
        if offsets is not None:
            ends = torch.cat([offsets[1:], offsets.new_tensor([len(places)])])
            grad = grad.repeat_interleave(ends - offsets, dim=0)
        return grad.new_zeros((n, grad.shape[1])).index_add(0, places, grad)
    made = torch.empty((n, grad.shape[1])) if room is None else room(n)
    bags = None if offsets is None else offsets.numpy()
    if grad.stride(-1) != 1 or grad.stride(0) < grad.shape[1]:
        grad = grad.contiguous()
    _core.sum_bags(places.numpy(), bags, grad.numpy(), made.numpy(), order)
    return made


def sums(
    found: Found,
    offsets: Any,
    room: Room,
    *,
    output: Room | None = None,
    include_last: bool = False,
    in_torchs_order: bool = True,
) -> Any:
    """The sums of bags of ids. None: there is no quicker way than torch's, or torch says better what is wrong.

    room, output: give memory for gradients of so many rows, and for what is returned.
    in_torchs_order: gradients have torch's last bits, too, for the price of a sort.
    """
    rows, places = found.rows, found.inverse
    if not rows.requires_grad or not is_plain(rows):
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
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] > len(places):
        return None
    least, most = torch.aminmax(offsets.diff()) if len(offsets) > 1 else (1, 1)
    if least < 0:
        return None
    singles = least == 1 == most and len(offsets) == len(places) and found.padding is None
    if singles:
        return rows_at(rows, places, room, output, sorts=in_torchs_order and len(places) < RADIX_FROM)
    return _Sums.apply(rows, places, offsets, found.padding, room, in_torchs_order)
