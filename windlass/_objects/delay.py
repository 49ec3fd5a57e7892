"""Delays: a worker continues with weights that are a few of its own steps old while its requests travel."""

from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass._errors import InvalidArgument, Timeout, WindlassError
from windlass._objects.arrays import ArrayLike, as_torch, is_torch
from windlass._objects.future import Future
from windlass._objects.outputs import empty

if TYPE_CHECKING:
    from windlass._objects.table import Table
    from windlass._objects.tensor import Tensor


class Delayed:
    """A tensor whose push_pulls travel while the worker goes on; made by ``tensor.delayed(k)``. ::

        with w.delayed(2) as d:
            weights = d.weights
            for batch in batches:
                weights = d.push_pull(gradient(weights, batch))

    Weights are up to `k` of this worker's own steps old. The worker waits only while the push_pull `k` steps back is
    not done; with 0 this is a plain loop of push_pulls.

    The returned array does not change before the next call. An ordinary gradient is copied, as by ``push``; one that is
    registered is on loan for up to `k` further steps, so take them from ``cluster.slots(shape, count=k + 1)``.

    The call that would return a push_pull's weights raises its error; if the error is known earlier, an earlier call
    raises it, before it sends anything. After Timeout the push continues; the next call waits for it again.
    """

    __slots__ = ("_free", "_tensor", "_torch", "_under_way", "_weights", "delay")

    def __init__(self, tensor: "Tensor", delay: int) -> None:
        self.delay = check_delay(delay, f"delayed: tensor {tensor.name!r}")  #: how many steps weights may be old
        self._tensor = tensor
        # One for each that may be under way at once, which is one more than the delay, and one that the caller reads.
        self._free = [empty(tensor._cluster, tensor.shape, tensor._dtype) for _ in range(self.delay + 2)]
        self._torch = tensor._cluster._torch  # whether the caller's arrays are
        self._under_way: deque[tuple[Future[Any], Any]] = deque()
        self._weights = tensor.pull(out=self._free.pop())

    @property
    def weights(self) -> Any:
        """The newest weights that have landed; at first, those on the servers when this was made."""
        return as_torch(self._weights) if self._torch else self._weights

    def push_pull(
        self,
        grad: ArrayLike,
        *,
        weight: float = 1.0,
        timeout: float | None = None,
        priority: int = 0,
        **hyper: float,
    ) -> Any:
        """Sends a gradient and returns the newest weights that have landed, in a registered array."""
        self._land(self.delay, timeout)  # raises a known error before anything is sent
        out = self._free[-1]
        future = self._tensor.push_pull_async(grad, out=out, weight=weight, timeout=timeout, priority=priority, **hyper)
        self._under_way.append((future, self._free.pop()))
        self._land(self.delay, timeout)
        self._torch = self._torch or is_torch(grad)
        return self.weights

    def finish(self, *, timeout: float | None = None) -> Any:
        """Waits for all push_pulls and returns the weights after the last of them."""
        self._land(0, timeout)
        return self.weights

    def _land(self, most: int, timeout: float | None) -> None:
        """Takes in what is done, in order, and waits until at most `most` are under way."""
        while self._under_way and (len(self._under_way) > most or self._under_way[0][0].done()):
            future, landed = self._under_way[0]
            try:
                future.wait(timeout)
            except Timeout:  # the request continues
                raise
            except WindlassError:
                self._under_way.popleft()
                self._free.append(landed)
                raise
            self._under_way.popleft()
            self._free.append(self._weights)
            self._weights = landed

    def __enter__(self) -> "Delayed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()

    def __repr__(self) -> str:
        return f"<Delayed by {self.delay}, {len(self._under_way)} under way, {self._tensor!r}>"


def pull_ahead(
    table: "Table", batches: Iterable[Any], delay: int, dtype: object, create: bool, timeout: float | None
) -> Iterator[tuple[Any, Any]]:
    """What ``table.ahead()`` gives."""
    under_way: deque[tuple[Any, Future[Any]]] = deque()
    for keys in batches:
        under_way.append((keys, table.pull_async(keys, dtype=dtype, create=create, timeout=timeout)))
        if len(under_way) > delay:
            used, future = under_way.popleft()
            yield used, future.wait()
    while under_way:
        used, future = under_way.popleft()
        yield used, future.wait()


def check_delay(delay: int, what: str) -> int:
    """A delay is a whole number of steps."""
    if isinstance(delay, bool) or not isinstance(delay, (int, np.integer)) or delay < 0:
        raise InvalidArgument(f"{what}: delay must be a whole number of at least 0, not {delay!r}")
    return int(delay)
