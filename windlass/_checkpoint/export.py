"""A checkpoint as plain safetensors, under the names that users know.

    tensor "w"                       w, w.STATE ...
    tensor with a note               each parameter that lies in it by its own name, and PARAMETER.STATE ...
    table "user"                     user.keys, user.weights, user.STATE ...

A plan says where in which file every number goes; then each block is read once, and its numbers are put there.
"""

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import numpy as np

from windlass._checkpoint.layout import DTYPES, Array, Object, ParameterNote, Shard, TensorNote, plain
from windlass._checkpoint.names import MANIFEST
from windlass._checkpoint.reader import Checkpoint, ReadPiece
from windlass._checkpoint.store import failed
from windlass._checkpoint.writer import safetensors_head
from windlass._errors import CorruptCheckpoint, InvalidArgument, NotFound, StorageFailed

FILE_BYTES_MAX = 4 << 30
_ENDING = ".safetensors"
_READ_BYTES = 64 << 20  # at once; the system takes 2 GiB
_WEIGHTS = ("keys", "weights")  # what is no state


@dataclasses.dataclass
class _Out:
    """An array that is written."""

    name: str
    dtype: str
    shape: list[int]
    first: int  #: of its elements, in the array of all shards that it comes from
    strides: list[int] | None = None  #: in which they lie there, if not row-major
    file: int = 0
    at: int = 0  #: its first byte in the file

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * np.dtype(DTYPES[self.dtype]).itemsize


@dataclasses.dataclass
class _Source:
    """An array of an object, all shards one behind the other."""

    width: int  #: elements of an entry
    base: dict[int, int]  #: the first entry of each shard
    outs: list[_Out]  #: sorted by their first element


def export(
    checkpoint: Checkpoint,
    to: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    names: Collection[str] | None = None,
    file_bytes_max: int = FILE_BYTES_MAX,
) -> list[str]:
    """Writes a file of safetensors at a path or URL; what is too large for one becomes several, with an index.

    names: of objects; default: all of the checkpoint's. weights_only: without the state of rules. Returns the files.
    """
    target = os.fspath(to)
    if not target.endswith(_ENDING):
        raise InvalidArgument(f"export: expected a file name that ends in {_ENDING}, saw {target!r}")
    sources = _plan(checkpoint, weights_only, _chosen(checkpoint, names))
    outs = [out for source in sources.values() for out in source.outs]
    seen: set[str] = set()
    for out in outs:
        if out.name in seen:
            raise InvalidArgument(f"export: two arrays are called {out.name!r}; choose objects by their names")
        seen.add(out.name)
    heads = _lay_out(outs, file_bytes_max)
    if "://" in target and not target.startswith("file://"):
        with tempfile.TemporaryDirectory(prefix="windlass-export-") as folder:
            base = target.rpartition("/")[2]
            local = _write(checkpoint, sources, heads, os.path.join(folder, base))
            return _upload(local, target)
    return _write(checkpoint, sources, heads, target.removeprefix("file://"))


def short_name(name: str) -> str:
    """An object's, without its app."""
    return name.partition("/")[2] or name


def _chosen(checkpoint: Checkpoint, names: Collection[str] | None) -> list[Object]:
    objects = checkpoint.manifest.objects
    if names is None:
        return objects
    for name in names:
        if not any(name in (one.name, short_name(one.name)) for one in objects):
            has = ", ".join(repr(short_name(one.name)) for one in objects) or "nothing"
            raise NotFound(f"{checkpoint.folder.where(checkpoint.place)}: {name!r} is not in it; it has {has}")
    return [one for one in objects if one.name in names or short_name(one.name) in names]


