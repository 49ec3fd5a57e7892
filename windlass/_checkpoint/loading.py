"""A server's part of a resume: the shards that are here, filled from a checkpoint before anybody trains on them."""

import bisect
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from windlass import _core
from windlass._checkpoint.arrays import Parts, parts_of
from windlass._checkpoint.layout import DTYPES, Shard
from windlass._checkpoint.reader import Checkpoint, ReadPiece
from windlass._errors import CorruptCheckpoint

_THREADS = 4  # each has a block in memory; while one waits for the disk, another has work
_UPDATES_OF_NEW_STATE = 1  # a row that was updated before, and whose rule begins anew


def fill(
    shelf: _core.Shelf,
    checkpoint: Checkpoint,
    objects: Iterable[tuple[int, Iterable[int]]],
    progress: Callable[[int], None] | None = None,
    app: str | None = None,
) -> list[str]:
    """Fills the shards of these objects, (number, shards here), and says in words what is not as it was.

    app: whose files call the objects theirs, if they have other names here.
    """
    said: list[str] = []
    filling: dict[str, _Filling] = {}
    for number, shards in objects:
        parts = parts_of(shelf, number, app)
        if _same_rule(checkpoint, parts):
            filling[parts.name] = _Filling(shelf, checkpoint, number, parts, list(shards))
        else:
            said.append(f"{parts.name!r} has another rule than in the checkpoint: only its weights are taken")
            filling[parts.name] = _FillingWeights(shelf, checkpoint, number, parts, list(shards))
    wanted = {(name, shard) for name, one in filling.items() for shard in one.wanted}
    lock = threading.Lock()

    def place(block: Callable[[], list[ReadPiece]]) -> None:
        for read in block():
            filling[read.object].take(read)
            if progress is not None:
                with lock:
                    progress(sum(array.nbytes for array in read.arrays.values()))

    with concurrent.futures.ThreadPoolExecutor(_THREADS, "windlass-load") as pool:
        try:
            for _ in pool.map(place, checkpoint.blocks(wanted)):
                pass
            for _ in pool.map(lambda one: one[0].finish(one[1]), _each_shard(filling.values())):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return said


def _each_shard(filling: "Iterable[_Filling]") -> "list[tuple[_Filling, int]]":
    return [(one, shard) for one in filling for shard in one.shards]


