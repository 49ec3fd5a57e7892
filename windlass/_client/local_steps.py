"""Schedules in the worker: local steps on its own weights, and every few steps an exchange with the servers.

A schedule is not a gate. It works with any `sync` of its tensors: under ASP a worker exchanges at its own pace,
under BSP every worker waits for all at each exchange.
"""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from windlass import _core
from windlass._client.first_weights import Agreement
from windlass._errors import InvalidArgument, ShapeMismatch
from windlass._objects.arrays import Array, check_torch, dtype_name, is_torch
from windlass._objects.outputs import empty
from windlass._rules.optimizers import SGD
from windlass._rules.rule import Average, Rule, Sum

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster
    from windlass._objects.tensor import Tensor

_Numpy: TypeAlias = "np.ndarray[Any, Any]"
Arrays: TypeAlias = "Array | list[Array] | tuple[Array, ...] | Mapping[str, Array]"


class Schedule:
    """What both have in common: the arrays, their tensors, the first weights, and when to exchange."""

    def __init__(
        self,
        cluster: "Cluster",
        arrays: Arrays,
        every: int,
        rule: Rule,
        name: str,
        sync: object,
        timeout: float | None,
    ) -> None:
        self.name = name  #: what its tensors are called: `name`, or `name`.0, or `name`.key
        self._what = f"{type(self).__name__.lower()} {name!r}"
        if isinstance(every, bool) or not isinstance(every, (int, np.integer)) or every < 1:
            raise InvalidArgument(f"{self._what}: every must be a whole number of at least 1, not {every!r}")
        self.every = int(every)  #: how many steps there are between two exchanges
        self._cluster = cluster
        self._given = arrays
        self._arrays = named(arrays, name, self._what)
        self._rule = rule
        self._since = 0
        self._failed = False
        policy: dict[str, Any] = {} if sync is None else {"sync": sync}
        self._tensors: list[Tensor] = [
            cluster.tensor(key, array.shape, rule=rule, **policy) for key, array in self._arrays.items()
        ]
        self._torch = cluster._torch or any(map(is_torch, values_of(arrays)))
        self._centre = [empty(cluster, array.shape, _core.Dtype.FLOAT32) for array in self._arrays.values()]
        self._sent = [empty(cluster, array.shape, _core.Dtype.FLOAT32) for array in self._arrays.values()]
        self._begin(cluster._timeout if timeout is None else timeout)

    def step(self, *, timeout: float | None = None) -> bool:
        """Counts a step of the worker and exchanges after `every` of them. Returns whether it did."""
        self._check()
        self._since += 1
        if self._since < self.every:
            return False
        self._now(timeout)
        return True

    def finish(self, *, timeout: float | None = None) -> None:
        """Exchanges once more if there were steps since the last time. Idempotent."""
        self._check()
        if self._since:
            self._now(timeout)

    def centre(self) -> Any:
        """The weights on the servers, as new arrays in the form that was given: for evaluation."""
        kind = sys.modules["torch"].float32 if self._torch else None
        fresh = {tensor.name: tensor.pull(dtype=kind) for tensor in self._tensors}
        if isinstance(self._given, Mapping):
            return {key: fresh[f"{self.name}.{key}"] for key in self._given}
        return list(fresh.values()) if isinstance(self._given, (list, tuple)) else fresh[self.name]

    def _exchange(self, timeout: float | None) -> None:
        raise NotImplementedError

    def _check(self) -> None:
        if self._failed:
            raise InvalidArgument(
                f"{self._what}: an exchange has failed, and part of it may have been applied; "
                "make a new one, which begins with the weights on the servers"
            )

    def _now(self, timeout: float | None) -> None:
        self._failed = True
        self._exchange(timeout)
        self._failed = False
        self._since = 0

    def _pull(self, timeout: float | None) -> None:
        """Pulls the weights on the servers into the centre."""
        futures = [
            tensor.pull_async(out=out, timeout=timeout) for tensor, out in zip(self._tensors, self._centre, strict=True)
        ]
        for future in futures:
            future.wait()

    def _begin(self, timeout: float) -> None:
        """Starts all workers from the weights on the servers, or from those of the lowest rank."""
        described = [(key, "float32", array.shape) for key, array in self._arrays.items()]
        Agreement(self._cluster, self.name, described, what=self._what).begin(lambda: self._put(timeout), timeout)
        self._pull(timeout)
        self._take()

    def _put(self, timeout: float) -> None:
        for tensor, array in zip(self._tensors, self._arrays.values(), strict=True):
            tensor.put(np.asarray(array, np.float32), timeout=timeout)

    def _take(self) -> None:
        """The arrays become what is in the centre."""
        for array, centre in zip(self._arrays.values(), self._centre, strict=True):
            array[...] = centre

    # -- as a context manager --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} every {self.every}, {len(self._arrays)} arrays, {self._rule}>"


