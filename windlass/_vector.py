"""Vector operations between tensors that lie on the same servers, shard by shard."""

import numbers
from typing import TYPE_CHECKING, Any

from windlass import _core
from windlass._errors import InvalidArgument
from windlass._snapshot import whole

if TYPE_CHECKING:
    from windlass._cluster import Cluster
    from windlass._tensor import Tensor

Op = _core.VectorOp
NAMES = {
    Op.DOT: "dot",
    Op.AXPY: "axpy",
    Op.SCALE: "scale",
    Op.COPY: "copy_from",
    Op.ADD: "add",
    Op.MULTIPLY: "multiply",
    Op.FILL: "fill",
}
_ALONE = (Op.SCALE, Op.FILL)  # they have no other tensor
_NUMBERED = (Op.AXPY, Op.SCALE, Op.FILL)


def run(operation: _core.VectorOp, tensor: "Tensor", other: "Tensor | None", a: object, timeout: float | None) -> Any:
    """Does it, on all shards; returns what dot gives, else None."""
    from windlass._tensor import Tensor

    what = whole(tensor, NAMES[operation])
    if operation not in _ALONE and not isinstance(other, Tensor):
        raise InvalidArgument(f"{what}: expected a tensor, saw {other!r}")
    if other is not None and other._rows is not None:
        raise InvalidArgument(f"{what}: expected the whole tensor {other.name!r}, saw {other.shape[0]} of its rows")
    number = number_of(a, tensor.dtype, what) if operation in _NUMBERED else 0
    seconds = tensor._cluster._timeout if timeout is None else timeout
    return tensor._core.vector(operation, None if other is None else other._core, number, seconds)


def number_of(a: Any, dtype: str, what: str) -> float | int:
    """The number as the core takes it: a float, or for int64 an int of 64 bits."""
    if hasattr(a, "item") and getattr(a, "ndim", 0) == 0:  # of numpy or torch
        a = a.item()
    if isinstance(a, bool) or not isinstance(a, numbers.Real):
        raise InvalidArgument(f"{what}: expected a number, saw {a!r}")
    if dtype != "int64":
        return float(a)
    if not isinstance(a, numbers.Integral) or not -(2**63) <= int(a) < 2**63:
        raise InvalidArgument(f"{what}: expected a whole number of 64 bits for an int64 tensor, saw {a!r}")
    return int(a)


def app_of(cluster: "Cluster", name: str) -> str:
    """The app whose tensor that name is."""
    app, slash, _ = name.partition("/")
    return app if slash else "" if cluster._remote is None else cluster._remote.app


def root_of(cluster: "Cluster", name: str, like: "Tensor", shape: object, dtype: object) -> str:
    """The name, within its app, of the tensor whose placement a new one shares: `like`, or the one that it is like."""
    from windlass._arrays import dtype_name
    from windlass._tensor import Tensor

    what = f"tensor {name!r}"
    if not isinstance(like, Tensor):
        raise InvalidArgument(f"{what}: like must be a tensor, not {like!r}")
    what = f"{what}, like {like.name!r}"
    if like._rows is not None:
        raise InvalidArgument(f"{what}: expected the whole tensor, saw {like.shape[0]} of its rows")
    if like._cluster._session is not cluster._session:
        raise InvalidArgument(f"{what}: expected a tensor of the same worker, saw one of {like._cluster!r}")
    if (here := app_of(cluster, name)) != (there := app_of(cluster, like.name)):
        raise InvalidArgument(f"{what}: expected a tensor of the same app, {here!r}, saw one of {there!r}")
    if shape is not None:
        raise InvalidArgument(f"{what}: the shape is that of {like.name!r}, {like.shape}, and is not given")
    if dtype is not None and dtype_name(dtype) != like.dtype:
        raise InvalidArgument(f"{what}: expected dtype {like.dtype}, saw {dtype_name(dtype)}")
    return like._like or like.name.rpartition("/")[2]
