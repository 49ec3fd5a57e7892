"""A folder of checkpoints: which there are, and what lies in each.

A checkpoint without a manifest is half-written: somebody is still writing it, or died over it. Nobody reads it.
"""

import os
from typing import NamedTuple

from windlass._checkpoint.layout import MANIFEST_BYTES_MAX, FileRef, Manifest, decode_manifest
from windlass._checkpoint.names import MANIFEST, TEMPORARY, Place, check_file_name, is_ours, place_of, unescape
from windlass._checkpoint.store import Bytes, Found, Store, store_at, wrong_size
from windlass._errors import CorruptCheckpoint


class Entry(NamedTuple):
    """A checkpoint as it lies there, its files unread."""

    place: Place
    files: dict[str, Found]

    @property
    def complete(self) -> bool:
        """Whether its manifest was written."""
        return MANIFEST in self.files

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def changed(self) -> float:
        """When a file of it was last written, by the clock of whoever keeps the files; 0: unknown."""
        return max((file.changed for file in self.files.values()), default=0.0)


class Folder:
    """Checkpoints of any number of apps, in a local directory or at a URL. It need not exist yet."""

    def __init__(self, where: "str | os.PathLike[str] | Store") -> None:
        self.store: Store = store_at(where) if isinstance(where, (str, os.PathLike)) else where

    def apps(self) -> list[str]:
        """Apps that have checkpoints here, sorted."""
        named = (unescape(name) for name in self.store.folders(""))
        return sorted(app for app in named if app is not None and self.places(app))

    def places(self, app: str) -> list[Place]:
        """Of an app's checkpoints, by clock, complete or not."""
        root = Place(app, 0, "0" * 16).path.partition("/")[0]
        return sorted(place for name in self.store.folders(root) if (place := place_of(app, name)) is not None)

    def entry(self, place: Place) -> Entry:
        """What lies there of one."""
        return Entry(place, self.store.files(place.path))

    def entries(self, app: str) -> list[Entry]:
        """Of all of an app."""
        return [self.entry(place) for place in self.places(app)]

    def where(self, place: Place, name: str = "") -> str:
        """A checkpoint or a file of it, for people."""
        return "/".join((self.store.url, place.path, *([name] if name else [])))

    def read(self, place: Place, file: FileRef) -> Bytes:
        """A file as its reference says that it is; else CorruptCheckpoint."""
        name = check_file_name(file.name)
        data, seen = self.store.read(place.path, name, file.bytes)
        if seen != file.crc32c:
            where = self.where(place, name)
            raise CorruptCheckpoint(f"{where}: expected checksum {file.crc32c:#010x}, saw {seen:#010x}")
        return data

    def manifest(self, entry: Entry) -> Manifest:
        """The manifest of a checkpoint, checked."""
        where = self.where(entry.place, MANIFEST)
        found = entry.files.get(MANIFEST)
        if found is None:
            raise CorruptCheckpoint(f"{self.where(entry.place)}: half-written: there is no {MANIFEST}")
        if found.bytes > MANIFEST_BYTES_MAX:
            raise wrong_size(where, MANIFEST_BYTES_MAX, found.bytes)
        manifest = decode_manifest(self.store.read(entry.place.path, MANIFEST, found.bytes)[0], where)
        seen = Place(manifest.app, manifest.clock, manifest.id)
        if seen != entry.place:
            raise CorruptCheckpoint(f"{where}: it is that of checkpoint {seen.path}")
        return manifest

    def remove(self, place: Place) -> None:
        """Removes a checkpoint, its manifest first. Files that are not ours stay, and their folder with them."""
        names = [name for name in self.store.files(place.path) if is_ours(name)]
        if MANIFEST in names:
            self.store.remove(place.path, [MANIFEST])
        self.store.remove(place.path, [name for name in names if name != MANIFEST])
        self.store.remove_folder(place.path)

    def remove_files(self, place: Place, names: list[str]) -> None:
        """Removes files of a checkpoint, half-written ones too, and its folder if nothing else is in it."""
        for name in names:
            check_file_name(name)
        self.store.remove(place.path, [*names, *(name + TEMPORARY for name in names)])
        self.store.remove_folder(place.path)
