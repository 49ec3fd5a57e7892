"""All-reduces as a worker sees them: its array on the way to the others, and the result on the way back."""

import math
from typing import Any, NamedTuple

import numpy as np

from windlass import _errors
from windlass._errors import InvalidArgument, WindlassError
from windlass._objects.arrays import as_torch, check_torch, dtype_name, is_torch
from windlass.control.messages import DIMS_MAX, REDUCE_BYTES_MAX, Numbers, Reduced

OPS = ("sum", "mean", "max", "min")
DTYPES = ("float32", "float64", "int64")


class Reduction(NamedTuple):
    """What ``all_reduce_counted()`` returns."""

    value: Any  #: as ``all_reduce()`` returns it
    workers: int  #: of how many workers it is made


def numbers_of(x: Any, op: str) -> Numbers:
    """What travels. Raises for what cannot be reduced."""
    if op not in OPS:
        raise InvalidArgument(f"all_reduce: op must be one of {', '.join(OPS)}, not {op!r}")
    if is_torch(x):
        check_torch(x, "all_reduce")
    try:
        array: Any = x if is_torch(x) else np.asarray(x)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"all_reduce: {error}") from None
    if (name := dtype_name(array.dtype)) not in DTYPES:
        raise InvalidArgument(f"all_reduce: expected dtype {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, saw {name}")
    shape = list(array.shape)
    size = math.prod(shape) * np.dtype(name).itemsize
    if size > REDUCE_BYTES_MAX or len(shape) > DIMS_MAX:
        raise InvalidArgument(
            f"all_reduce: an array of {size} bytes and shape {tuple(shape)}, at most {REDUCE_BYTES_MAX} bytes and "
            f"{DIMS_MAX} dimensions; for more use push_pull of a tensor under BSP with the rule Sum or Average"
        )
    given = array.detach().numpy() if is_torch(x) else array
    return Numbers(op, name, shape, given.astype(np.dtype(name).newbyteorder("<")).tobytes())  # type: ignore[arg-type]


def value_of(reduced: Reduced, x: Any, torch: bool) -> Any:
    """The result, in the form of what was given: a number, or an array of numpy's or torch's."""
    stored = np.dtype(reduced.dtype)
    array = np.frombuffer(reduced.data, stored.newbyteorder("<")).astype(stored).reshape(np.shape(x))
    if is_torch(x):
        return as_torch(array)
    if isinstance(x, np.generic):
        return array[()]
    if isinstance(x, (int, float)):
        return array.item()
    return as_torch(array) if torch else array


def error_in(reduced: Reduced, what: str) -> WindlassError:
    """Why nothing could be made of what workers gave."""
    kind = getattr(_errors, reduced.error, WindlassError)
    made: WindlassError = kind(f"{what}: {reduced.why}")
    return made
