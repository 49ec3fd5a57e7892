"""cluster.save(): a checkpoint of this worker's app, cut at its own clock."""

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass._checkpoint.names import check_tag
from windlass._errors import CheckpointFailed, InvalidArgument, Timeout, WindlassError
from windlass.control import messages as m
from windlass.control.member import error_of

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

_KEEPS, _ASKS, _ASKS_NOW = 1, 2, 3
_log = logging.getLogger("windlass")


class Resumed(NamedTuple):
    """The checkpoint that a cluster began with."""

    id: str
    clock: int
    extra: Any  #: what this rank left in it; None: nothing


class SavedCheckpoint:
    """A checkpoint that is being written. Training goes on meanwhile."""

    def __init__(self, id: str, clock: int) -> None:
        self.id = id
        self.clock = clock  #: it has what was closed before
        self._over = threading.Event()
        self._error: WindlassError | None = None

    @property
    def done(self) -> bool:
        """Whether it is complete, or was given up."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> "SavedCheckpoint":
        """Waits until it is complete. Raises CheckpointFailed if there will be none, and Timeout."""
        if not self._over.wait(timeout):
            raise Timeout(f"checkpoint {self.id}: not complete within {timeout} s; it is still being written")
        if self._error is not None:
            raise self._error
        return self

    def _end(self, error: WindlassError | None) -> None:
        self._error = error
        self._over.set()

    def __repr__(self) -> str:
        state = "complete" if self._error is None else "given up"
        return f"<checkpoint {self.id}, clock {self.clock}, {state if self.done else 'being written'}>"


class Saver:
    """One worker's checkpoints. Calls come from its thread, words of the scheduler from the member's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows
        self._going: dict[str, SavedCheckpoint] = {}
        self._ended: dict[str, WindlassError | None] = {}  # before the answer that it was armed was seen
        self.due = 0  #: 0: no checkpoint is; 1: this worker is to say what it keeps; 2, 3: and to ask for it, soon, now
        self.keeps: Callable[[], Any] | None = None
        self.holds = False  #: the process was told to end, and waits for a checkpoint
        self.awake = False  #: there is something to do between two iterations: one is due, or the process is to end

    def over(self, message: m.SaveOver) -> None:
        """The scheduler's word."""
        error = error_of(message.error, f"checkpoint {message.id}: {message.why}") if message.error else None
        with self._lock:
            going = self._going.pop(message.id, None)
            if going is None:
                self._ended[message.id] = error
        if going is not None:
            going._end(error)

    def note(self, id: str, clock: int) -> SavedCheckpoint:
        """One that has begun."""
        made = SavedCheckpoint(id, clock)
        with self._lock:
            if id in self._ended:
                made._end(self._ended.pop(id))
            else:
                self._going[id] = made
        return made

    def ask(self, lowest: bool) -> None:
        """A checkpoint is due; the lowest rank asks for it."""
        self.due = _ASKS if lowest else _KEEPS
        self.awake = True

    def end(self, error: WindlassError) -> None:
        """The cluster is over."""
        with self._lock:
            going, self._going = list(self._going.values()), {}
        for one in going:
            one._end(error)

    @property
    def going(self) -> list[SavedCheckpoint]:
        """Those that are being written."""
        with self._lock:
            return list(self._going.values())


def as_json(value: Any, what: str) -> bytes:
    """What travels with a checkpoint. Raises InvalidArgument."""
    try:
        data = json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what}: expected what JSON can say: {error}") from None
    if len(data) > m.EXTRA_BYTES_MAX:
        raise InvalidArgument(f"{what}: expected at most {m.EXTRA_BYTES_MAX} bytes as JSON, saw {len(data)}")
    return data


def save(
    cluster: "Cluster",
    tag: str | None,
    only: Sequence[Any] | None,
    extra: Any,
    to: "str | os.PathLike[str] | None",
    timeout: float,
) -> SavedCheckpoint:
    """Has it taken, and waits until nothing of the cut can be lost any more."""
    what = "save" if tag is None else f"save {tag!r}"
    if tag is not None:
        check_tag(tag, what)
    attendance = cluster._attendance
    if attendance is None and cluster._remote is not None:
        raise InvalidArgument(f"{what}: checkpoints of servers by their addresses need a scheduler")
    if attendance is not None and to is not None:
        raise InvalidArgument(f"{what}: to={os.fspath(to)!r}: servers write below their own checkpoint_dir alone")
    if cluster._session.begun == 1:
        raise InvalidArgument(
            f"{what}: this worker is within iteration {cluster.clock}: some of its BSP objects are pushed or closed, "
            "and some are not; call tick() first, or save after step()"
        )
    if cluster._session.begun == 2:
        cluster._session.tick(timeout)
    names = None if only is None else [one if isinstance(one, str) else one.name for one in only]
    packed = b"" if extra is None else as_json(extra, f"{what}: extra")
    deadline = time.monotonic() + timeout
    clock = cluster.clock
    cluster._session.settle(max(0.0, deadline - time.monotonic()))
    notes = notes_of(cluster)
    if attendance is None:
        return cluster._near_saves().save(cluster, tag, names, packed, to, notes)
    answer = attendance.member.ask(
        lambda n: m.Save(n, clock, tag, names, packed, notes), what, max(0.0, deadline - time.monotonic())
    )
    return attendance.saver.note(answer.saved, clock)


def notes_of(cluster: "Cluster") -> dict[str, bytes]:
    """What travels of them: one that is too long is left out, and its tensor is exported as it is."""
    fitting = ((name, note) for name, note in cluster._notes.items() if len(note) <= m.NOTE_BYTES_MAX)
    return dict(itertools.islice(fitting, m.NOTES_MAX))


def take_due(cluster: "Cluster") -> None:
    """Between two iterations, when a checkpoint is due. Whoever asks does so one iteration later than it keeps, so that
    what the others keep is in it."""
    saver = cluster._saver
    if cluster._session.begun == 1:
        return  # the iteration is not over
    if cluster._session.begun == 2:
        cluster._session.tick(cluster._timeout)
    due, saver.due = saver.due, 0
    if due == _ASKS_NOW:
        try:
            save(cluster, None, None, None if saver.keeps is None else saver.keeps(), None, cluster._timeout)
        except WindlassError as error:
            _log.warning("checkpoint: %s", error)
        return
    if saver.keeps is not None:
        kept = as_json(saver.keeps(), "keep")
        if cluster._attendance is not None:
            cluster._attendance.member.tell(m.Keep(cluster.clock, kept))
        else:
            cluster._near_saves().keep(cluster.rank, cluster.clock, kept)
    if due == _ASKS:
        saver.due = _ASKS_NOW


__all__ = ["CheckpointFailed", "Resumed", "SavedCheckpoint", "Saver", "save"]
