"""Futures: requests under way."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from windlass import _core
from windlass._release import owns_native

T = TypeVar("T")


class Seen(NamedTuple):
    """What ``future.seen`` says a pull saw of the other workers, at the shard where it saw least."""

    asked: int  #: the clock at which it looked
    clock: int  #: up to which everybody's pushes were there
    waited_seconds: float  #: at the gate, where it waited longest
    waited_for: int | None  #: the rank it waited for

    @property
    def staleness(self) -> int:
        """How many iterations of the slowest worker were missing."""
        return max(self.asked - self.clock, 0)


@owns_native("_call")
class Future(Generic[T]):
    """A request under way. ``wait()`` returns its result or raises its error.

    A future may be dropped: the request continues, and if it fails, the next call on the same object, ``tick()`` or
    ``close()`` raises the error.
    """

    __slots__ = ("_call", "_result", "_timeout")

    def __init__(self, call: _core.Future, result: Callable[[], T], timeout: float) -> None:
        self._call = call
        self._result = result
        self._timeout = timeout

    def done(self) -> bool:
        """Whether the request has finished, well or not."""
        return self._call.done()

    def wait(self, timeout: float | None = None) -> T:
        """Waits up to `timeout` seconds (default: the request's). After Timeout it can be waited for again."""
        self._call.wait(self._timeout if timeout is None else timeout)
        return self._result()

    @property
    def seen(self) -> Seen:
        """Of a pull or push_pull that is done: how stale its weights were, and whom it waited for."""
        asked, clock, seconds, rank = self._call.seen()
        return Seen(asked, clock, seconds, None if rank < 0 else rank)

    def cancel(self) -> bool:
        """Takes back the parts that have not begun; returns whether that was all of them, also when called again.

        A part of a push that is taken back never reaches its shard. If there was any, ``wait()`` raises Cancelled.
        """
        return self._call.cancel()

    def __repr__(self) -> str:
        return f"<Future, {'done' if self.done() else 'under way'}>"
