"""Reading a checkpoint: nothing is believed before its checksum was right, and no length before it was checked."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from windlass._checkpoint.folder import Entry, Folder
from windlass._checkpoint.layout import (
    DTYPES,
    HEADER_BYTES_MAX,
    Dims,
    FileRef,
    Index,
    Manifest,
    Name,
    Number,
    Object,
    Part,
    Piece,
    Shard,
    decode,
    decode_index,
)
from windlass._checkpoint.names import Place
from windlass._checkpoint.store import wrong_size
from windlass._errors import CorruptCheckpoint, InvalidArgument, NotFound, StorageFailed

BFLOAT16 = np.dtype("V2")  # numpy has none: its bits
Arrays: TypeAlias = "dict[str, np.ndarray[Any, Any]]"


class _Entry(Part, frozen=True):
    """Of a block's head."""

    dtype: Name
    shape: Dims
    data_offsets: tuple[Number, Number]


class ReadPiece(NamedTuple):
    """Some entries of a shard's arrays: views of memory that nobody else has."""

    object: str
    shard: int
    offset: int
    arrays: Arrays


class Checkpoint:
    """A complete checkpoint whose manifest and indexes are good, and whose files have the right sizes."""

    def __init__(self, folder: Folder, entry: Entry, manifest: Manifest) -> None:
        self.folder = folder
        self.place = entry.place
        self.manifest = manifest
        self.objects: dict[str, Object] = {one.name: one for one in manifest.objects}
        self.bytes = entry.bytes
        self._indexes: list[Index] = []
        self._shards: dict[str, dict[int, tuple[int, Shard]]] = {name: {} for name in self.objects}  # with their index
        self._in_block: dict[tuple[int, int], list[tuple[Shard, Piece]]] = {}
        self._last: tuple[tuple[int, int], dict[str, ReadPiece]] | None = None
        for ref in manifest.indexes:
            self._check_size(entry, ref.name, ref.bytes)
            index = decode_index(folder.read(self.place, FileRef(ref.name, ref.bytes, ref.crc32c)), self._at(ref.name))
            if (index.id, index.server) != (manifest.id, ref.server):
                raise CorruptCheckpoint(
                    f"{self._at(ref.name)}: expected the index of server {ref.server} in {manifest.id}, saw that of "
                    f"server {index.server} in {index.id}"
                )
            for block in index.blocks:
                self._check_size(entry, block.name, block.bytes)
            self._add(index, self._at(ref.name))
        for one in manifest.objects:
            there = self._shards[one.name]
            if len(there) != one.shards:
                missing = next(shard for shard in range(one.shards) if shard not in there)
                raise CorruptCheckpoint(f"{folder.where(self.place)}: shard {missing} of {one.name!r} is in no index")

    @classmethod
    def open(cls, folder: Folder, place: Place) -> "Checkpoint":
        """Checks the manifest, the indexes and the sizes of all files; CorruptCheckpoint names what is wrong."""
        entry = folder.entry(place)
        return cls(folder, entry, folder.manifest(entry))

    def shards(self, object: str) -> list[Shard]:
        """Of a tensor or table, by number: arrays, pieces and facts."""
        of = self._of(object)
        return [of[number][1] for number in sorted(of)]

    def fingerprint(self, object: str) -> int:
        """Of a tensor or table, from those of its shards."""
        return sum(shard.facts.fingerprint for shard in self.shards(object)) % 2**64

    def read_shard(self, object: str, shard: int) -> Iterator[ReadPiece]:
        """The pieces of a shard. Of many shards, use read(): it reads each file once."""
        of = self._of(object)
        if shard not in of:
            raise NotFound(
                f"{self.folder.where(self.place)}: {object!r} has {len(of)} shards, and none of number {shard}"
            )
        index, found = of[shard]
        for piece in found.pieces:
            yield self._read_block(index, piece.block)[piece.name]

    def read(self, wanted: Iterable[tuple[str, int]] | None = None) -> Iterator[ReadPiece]:
        """The pieces of these shards, or of all, in the order in which they lie there: each file is read once."""
        for block in self.blocks(wanted):
            yield from block()

    def blocks(self, wanted: Iterable[tuple[str, int]] | None = None) -> "list[Callable[[], list[ReadPiece]]]":
        """The same, a function per file that reads it: threads may call them side by side."""
        chosen = None if wanted is None else set(wanted)

        def read(key: tuple[int, int]) -> list[ReadPiece]:
            found = self._parse_block(*key).values()
            return [one for one in found if chosen is None or (one.object, one.shard) in chosen]

        return [
            functools.partial(read, key)
            for key in sorted(self._in_block)
            if chosen is None or any((shard.object, shard.shard) in chosen for shard, _ in self._in_block[key])
        ]

    def verify(self, progress: Callable[[int], None] | None = None) -> int:
        """Reads every byte; CorruptCheckpoint names the file that is wrong. Returns how many bytes were read."""
        total = 0
        for key in sorted(self._in_block):
            self._parse_block(*key)
            n = self._indexes[key[0]].blocks[key[1]].bytes
            total += n
            if progress is not None:
                progress(n)
        return total

    def _add(self, index: Index, where: str) -> None:
        number = len(self._indexes)
        self._indexes.append(index)
        for block in range(len(index.blocks)):
            self._in_block[number, block] = []
        for shard in index.shards:
            known = self.objects.get(shard.object)
            if known is None or shard.shard >= known.shards or shard.shard in self._shards[shard.object]:
                raise CorruptCheckpoint(
                    f"{where}: shard {shard.shard} of {shard.object!r} is not in the manifest, or in two indexes"
                )
            self._shards[shard.object][shard.shard] = (number, shard)
            for piece in shard.pieces:
                self._in_block[number, piece.block].append((shard, piece))

    def _read_block(self, index: int, number: int) -> dict[str, ReadPiece]:
        """The same of the last block again: shards that follow one another are in it, too."""
        if self._last is None or self._last[0] != (index, number):
            self._last = (index, number), self._parse_block(index, number)
        return self._last[1]

    def _parse_block(self, index: int, number: int) -> dict[str, ReadPiece]:
        """All pieces in a block, by name."""
        block = self._indexes[index].blocks[number]
        where = self._at(block.name)
        arrays = parse_safetensors(self.folder.read(self.place, block), where)
        pieces = {}
        for shard, piece in self._in_block[index, number]:
            of = {array.name: array for array in shard.arrays}
            found = {}
            for name in piece.arrays:
                array = arrays.pop(f"{piece.name}/{name}", None)
                expected = (DTYPES[of[name].dtype], (piece.length, *of[name].shape[1:]))
                if array is None or (array.dtype.name, array.shape) != expected:
                    seen = None if array is None else (array.dtype.name, array.shape)
                    raise CorruptCheckpoint(f"{where}: {piece.name}/{name}: expected {expected}, saw {seen}")
                found[name] = array
            pieces[piece.name] = ReadPiece(shard.object, shard.shard, piece.offset, found)
        if arrays:
            raise CorruptCheckpoint(f"{where}: {next(iter(arrays))[:80]!r} is not in the index")
        return pieces

    def _of(self, object: str) -> dict[int, tuple[int, Shard]]:
        if object not in self._shards:
            has = ", ".join(map(repr, self._shards)) or "nothing"
            raise NotFound(f"{self.folder.where(self.place)}: {object!r} is not in it; it has {has}")
        return self._shards[object]

    def _at(self, name: str) -> str:
        return self.folder.where(self.place, name)

    def _check_size(self, entry: Entry, name: str, expected: int) -> None:
        found = entry.files.get(name)
        if found is None:
            raise CorruptCheckpoint(f"{self._at(name)}: expected {expected} bytes, saw no such file")
        if found.bytes != expected:
            raise wrong_size(self._at(name), expected, found.bytes)


