"""Files by paths, globs and URLs, and parts of them: ranges of bytes that begin and end with lines."""

import dataclasses
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from windlass._errors import InvalidArgument, NotFound, StorageFailed
from windlass._objects.arrays import is_whole

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PORTION_BYTES = 64 << 20
_BLOCK_BYTES = 32 << 20
_MAGIC = frozenset("*?[")

Path: TypeAlias = str | os.PathLike[str]
Part: TypeAlias = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Block:
    """Whole lines of one file."""

    name: str
    begin: int  #: where in the file; of a compressed one, in what it unpacks to
    data: bytes

    def where(self, line: int) -> str:
        """Of a line of it, counted from 0, for messages."""
        begin = self.begin + sum(map(len, self.data.split(b"\n", line)[:line])) + line
        return f"{self.name}, byte {begin}"


@dataclasses.dataclass(frozen=True)
class _File:
    system: "AbstractFileSystem"
    path: str
    name: str
    bytes: int
    compression: str | None

    def open(self) -> Any:
        """For reading bytes, unpacked ones if it is compressed."""
        try:
            return self.system.open(self.path, "rb", compression=self.compression)
        except (OSError, ValueError) as error:
            raise StorageFailed(f"{self.name}: {error}") from error


class Files:
    """Files in the order of their names, as one run of bytes that can be cut into parts.

    where: a path, a glob, a folder, a URL that fsspec knows, or a list of them, whose order stays.
    """

    def __init__(self, where: "Path | Sequence[Path]") -> None:
        given = [where] if isinstance(where, (str, os.PathLike)) else list(where)
        if not given:
            raise InvalidArgument("data: expected at least one file, not an empty list")
        self._files = [file for one in given for file in _found(os.fspath(one))]

    @property
    def names(self) -> list[str]:
        """Of all files."""
        return [file.name for file in self._files]

    @property
    def bytes(self) -> int:
        """Of all files together, compressed ones as they lie there."""
        return sum(file.bytes for file in self._files)

    def portions(self, size: int = PORTION_BYTES) -> int:
        """How many parts of about so many bytes there are: for a lease, whose samples are numbers of parts."""
        return max(1, -(-self.bytes // size))

    def blocks(self, part: Part = (0, 1), size: int = _BLOCK_BYTES) -> Iterator[Block]:
        """The lines of a part, (i, n), in blocks of about so many bytes."""
        number, count = checked_part(part)
        begin, end = (self.bytes * i // count for i in (number, number + 1))
        at = 0
        for file in self._files:
            first, last = max(begin - at, 0), min(end - at, file.bytes)
            at += file.bytes
            if first >= last:
                continue
            if file.compression is None:
                yield from _lines_of(file, first, last, size)
            elif first == 0:  # it is whoever's its first byte is
                yield from _unpacked(file, size)


def checked_part(part: Part) -> Part:
    """The same. Raises InvalidArgument."""
    number, count = part if isinstance(part, tuple) and len(part) == 2 else (None, None)
    if not (is_whole(number) and is_whole(count)) or not 0 <= int(number) < int(count):
        raise InvalidArgument(f"data: expected part=(i, n) with 0 <= i < n, not {part!r}")
    return part


def _found(where: str) -> list[_File]:
    import fsspec
    from fsspec.utils import infer_compression

    try:
        system, path = fsspec.core.url_to_fs(where)
        if any(letter in _MAGIC for letter in where) and not system.exists(path):
            paths = sorted(one for one in system.glob(path) if system.isfile(one))
        elif system.isdir(path):
            names = system.find(path, maxdepth=1)
            paths = sorted(one for one in names if not one.rpartition("/")[2].startswith("."))
        else:
            paths = [path] if system.exists(path) else []
        sizes = [int(system.size(one)) for one in paths]
    except (OSError, ValueError, ImportError) as error:
        raise StorageFailed(f"data: {where}: {error}") from error
    if not paths:
        raise NotFound(f"data: there is no file {where}")
    local = "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,))
    names = paths if local else [system.unstrip_protocol(one) for one in paths]
    return [
        _File(system, one, name, size, infer_compression(one))
        for one, name, size in zip(paths, names, sizes, strict=True)
    ]


def _lines_of(file: _File, begin: int, end: int, size: int) -> Iterator[Block]:
    """Lines whose first bytes are in the range."""
    with file.open() as stream:
        at = max(begin - 1, 0)
        stream.seek(at)
        if begin > 0:
            at += len(stream.readline())  # the end of a line that another part has
        while at < end:
            data = _read(file, stream, min(size, end - at))
            if not data:
                raise StorageFailed(f"{file.name}: it ends at byte {at}, and had {file.bytes} bytes before")
            if not data.endswith(b"\n"):
                data += stream.readline()
            yield Block(file.name, at, data)
            at += len(data)


def _unpacked(file: _File, size: int) -> Iterator[Block]:
    with file.open() as stream:
        at = 0
        while data := _read(file, stream, size):
            if not data.endswith(b"\n"):
                data += stream.readline()
            yield Block(file.name, at, data)
            at += len(data)


def _read(file: _File, stream: IO[bytes], size: int) -> bytes:
    try:
        return stream.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise StorageFailed(f"{file.name}: {error or 'it is cut off'}") from error
