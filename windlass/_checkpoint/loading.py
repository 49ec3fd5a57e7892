"""A server's part of a resume: the shards that are here, filled from a checkpoint before anybody trains on them."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from windlass import _core
from windlass._checkpoint.arrays import Parts, parts_of
from windlass._checkpoint.layout import DTYPES
from windlass._checkpoint.reader import Checkpoint, ReadPiece
from windlass._errors import CorruptCheckpoint

_THREADS = 4  # each has a block in memory; while one waits for the disk, another has work
_UPDATES_OF_NEW_STATE = 1  # a row that was updated before, and whose rule begins anew


def fill(
    shelf: _core.Shelf,
    checkpoint: Checkpoint,
    objects: Iterable[tuple[int, Iterable[int]]],
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Fills the shards of these objects, (number, shards here), and says in words what is not as it was."""
    said = []
    wanted: dict[tuple[str, int], tuple[int, Parts, bool]] = {}
    for number, shards in objects:
        parts = parts_of(shelf, number)
        whole = _same_state(checkpoint, parts)
        if not whole:
            said.append(f"{parts.name!r} has another rule than in the checkpoint: only its weights are taken")
        for shard in shards:
            wanted[parts.name, shard] = number, parts, whole
    by_name = {
        (shard.object, shard.shard): shard for name in {n for n, _ in wanted} for shard in checkpoint.shards(name)
    }
    lock = threading.Lock()

    def place(block: Callable[[], list[ReadPiece]]) -> None:
        for read in block():
            number, parts, whole = wanted[read.object, read.shard]
            if parts.is_table:
                arrays = read.arrays if whole else _weights_alone(parts, read.arrays)
                shelf.rows(number, read.shard, len(read.arrays["keys"]), [*map(_bytes_of, arrays.values())])
            else:
                places = {array.name: place for place, array in enumerate(by_name[read.object, read.shard].arrays)}
                for name, array in read.arrays.items():
                    if whole or name == "weights":
                        at = read.offset * array.itemsize
                        shelf.piece(number, read.shard, places[name], at, _bytes_of(array))
            if progress is not None:
                with lock:
                    progress(sum(array.nbytes for array in read.arrays.values()))

    def finish(key: tuple[str, int]) -> None:
        number, _, whole = wanted[key]
        facts = by_name[key].facts
        seen = shelf.counts(number, key[1], facts.version, facts.count if whole else 0, facts.made)
        if whole and seen != facts.fingerprint:
            where = f"{checkpoint.folder.where(checkpoint.place)}: shard {key[1]} of {key[0]!r}"
            raise CorruptCheckpoint(f"{where}: expected fingerprint {facts.fingerprint:016x}, saw {seen:016x}")

    with concurrent.futures.ThreadPoolExecutor(_THREADS, "windlass-load") as pool:
        try:
            for _ in pool.map(place, checkpoint.blocks(wanted)):
                pass
            for _ in pool.map(finish, wanted):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return said


def _bytes_of(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return array.reshape(-1).view(np.uint8)


def _same_state(checkpoint: Checkpoint, parts: Parts) -> bool:
    """Whether the checkpoint has the arrays that the shard has, with the same rule. Raises if the weights differ."""
    where = checkpoint.folder.where(checkpoint.place)
    there = checkpoint.objects[parts.name]
    kind = "table" if parts.is_table else "tensor"
    seen = (there.kind, tuple(there.shape), DTYPES.get(there.dtype), there.shards)
    expected = (kind, parts.shape, parts.dtype, parts.shards)
    if seen != expected:
        raise CorruptCheckpoint(f"{where}: {parts.name!r}: expected {expected}, saw {seen}")
    return bool(_core.same_rule(there.spec, parts.spec))


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
