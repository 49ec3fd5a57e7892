"""A server's part of a checkpoint: what it holds, captured at the cut and written while training goes on.

arm()      from now on nothing of the cut can be lost; fast, whatever the size
write()    the captured shards, some at a time, into files; as long as the disk takes

    hands          each reads its part of every object's shards, one after another
      | one at a time
    ServerFiles    assembles blocks, which threads of its own write
"""

import concurrent.futures
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from windlass import _core
from windlass._checkpoint.arrays import Parts, parts_of
from windlass._checkpoint.layout import Facts, IndexRef, Record
from windlass._checkpoint.writer import ServerFiles
from windlass._errors import WindlassError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Capture: TypeAlias = tuple[Parts, _core.Capture]

_TAKEN_BYTES = 4 << 20  # of a shard at once
_HANDS = 2  # threads that read shards, as fast as one disk writes; one is enough for a rate
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
        self._adding = threading.Lock()  # of files and bytes
        self._cancelled = threading.Event()
        self._failed = threading.Event()  # one hand did, so that the others end
        objects = [(number, parts_of(shelf, number, app)) for number in numbers]
        hands = 1 if files.is_paced else _HANDS
        self._hands: list[list[_Capture]] = [
            [(parts, _core.Capture(shelf, number, clock, hand, hands)) for number, parts in objects]
            for hand in range(hands)
        ]
        self.specs = [parts.spec for _, parts in objects]  #: of the objects, as files have them
        self.bytes = 0  #: captured so far

    def arm(self) -> None:
        """Raises InvalidArgument if a shard is beyond the cut, or cannot be captured now."""
        for hand in self._hands:
            for _, capture in hand:
                capture.arm()

    def write(self, progress: "Callable[[int], None] | None" = None) -> IndexRef:
        """Until all of it is on disk. Whatever fails removes what was written."""
        try:
            self._read(progress)
            return self._files.finish()
        except BaseException:
            self._hands.clear()
            self._files.abort()
            raise
        finally:
            self._hands.clear()

    def _read(self, progress: "Callable[[int], None] | None") -> None:
        """All hands; this thread is the first."""
        own, *others = self._hands
        with contextlib.ExitStack() as ending:
            reading = []
            if others:
                threads = concurrent.futures.ThreadPoolExecutor(len(others), "windlass-checkpoint-read")
                ending.enter_context(threads)
                ending.callback(self._failed.set)  # if this thread fails
            for hand in others:
                try:
                    reading.append(threads.submit(self._read_with, hand, progress))
                except RuntimeError:  # the process is ending: there are no threads to be had any more
                    own = own + hand
            self._read_with(own, progress)
            for one in reading:
                one.result()

    def _read_with(self, hand: "list[_Capture]", progress: "Callable[[int], None] | None") -> None:
        try:
            waiting = list(hand)
            asked = 0  # how many in a row had nothing
            while waiting:
                if self._cancelled.is_set():
                    raise CutOver("the checkpoint was given up")
                if self._failed.is_set():
                    return
                one = self._next_of(waiting)
                taken = one[1].next(_TAKEN_BYTES)
                if taken is not None and taken[0] != "wait":
                    asked = 0
                    with self._adding:
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
        except BaseException:
            self._failed.set()
            raise

    def cancel(self) -> None:
        """write() raises CutOver soon."""
        self._cancelled.set()

    def _next_of(self, waiting: "list[_Capture]") -> "_Capture":
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