def _bytes_of(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return array.reshape(-1).view(np.uint8)


class _Filling:
    """An object whose shards here become as they were. Under BSP all updates before the cut are made."""

    def __init__(
        self, shelf: _core.Shelf, checkpoint: Checkpoint, number: int, parts: Parts, shards: list[int]
    ) -> None:
        self.shelf, self.checkpoint, self.number, self.parts, self.shards = shelf, checkpoint, number, parts, shards
        self.there: list[Shard] = checkpoint.shards(parts.name)

    @property
    def wanted(self) -> Iterable[int]:
        """Shards of the checkpoint that have something for those here."""
        return self.shards

    def take(self, read: ReadPiece) -> None:
        """A piece of one of them."""
        if self.parts.is_table:
            self.put_rows(read.shard, read.arrays)
            return
        places = {array.name: place for place, array in enumerate(self.there[read.shard].arrays)}
        for name, array in read.arrays.items():
            self.put_piece(read.shard, places[name], read.offset, array)

    def put_rows(self, shard: int, arrays: dict[str, "np.ndarray[Any, Any]"]) -> None:
        in_all = self.there[shard].facts.rows
        self.shelf.rows(self.number, shard, len(arrays["keys"]), [*map(_bytes_of, arrays.values())], in_all)

    def put_piece(self, shard: int, place: int, offset: int, array: "np.ndarray[Any, Any]") -> None:
        self.shelf.piece(self.number, shard, place, offset * array.itemsize, _bytes_of(array))

    def finish(self, shard: int) -> None:
        """After the last piece."""
        facts = self.there[shard].facts
        seen = self.shelf.counts(self.number, shard, facts.version, facts.count, self.checkpoint.manifest.clock)
        if seen != facts.fingerprint:
            where = f"{self.checkpoint.folder.where(self.checkpoint.place)}: shard {shard} of {self.parts.name!r}"
            raise CorruptCheckpoint(f"{where}: expected fingerprint {facts.fingerprint:016x}, saw {seen:016x}")


class _FillingWeights(_Filling):
    """One that has another rule: its state begins anew, and the rule may cut a tensor otherwise."""

    def __init__(
        self, shelf: _core.Shelf, checkpoint: Checkpoint, number: int, parts: Parts, shards: list[int]
    ) -> None:
        super().__init__(shelf, checkpoint, number, parts, shards)
        self._version = max(shard.facts.version for shard in self.there)
        if not parts.is_table:
            self._first_here = _core.cut_of(parts.spec)
            self._first_there = _core.cut_of(checkpoint.objects[parts.name].spec)

    @property
    def wanted(self) -> Iterable[int]:
        if self.parts.is_table:
            return self.shards
        return {
            there
            for shard in self.shards
            for there in _between(self._first_there, self._first_here[shard], self._first_here[shard + 1])
        }

    def take(self, read: ReadPiece) -> None:
        if self.parts.is_table:
            self.put_rows(read.shard, _weights_alone(self.parts, read.arrays))
            return
        weights = read.arrays.get("weights")
        if weights is None:
            return
        begin = self._first_there[read.shard] + read.offset
        end = begin + len(weights)
        here = set(self.shards)
        for shard in _between(self._first_here, begin, end):
            first, last = max(begin, self._first_here[shard]), min(end, self._first_here[shard + 1])
            if shard in here:
                self.put_piece(shard, 0, first - self._first_here[shard], weights[first - begin : last - begin])

    def finish(self, shard: int) -> None:
        self.shelf.counts(self.number, shard, self._version, 0, self.checkpoint.manifest.clock)


def _between(firsts: list[int], begin: int, end: int) -> Iterable[int]:
    """The shards, by their first elements, that have some of these."""
    at = max(0, bisect.bisect_right(firsts, begin) - 1)
    return itertools.takewhile(lambda shard: firsts[shard] < end, range(at, len(firsts) - 1))


def _same_rule(checkpoint: Checkpoint, parts: Parts) -> bool:
    """Whether the checkpoint has the arrays that the shard has, with the same rule. Raises if the weights differ."""
    where = checkpoint.folder.where(checkpoint.place)
    there = checkpoint.objects[parts.name]
    same = bool(_core.same_rule(there.spec, parts.spec))
    kind = "table" if parts.is_table else "tensor"
    seen: tuple[Any, ...] = (there.kind, tuple(there.shape), DTYPES.get(there.dtype))
    expected: tuple[Any, ...] = (kind, parts.shape, parts.dtype)
    if same or parts.is_table:
        seen, expected = (*seen, there.shards), (*expected, parts.shards)
    if seen != expected:
        raise CorruptCheckpoint(f"{where}: {parts.name!r}: expected {expected}, saw {seen}")
    return same


def _weights_alone(parts: Parts, arrays: dict[str, "np.ndarray[Any, Any]"]) -> dict[str, "np.ndarray[Any, Any]"]:
    """Rows of another rule, with the state of a fresh one."""
    n = len(arrays["keys"])
    taken: dict[str, np.ndarray[Any, Any]] = {}
    for (name, dtype), width in zip(parts.arrays, parts.widths, strict=True):
        if name in ("keys", "touched", "weights"):
            taken[name] = arrays[name]
        elif name == "updates":
            taken[name] = np.minimum(arrays[name], _UPDATES_OF_NEW_STATE).astype(np.uint32)
        else:
            taken[name] = np.full((n, width), parts.initial_state, dtype)
    return taken
