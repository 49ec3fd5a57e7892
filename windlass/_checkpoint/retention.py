"""Which checkpoints of an app stay, and which go."""

from collections.abc import Collection
from typing import NamedTuple

from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import Manifest
from windlass._checkpoint.names import MANIFEST, Place
from windlass._checkpoint.reader import Checkpoint, Passed, by_age
from windlass._errors import CorruptCheckpoint, InvalidArgument, StorageFailed


class Pruned(NamedTuple):
    """What prune() did."""

    removed: list[Place]
    passed: list[Passed]  #: damaged ones, or of another version: they stay and count for nothing


def prune(folder: Folder, app: str, keep: int, writing: Collection[str] = ()) -> Pruned:
    """Keeps the newest `keep` complete checkpoints, whatever has a tag, and those of chosen objects.

    Half-written ones go too, if they were last written before the newest complete one was, and their id is not among
    `writing`. A checkpoint that cannot be read stays: somebody may want to look at it, or a later version can read it.
    """
    if keep < 1:
        raise InvalidArgument(f"checkpoint: expected to keep at least 1, not {keep}")
    good, passed = by_age(folder, app)
    half = [one for one in passed if one.half_written]
    damaged = [one for one in passed if not one.half_written]
    removed, kept, complete_at = [], 0, 0.0
    for entry, manifest in good:
        try:
            Checkpoint(folder, entry, manifest)
        except (CorruptCheckpoint, StorageFailed) as error:
            damaged.append(Passed(entry.place, str(error)))
            continue
        complete_at = max(complete_at, entry.files[MANIFEST].changed)
        if _counts(manifest):
            kept += 1
            if kept > keep:
                folder.remove(entry.place)
                removed.append(entry.place)
    for one in half:
        entry = folder.entry(one.place)
        if one.place.id not in writing and not entry.complete and entry.changed < complete_at:
            folder.remove(one.place)
            removed.append(one.place)
    return Pruned(removed, damaged)


def _counts(manifest: Manifest) -> bool:
    return manifest.tag is None and not manifest.partial
