"""Where files lie: a local directory, or any URL that fsspec knows. A file there is whole, or not there.

A store knows of paths below its root and of nothing else; names have been checked before they come here.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from windlass._checkpoint.layout import FileRef
from windlass._errors import CorruptCheckpoint, InvalidArgument, StorageFailed

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
#: What is written at once, and checksummed while the cache has it.
CHUNK_BYTES = 1 << 20


class Found(NamedTuple):
    """A file that lies there."""

    bytes: int
    changed: float  #: seconds since 1970; 0: unknown


class Pace:
    """Holds writers, of any thread, to so many bytes a second."""

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise InvalidArgument(f"checkpoint: expected a rate of more than 0 bytes/s, saw {bytes_per_second}")
        self._seconds_per_byte = 1.0 / bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, n: int) -> None:
        """Waits for the turn of n bytes."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + n * self._seconds_per_byte
        if begin > now:
            time.sleep(begin - now)


class Store(Protocol):
    """One place."""

    url: str

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a folder; none where there is no such folder."""

    def files(self, path: str) -> dict[str, Found]:
        """The files in a folder, without links and devices; likewise."""

    def write(
        self,
        path: str,
        name: str,
        parts: Sequence[Any],
        pace: Pace | None = None,
        taken: Callable[[], None] | None = None,
    ) -> FileRef:
        """A file of these buffers, one behind the other. It has its name once it is complete.

        taken: called when the buffers are no longer needed, which may be before the file is there to stay.
        """

    def settle(self, path: str) -> None:
        """What was written to a folder is there after a loss of power, too."""

    def read(self, path: str, name: str, expected: int) -> tuple[Bytes, int]:
        """A file of so many bytes, and its CRC32C; CorruptCheckpoint if it has more or fewer."""

    def remove(self, path: str, names: Iterable[str]) -> None:
        """Removes files; those that are not there do not matter."""

    def remove_folder(self, path: str) -> None:
        """Removes a folder, if nothing lies in it any more."""


def store_at(url: str | os.PathLike[str]) -> Store:
    """The store at a path or URL."""
    from windlass._checkpoint.local import LocalStore

    text = os.fspath(url)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgument(f"checkpoint: expected a path or a URL, saw {text!r}")
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text:
        return LocalStore(text)
    from windlass._checkpoint.remote import RemoteStore

    return RemoteStore(text)


def wrong_size(where: str, expected: int, seen: int) -> CorruptCheckpoint:
    """Of a file that was cut off or extended."""
    return CorruptCheckpoint(f"{where}: expected {expected} bytes, saw {seen}")


def failed(where: str, what: str, error: BaseException) -> StorageFailed:
    """An error of the system's in our words."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    wrapped = StorageFailed(f"{where}: {what}: {why}")
    with contextlib.suppress(AttributeError):
        wrapped.errno = error.errno  # type: ignore[attr-defined]
    return wrapped
