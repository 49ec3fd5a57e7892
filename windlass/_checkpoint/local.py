"""A store in a local directory.

NAME.tmp: write, fsync, rename to NAME, ... settle: fsync of the folder
"""

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from windlass import _core
from windlass._checkpoint.layout import FileRef
from windlass._checkpoint.names import TEMPORARY
from windlass._checkpoint.store import CHUNK_BYTES, Bytes, Found, Pace, failed, wrong_size

_BUFFERS_MAX = 512  # of one writev; the system takes 1024
_EARLY_BYTES = 8 << 20  # the disk begins with them while the next are written
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # not to wait for the writer of a named pipe
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalStore:
    """See Store."""

    def __init__(self, root: str) -> None:
        self.url = os.path.abspath(root)
        self._making = threading.Lock()  # of folders

    def folders(self, path: str) -> list[str]:
        with _failing(where := self._at(path), "cannot be listed"):
            return [entry.name for entry in _entries(where) if entry.is_dir(follow_symlinks=False)]

    def files(self, path: str) -> dict[str, Found]:
        found = {}
        with _failing(where := self._at(path), "cannot be listed"):
            for entry in _entries(where):
                with contextlib.suppress(FileNotFoundError):  # renamed or removed since
                    if entry.is_file(follow_symlinks=False):
                        about = entry.stat(follow_symlinks=False)
                        found[entry.name] = Found(about.st_size, about.st_mtime)
        return found

    def write(
        self,
        path: str,
        name: str,
        parts: Sequence[Any],
        pace: Pace | None = None,
        taken: Callable[[], None] | None = None,
    ) -> FileRef:
        where = self._at(path, name)
        with _failing(where, "cannot be written"):
            with self._making:
                self._make(self._at(path))
            try:
                fd = os.open(where + TEMPORARY, _WRITE, 0o666)
                try:
                    written, crc = _write(fd, parts, pace)
                    if taken is not None:
                        taken()
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(where + TEMPORARY, where)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(where + TEMPORARY)
                raise
        return FileRef(name, written, crc)

    def settle(self, path: str) -> None:
        with _failing(where := self._at(path), "cannot be written"):
            _sync_folder(where)

    def read(self, path: str, name: str, expected: int) -> tuple[Bytes, int]:
        where = self._at(path, name)
        with _failing(where, "cannot be read"):
            fd = os.open(where, _READ)
            try:
                about = os.fstat(fd)
                if not stat.S_ISREG(about.st_mode) or about.st_size != expected:
                    raise wrong_size(where, expected, about.st_size)
                data = np.empty(expected, np.uint8)
                crc = at = 0
                while at < expected:
                    n = os.readv(fd, [data[at : at + CHUNK_BYTES].data])
                    if n == 0:
                        raise wrong_size(where, expected, at)
                    crc = _core.crc32c(data[at : at + n], crc)
                    at += n
            finally:
                os.close(fd)
        return data, crc

    def remove(self, path: str, names: Iterable[str]) -> None:
        for name in names:
            with _failing(where := self._at(path, name), "cannot be removed"), contextlib.suppress(FileNotFoundError):
                os.unlink(where)
        with _failing(where := self._at(path), "cannot be written"), contextlib.suppress(FileNotFoundError):
            _sync_folder(where)

    def remove_folder(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._at(path))

    def _at(self, *path: str) -> str:
        return os.path.join(self.url, *path)

    def _make(self, path: str) -> None:
        """A folder and those above it, there to stay."""
        if os.path.isdir(path):
            return
        above = os.path.dirname(path)
        self._make(above)
        with contextlib.suppress(FileExistsError):  # somebody else made it just now
            os.mkdir(path)
        _sync_folder(above)


def _entries(path: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _write(fd: int, parts: Sequence[Any], pace: Pace | None) -> tuple[int, int]:
    """Writes buffers; returns their bytes and checksum."""
    crc = total = begun = 0
    for batch in _batches(parts):
        for chunk in batch:
            crc = _core.crc32c(chunk, crc)
        n = sum(chunk.nbytes for chunk in batch)
        if pace is not None:
            pace.take(n)
        total += n
        while batch:
            done = os.writev(fd, batch)
            while batch and done >= batch[0].nbytes:
                done -= batch.pop(0).nbytes
            if batch and done:
                batch[0] = batch[0][done:]
        if total - begun >= _EARLY_BYTES:
            _begin_to_sync(fd, begun, total - begun)
            begun = total
    return total, crc


def _begin_to_sync(fd: int, at: int, n: int) -> None:
    """Has the system write these bytes to the disk, without waiting: else it would begin at the fsync."""
    with contextlib.suppress(OSError):  # the fsync does it all
        os.posix_fadvise(fd, at, n, os.POSIX_FADV_DONTNEED)


def _batches(parts: Sequence[Any]) -> Iterator[list[memoryview]]:
    """What is written at once: pieces of large buffers, small ones together."""
    batch: list[memoryview] = []
    room = CHUNK_BYTES
    for part in parts:
        view = memoryview(part)
        at = 0
        while at < view.nbytes:
            chunk = view[at : at + room]
            batch.append(chunk)
            at += chunk.nbytes
            room -= chunk.nbytes
            if room == 0 or len(batch) == _BUFFERS_MAX:
                yield batch
                batch, room = [], CHUNK_BYTES
    if batch:
        yield batch


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _failing(where: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failed(where, what, error) from error
