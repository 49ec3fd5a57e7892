"""Where requests of tensors and tables write their answers, and a check that their pushes share."""

import math
import numbers
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from windlass import _core
from windlass._errors import InvalidArgument
from windlass._objects.arrays import as_numpy, as_output, as_torch, core_dtype, dtype_name, is_torch, is_torch_dtype

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster


def check_weight(weight: float, kind: str, name: str) -> None:
    """Raises unless a worker's share in a mean is a finite number above zero."""
    if weight != 1.0 and not (isinstance(weight, numbers.Real) and math.isfinite(weight) and weight > 0):
        raise InvalidArgument(f"{kind} {name!r}: weight must be a finite number above 0, not {weight!r}")


def check_priority(priority: int, what: str) -> int:
    """Raises unless it is a whole number that the wire has room for."""
    if type(priority) is not int or not 0 <= priority <= 255:
        raise InvalidArgument(f"{what}: priority must be a whole number from 0 to 255, not {priority!r}")
    return priority


def empty(cluster: "Cluster", shape: tuple[int, ...], dtype: _core.Dtype) -> Any:
    """A registered array of numpy's, whatever those of the cluster are."""
    return as_numpy(cluster._engine.empty(list(shape), dtype))


def in_torch(cluster: "Cluster", dtype: object, *given: Any) -> bool:
    """Whether a new array is torch's: the cluster's are, or the dtype is, or anything that the caller gave."""
    return cluster._torch or is_torch_dtype(dtype) or any(map(is_torch, given))


def shown(cluster: "Cluster", array: Any) -> Any:
    """An array of numpy's that is returned, as the caller of this cluster sees it."""
    return as_torch(array) if cluster._torch else array


def new_output(cluster: "Cluster", shape: tuple[int, ...], dtype: _core.Dtype, torch: bool) -> tuple[Any, Any]:
    """A new array: as the core writes it, and as the caller sees it."""
    if dtype == _core.Dtype.FLOAT32 and math.prod(shape) <= 4096:  # a mapping of its own would cost more
        cluster._session.check()
        raw: Any = np.empty(shape, np.float32)
    else:
        raw = cluster._engine.empty(list(shape), dtype)
    return raw, (as_torch(raw) if torch else as_numpy(raw))


def given_output(out: Any, dtype: object, what: str, stored: str = "float32") -> Any:
    """The caller's array as the core writes it; `dtype`, if given, must be the array's."""
    target = as_output(out, what, stored)
    if dtype is not None and dtype_name(dtype) != dtype_name(out.dtype):
        raise InvalidArgument(f"{what}: out is {dtype_name(out.dtype)}, but dtype={dtype_name(dtype)}")
    return target


def landing_for(cluster: "Cluster", target: Any) -> tuple[Any, Any]:
    """Where an asynchronous request writes, and a function that then brings it to the caller.

    A registered array is written in place. An ordinary one may be gone or in use when the answer comes, so the answer
    lands in a registered one and is copied when the caller waits for the future.
    """
    cluster._session.check()  # first: in the child of a fork the arena must not be asked
    if cluster._engine.registered(target):
        return target, lambda result: result
    landing: np.ndarray[Any, Any] | None = cluster._engine.empty(
        list(target.shape), core_dtype(target.dtype if target.dtype != np.uint16 else "bfloat16", "out")
    )

    def land(result: Any) -> Any:
        nonlocal landing
        if landing is not None:  # once: what the caller writes there later is the caller's
            if is_torch(target):
                target.copy_(as_torch(landing))
            else:
                cast("np.ndarray[Any, Any]", target)[...] = landing
            landing = None
        return result

    return landing, land


def nothing() -> None:
    """What a push returns."""
    return None
