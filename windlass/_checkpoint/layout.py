"""What the two kinds of JSON in a checkpoint say: its manifest, and an index per server.

The manifest carries its own checksum and those of the indexes, and an index those of its blocks, so whoever believes
the manifest can check everything else.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from windlass import _core
from windlass._checkpoint.names import CLOCK_MAX, block_name, index_name
from windlass._errors import CorruptCheckpoint, InvalidArgument

FORMAT_VERSION = 1
BLOCK_BYTES = 64 << 20  # of numbers in one file
HEADER_BYTES_MAX = 16 << 20  # of a block
BLOCK_FILE_BYTES_MAX = 8 + HEADER_BYTES_MAX + BLOCK_BYTES
INDEX_BYTES_MAX = 1 << 30
MANIFEST_BYTES_MAX = 64 << 20
SERVERS_MAX = 1 << 20
SHARDS_MAX = 1 << 20  # of one object
DIMS_MAX = 16
_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1

#: numpy's name of a dtype, by that of safetensors.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
SAFETENSORS = {numpy: safetensors for safetensors, numpy in DTYPES.items()}

Number = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Dims = Annotated[list[Number], Meta(max_length=DIMS_MAX)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The root of what the JSON is made of."""


class FileRef(Part, frozen=True):
    """A file as it must be."""

    name: Name
    bytes: Number
    crc32c: Number


class IndexRef(Part, frozen=True):
    """The index of one server, and how much lies in the blocks that it names."""

    name: Name
    bytes: Number
    crc32c: Number
    server: Number
    blocks: Number
    block_bytes: Number  #: of all blocks together


class Record(Part, frozen=True):
    """How far the pushes of one session go that are in a shard."""

    rank: Number
    incarnation: Number
    sequence: Number
    clock: Number


class Facts(Part, frozen=True):
    """What a shard is beside its numbers."""

    version: Number = 0  #: how many pushes and puts were applied to it
    count: Number = 0  #: how many updates its rule counts
    rows: Number = 0  #: of a table's shard
    made: Number = 0  #: how many BSP updates were made
    fingerprint: Number = 0
    records: list[Record] = []


class Array(Part, frozen=True):
    """An array of a shard, all its pieces together."""

    name: Name
    dtype: Name  #: as safetensors calls it
    shape: Annotated[Dims, Meta(min_length=1)]


class Piece(Part, frozen=True):
    """A run of entries along the first axis of some arrays of a shard. In its block they are called NAME/ARRAY."""

    block: Number  #: the place of its file in the index
    name: Name
    arrays: Annotated[list[Name], Meta(min_length=1)]
    offset: Number
    length: Number


class Shard(Part, frozen=True):
    """Where a shard is."""

    object: Name
    shard: Number
    facts: Facts
    arrays: list[Array]
    pieces: list[Piece]


class Index(Part, frozen=True):
    """What one server wrote."""

    format_version: Number
    id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    server: Number
    blocks: list[FileRef]
    shards: list[Shard]


class Object(Part, frozen=True):
    """A tensor or a table."""

    name: Name  #: app/name
    kind: Literal["tensor", "table"]
    dtype: Name  #: of the weights, as safetensors calls it
    shape: Dims  #: of a tensor; of a table, that of one row
    shards: Number
    spec: bytes  #: as in docs/formats/wire.md
    description: Text = ""
    sync: Text = ""


class Manifest(Part, frozen=True):
    """What a checkpoint is. Without its file there is none."""

    id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    app: Name
    clock: Number
    created: Annotated[float, Meta(ge=0)]  #: seconds since 1970
    windlass: Text  #: the version that wrote it
    objects: list[Object]
    indexes: list[IndexRef]
    tag: Annotated[str, Meta(pattern=r"\A[0-9A-Za-z][0-9A-Za-z_.-]{0,127}\Z")] | None = None
    partial: bool = False  #: objects were chosen: nobody resumes from it unasked
    world_size: Number = 0  #: workers in the view; 0: unknown
    ledgers: msgspec.Raw = msgspec.Raw(b"null")
    notes: dict[str, msgspec.Raw] = {}  #: what others keep about objects, by their names: see export.py
    extra: dict[Annotated[str, Meta(pattern=r"\A(0|[1-9][0-9]{0,9})\Z")], msgspec.Raw] = {}  #: of users, by rank
    splits: msgspec.Raw = msgspec.Raw(b"null")  #: how far each rank had got with its static splits