class Local(Schedule):
    """Local steps between exchanges; made by ``cluster.local()``. As a context manager it finishes at the end."""

    def __init__(
        self,
        cluster: "Cluster",
        arrays: Arrays,
        *,
        every: int,
        outer: Rule,
        name: str = "local",
        sync: object = None,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(outer, (SGD, Average)):
            raise InvalidArgument(f"local {name!r}: outer must be SGD or Average, not {outer!r}")
        if isinstance(outer, SGD) and outer.dampening:
            raise InvalidArgument(f"local {name!r}: outer must have no dampening, not {outer.dampening:g}")
        self.outer = outer  #: the rule on the servers
        super().__init__(cluster, arrays, every, outer, name, sync, timeout)

    def _exchange(self, timeout: float | None) -> None:
        for array, start, sent in zip(self._arrays.values(), self._centre, self._sent, strict=True):
            if isinstance(self.outer, Average):
                sent[...] = array
            else:
                np.subtract(start, array, out=sent)
        with self._cluster.step(timeout=timeout) as s:
            s.push_pull(self._tensors, self._sent, out=self._centre)
        self._take()


class Elastic(Schedule):
    """Elastic averaging; made by ``cluster.elastic()``. As a context manager it finishes at the end."""

    def __init__(
        self,
        cluster: "Cluster",
        arrays: Arrays,
        *,
        every: int,
        alpha: float,
        name: str = "elastic",
        sync: object = None,
        timeout: float | None = None,
    ) -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float, np.number)) or not 0 < alpha <= 1:
            raise InvalidArgument(f"elastic {name!r}: alpha must be above 0 and at most 1, not {alpha!r}")
        self.alpha = float(alpha)  #: how far the worker and the centre move
        super().__init__(cluster, arrays, every, Sum(), name, sync, timeout)

    def _exchange(self, timeout: float | None) -> None:
        self._pull(timeout)
        for array, centre, sent in zip(self._arrays.values(), self._centre, self._sent, strict=True):
            np.subtract(array, centre, out=sent)
            sent *= np.float32(self.alpha)
        with self._cluster.step(timeout=timeout) as s:
            s.push(self._tensors, self._sent)
        for array, sent in zip(self._arrays.values(), self._sent, strict=True):
            array -= sent


def values_of(arrays: Arrays) -> list[Any]:
    """The arrays themselves."""
    if isinstance(arrays, Mapping):
        return list(arrays.values())
    return list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]


def named(arrays: Arrays, name: str, what: str) -> dict[str, _Numpy]:
    """The arrays by the names of their tensors, in an order that is the same for all workers."""
    if not isinstance(name, str) or not name or "/" in name:
        raise InvalidArgument(f"{what}: name must be text without '/', which would name another app")
    found: dict[str, Any]
    if isinstance(arrays, Mapping):
        for key in arrays:
            if not isinstance(key, str) or not key or "/" in key:
                raise InvalidArgument(f"{what}: names of arrays are text without '/', use '.' instead; not {key!r}")
        found = {f"{name}.{key}": arrays[key] for key in sorted(arrays)}
    elif isinstance(arrays, (list, tuple)):
        found = {f"{name}.{i}": array for i, array in enumerate(arrays)}
    else:
        found = {name: arrays}
    if not found:
        raise InvalidArgument(f"{what}: expected at least one array")
    return {key: _in_numpy(array, f"{what}, {key!r}") for key, array in found.items()}


def _in_numpy(array: Any, what: str) -> _Numpy:
    """The array, or the memory of a torch tensor, which it shares."""
    if is_torch(array):
        check_torch(array, what)
    elif not isinstance(array, np.ndarray):
        raise ShapeMismatch(f"{what}: expected a numpy array or a torch tensor, saw {type(array).__name__}")
    if dtype_name(array.dtype) not in ("float32", "float64"):
        raise ShapeMismatch(f"{what}: expected float32 or float64, saw {dtype_name(array.dtype)}")
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise ShapeMismatch(f"{what}: the array is read-only")
        return array
    memory: _Numpy = array.detach().numpy()
    return memory
