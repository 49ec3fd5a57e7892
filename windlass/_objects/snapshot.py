"""Weights and rule state of a tensor, read and put as they are kept on the servers."""

import dataclasses
import operator
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass._errors import InvalidArgument, ShapeMismatch
from windlass._objects.arrays import ArrayLike, as_input, as_torch, is_torch

if TYPE_CHECKING:
    from windlass._objects.tensor import Tensor

_UPDATES_MAX = 2**62


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What ``tensor.snapshot()`` returns and ``tensor.put()`` takes: ``t.put(s.weights, state=s.state, ...)``.

    Each shard is of one moment; while others push, shards may be of different moments.
    """

    weights: Any  #: of the tensor's shape and dtype
    #: By torch.optim's names: "momentum_buffer" of SGD with momentum, "exp_avg" and "exp_avg_sq" of Adam, AdamW and
    #: NAdam, "exp_avg" and "exp_inf" of Adamax, "sum" of Adagrad, "square_avg" and what else it keeps of RMSProp,
    #: "square_avg" and "acc_delta" of Adadelta; "exp_avg" of Lion, "z" and "n" of FTRL; "sum" of RowAdagrad has one
    #: number per row; of a rule of your own its own names. All float32.
    state: dict[str, Any]
    updates: Any  #: int64: how many updates the rule has made, of each shard


def take(tensor: "Tensor", timeout: float) -> Snapshot:
    """The whole tensor as it is."""
    whole(tensor, "snapshot")
    weights: np.ndarray[Any, Any] = np.empty(tensor.shape, tensor.dtype)
    state = {name: np.empty(shape, np.float32) for name, shape in state_shapes(tensor).items()}
    updates: np.ndarray[Any, np.dtype[np.int64]] = np.empty(tensor.shards, np.int64)
    tensor._core.snapshot([weights, *state.values()], updates, timeout)
    return Snapshot(weights, state, updates)


def in_torch(taken: Snapshot) -> Snapshot:
    """The same memory as torch tensors."""
    state = {name: as_torch(array) for name, array in taken.state.items()}
    return Snapshot(as_torch(taken.weights), state, as_torch(taken.updates))


def put(
    tensor: "Tensor",
    weights: "ArrayLike | None",
    state: "Mapping[str, ArrayLike] | None",
    updates: "int | ArrayLike | None",
    timeout: float,
) -> None:
    """Sets what is given; the rest stays as it is."""
    what = whole(tensor, "put")
    shapes = state_shapes(tensor)
    state = {} if state is None else state
    if unknown := sorted(set(state) - set(shapes)):
        has = ", ".join(map(repr, shapes)) or "none"
        raise InvalidArgument(f"{what}: {tensor.rule} has no state {unknown[0]!r}; it has {has}")
    arrays: list[Any] = [None if weights is None else as_kept(weights, tensor.shape, tensor.dtype, f"{what}, weights")]
    for name, shape in shapes.items():
        given = state.get(name)
        arrays.append(None if given is None else as_kept(given, shape, "float32", f"{what}, state {name!r}"))
    tensor._core.put(arrays, None if updates is None else counts(updates, tensor.shards, f"{what}, updates"), timeout)


def whole(tensor: "Tensor", verb: str) -> str:
    """Says what is done to which tensor. Raises for rows of a tensor."""
    what = f"{verb} of tensor {tensor.name!r}"
    if tensor._rows is not None:
        raise InvalidArgument(f"{what}: expected the whole tensor, saw {tensor.shape[0]} of its rows")
    return what


def state_shapes(tensor: "Tensor") -> dict[str, tuple[int, ...]]:
    """The rule's state arrays, in the core's order."""
    return tensor.rule._state_shapes(tensor.shape, tensor.shards)


def as_kept(
    array: "ArrayLike", shape: tuple[int, ...], dtype: str, what: str, *, rows: bool = False
) -> "np.ndarray[Any, Any]":
    """The numbers as the servers keep them. rows: of a table, where a list of numbers will do for rows of one each."""
    given = as_input(array, what, dtype)
    if is_torch(given):
        given = given.to(getattr(sys.modules["torch"], dtype)).numpy()
    elif given.dtype == np.uint16:  # the bits of bfloat16
        given = (given.astype(np.uint32) << 16).view(np.float32)
    if rows and shape[1:] == (1,) and given.ndim == 1:
        given = given.reshape(-1, 1)
    if given.shape != shape:
        raise ShapeMismatch(f"{what}: expected {dtype} of shape {shape}, saw an array of shape {given.shape}")
    return np.ascontiguousarray(given, dtype).reshape(shape)


def counts(updates: "int | ArrayLike", shards: int, what: str) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """A count for each shard; `updates` is one for all or one for each."""
    try:
        listed = [operator.index(updates)] * shards  # type: ignore[arg-type]
    except TypeError:
        array = updates.numpy() if is_torch(updates) else np.asarray(updates)  # type: ignore[union-attr]
        if array.shape != (shards,) or array.dtype.kind not in "iu":
            raise ShapeMismatch(
                f"{what}: expected a whole number or {shards} of them, saw {array.dtype.name} of shape {array.shape}"
            ) from None
        listed = array.tolist()
    for count in listed:
        if not 0 <= count <= _UPDATES_MAX:
            raise InvalidArgument(f"{what}: expected 0 to 2**62, saw {count}")
    return np.array(listed, np.int64)
