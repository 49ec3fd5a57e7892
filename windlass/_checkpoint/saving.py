"""A server's part of a checkpoint: what it holds, captured at the cut and written while training goes on.

arm()      from now on nothing of the cut can be lost; fast, whatever the size
write()    the captured shards, one after another, into files; as long as the disk takes
"""

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass import _core
from windlass._checkpoint.arrays import Parts, parts_of
from windlass._checkpoint.layout import Facts, IndexRef, Record
from windlass._checkpoint.writer import ServerFiles
from windlass._errors import WindlassError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TAKEN_BYTES = 4 << 20  # of a shard at a turn
_WAIT_SECONDS = 0.01  # for shards that have not reached the cut


class CutOver(WindlassError):
    """The checkpoint was given up."""


class Saving:
    """See the head of this file. arm() and write() are one thread's; cancel() anybody's."""

    def __init__(
        self, shelf: _core.Shelf, numbers: "Sequence[int]", clock: int, files: ServerFiles, app: str | None = None
    ) -> None:
        """app: whose files call the objects theirs, if they have other names here."""
        self._shelf = shelf
        self._files = files
        self._cancelled = threading.Event()
        self._captures: list[tuple[Parts, _core.Capture]] = [
            (parts_of(shelf, number, app), _core.Capture(shelf, number, clock)) for number in numbers
        ]
        self.specs = [parts.spec for parts, _ in self._captures]  #: of the objects, as files have them
        self.bytes = 0  #: captured so far

    def arm(self) -> None:
        """Raises InvalidArgument if a shard is beyond the cut, or cannot be captured now."""
        for _, capture in self._captures:
            capture.arm()

    def write(self, progress: "Callable[[int], None] | None" = None) -> IndexRef:
        """Until all of it is on disk. Whatever fails removes what was written."""
        try:
            waiting = list(self._captures)
            asked = 0  # how many in a row had nothing
            while waiting:
                if self._cancelled.is_set():
                    raise CutOver("the checkpoint was given up")
                one = self._next_of(waiting)
                taken = one[1].next(_TAKEN_BYTES)
                if taken is not None and taken[0] != "wait":
                    asked = 0
                    self._keep(one[0], taken, progress)
                    continue
                waiting.remove(one)
                if taken is None:
                    continue
                waiting.append(one)
                asked += 1
                if asked >= len(waiting):
                    asked = 0
                    self._cancelled.wait(_WAIT_SECONDS)
            return self._files.finish()
        except BaseException:
            self._captures.clear()
            self._files.abort()
            raise
        finally:
            self._captures.clear()

    def cancel(self) -> None:
        """write() raises CutOver soon."""
        self._cancelled.set()

    def _next_of(self, waiting: "list[tuple[Parts, _core.Capture]]") -> "tuple[Parts, _core.Capture]":
        """One object after the other; but that of which most was set aside, if writers will soon want for room."""
        if not self._shelf.aside_presses:
            return waiting[0]
        return max(waiting, key=lambda one: one[1].aside_bytes)

    def _keep(self, parts: Parts, taken: "tuple[Any, ...]", progress: "Callable[[int], None] | None") -> None:
        match taken:
            case ("piece", shard, which, at, data):
                name, dtype = parts.arrays[which]
                self._files.add(parts.name, shard, {name: data.view(dtype)}, at // dtype.itemsize)
                self._count(data, progress)
            case ("rows", shard, rows, data):
                self._files.add(parts.name, shard, parts.rows(data, rows))
                self._count(data, progress)
            case ("shard", shard, version, count, made, rows, fingerprint, marks):
                for name, array in parts.empty(shard, rows).items():
                    self._files.add(parts.name, shard, {name: array}, 0)
                records = [Record(*mark) for mark in marks]
                self._files.shard_done(parts.name, shard, Facts(version, count, rows, made, fingerprint, records))

    def _count(self, data: "np.ndarray[Any, Any]", progress: "Callable[[int], None] | None") -> None:
        self.bytes += data.nbytes
        if progress is not None:
            progress(data.nbytes)