class ParameterNote(Part, frozen=True):
    """A user's parameter in a flat tensor. Strides, in elements, where its numbers are not in row-major order."""

    name: Name
    shape: Dims
    offset: Number
    strides: Dims | None = None


class TensorNote(msgspec.Struct, frozen=True):
    """What a note on a tensor may say; others may add fields of their own."""

    parameters: list[ParameterNote] | None = None


class _Sealed(Part, frozen=True):
    """manifest.json. The checksum is that of the bytes of `manifest`."""

    format_version: Number
    crc32c: Number
    manifest: msgspec.Raw


class _Versioned(msgspec.Struct, frozen=True):
    """As much of either JSON as every version has."""

    format_version: int


def opaque(value: Any) -> msgspec.Raw:
    """A value for `ledgers`, `notes` or `extra`: whatever JSON can say."""
    return msgspec.Raw(msgspec.json.encode(value))


def plain(raw: msgspec.Raw, type: Any = Any, where: str = "checkpoint: a value of the manifest") -> Any:
    """What was put in, checked against a type."""
    return decode(bytes(raw), type, where)


def decode(data: Any, type: Any, where: str) -> Any:
    """JSON of somebody else's, checked; `where` it comes from, for errors."""
    try:
        return msgspec.json.decode(data, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CorruptCheckpoint(f"{where}: malformed: {_short(error)}") from None


def _check_version(data: Any, where: str) -> None:
    version = decode(data, _Versioned, where).format_version
    if version != FORMAT_VERSION:
        by = "a later" if version > FORMAT_VERSION else "an earlier"
        raise CorruptCheckpoint(
            f"{where}: {by} version of Windlass wrote it: expected format version {FORMAT_VERSION}, saw {version}"
        )


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    body = msgspec.json.encode(manifest)
    sealed = _Sealed(FORMAT_VERSION, _core.crc32c(body), msgspec.Raw(body))
    data = msgspec.json.encode(sealed)
    if len(data) > MANIFEST_BYTES_MAX:
        raise InvalidArgument(
            f"checkpoint: a manifest of {len(data)} bytes; at most {MANIFEST_BYTES_MAX} are read again"
        )
    decode_manifest(data, "checkpoint: manifest")
    return data


def decode_manifest(data: Any, where: str) -> Manifest:
    """Of such bytes; `where` they come from, for errors."""
    _check_version(data, where)
    sealed: _Sealed = decode(data, _Sealed, where)
    if (seen := _core.crc32c(sealed.manifest)) != sealed.crc32c:
        raise CorruptCheckpoint(f"{where}: expected checksum {sealed.crc32c:#010x}, saw {seen:#010x}")
    manifest: Manifest = decode(sealed.manifest, Manifest, where)
    _check_range(where, manifest.clock, CLOCK_MAX, "clock")
    names = set()
    for one in manifest.objects:
        what = f"{where}: {one.name[:80]!r}"
        if one.name in names:
            raise CorruptCheckpoint(f"{what} is in it twice")
        names.add(one.name)
        _check_range(what, one.shards, SHARDS_MAX, "shards")
        _check_dtype(what, one.dtype)
        if not one.name.isprintable():
            raise CorruptCheckpoint(f"{what}: expected a printable name")
    servers = set()
    for index in manifest.indexes:
        _check_range(where, index.server, SERVERS_MAX, "server")
        if index.name != index_name(index.server) or index.server in servers:
            raise CorruptCheckpoint(f"{where}: an index {index.name!r} of server {index.server}")
        servers.add(index.server)
        _check_range(f"{where}: {index.name}: bytes", index.bytes, INDEX_BYTES_MAX, "bytes")
        _check_range(f"{where}: {index.name}", index.crc32c, _U32_MAX, "checksum")
    return manifest


def encode_index(index: Index) -> bytes:
    """The bytes of an index."""
    data = msgspec.json.encode(index)
    if len(data) > INDEX_BYTES_MAX:
        raise InvalidArgument(f"checkpoint: an index of {len(data)} bytes; at most {INDEX_BYTES_MAX} are read again")
    return data


def decode_index(data: Any, where: str) -> Index:
    """Of such bytes, whose checksum was right; `where` they come from, for errors."""
    _check_version(data, where)
    index: Index = decode(data, Index, where)
    for number, block in enumerate(index.blocks):
        if block.name != block_name(index.server, number):
            raise CorruptCheckpoint(
                f"{where}: expected {block_name(index.server, number)!r} as block {number}, saw {block.name[:80]!r}"
            )
        _check_range(f"{where}: {block.name}", block.bytes, BLOCK_FILE_BYTES_MAX, "bytes")
        _check_range(f"{where}: {block.name}", block.crc32c, _U32_MAX, "checksum")
    room = sum(block.bytes for block in index.blocks)
    for shard in index.shards:
        check_shard(shard, len(index.blocks), f"{where}: shard {shard.shard} of {shard.object[:80]!r}")
        room -= sum(math.prod(array.shape) * np.dtype(DTYPES[array.dtype]).itemsize for array in shard.arrays)
        if room < 0:
            raise CorruptCheckpoint(f"{where}: shard {shard.shard} of {shard.object!r} has more numbers than blocks do")
    return index


def check_shard(shard: Shard, blocks: int, where: str) -> None:
    for value in (shard.facts.version, shard.facts.count, shard.facts.made, shard.facts.fingerprint):
        _check_range(where, value, _U64_MAX, "facts")
    for record in shard.facts.records:
        _check_range(where, record.rank, _U32_MAX, "rank")
        for value in (record.incarnation, record.sequence, record.clock):
            _check_range(where, value, _U64_MAX, "record")
    arrays = {array.name: array for array in shard.arrays}
    if len(arrays) != len(shard.arrays):
        raise CorruptCheckpoint(f"{where}: an array is in it twice")
    for array in shard.arrays:
        _check_dtype(where, array.dtype)
        if "/" in array.name:
            raise CorruptCheckpoint(f"{where}: expected a name without '/', saw {array.name[:80]!r}")
    lengths: dict[str, list[tuple[int, int]]] = {name: [] for name in arrays}
    for number, piece in enumerate(shard.pieces):
        if piece.name != piece_name(shard.object, shard.shard, number):
            raise CorruptCheckpoint(f"{where}: piece {number} is called {piece.name[:80]!r}")
        if piece.block >= blocks or len(set(piece.arrays)) != len(piece.arrays) or not arrays.keys() >= {*piece.arrays}:
            raise CorruptCheckpoint(
                f"{where}: piece {number} is in a block or of an array that the index does not have"
            )
        for name in piece.arrays:
            lengths[name].append((piece.offset, piece.length))
    for name, runs in lengths.items():
        if (wrong := gap_in(runs, arrays[name].shape[0])) is not None:
            raise CorruptCheckpoint(f"{where}: {name!r}: {wrong}")
    keys = arrays.get("keys")
    if keys is not None and keys.shape[0] != shard.facts.rows:
        raise CorruptCheckpoint(f"{where}: expected {shard.facts.rows} rows, saw {keys.shape[0]} keys")


def piece_name(object: str, shard: int, number: int) -> str:
    """Of a piece: what its arrays are called by in the block, before the last slash."""
    return f"{object}#{shard}.{number}"


def gap_in(runs: list[tuple[int, int]], length: int) -> str | None:
    """What is wrong with runs (offset, length) that should cover so much, each part once; None if nothing is."""
    at = 0
    for offset, n in sorted(runs):
        if offset != at:
            return f"expected the next piece at {at}, saw one at {offset}"
        at += n
    return None if at == length else f"expected {length} entries in its pieces, saw {at}"


def _check_dtype(where: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise CorruptCheckpoint(f"{where}: expected dtype {', '.join(DTYPES)}, saw {dtype[:20]!r}")


def _check_range(where: str, value: int, most: int, what: str) -> None:
    if value > most:
        raise CorruptCheckpoint(f"{where}: {what}: expected at most {most}, saw {value}")


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
