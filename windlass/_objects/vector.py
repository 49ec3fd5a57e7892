"""Vector operations between tensors that lie on the same servers, shard by shard."""

import numbers
from typing import TYPE_CHECKING, Any, cast

from windlass import _core
from windlass._errors import InvalidArgument
from windlass._objects.snapshot import whole

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster
    from windlass._objects.tensor import Tensor

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
_ALONE = (Op.SCALE, Op.FILL)  # without another tensor
_NUMBERED = (Op.AXPY, Op.SCALE, Op.FILL)


class VectorOperations:
    """What a tensor can do with another one that is like it."""

    __slots__ = ()

    def dot(self, other: "Tensor", *, timeout: float | None = None) -> float:
        """The sum of the products of their elements: a float, for int64 an int that wraps around.

        `other` is this tensor or one that is like it (``cluster.tensor(like=)``). What this worker pushed to either
        before is seen. Summed in float64 in a fixed order: the same bits for any number of servers.
        """
        product: float = run(Op.DOT, self, other, None, timeout)
        return product

    def axpy(self, a: float, x: "Tensor", *, timeout: float | None = None) -> None:
        """``self += a * x``. Like everything below it returns when it is done on all shards.

        The servers work on what they hold: no rule is applied, no gate waits, and no iteration is closed. It keeps its
        place among this worker's pushes and is done exactly once, whatever happens to connections and shards.
        """
        run(Op.AXPY, self, x, a, timeout)

    def scale(self, a: float, *, timeout: float | None = None) -> None:
        """``self *= a``."""
        run(Op.SCALE, self, None, a, timeout)

    def copy_from(self, x: "Tensor", *, timeout: float | None = None) -> None:
        """``self = x``: its weights, not its rule's state."""
        run(Op.COPY, self, x, None, timeout)

    def add(self, x: "Tensor", *, timeout: float | None = None) -> None:
        """``self += x``."""
        run(Op.ADD, self, x, None, timeout)

    def multiply(self, x: "Tensor", *, timeout: float | None = None) -> None:
        """``self *= x``, element by element."""
        run(Op.MULTIPLY, self, x, None, timeout)

    def fill(self, a: float, *, timeout: float | None = None) -> None:
        """``self = a``, every element."""
        run(Op.FILL, self, None, a, timeout)


def run(
    operation: _core.VectorOp, of: VectorOperations, other: "Tensor | None", a: object, timeout: float | None
) -> Any:
    """Runs the operation on all shards; returns the product for dot, else None."""
    from windlass._objects.tensor import Tensor

    tensor = cast(Tensor, of)
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
    """The app that a tensor of that name belongs to."""
    app, slash, _ = name.partition("/")
    return app if slash else "" if cluster._remote is None else cluster._remote.app


def root_of(cluster: "Cluster", name: str, like: "Tensor", shape: object, dtype: object) -> str:
    """The name, within its app, of the tensor whose placement a new one shares: `like`, or the one that it is like."""
    from windlass._objects.arrays import dtype_name
    from windlass._objects.tensor import Tensor

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
