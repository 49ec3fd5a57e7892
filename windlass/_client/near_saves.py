"""Checkpoints of an engine inside the process: the same calls and the same files as of a cluster, without a scheduler.

    save()   arms in the caller's thread; a thread of its own writes, as a server does, and then the manifest
    resume() objects are made and filled before anybody trains; workers begin at the cut's clock

In files objects belong to the app that WINDLASS_APP names, so a cluster can go on where a process stopped, and a
process where a cluster did.
"""

import contextlib
import json
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, TypeVar

from windlass import _core
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.loading import fill
from windlass._checkpoint.names import Place
from windlass._checkpoint.reader import Checkpoint, by_age, find
from windlass._checkpoint.saving import Saving
from windlass._checkpoint.writer import ServerFiles
from windlass._client.saving import Resumed, SavedCheckpoint
from windlass._errors import (
    CheckpointFailed,
    CorruptCheckpoint,
    InvalidArgument,
    NotFound,
    SpecMismatch,
    StorageFailed,
)
from windlass._objects.named import rule_in
from windlass._release import owns_native
from windlass._rules.user_rules import UserRule
from windlass._specs import like_of, settled_in
from windlass.control import messages as m
from windlass.control.manifests import Checkpoints, resume_of
from windlass.control.resume import Resume
from windlass.control.saves import Save

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster
    from windlass._client.near import Near, SaveTerms

_KEPT_PER_RANK = 8
_LOOK_SECONDS = 0.1
_PLACES_SECONDS = 5.0
_STALL_SECONDS = 15.0  # without a byte, at the end: a shard waits for a worker that is gone, or a disk hangs
_APP = "embedded"  # what the core calls the app inside a process
_log = logging.getLogger("windlass")
T = TypeVar("T")