def parse_safetensors(data: np.ndarray[Any, np.dtype[np.uint8]], where: str, *, foreign: bool = False) -> Arrays:
    """The arrays in a file, as views of it.

    foreign: others wrote it. It may have metadata, and numbers of bfloat16, which come as their bits.
    """
    if len(data) < 8:
        raise CorruptCheckpoint(f"{where}: expected a head of 8 bytes, saw {len(data)}")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(HEADER_BYTES_MAX, len(data) - 8):
        raise CorruptCheckpoint(f"{where}: expected a head of at most {len(data) - 8} bytes, saw {length}")
    if foreign:
        heads: dict[str, msgspec.Raw] = decode(data[8 : 8 + length], dict[str, msgspec.Raw], where)
        heads.pop("__metadata__", None)
        entries: dict[str, _Entry] = {name: decode(head, _Entry, where) for name, head in heads.items()}
    else:
        entries = decode(data[8 : 8 + length], dict[str, _Entry], where)
    numbers = data[8 + length :]
    arrays, at = {}, 0
    for name, entry in sorted(entries.items(), key=lambda one: one[1].data_offsets):
        begin, end = entry.data_offsets
        dtype: Any = BFLOAT16 if foreign and entry.dtype == "BF16" else DTYPES.get(entry.dtype)
        if dtype is None:
            raise CorruptCheckpoint(
                f"{where}: {name[:80]!r}: expected dtype {', '.join(DTYPES)}, saw {entry.dtype[:20]!r}"
            )
        to = at + math.prod(entry.shape) * np.dtype(dtype).itemsize
        if (begin, end) != (at, to) or end > len(numbers):
            raise CorruptCheckpoint(
                f"{where}: {name[:80]!r}: expected bytes {at} to {to} of {len(numbers)}, saw {begin} to {end}"
            )
        arrays[name] = _view(numbers[begin:end], dtype, entry.shape, f"{where}: {name[:80]!r}")
        at = end
    if at != len(numbers):
        raise CorruptCheckpoint(f"{where}: expected {at} bytes of numbers, saw {len(numbers)}")
    return arrays