def _plan(checkpoint: Checkpoint, weights_only: bool, objects: list[Object]) -> dict[tuple[str, str], _Source]:
    sources = {}
    where = checkpoint.folder.where(checkpoint.place, MANIFEST)
    for one in objects:
        shards = checkpoint.shards(one.name)
        note = checkpoint.manifest.notes.get(one.name)
        parameters = plain(note, TensorNote, where).parameters if note is not None and one.kind == "tensor" else None
        for array in _arrays(shards, where):
            if weights_only and array not in _WEIGHTS:
                continue
            sources[one.name, array] = _source(one, shards, array, parameters, f"{where}: {one.name!r}")
    return sources


def _arrays(shards: list[Shard], where: str) -> list[str]:
    """Names of the arrays that shards have, in their order."""
    found: dict[str, Array] = {}
    for shard in shards:
        for array in shard.arrays:
            first = found.setdefault(array.name, array)
            if (first.dtype, first.shape[1:]) != (array.dtype, array.shape[1:]):
                raise CorruptCheckpoint(f"{where}: {array.name!r} of {shard.object!r} differs from shard to shard")
    return [*found]


def _source(one: Object, shards: list[Shard], name: str, parameters: list[ParameterNote] | None, where: str) -> _Source:
    """Where its numbers go."""
    base, entries = {}, 0
    like_weights = one.kind == "tensor"
    dtype, entry = one.dtype, [1]
    for shard in shards:
        base[shard.shard] = entries
        of = {array.name: array for array in shard.arrays}
        weights = of.get("weights")
        like_weights &= name in of and weights is not None and of[name].shape == weights.shape
        if name in of:
            entries += of[name].shape[0]
            dtype, entry = of[name].dtype, of[name].shape[1:]
    width = math.prod(entry)
    public = short_name(one.name)
    if one.kind == "tensor" and name == "weights" and entries * width != math.prod(one.shape):
        raise CorruptCheckpoint(
            f"{where}: expected {math.prod(one.shape)} numbers in its shards, saw {entries * width}"
        )
    ending = "" if one.kind == "tensor" and name == "weights" else f".{name}"
    if not like_weights:
        return _Source(width, base, [_Out(public + ending, dtype, [entries, *entry], 0)])
    if parameters is None:
        return _Source(width, base, [_Out(public + ending, dtype, list(one.shape), 0)])
    outs = [_Out(p.name + ending, dtype, list(p.shape), p.offset, _strides(p, where)) for p in parameters]
    outs.sort(key=lambda out: out.first)
    end = 0
    for out in outs:
        if out.first < end or out.first + out.elements > entries * width:
            raise CorruptCheckpoint(
                f"{where}: its note puts {out.elements} numbers of {out.name!r} at {out.first}; expected a place from "
                f"{end} to {entries * width}"
            )
        end = out.first + out.elements
    return _Source(width, base, outs)


def _strides(note: ParameterNote, where: str) -> list[int] | None:
    """None if the numbers are in row-major order. They fill their place without gaps, in whatever order."""
    if note.strides is None or math.prod(note.shape) < 2:
        return None
    row_major = [math.prod(note.shape[i + 1 :]) for i in range(len(note.shape))]
    expected = 1
    for stride, n in sorted(zip(note.strides, note.shape, strict=False)):
        if n != 1 and stride != expected:
            raise CorruptCheckpoint(f"{where}: its note says that {note.name!r} has strides {note.strides}")
        expected *= n
    if len(note.strides) != len(note.shape):
        raise CorruptCheckpoint(f"{where}: its note says that {note.name!r} has strides {note.strides}")
    return None if list(note.strides) == row_major else list(note.strides)


def _lay_out(outs: list[_Out], file_bytes_max: int) -> list[bytes]:
    """Gives every array its place; returns the heads of the files."""
    files: list[list[_Out]] = [[]]
    filled = 0
    for out in outs:
        if files[-1] and filled + out.bytes > file_bytes_max:
            files.append([])
            filled = 0
        files[-1].append(out)
        filled += out.bytes
    heads = []
    for number, file in enumerate(files):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for out in sorted(file, key=lambda out: -np.dtype(DTYPES[out.dtype]).itemsize):
            out.file, out.at = number, at
            at += out.bytes
            header[out.name] = {"dtype": out.dtype, "shape": out.shape, "data_offsets": (out.at, at)}
        heads.append(safetensors_head(header))
        for out in file:
            out.at += len(heads[-1])
    return heads