@owns_native("_engine")
class NearSaves:
    """Those of one engine. Any of its workers may call."""

    def __init__(self, engine: _core.Engine, near: "Near", terms: "SaveTerms") -> None:
        self._engine = engine
        self._near = weakref.ref(near)  # who has us
        self.terms = terms
        self.resumed: Resume | None = None
        self.said: list[str] = []  #: what is not as it was in the checkpoint
        self._unopened: dict[str, Checkpoint] = {}  # objects as they were that nobody has opened yet
        self._opening = threading.RLock()  # of that
        self._lock = threading.Lock()  # of what follows
        self._going: tuple[SavedCheckpoint, Saving, threading.Thread] | None = None
        self._kept: dict[int, list[tuple[int, bytes]]] = {}

    @property
    def _shelf(self) -> _core.Shelf:
        return _core.Shelf(self._engine)

    def _workers(self) -> "list[Cluster]":
        near = self._near()
        return [] if near is None else [one for one in list(near.workers) if not one._session.closed]

    # -- saving ------------------------------------------------------------------------------------------------------

    def keep(self, rank: int, clock: int, extra: bytes) -> None:
        """What a worker wants back."""
        with self._lock:
            kept = self._kept.setdefault(rank, [])
            kept.append((clock, extra))
            del kept[:-_KEPT_PER_RANK]

    def save(
        self,
        cluster: "Cluster",
        tag: str | None,
        names: list[str] | None,
        extra: bytes,
        to: "str | os.PathLike[str] | None",
        notes: dict[str, bytes],
    ) -> SavedCheckpoint:
        """Between two iterations of this worker, which has settled."""
        what, clock = "save" if tag is None else f"save {tag!r}", cluster.clock
        where = self.terms.where if to is None else os.fspath(to)
        if where is None:
            raise InvalidArgument(
                f"{what}: there is no place for it; give to=, or connect(checkpoint_dir=), or WINDLASS_CHECKPOINT_DIR"
            )
        shelf = self._shelf
        own = {name.partition("/")[2]: number for number, name in shelf.objects()}
        if names is not None and (missing := sorted(set(names) - set(own))):
            raise NotFound(f"{what}: there is no object {missing[0]!r}")
        numbers = sorted(own.values() if names is None else {own[name] for name in names})
        with self._lock:
            if self._going is not None and not self._going[0].done:
                raise InvalidArgument(f"{what}: another one, {self._going[0].id}, is being taken")
            kept = {
                rank: fitting[-1]
                for rank, of in self._kept.items()
                if (fitting := [value for at, value in of if at <= clock])
            }
            if extra:
                kept[cluster.rank] = extra
            near, workers = self._near(), self._workers()
            assert near is not None
            save = Save(
                0,
                secrets.token_hex(8),
                self.terms.app,
                clock,
                tag,
                names is not None,
                numbers,
                0,
                0,
                {},
                near.saved_ledgers(),
                kept,
                {f"{self.terms.app}/{name}": note for name, note in notes.items()},
                max((worker.world_size for worker in workers), default=1),
            )
            for worker in workers:  # under BSP others may be behind the cut: they tell when they are there
                if worker._places:
                    worker._places.tell(clock, lambda at, rank=worker.rank: save.places.update({rank: at}))  # type: ignore[misc]
            files = ServerFiles(
                Folder(where), Place(save.app, clock, save.id), 0, bytes_per_second=self.terms.bytes_per_second
            )
            try:
                saving = Saving(shelf, numbers, clock, files, self.terms.app)
                saving.arm()
                made = SavedCheckpoint(save.id, clock)
                thread = threading.Thread(
                    target=self._write, args=(made, save, saving, where), name="windlass-checkpoint", daemon=True
                )
                thread.start()
            except BaseException:
                files.abort()
                raise
            self._going = made, saving, thread
        return made

    def _write(self, made: SavedCheckpoint, save: Save, saving: Saving, where: str) -> None:
        checkpoints = Checkpoints(where, self.terms.keep)
        try:
            index = saving.write()
            self._await_places()
            save.indexes[0] = m.Saved(0, "", index.name, index.bytes, index.crc32c, index.blocks, index.block_bytes)
            if why := checkpoints.write(save, saving.specs):
                raise CheckpointFailed(why)
        except Exception as error:
            text = f"checkpoint {made.id}: {error or type(error).__name__}"
            _log.error("%s", text)
            made._end(CheckpointFailed(text))
            return
        _log.info("checkpoint %s is complete", made.id)
        made._end(None)
        with self._lock:  # who would begin another one meanwhile waits
            checkpoints.prune(save.app, {save.id})

    def _await_places(self) -> None:
        """Workers that were behind the cut have got there: the shards have."""
        until = time.monotonic() + _PLACES_SECONDS
        while waiting := [worker for worker in self._workers() if worker._places.wanted]:
            for worker in waiting:
                worker._places.look()
            if time.monotonic() > until:
                _log.warning("checkpoint: it is not known how far workers %s have got", [one.rank for one in waiting])
                return
            time.sleep(_LOOK_SECONDS / 10)

    def look(self, cluster: "Cluster") -> None:
        """Between two iterations: whether a checkpoint is due. The one that is under way ends first."""
        if (self._going is None or self._going[0].done) and self.terms.is_due(cluster):
            workers = self._workers()
            lowest = min(worker.rank for worker in workers)
            for worker in workers:
                worker._saver.ask(worker.rank == lowest)

    def close(self) -> None:
        """Waits for what is being written; where nothing comes any more, it is given up."""
        with self._lock:
            going = self._going
        if going is None:
            return
        _, saving, thread = going
        seen = -1
        while thread.is_alive() and seen != saving.bytes:
            seen = saving.bytes
            until = time.monotonic() + _STALL_SECONDS
            while thread.is_alive() and seen == saving.bytes and time.monotonic() < until:
                thread.join(_LOOK_SECONDS)
        saving.cancel()
        thread.join(_STALL_SECONDS)

    # -- going on ----------------------------------------------------------------------------------------------------

    def resume_from(self, where: str, which: str | None) -> None:
        """which: an id, a tag or a folder's name; None: the newest good one. Raises NotFound, CorruptCheckpoint."""
        folder, app = Folder(where), self.terms.app
        if which is not None:
            self.resume(Checkpoint.open(folder, find(folder, app, which)))
            return
        good, passed = by_age(folder, app)
        for one in passed:
            _log.warning("checkpoint %s is passed over: %s", one.place.name, one.why)
        for entry, manifest in good:
            if manifest.partial:
                continue
            try:
                self.resume(Checkpoint(folder, entry, manifest))
                return
            except (CorruptCheckpoint, StorageFailed) as error:
                _log.warning("checkpoint %s is passed over: %s", entry.place.name, error)
        raise NotFound(f"{folder.store.url}: there is no checkpoint of app {app!r} to resume from")

    def resume(self, checkpoint: Checkpoint) -> None:
        """Makes the objects and fills them; workers that come from now on begin at its clock. All of it, or nothing."""
        manifest, near = checkpoint.manifest, self._near()
        assert near is not None
        resume = resume_of(checkpoint)
        names = [one.name.partition("/")[2] for one in manifest.objects]
        try:
            self._fill(checkpoint, names)
            near.restore_ledgers(resume.ledgers)
        except BaseException:
            self._remove(names)
            raise
        self._shelf.begin_at(manifest.clock)
        self.resumed = resume
        self._unopened = dict.fromkeys(names, checkpoint)
        if self.terms.iterations is not None:
            self.terms.at_clock = manifest.clock + self.terms.iterations
        _log.info("goes on from checkpoint %s, clock %d", manifest.id, manifest.clock)

    def _know(self, spec: bytes) -> None:
        """Registers the user's rule that an object has, where this process has imported it."""
        rule, shape, _ = rule_in(spec)
        if not isinstance(rule, UserRule):
            return
        near = self._near()
        assert near is not None
        name, is_table = rule._name(shape), _core.spec_facts(spec)[1]
        if not rule._is_here:
            raise InvalidArgument(f"{_core.spec_facts(spec)[0]!r}: import its rule {name.partition(' ')[0]!r} first")
        rule._prepare(shape, is_table)
        calls = near.calls(self._engine)
        calls.own.add(name, rule._found)
        calls.start()

    def _remove(self, names: Iterable[str]) -> None:
        session = _core.Session(self._engine, 0, 0)
        for name in reversed(list(names)):
            with contextlib.suppress(NotFound):
                session.remove(name, 1.0)

    def told(self, rank: int) -> Resumed | None:
        """What a worker finds in ``cluster.resumed``."""
        if self.resumed is None:
            return None
        extra = self.resumed.extra.get(rank)
        return Resumed(self.resumed.id, self.resumed.clock, None if extra is None else json.loads(extra))

    # -- objects that are opened -------------------------------------------------------------------------------------

    def open(self, name: str, make: Callable[[], T]) -> T:
        """What `make` makes. An object that nobody has opened as it was may have another rule or policy: it is made
        again, and its weights are taken from the checkpoint."""
        with self._opening:
            checkpoint = self._unopened.get(name)
            if checkpoint is None:
                return make()
            try:
                made = make()
            except SpecMismatch as error:
                made = self._make_again(name, checkpoint, make, error)
            self._unopened.pop(name)
            return made

    def _make_again(self, name: str, checkpoint: Checkpoint, make: Callable[[], T], error: SpecMismatch) -> T:
        objects = {one.name.partition("/")[2]: one for one in checkpoint.manifest.objects}
        group = [name, *(other for other, one in objects.items() if like_of(one.spec) == name)]  # these lie like it
        if any(other not in self._unopened for other in group):
            raise error
        self._remove(group)
        try:
            made = make()
            there = self._numbers()[name]
            asked = self._shelf.describe(there)[1]
            if settled_in(asked) != settled_in(objects[name].spec):
                raise error
            if len(group) > 1 and _core.cut_of(asked) != _core.cut_of(objects[name].spec):
                raise error
            before, now = (_core.spec_facts(spec)[6] for spec in (objects[name].spec, asked))
            said = [f"{name!r} has the policy {now}, and had {before} in the checkpoint"] if now != before else []
            said += self._fill(checkpoint, group, made=[name])
        except BaseException:
            self._remove(group)
            self._fill(checkpoint, group)
            raise
        for line in said:
            self.said.append(line)
            _log.warning("%s", line)
        return made

    def _numbers(self) -> dict[str, int]:
        return {name.partition("/")[2]: number for number, name in self._shelf.objects()}

    def _fill(self, checkpoint: Checkpoint, names: Iterable[str], made: Container[str] = ()) -> list[str]:
        """Makes these objects of a checkpoint, but for some that are made, and fills them."""
        shelf, app = self._shelf, checkpoint.manifest.app
        numbers = self._numbers()
        wanted = []
        for name in names:
            one = checkpoint.objects[f"{app}/{name}"]
            if name not in made:
                self._know(one.spec)
                numbers[name] = shelf.make(_core.renamed_spec(one.spec, f"{_APP}/{name}"))
            wanted.append((numbers[name], range(shelf.describe(numbers[name])[5])))
        return fill(shelf, checkpoint, wanted, app=app)
