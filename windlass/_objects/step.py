"""Steps: what a worker pushes and pulls in one iteration, as one request per server."""

from types import TracebackType
from typing import TYPE_CHECKING, Any

from windlass import _core
from windlass._errors import InvalidArgument, NotApplied
from windlass._objects.arrays import ArrayLike
from windlass._release import owns_native

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster
    from windlass._objects.table import Table
    from windlass._objects.tensor import Tensor


@owns_native("_core")
class Step:
    """Gathers pushes and pulls; made by ``cluster.step()``. At the end of its block they leave together.

    Each method takes a tensor, a table, or a list of tensors with lists of arrays, which is quickest for many.

    Arrays are checked when they are given. An ordinary input is copied at once; a registered one and every `out` belong
    to the step until its end, when the weights are in `out`.
    """

    __slots__ = ("_cluster", "_core", "_kept", "_timeout")

    def __init__(self, cluster: "Cluster", timeout: float) -> None:
        self._cluster = cluster
        self._timeout = timeout
        self._core: _core.Step | None = None
        self._kept: list[Any] = []  # arrays that the core has pointers to

    def push(
        self,
        to: "Tensor | Table | list[Tensor] | tuple[Tensor, ...]",
        *arrays: Any,
        weight: float = 1.0,
        only: NotApplied | None = None,
        **hyper: float,
    ) -> None:
        """``push(tensor, grad)``, ``push(table, keys, grads)`` or ``push(tensors, grads)``.

        `only`, for a single tensor or table: as in its own ``push()``.
        """
        if isinstance(to, (list, tuple)):
            if only is not None:
                raise InvalidArgument(f"push of {len(to)} tensors in a step: only= is for one of them")
            self._many("push", to, arrays, None, None, weight, hyper)
        else:
            to._join(self, "push", arrays, None, None, True, weight, hyper, only)

    def pull(
        self,
        of: "Tensor | Table | list[Tensor] | tuple[Tensor, ...]",
        *keys: ArrayLike,
        out: Any = None,
        dtype: object = None,
        create: bool = True,
    ) -> Any:
        """``pull(tensor)``, ``pull(table, keys)`` or ``pull(tensors)``: arrays for the weights, filled at the end."""
        if isinstance(of, (list, tuple)):
            return self._many("pull", of, keys, out, dtype, 1.0, {})
        return of._join(self, "pull", keys, out, dtype, create, 1.0, {})

    def push_pull(
        self,
        of: "Tensor | Table | list[Tensor] | tuple[Tensor, ...]",
        *arrays: Any,
        out: Any = None,
        dtype: object = None,
        weight: float = 1.0,
        **hyper: float,
    ) -> Any:
        """``push_pull(tensor, grad)``, ``(table, keys, grads)`` or ``(tensors, grads)``: the weights after it."""
        if isinstance(of, (list, tuple)):
            return self._many("push_pull", of, arrays, out, dtype, weight, hyper)
        return of._join(self, "push_pull", arrays, out, dtype, True, weight, hyper)

    def _many(
        self,
        verb: str,
        tensors: "list[Tensor] | tuple[Tensor, ...]",
        arrays: tuple[Any, ...],
        out: Any,
        dtype: object,
        weight: float,
        hyper: dict[str, float],
    ) -> list[Any]:
        what = f"{verb} of {len(tensors)} tensors in a step"
        pushes, pulls = verb != "pull", verb != "push"
        grads: list[Any] = list(*given(arrays, ("a list of gradients",) if pushes else (), what))
        outs = list(out) if out is not None else [None] * len(tensors) if pulls else []
        for name, lists in (("gradients", grads if pushes else tensors), ("outs", outs if pulls else tensors)):
            if len(lists) != len(tensors):
                raise InvalidArgument(f"{what}: expected as many {name}, saw {len(lists)}")
        core = self._open(self._cluster, what)
        tensors, at = list(tensors), 0
        plain = weight == 1.0 and not hyper and dtype is None and (out is not None or not pulls)
        while at < len(tensors):
            if plain:
                at = _core.Tensor.add_many(core, self._cluster, tensors, grads, outs, at)
                if at == len(tensors):
                    break
            if not hasattr(tensors[at], "_rows"):
                raise InvalidArgument(f"{what}: expected tensors, saw {tensors[at]!r}")
            grad = (grads[at],) if pushes else ()
            result = tensors[at]._join(self, verb, grad, outs[at] if pulls else None, dtype, True, weight, hyper)
            if pulls:
                outs[at] = result
            at += 1
        self._kept.append((grads, outs))
        return outs

    def _open(self, cluster: "Cluster", what: str) -> _core.Step:
        if self._core is None:
            raise InvalidArgument(f"{what}: the step is not open; use it inside its `with cluster.step() as s:`")
        if cluster._session is not self._cluster._session:
            raise InvalidArgument(f"{what}: it is another worker's than the step")
        return self._core

    def __enter__(self) -> "Step":
        self._cluster._session.check()
        self._core = _core.Step(self._cluster._session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        core, self._core = self._core, None
        kept, self._kept = self._kept, []
        if error is None and core is not None:
            core.run(self._timeout)
        del kept
        if error is None and core is not None:
            self._cluster._between()


def given(arrays: tuple[Any, ...], names: tuple[str, ...], what: str) -> tuple[Any, ...]:
    """The arrays, as many as there are names."""
    if len(arrays) != len(names):
        raise InvalidArgument(f"{what}: expected {' and '.join(names) or 'no arrays'}, saw {len(arrays)} arrays")
    return arrays
