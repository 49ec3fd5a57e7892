"""A store at a URL that fsspec knows: each file is one PUT, and there once that is over."""

import contextlib
import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from windlass import _core
from windlass._checkpoint.layout import FileRef
from windlass._checkpoint.store import Bytes, Found, Pace, failed, wrong_size
from windlass._errors import InvalidArgument, WindlassError

_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "created")  # what file systems call it
#: Their clients would make a bucket where the name of one was mistyped.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2"}


class RemoteStore:
    """See Store."""

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            more = ": pip install windlass[s3]" if url.startswith(("s3:", "s3a:")) else ""
            raise InvalidArgument(f"checkpoint: {url}: {error}{more}") from None
        except ValueError as error:
            raise InvalidArgument(f"checkpoint: {url}: {error}") from None
        self._root = self._root.rstrip("/")
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else {*self._fs.protocol}
        self._has_folders = not protocols & _WITHOUT_FOLDERS
        self.url = url.rstrip("/")

    def folders(self, path: str) -> list[str]:
        return [_last(entry["name"]) for entry in self._list(path) if entry["type"] == "directory"]

    def files(self, path: str) -> dict[str, Found]:
        return {
            _last(entry["name"]): Found(int(entry["size"]), _changed(entry))
            for entry in self._list(path)
            if entry["type"] == "file" and entry.get("size") is not None and not entry.get("islink")
        }

    def write(
        self,
        path: str,
        name: str,
        parts: Sequence[Any],
        pace: Pace | None = None,
        taken: Callable[[], None] | None = None,
    ) -> FileRef:
        del taken  # a copy travels: while it does, no other block is to be made
        data = b"".join(parts)
        if pace is not None:
            pace.take(len(data))
        at = self._at(path, name)
        with self._failing(f"{path}/{name}", "cannot be written"):
            try:
                self._fs.pipe_file(at, data)
            except FileNotFoundError:
                if not self._has_folders:
                    raise
                self._fs.makedirs(self._at(path), exist_ok=True)
                self._fs.pipe_file(at, data)
        return FileRef(name, len(data), _core.crc32c(data))

    def settle(self, path: str) -> None:
        pass

    def read(self, path: str, name: str, expected: int) -> tuple[Bytes, int]:
        with self._failing(f"{path}/{name}", "cannot be read"):
            data = self._fs.cat_file(self._at(path, name), start=0, end=expected + 1)
            if len(data) != expected:
                raise wrong_size(f"{self.url}/{path}/{name}", expected, len(data))
        return np.frombuffer(data, np.uint8), _core.crc32c(data)

    def remove(self, path: str, names: Iterable[str]) -> None:
        for name in names:
            with self._failing(f"{path}/{name}", "cannot be removed"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(path, name))

    def remove_folder(self, path: str) -> None:
        with contextlib.suppress(Exception):  # many stores have none
            self._fs.rmdir(self._at(path))

    def _at(self, *path: str) -> str:
        return "/".join((self._root, *(one for one in path if one)))

    def _list(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with self._failing(path, "cannot be listed"), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            found = self._fs.ls(self._at(path), detail=True)
        return [entry for entry in found if entry["name"].strip("/") != self._at(path).strip("/")]

    @contextlib.contextmanager
    def _failing(self, path: str, what: str) -> Iterator[None]:
        try:
            yield
        except WindlassError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise failed(f"{self.url}/{path}", what, error) from error


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _changed(entry: dict[str, Any]) -> float:
    value = next((entry[key] for key in _CHANGED if entry.get(key) is not None), 0.0)
    return value.timestamp() if isinstance(value, datetime.datetime) else float(value)
