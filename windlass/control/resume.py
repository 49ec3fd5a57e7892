"""Starting where a checkpoint was cut. Pure, like State, whose part it is.

When all servers are there, the objects of the checkpoint are placed on them, as many as there are, and each server is
ordered to fill its shards. Apps start when all have said that they did, at the checkpoint's clock and with its ledgers.
"""

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from windlass.control import messages as m
from windlass.control.leases import BadLease, Ledger
from windlass.control.leases import Saved as SavedLedger

if TYPE_CHECKING:
    from windlass.control.state import State


@dataclasses.dataclass(frozen=True)
class Resume:
    """What a scheduler knows of the checkpoint that its cluster begins with."""

    id: str
    app: str
    clock: int
    world_size: int
    specs: list[bytes]
    ledgers: dict[str, SavedLedger]
    extra: dict[int, bytes] = dataclasses.field(default_factory=dict)  #: by rank
    created: float = 0.0  #: seconds since 1970


class Resuming:
    """See the head of this file."""

    def __init__(self, state: "State", resume: Resume | None) -> None:
        self._state = state
        self.resume = resume
        self.going = resume is not None  #: nobody may begin yet
        self._begun = False
        self._loaded: set[int] = set()
        self._taken = False  #: the app has started once
        self._clock = resume.clock if resume is not None else 0
        self._ledgers = dict(resume.ledgers) if resume is not None else {}

    @property
    def loading(self) -> list[int]:
        """Servers that fill their shards. It takes as long as the disk does, and nobody gives up meanwhile."""
        if not (self.going and self._begun):
            return []
        return sorted(set(self._state.servers) - self._loaded)

    def begin(self) -> bool:
        """The servers are there. Whether there is nothing to wait for."""
        if self.resume is None or not self.going or self._begun:
            return not self.going
        self._begun = True
        state, resume = self._state, self.resume
        objects = [state.place_anew(spec, resume.app).placed() for spec in resume.specs]
        state.log("info", f"resumes app {resume.app!r} from checkpoint {resume.id}, clock {resume.clock}")
        state.tell(state.servers.values(), m.Load(resume.id, resume.app, resume.clock, objects))
        return False

    def loaded(self, server: int, message: m.Loaded) -> None:
        """A server's word."""
        if not self.going or not self._begun:
            return
        if message.error:
            self._state.fail(f"cannot resume: {message.error}")
            return
        for line in message.said:
            self._state.log("warning", line)
        self._loaded.add(server)
        if self._loaded >= set(self._state.servers):
            self.going = False
            self._state.begin_apps()

    def tell(self, welcome: m.Welcome, app: str, rank: int) -> m.Welcome:
        """To a worker that starts with its app: what its rank kept."""
        resume = self.resume
        if resume is None or app != resume.app or self._taken:
            return welcome
        extra = resume.extra.get(rank, b"")
        return msgspec.structs.replace(welcome, resumed=resume.id, resumed_clock=resume.clock, extra=extra)

    def take_clock(self, app: str) -> int:
        """At which an app starts: the checkpoint's, the first time."""
        if self.resume is None or app != self.resume.app:
            return 0
        clock, self._clock, self._taken = self._clock, 0, True
        return clock

    def take_ledgers(self, app: str, world_size: int) -> dict[tuple[str, str], Ledger]:
        """What an app's leases begin with, the first time."""
        if self.resume is None or app != self.resume.app:
            return {}
        saved, self._ledgers = self._ledgers, {}
        found = {}
        for name, ledger in saved.items():
            try:
                found[app, name] = Ledger.restored(ledger)
            except BadLease as error:
                self._state.log("error", f"lease {name!r} begins anew: {error}")
        return found
