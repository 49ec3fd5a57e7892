"""Writing a checkpoint: each server its blocks and an index, then somebody the manifest.

    add(object, shard, arrays) ... -> a block in memory, by reference -> header, arrays -> the file
    shard_done(object, shard, facts)                    finish() -> the index

A block is written when the next arrays do not fit, by a thread: while the disk is busy with some blocks, the next is
assembled. What was added belongs to the writer until the system has it, and is not copied.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import (
    BLOCK_BYTES,
    DIMS_MAX,
    FORMAT_VERSION,
    HEADER_BYTES_MAX,
    SAFETENSORS,
    SERVERS_MAX,
    Array,
    Facts,
    FileRef,
    Index,
    IndexRef,
    Manifest,
    Piece,
    Shard,
    check_shard,
    encode_index,
    encode_manifest,
    piece_name,
)
from windlass._checkpoint.names import MANIFEST, Place, block_name, index_name
from windlass._checkpoint.reader import Checkpoint
from windlass._checkpoint.store import Pace
from windlass._errors import CorruptCheckpoint, InvalidArgument, StorageFailed

_ALIGNMENT = 64  # of the numbers in a file
_BLOCKS_AT_ONCE = 2  # in memory, being written, beside the one that is assembled
_SYNCED_AT_ONCE = 4  # that the system has, and that are not on the disk yet
_HEADER_BYTES_PER_ARRAY = 256  # beside its name; more than it takes
_NICE = 10  # of threads that are held to a rate: they leave the processors to the training


@dataclasses.dataclass
class _Open:
    """A shard of which more may come."""

    arrays: dict[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)  # dtype, shape of an entry
    lengths: dict[str, int] = dataclasses.field(default_factory=dict)  # how many entries of each there are so far
    pieces: list[Piece] = dataclasses.field(default_factory=list)


class ServerFiles:
    """The files of one server. One thread uses it; calls may block for as long as the disk takes."""

    def __init__(
        self,
        folder: Folder,
        place: Place,
        server: int,
        *,
        bytes_per_second: float | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        if not 0 <= server <= SERVERS_MAX:
            raise InvalidArgument(f"checkpoint {place.id}: expected a server of 0 to {SERVERS_MAX}, saw {server}")
        if not 0 < block_bytes <= BLOCK_BYTES:
            raise InvalidArgument(f"checkpoint: expected blocks of 1 to {BLOCK_BYTES} bytes, saw {block_bytes}")
        self._folder = folder
        self._place = place
        self._server = server
        self._block_bytes = block_bytes
        self._pace = None if bytes_per_second is None else Pace(bytes_per_second)
        self._open: dict[tuple[str, int], _Open] = {}
        self._done: dict[tuple[str, int], Shard] = {}
        self._block: list[tuple[str, np.ndarray[Any, Any]]] = []
        self._block_filled = 0
        self._header_filled = 0
        self._blocks: list[FileRef | None] = []
        self._under_way: dict[concurrent.futures.Future[FileRef], int] = {}
        self._memory = threading.Semaphore(_BLOCKS_AT_ONCE)
        self._writers = concurrent.futures.ThreadPoolExecutor(
            _BLOCKS_AT_ONCE + _SYNCED_AT_ONCE,
            "windlass-checkpoint",
            initializer=None if self._pace is None else _step_back,
        )
        self.written_bytes = 0  #: in files that are complete

    @property
    def is_paced(self) -> bool:
        """Whether it is held to a rate."""
        return self._pace is not None

    def add(
        self, object: str, shard: int, arrays: Mapping[str, np.ndarray[Any, Any]], offset: int | None = None
    ) -> None:
        """Some entries of a shard's arrays, which are equally long; by default those behind what was added before.

        Nobody may change the arrays any more. Pieces may come in any order, and each entry once.
        """
        if (object, shard) in self._done:
            raise self._wrong(object, shard, "it is done")
        of = self._open.setdefault((object, shard), _Open())
        length = self._check(of, object, shard, arrays)
        if offset is None:
            ends = {of.lengths.get(name, 0) for name in arrays}
            if len(ends) != 1:
                raise self._wrong(object, shard, f"{', '.join(arrays)} end at different entries: name the offset")
            (offset,) = ends
        for name, array in arrays.items():
            of.arrays[name] = (SAFETENSORS[array.dtype.name], array.shape[1:])
            of.lengths[name] = of.lengths.get(name, 0) + length
        entry_bytes = sum(array.nbytes for array in arrays.values()) // max(length, 1)
        if entry_bytes > self._block_bytes:
            raise self._wrong(object, shard, f"one entry of {entry_bytes} bytes; a block has {self._block_bytes}")
        at = 0
        while at < length:
            left = length - at
            fit = (self._block_bytes - self._block_filled) // max(entry_bytes, 1)
            whole = left * entry_bytes <= self._block_bytes
            if self._block and (self._header_filled > HEADER_BYTES_MAX // 4 or fit == 0 or (whole and fit < left)):
                self._write_block()
                continue
            n = min(left, fit) if entry_bytes else left
            self._put(of, object, shard, {name: array[at : at + n] for name, array in arrays.items()}, offset + at)
            at += n

    def shard_done(self, object: str, shard: int, facts: Facts) -> None:
        """Nothing more of it comes; its pieces must be complete."""
        if (object, shard) in self._done:
            raise self._wrong(object, shard, "it is done already")
        of = self._open.pop((object, shard), _Open())
        arrays = [Array(name, dtype, [of.lengths[name], *entry]) for name, (dtype, entry) in of.arrays.items()]
        done = Shard(object, shard, facts, arrays, of.pieces)
        try:
            check_shard(done, len(self._blocks) + 1, f"checkpoint {self._place.id}: shard {shard} of {object!r}")
        except CorruptCheckpoint as error:
            raise InvalidArgument(str(error)) from None
        self._done[object, shard] = done

    def finish(self) -> IndexRef:
        """Writes what is left and the index; all of it is there to stay when this returns."""
        if self._open:
            object, shard = next(iter(self._open))
            raise self._wrong(object, shard, f"it is not done, as are {len(self._open) - 1} others")
        if self._block:
            self._write_block()
        self._await(0)
        self._writers.shutdown()
        blocks = [block for block in self._blocks if block is not None]
        data = encode_index(Index(FORMAT_VERSION, self._place.id, self._server, blocks, [*self._done.values()]))
        store, path = self._folder.store, self._place.path
        file = store.write(path, index_name(self._server), [data], self._pace)
        store.settle(path)
        total = sum(block.bytes for block in blocks)
        return IndexRef(file.name, file.bytes, file.crc32c, self._server, len(blocks), total)

    def abort(self) -> None:
        """Removes what was written. Idempotent; also after an error, and after finish()."""
        self._writers.shutdown(cancel_futures=True)
        self._block.clear()
        self._under_way.clear()
        names = [block_name(self._server, number) for number in range(len(self._blocks))]
        self._folder.remove_files(self._place, [index_name(self._server), *names])

    def _check(self, of: _Open, object: str, shard: int, arrays: Mapping[str, np.ndarray[Any, Any]]) -> int:
        """How long they are."""
        if not arrays:
            raise self._wrong(object, shard, "no arrays")
        for name, array in arrays.items():
            what = None
            if not name or "/" in name or not name.isprintable():
                what = "expected a printable name without '/'"
            elif array.dtype.name not in SAFETENSORS or not array.dtype.isnative:
                what = f"expected dtype {', '.join(SAFETENSORS)}, saw {array.dtype}"
            elif not 1 <= array.ndim <= DIMS_MAX or not array.flags.c_contiguous:
                what = f"expected a contiguous array of 1 to {DIMS_MAX} dimensions, saw shape {array.shape}"
            elif name in of.arrays and of.arrays[name] != (SAFETENSORS[array.dtype.name], array.shape[1:]):
                what = f"expected {of.arrays[name]} as before, saw {array.dtype}, {array.shape[1:]}"
            if what is not None:
                raise self._wrong(object, shard, f"{name!r}: {what}")
        lengths = {name: len(array) for name, array in arrays.items()}
        if len({*lengths.values()}) != 1:
            raise self._wrong(object, shard, f"expected arrays of one length, saw {lengths}")
        return next(iter(lengths.values()))

    def _put(self, of: _Open, object: str, shard: int, arrays: dict[str, np.ndarray[Any, Any]], offset: int) -> None:
        name = piece_name(object, shard, len(of.pieces))
        length = len(next(iter(arrays.values())))
        of.pieces.append(Piece(len(self._blocks), name, [*arrays], offset, length))
        for array_name, array in arrays.items():
            full = f"{name}/{array_name}"
            self._block.append((full, array))
            self._block_filled += array.nbytes
            self._header_filled += len(full.encode()) + _HEADER_BYTES_PER_ARRAY

    def _write_block(self) -> None:
        self._await(_BLOCKS_AT_ONCE + _SYNCED_AT_ONCE - 1)
        self._memory.acquire()
        block, self._block, self._block_filled, self._header_filled = self._block, [], 0, 0
        number = len(self._blocks)
        self._blocks.append(None)
        parts = block_parts(block)
        name = block_name(self._server, number)
        try:
            future = self._writers.submit(self._write_file, name, parts)
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise
            # The process is ending: there are no threads to be had any more.
            future = concurrent.futures.Future()
            future.set_result(self._write_file(name, parts))
        self._under_way[future] = number

    def _write_file(self, name: str, parts: list[Any]) -> FileRef:
        """Called from any thread. The next block may be written as soon as nobody needs the memory of this one."""
        held = True

        def taken() -> None:
            nonlocal held
            if held:
                held = False
                parts.clear()
                self._memory.release()

        try:
            return self._folder.store.write(self._place.path, name, parts, self._pace, taken)
        finally:
            taken()

    def _await(self, most: int) -> None:
        """Until at most so many blocks are being written; the error of one that failed."""
        while self._under_way:
            wait_s = None if len(self._under_way) > most else 0
            done, _ = concurrent.futures.wait(self._under_way, wait_s, concurrent.futures.FIRST_COMPLETED)
            if not done:
                return
            for future in done:
                file = future.result()
                self._blocks[self._under_way.pop(future)] = file
                self.written_bytes += file.bytes

    def _wrong(self, object: str, shard: int, what: str) -> InvalidArgument:
        return InvalidArgument(f"checkpoint {self._place.id}: shard {shard} of {object!r}: {what}")


def _step_back() -> None:
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def block_parts(arrays: list[tuple[str, np.ndarray[Any, Any]]]) -> list[Any]:
    """A file of safetensors: its head and the arrays' own memory. Wide numbers come first, so that all are aligned."""
    header, parts, at = {}, [], 0
    for name, array in sorted(arrays, key=lambda one: -one[1].itemsize):
        end = at + array.nbytes
        header[name] = {
            "dtype": SAFETENSORS[array.dtype.name],
            "shape": array.shape,
            "data_offsets": (at, end),
        }
        parts.append(array.reshape(-1).view(np.uint8))
        at = end
    return [safetensors_head(header), *parts]


def safetensors_head(header: dict[str, Any]) -> bytes:
    """What a file of safetensors begins with: a length, and JSON padded with spaces."""
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_manifest(folder: Folder, manifest: Manifest) -> FileRef:
    """Makes a checkpoint complete, once everything that it names was found to be there. Durable when it returns."""
    data = encode_manifest(manifest)
    place = Place(manifest.app, manifest.clock, manifest.id)
    Checkpoint(folder, folder.entry(place), manifest)
    try:
        file = folder.store.write(place.path, MANIFEST, [data])
        folder.store.settle(place.path)
    except BaseException:
        with contextlib.suppress(StorageFailed):  # a manifest that may be gone tomorrow would hide the one before
            folder.store.remove(place.path, [MANIFEST])
        raise
    return file
