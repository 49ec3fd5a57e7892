"""Starting where a checkpoint was cut. Pure, like State, whose part it is.

When all servers are there, the objects of the checkpoint are placed on them, as many as there are, and each server is
ordered to fill its shards. Apps start when all have said that they did, at the checkpoint's clock and with its ledgers.

A worker may open such an object with another rule or policy, as long as nobody has opened it as it was:

    Open, other rule ---> the object is made again where it was ---> Load of it alone ---> Loaded from all: Answer
"""

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from windlass.control import kept
from windlass.control import messages as m
from windlass.control.leases import BadLease, Ledger
from windlass.control.leases import Saved as SavedLedger
from windlass.control.refusal import Wrong

if TYPE_CHECKING:
    from windlass.control.model import Member, Object, Spec
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
    places: dict[int, dict[str, m.SplitPlace]] = dataclasses.field(default_factory=dict)  #: of static splits, by rank
    created: float = 0.0  #: seconds since 1970
    older: "list[Resume]" = dataclasses.field(default_factory=list)  #: what to take if it is damaged, the newest first

    def places_of(self, rank: int, world_size: int) -> tuple[dict[str, m.SplitPlace], str]:
        """Where a rank's static splits go on; and why they begin their epochs again, if they do."""
        own = self.places.get(rank)
        if not self.places or (world_size == self.world_size and own is not None):
            return own or {}, ""
        lowest: dict[str, m.SplitPlace] = {}
        for places in self.places.values():
            for name, place in places.items():
                if name not in lowest or place.epoch < lowest[name].epoch:
                    lowest[name] = msgspec.structs.replace(place, batches=0)
        if world_size != self.world_size:
            return lowest, f"checkpoint {self.id} is of {self.world_size} workers, and now there are {world_size}"
        return lowest, f"checkpoint {self.id} does not say how far worker {rank} had got"


@dataclasses.dataclass
class _Change:
    """An object that is made again."""

    object: int
    servers: set[int]  # that have not loaded it
    askers: list[tuple[int, int]]  # and the numbers of their questions