def _view(data: np.ndarray[Any, Any], dtype: Any, shape: list[int], what: str) -> np.ndarray[Any, Any]:
    """Copied only if a foreign writer left it where the processor cannot read it."""
    try:
        array: np.ndarray[Any, Any] = data.view(dtype).reshape(shape)
    except (ValueError, OverflowError) as error:  # no numbers, and dimensions beyond what numpy has
        raise CorruptCheckpoint(f"{what}: {error}") from None
    return array if array.flags.aligned else array.copy()


class Passed(NamedTuple):
    """A checkpoint that cannot be used, and why."""

    place: Place
    why: str
    half_written: bool = False


class Newest(NamedTuple):
    """The newest good checkpoint, if there is one, and those that would have come before it."""

    checkpoint: Checkpoint | None
    passed: list[Passed]


def by_age(folder: Folder, app: str) -> tuple[list[tuple[Entry, Manifest]], list[Passed]]:
    """Those with a good manifest, newest first by the time at which they were made; and the others, by clock."""
    good: list[tuple[Entry, Manifest]] = []
    passed = []
    for entry in folder.entries(app):
        try:
            good.append((entry, folder.manifest(entry)))
        except (CorruptCheckpoint, StorageFailed) as error:
            passed.append(Passed(entry.place, str(error), half_written=not entry.complete))
    return sorted(good, key=lambda one: (one[1].created, one[0].place), reverse=True), passed


def newest(folder: Folder, app: str) -> Newest:
    """The newest checkpoint that holds all objects and whose indexes and sizes are right."""
    good, passed = by_age(folder, app)
    for entry, manifest in good:
        if manifest.partial:
            passed.append(Passed(entry.place, "it holds only some objects"))
            continue
        try:
            return Newest(Checkpoint(folder, entry, manifest), passed)
        except (CorruptCheckpoint, StorageFailed) as error:
            passed.append(Passed(entry.place, str(error)))
    return Newest(None, passed)


def find(folder: Folder, app: str, which: str) -> Place:
    """A checkpoint by its id, its tag, or the name of its folder."""
    places = folder.places(app)
    named = [place for place in places if which in (place.id, place.name)]
    if not named:
        good, _ = by_age(folder, app)
        named = [entry.place for entry, manifest in good if manifest.tag == which][:1]
    if not named:
        has = ", ".join(place.name for place in places[-5:]) or "none"
        raise NotFound(f"{folder.store.url}: app {app!r} has no checkpoint {which!r}; the last are: {has}")
    if len(named) > 1:
        raise InvalidArgument(f"{folder.store.url}: app {app!r} has {len(named)} checkpoints {which!r}")
    return named[0]