def _write(
    checkpoint: Checkpoint, sources: dict[tuple[str, str], _Source], heads: list[bytes], target: str
) -> list[str]:
    outs = [out for source in sources.values() for out in source.outs]
    paths = _paths(target, len(heads))
    index = target + ".index.json" if len(paths) > 1 else None
    with _files(paths) as fds:
        for number, head in enumerate(heads):
            end = max((out.at + out.bytes for out in outs if out.file == number), default=len(head))
            os.ftruncate(fds[number], end)
            _put(fds[number], head, 0)
        wanted = {(name, shard.shard) for name, _ in sources for shard in checkpoint.shards(name)}
        for piece in checkpoint.read(wanted):
            _put_piece(fds, sources, piece)
        for out in outs:
            if out.strides is not None:
                _reorder(fds[out.file], out)
    if index is not None:
        weight_map = {out.name: os.path.basename(paths[out.file]) for out in outs}
        text = msgspec.json.encode(
            {"metadata": {"total_size": sum(out.bytes for out in outs)}, "weight_map": weight_map}
        )
        with _files([index]) as fds:
            _put(fds[0], msgspec.json.format(text), 0)
        paths.append(index)
    return paths


def _paths(target: str, n: int) -> list[str]:
    stem = target.removesuffix(_ENDING)
    return [target] if n == 1 else [f"{stem}-{i + 1:05d}-of-{n:05d}{_ENDING}" for i in range(n)]


def _put_piece(fds: list[int], sources: dict[tuple[str, str], _Source], piece: ReadPiece) -> None:
    for name, array in piece.arrays.items():
        source = sources.get((piece.object, name))
        if source is None:
            continue
        flat = array.reshape(-1)
        begin = (source.base[piece.shard] + piece.offset) * source.width
        for out in source.outs:
            first, end = max(begin, out.first), min(begin + len(flat), out.first + out.elements)
            if first < end:
                part = flat[first - begin : end - begin]
                _put(fds[out.file], part.view(np.uint8), out.at + (first - out.first) * flat.itemsize)


def _reorder(fd: int, out: _Out) -> None:
    """Puts numbers into row-major order, in place."""
    dtype = np.dtype(DTYPES[out.dtype])
    data = np.empty(out.elements, dtype)
    view = data.view(np.uint8).data
    for at in range(0, out.bytes, _READ_BYTES):
        os.preadv(fd, [view[at : at + _READ_BYTES]], out.at + at)
    strides = [stride * dtype.itemsize for stride in out.strides or ()]
    ordered = np.lib.stride_tricks.as_strided(data, out.shape, strides, writeable=False)
    _put(fd, np.ascontiguousarray(ordered).reshape(-1).view(np.uint8), out.at)


def _put(fd: int, data: Any, at: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n


@contextlib.contextmanager
def _files(paths: list[str]) -> Iterator[list[int]]:
    """New files, which get their names once they are complete; none of them if something fails."""
    fds: list[int] = []
    made = []
    try:
        for path in paths:
            fds.append(os.open(path + ".tmp", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
            made.append(path + ".tmp")
        yield fds
        for fd, path in zip(fds, paths, strict=True):
            os.fsync(fd)
            os.rename(path + ".tmp", path)
    except StorageFailed:
        raise
    except OSError as error:
        raise failed(paths[0], "cannot be written", error) from error
    finally:
        for fd in fds:
            os.close(fd)
        for path in made:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _upload(local: list[str], target: str) -> list[str]:
    import fsspec

    fs, path = fsspec.core.url_to_fs(target)
    written = []
    for file in local:
        name = os.path.basename(file)
        fs.put_file(file, f"{path.rpartition('/')[0]}/{name}")
        written.append(f"{target.rpartition('/')[0]}/{name}")
    return written