class Resuming:
    """See the head of this file."""

    def __init__(self, state: "State", resume: Resume | None) -> None:
        self._state = state
        self.resume = resume
        self.going = resume is not None  #: nobody may begin yet
        self.said: list[str] = []  #: what is not as it was in the checkpoint
        self._begun = False
        self._loaded: set[int] = set()
        self._order = 0  # the number of the order that servers are at
        self._taken = False  #: the app has started once
        self._older = list(resume.older) if resume is not None else []
        self._clock = resume.clock if resume is not None else 0
        self._ledgers = dict(resume.ledgers) if resume is not None else {}
        self._unopened: set[int] = set()  # objects as they were that nobody has opened yet
        self._changes: dict[int, _Change] = {}  # by the number of their orders
        self._next = 1
        self._lost: dict[str, str] = {}  # objects whose numbers could not be loaded again: why, by app/name

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
        state.note("resume")
        made = [state.place_anew(spec, resume.app) for spec in resume.specs]
        self._unopened = {object.number for object in made}
        objects = [object.placed() for object in made]
        state.log("info", f"resumes app {resume.app!r} from checkpoint {resume.id}, clock {resume.clock}")
        state.tell(state.servers.values(), m.Load(resume.id, resume.app, resume.clock, objects, self._order))
        return False

    def loaded(self, server: int, message: m.Loaded) -> None:
        """A server's word."""
        if message.load != self._order or not self.going or not self._begun:
            self._changed(server, message)
            return
        if message.error:
            self._take_older(message.error)
            return
        self._note(message.said)
        self._loaded.add(server)
        if self._loaded >= set(self._state.servers):
            self.going = False
            self._state.note("resume")
            self._state.begin_apps()

    def _take_older(self, why: str) -> None:
        """This one is damaged: the next older one is taken, or the cluster ends."""
        state, damaged = self._state, self.resume
        assert damaged is not None
        if not self._older:
            state.fail(f"cannot resume: {why}")
            return
        state.log("warning", f"checkpoint {damaged.id} is passed over: {why}")
        for object in sorted(self._unopened, reverse=True):
            state.remove_object(state.objects[object])
        resume = self.resume = self._older.pop(0)
        self._clock, self._ledgers = resume.clock, dict(resume.ledgers)
        self._begun = False
        self._loaded.clear()
        self._order, self._next = self._next, self._next + 1
        state.note("resume")
        state.welcome_again(resume.app)
        self.begin()

    def _note(self, lines: list[str]) -> None:
        for line in lines:
            if line not in self.said:  # several servers say the same
                self.said.append(line)
                self._state.note("resume")
                self._state.log("warning", line)

    # -- objects that are opened -------------------------------------------------------------------------------------

    def opened(self, object: int) -> None:
        """Somebody uses it as it was."""
        if object in self._unopened:
            self._unopened.discard(object)
            self._state.note("resume")

    def loads(self, objects: list[int]) -> bool:
        """Whether any of them is being loaded again."""
        return any(change.object in objects for change in self._changes.values())

    def await_load(self, object: int, asker: int, question: int) -> bool:
        """Whether whoever opens an object is answered when it is loaded."""
        for change in self._changes.values():
            if change.object == object:
                change.askers.append((asker, question))
                return True
        return False

    def check(self, name: str) -> None:
        """Raises for an object whose numbers are not there any more."""
        if name in self._lost:
            raise Wrong("CheckpointFailed", self._lost[name])

    def may_change(self, there: "Object", spec: "Spec") -> bool:
        """Whether an object can be what is asked for instead: it is as it was, and all but rule and policy agree."""
        return there.number in self._unopened and there.settled == spec.settled

    def change(self, there: "Object", spec_bytes: bytes, spec: "Spec") -> "Object":
        """Makes it again with this rule and policy, and orders servers to load it again. Raises Wrong."""
        state, resume = self._state, self.resume
        assert resume is not None
        own = spec.name.partition("/")[2]
        if state.saves.going is not None and there.number in state.saves.going.objects:
            raise Wrong("InvalidArgument", f"{own!r}: a checkpoint is being taken of it as it was; try again")
        if any(v.object == there.number for v in state.moves.going.values()):
            raise Wrong("InvalidArgument", f"{own!r}: shards of it are moving; try again")
        alike = sorted(o.name.partition("/")[2] for o in state.objects.values() if o.group == there.name != o.name)
        if alike and len(there.owners) != len(spec.shard_bytes):
            raise Wrong("SpecMismatch", f"{own!r}: its new rule cuts it otherwise, and {alike[0]!r} lies like it")
        if there.sync != spec.sync:
            self._note([f"{there.name!r} has the policy {spec.sync}, and had {there.sync} in the checkpoint"])
        self._unopened.discard(there.number)
        made = state.replace(there, spec_bytes)
        number, self._next = self._next, self._next + 1
        self._changes[number] = _Change(made.number, set(state.servers), [])
        state.note("resume")
        order = m.Load(resume.id, resume.app, resume.clock, [made.placed()], number)
        state.tell(state.servers.values(), order)
        return made

    def _changed(self, server: int, message: m.Loaded) -> None:
        change = self._changes.get(message.load)
        if change is None:
            return
        if message.error:
            self._give_up(message.load, message.error)
            return
        self._note(message.said)
        change.servers.discard(server)
        if change.servers:
            return
        del self._changes[message.load]
        self._state.note("resume")
        placed = self._state.objects[change.object].placed()
        for asker, question in change.askers:
            self._state.tell([asker], m.Answer(question, placed=[placed]))

    def _give_up(self, number: int, why: str) -> None:
        change = self._changes.pop(number)
        self._state.note("resume")
        if (there := self._state.objects.get(change.object)) is not None:
            own = there.name.partition("/")[2]
            self._lost[there.name] = f"{own!r} cannot be loaded with another rule or policy: {why}"
            self._state.log("error", self._lost[there.name])
            self._state.remove_object(there)
            why = self._lost[there.name]
        for asker, question in change.askers:
            self._state.tell([asker], m.Answer(question, "CheckpointFailed", why[: m.TEXT_CHARS_MAX]))

    def server_gone(self, server: int, why: str) -> None:
        """What waits for it is over."""
        for number, change in list(self._changes.items()):
            if server in change.servers:
                self._give_up(number, f"server {server} is gone: {why}")

    # -- when the scheduler has begun again --------------------------------------------------------------------------

    def row(self) -> "kept.Resumed | None":
        """For the journal."""
        if (resume := self.resume) is None:
            return None
        return kept.Resumed(
            resume.id,
            resume.app,
            resume.clock,
            resume.world_size,
            resume.created,
            self.going,
            self._begun,
            self._taken,
            self._order,
            self._next,
            self._clock,
            list(self.said),
            sorted(self._unopened),
            {number: change.object for number, change in sorted(self._changes.items())},
            dict(self._lost),
        )

    def restore(self, row: "kept.Resumed") -> None:
        """Goes on from there. The checkpoint itself is needed only until the app has started; else its row will do."""
        if self.resume is None or self.resume.id != row.id:
            if row.going or not row.taken:
                raise ValueError(f"checkpoint {row.id}, which the cluster was to begin with, is not there any more")
            self.resume = Resume(row.id, row.app, row.clock, row.world_size, [], {}, created=row.created)
        self.going, self._begun, self._taken = row.going, row.begun, row.taken
        self._order, self._next, self._clock, self.said = row.order, row.next, row.clock_left, list(row.said)
        self._unopened, self._lost = set(row.unopened), dict(row.lost)
        servers = set(self._state.servers)
        self._changes = {number: _Change(object, set(servers), []) for number, object in row.changes.items()}
        if row.taken:
            self._ledgers = {}

    def catch_up(self, server: "Member") -> None:
        """Orders that a server may have missed. One that has carried them out says so again."""
        if (resume := self.resume) is None:
            return
        objects = self._state.objects
        orders = {number: [change.object] for number, change in self._changes.items() if server.index in change.servers}
        if self.going and self._begun and server.index not in self._loaded:
            orders[self._order] = sorted(self._unopened)
        for number, of in orders.items():
            placed = [objects[object].placed() for object in of if object in objects]
            order = m.Load(resume.id, resume.app, resume.clock, placed, number)
            self._state.tell([server.join.incarnation], order)

    # -- workers that begin ------------------------------------------------------------------------------------------

    def tell(self, welcome: m.Welcome, app: str, rank: int, world_size: int) -> m.Welcome:
        """To a worker that starts with its app: what its rank kept."""
        resume = self.resume
        if resume is None or app != resume.app or self._taken:
            return welcome
        places, why = resume.places_of(rank, world_size)
        return msgspec.structs.replace(
            welcome,
            resumed=resume.id,
            resumed_clock=resume.clock,
            extra=resume.extra.get(rank, b""),
            places=places,
            places_why=why,
        )

    def take_clock(self, app: str) -> int:
        """At which an app starts: the checkpoint's, the first time."""
        if self.resume is None or app != self.resume.app:
            return 0
        clock, self._clock, self._taken = self._clock, 0, True
        self._state.note("resume")
        return clock

    def take_ledgers(self, app: str, world_size: int) -> dict[tuple[str, str], Ledger]:
        """What an app's leases begin with, the first time."""
        if self.resume is None or app != self.resume.app:
            return {}
        saved, self._ledgers = self._ledgers, {}
        if not self._taken:
            _, why = self.resume.places_of(0, world_size)
            if why:
                self._note([f"static splits begin their epochs again: {why}"])
        found = {}
        for name, ledger in saved.items():
            try:
                found[app, name] = Ledger.restored(ledger)
            except BadLease as error:
                self._state.log("error", f"lease {name!r} begins anew: {error}")
        return found
