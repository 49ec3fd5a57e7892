"""What the scheduler does about checkpoints beside its state: reads one to begin with, and writes manifests."""

import contextlib
import dataclasses
import logging
import time

import msgspec

import windlass
from windlass import _core
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import SAFETENSORS, IndexRef, Manifest, Object, opaque, plain
from windlass._checkpoint.names import Place
from windlass._checkpoint.reader import Checkpoint, by_age, find, newest
from windlass._checkpoint.retention import prune
from windlass._checkpoint.writer import write_manifest
from windlass._errors import CorruptCheckpoint, NotFound, StorageFailed
from windlass.control.leases import Saved as SavedLedger
from windlass.control.messages import SplitPlace
from windlass.control.resume import Resume
from windlass.control.saves import Save

_log = logging.getLogger("windlass.scheduler")
NEWEST = "newest"
_OLDER_MAX = 3  # that are tried if the newest is damaged
_NOTHING = msgspec.Raw(b"null")


class Checkpoints:
    """The folder of a cluster's checkpoints. write() and prune() are called from a thread."""

    def __init__(
        self, where: str, keep: int, resume: str | None = None, app: str = "", since: float | None = None
    ) -> None:
        """`resume`: which one of `app` to begin with, or NEWEST. `since`: the newest goes before that, if it was taken
        later, in seconds since 1970. Raises NotFound, CorruptCheckpoint.
        """
        self._folder = Folder(where)
        self._keep = keep
        self.resume: Resume | None = None
        if since is not None:
            latest = newest(self._folder, app).checkpoint
            if latest is not None and latest.manifest.created >= since:
                resume = NEWEST
        if resume == NEWEST:
            found, passed = newest(self._folder, app)
            for place, why, *_ in passed:
                _log.warning("checkpoint %s is passed over: %s", place.name, why)
            if found is None:
                raise NotFound(f"{where}: there is no checkpoint of app {app!r} to resume from")
            self.resume = dataclasses.replace(resume_of(found), older=self._older_than(found, app))
        elif resume is not None:
            self.resume = resume_of(Checkpoint.open(self._folder, find(self._folder, app, resume)))

    def _older_than(self, newest: Checkpoint, app: str) -> list[Resume]:
        """What else one can go on from, should a block be damaged."""
        older: list[Resume] = []
        good, _ = by_age(self._folder, app)
        for entry, manifest in good:
            if manifest.partial or entry.place == newest.place or len(older) == _OLDER_MAX:
                continue
            with contextlib.suppress(CorruptCheckpoint, StorageFailed):
                older.append(resume_of(Checkpoint(self._folder, entry, manifest)))
        return older

    def write(self, save: Save, specs: list[bytes]) -> str:
        """Makes it complete. What went wrong, if anything did."""
        try:
            indexes = [
                IndexRef(said.name, said.bytes, said.crc32c, server, said.blocks, said.block_bytes)
                for server, said in sorted(save.indexes.items())
            ]
            manifest = Manifest(
                save.id,
                save.app,
                save.clock,
                time.time(),
                windlass.__version__,
                [object_of(spec) for spec in specs],
                indexes,
                save.tag,
                save.partial,
                save.world_size,
                opaque(save.ledgers),
                {name: msgspec.Raw(note) for name, note in save.notes.items()},
                {str(rank): msgspec.Raw(extra) for rank, extra in save.extra.items()},
                opaque({str(rank): places for rank, places in save.places.items()}) if save.places else _NOTHING,
            )
            write_manifest(self._folder, manifest)
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def written_at(self, app: str, clock: int, id: str) -> float | None:
        """When the manifest of a checkpoint was written; None: there is none that can be read."""
        with contextlib.suppress(CorruptCheckpoint, StorageFailed, NotFound):
            return Checkpoint.open(self._folder, Place(app, clock, id)).manifest.created
        return None

    def prune(self, app: str, writing: set[str]) -> None:
        """Removes older ones, but not those that are being written."""
        try:
            prune(self._folder, app, self._keep, writing)
        except Exception as error:
            _log.warning("checkpoints: older ones stay: %s", error)


def object_of(spec: bytes) -> Object:
    """What the manifest says of an object."""
    name, is_table, shape, dtype, shards, description, sync = _core.spec_facts(spec)
    return Object(name, "table" if is_table else "tensor", SAFETENSORS[dtype], shape, shards, spec, description, sync)


def resume_of(checkpoint: Checkpoint) -> Resume:
    """What the scheduler's state has to know."""
    manifest = checkpoint.manifest
    where = checkpoint.folder.where(checkpoint.place)
    ledgers = plain(manifest.ledgers, dict[str, SavedLedger] | None, where) or {}
    extra = {int(rank): bytes(value) for rank, value in manifest.extra.items()}
    specs = [one.spec for one in manifest.objects]
    splits = plain(manifest.splits, dict[str, dict[str, SplitPlace]] | None, where) or {}
    places = {int(rank): of for rank, of in splits.items() if rank.isdecimal()}
    found = Resume(manifest.id, manifest.app, manifest.clock, manifest.world_size, specs, ledgers, extra, places)
    return dataclasses.replace(found, created=manifest.created)
