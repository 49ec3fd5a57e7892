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
from windlass._errors import InvalidArgument
from windlass._settings import Settings
from windlass.control import messages as m
from windlass.control.member import Member
from windlass.control.placement import spread

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
        self._going: dict[int, _Going] = {}
        self._loads: dict[int, m.Loaded | None] = {}  # what was said of each; None: it is under way

    @property
    def captured_bytes(self) -> int:
        """Of the checkpoint that is being taken."""
        with self._lock:
            return sum(one.saving.bytes for one in self._going.values() if one.saving is not None)

    def save(self, order: m.Capture) -> None:
        """Arms and writes, in a thread. Answers with Armed and Saved."""
        with self._lock:
            if order.save in self._going:
                return
            for number, one in self._going.items():  # one at a time: nobody waits for those before it
                if number < order.save and not one.decided.is_set():
                    one.give_up()
            before = [one.thread for one in self._going.values() if one.thread is not None]
            going = self._going[order.save] = _Going()
            going.thread = threading.Thread(
                target=self._save, args=(order, going, before), name="windlass-checkpoint", daemon=True
            )
        try:
            going.thread.start()
        except RuntimeError as error:  # no thread to be had
            with self._lock:
                del self._going[order.save]
            self._member.tell(m.Armed(order.save, str(error)))

    def _save(self, order: m.Capture, going: "_Going", before: list[threading.Thread]) -> None:
        for thread in before:  # one that was given up may still hold shards
            thread.join()
        files = None
        try:
            place = Place(order.app, order.clock, order.id)
            rate = self._settings.checkpoint_rate
            files = ServerFiles(self._folder(), place, self._member.welcome.index, bytes_per_second=rate)
            saving = Saving(self._shelf, self._attach(order.objects), order.clock, files)
            saving.arm()
        except Exception as error:
            self._member.tell(m.Armed(order.save, _text(error)))
            self._end(order.save)
            return
        with self._lock:
            going.saving = saving
            if going.over:
                saving.cancel()
        self._member.tell(m.Armed(order.save))
        try:
            index = saving.write()
        except Exception as error:
            _log.error("server: checkpoint: %s", error)
            self._member.tell(m.Saved(order.save, _text(error)))
            self._end(order.save)
            return
        self._member.tell(_said(order.save, index))
        going.decided.wait()
        if going.over and not going.complete:
            files.abort()
        self._end(order.save)

    def _end(self, save: int) -> None:
        with self._lock:
            self._going.pop(save, None)

    def over(self, save: int, complete: bool) -> None:
        """The checkpoint is complete, or nothing of it may stay."""
        with self._lock:
            going = self._going.get(save)
            if going is None:
                return
            if complete:
                going.over = going.complete = True  # before it decides
                going.decided.set()
            else:
                going.give_up()

    @property
    def going(self) -> bool:
        """Whether a checkpoint is being taken."""
        with self._lock:
            return bool(self._going)

    def load(self, order: m.Load) -> None:
        """Answers with Loaded. An order that is repeated is carried out once, and answered again."""
        with self._lock:
            if order.load in self._loads:
                if (said := self._loads[order.load]) is not None:
                    self._member.tell(said)
                return
            self._loads[order.load] = None
        threading.Thread(target=self._load, args=(order,), name="windlass-checkpoint", daemon=True).start()

    def _load(self, order: m.Load) -> None:
        said = self._loaded(order)
        with self._lock:
            self._loads[order.load] = said
        self._member.tell(said)

    def _loaded(self, order: m.Load) -> m.Loaded:
        try:
            checkpoint = Checkpoint.open(self._folder(), Place(order.app, order.clock, order.id))
            numbers = self._attach(order.objects)
            mine = self._member.welcome.index
            wanted = [
                (number, [shard for shard, owner in enumerate(spread(one.runs, self._shelf.describe(number)[5])[0])
                          if owner == mine])
                for number, one in zip(numbers, order.objects, strict=True)
            ]  # fmt: skip
            said = fill(self._shelf, checkpoint, wanted)
        except Exception as error:
            _log.error("server: resume: %s", error)
            return m.Loaded(_text(error), load=order.load)
        return m.Loaded(said=[line[: m.TEXT_CHARS_MAX] for line in said], load=order.load)

    def _attach(self, objects: list[m.Placed]) -> list[int]:
        for one in objects:
            self._host.hold(_core.write_map(one.object, one.runs) + one.spec, self._member.welcome.index)
        return [one.object for one in objects]

    def _folder(self) -> Folder:
        if self._settings.checkpoint_dir is None:
            raise InvalidArgument("this server has no checkpoint_dir (WINDLASS_CHECKPOINT_DIR)")
        return Folder(self._settings.checkpoint_dir)

    def close(self) -> None:
        """Gives up what is not written yet. What is written stays: the scheduler may have called it complete."""
        with self._lock:
            going = list(self._going.values())
            for one in going:
                if one.saving is not None:
                    one.saving.cancel()
                one.decided.set()
        for one in going:
            if one.thread is not None:
                one.thread.join(_END_SECONDS)


class _Going:
    """A checkpoint that is being taken here."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.saving: Saving | None = None  # once it is armed
        self.decided = threading.Event()  # since the scheduler has said what becomes of it:
        self.over = self.complete = False

    def give_up(self) -> None:
        """Nothing of it may stay."""
        self.over = True
        if self.saving is not None:
            self.saving.cancel()
        self.decided.set()


def _text(error: Exception) -> str:
    return str(error)[: m.TEXT_CHARS_MAX] or type(error).__name__


def _said(save: int, index: IndexRef) -> m.Saved:
    return m.Saved(save, "", index.name, index.bytes, index.crc32c, index.blocks, index.block_bytes)
