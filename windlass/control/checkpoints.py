"""What a server does about checkpoints: saves its part when it is told to, and fills its shards from one.

It writes only below its own checkpoint_dir; orders name a checkpoint, never a path.
"""

import logging
import threading

from windlass import _core
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import IndexRef
from windlass._checkpoint.loading import fill
from windlass._checkpoint.names import Place
from windlass._checkpoint.reader import Checkpoint
from windlass._checkpoint.saving import Saving
from windlass._checkpoint.writer import ServerFiles
from windlass._errors import InvalidArgument, WindlassError
from windlass._settings import Settings
from windlass.control import messages as m
from windlass.control.member import Member

_END_SECONDS = 5.0
_log = logging.getLogger("windlass")


class ServerCheckpoints:
    """Orders come on the member's thread; each is carried out by a thread of its own."""

    def __init__(self, host: _core.Host, member: Member, settings: Settings) -> None:
        self._host = host
        self._member = member
        self._settings = settings
        self._shelf = _core.Shelf(host)
        self._shelf.set_bytes_max(settings.checkpoint_bytes_max)
        self._lock = threading.Lock()  # of what follows
        self._going: dict[int, tuple[Saving, ServerFiles, threading.Thread]] = {}

    def save(self, order: m.Capture) -> None:
        """Arms at once, and writes in a thread. Answers with Armed and Saved."""
        try:
            with self._lock:
                if order.save in self._going:
                    return
                place = Place(order.app, order.clock, order.id)
                rate = self._settings.checkpoint_rate
                files = ServerFiles(self._folder(), place, self._member.welcome.index, bytes_per_second=rate)
                saving = Saving(self._shelf, self._attach(order.objects), order.clock, files)
                saving.arm()
                thread = threading.Thread(
                    target=self._write, args=(order.save, saving), name="windlass-checkpoint", daemon=True
                )
                self._going[order.save] = saving, files, thread
                thread.start()
        except (WindlassError, RuntimeError) as error:
            with self._lock:
                self._going.pop(order.save, None)
            self._member.tell(m.Armed(order.save, str(error)[: m.TEXT_CHARS_MAX]))
            return
        self._member.tell(m.Armed(order.save))

    def _write(self, save: int, saving: Saving) -> None:
        try:
            index = saving.write()
        except Exception as error:
            _log.error("server: checkpoint: %s", error)
            self._member.tell(m.Saved(save, str(error)[: m.TEXT_CHARS_MAX] or type(error).__name__))
            return
        self._member.tell(_said(save, index))

    def over(self, save: int, complete: bool) -> None:
        """The checkpoint is complete, or nothing of it may stay."""
        with self._lock:
            going = self._going.pop(save, None)
        if going is None or complete:
            return
        saving, files, thread = going
        saving.cancel()

        def remove() -> None:
            thread.join()
            files.abort()

        threading.Thread(target=remove, name="windlass-checkpoint", daemon=True).start()

    def load(self, order: m.Load) -> None:
        """Answers with Loaded."""
        threading.Thread(target=self._load, args=(order,), name="windlass-checkpoint", daemon=True).start()

    def _load(self, order: m.Load) -> None:
        try:
            checkpoint = Checkpoint.open(self._folder(), Place(order.app, order.clock, order.id))
            numbers = self._attach(order.objects)
            mine = self._member.welcome.index
            wanted = [
                (number, [shard for shard, owner in enumerate(owners_of(one.runs, self._shelf.describe(number)[5]))
                          if owner == mine])
                for number, one in zip(numbers, order.objects, strict=True)
            ]  # fmt: skip
            said = fill(self._shelf, checkpoint, wanted)
        except Exception as error:
            _log.error("server: resume: %s", error)
            self._member.tell(m.Loaded(str(error)[: m.TEXT_CHARS_MAX] or type(error).__name__))
            return
        self._member.tell(m.Loaded(said=[line[: m.TEXT_CHARS_MAX] for line in said]))

    def _attach(self, objects: list[m.Placed]) -> list[int]:
        for one in objects:
            self._host.hold(_core.write_map(one.object, one.runs) + one.spec, self._member.welcome.index)
        return [one.object for one in objects]

    def _folder(self) -> Folder:
        if self._settings.checkpoint_dir is None:
            raise InvalidArgument("this server has no checkpoint_dir (WINDLASS_CHECKPOINT_DIR)")
        return Folder(self._settings.checkpoint_dir)

    def close(self) -> None:
        """Gives up what is not written yet."""
        with self._lock:
            going = list(self._going.values())
        for saving, _, thread in going:
            saving.cancel()
            thread.join(_END_SECONDS)


def owners_of(runs: list[m.Run], shards: int) -> list[int]:
    """The server of every shard."""
    owners: list[int] = []
    for at, (first, server, _) in enumerate(runs):
        end = runs[at + 1][0] if at + 1 < len(runs) else shards
        owners += [server] * (end - first)
    return owners


def _said(save: int, index: IndexRef) -> m.Saved:
    return m.Saved(save, "", index.name, index.bytes, index.crc32c, index.blocks, index.block_bytes)
