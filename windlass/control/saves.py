"""Checkpoints of a running cluster, as the scheduler orders them. Pure, like State, whose part it is.

    Save ---> Capture to all servers ---> Armed from all: the asker is answered, and goes on
                                     ---> Saved from all: the shell writes the manifest ---> SaveOver, CaptureOver

    before it, if workers have static splits: SplitsDue to those ---> Splits from all

One at a time. A server that fails or is lost, and a shard that is beyond the cut, give the checkpoint up: what was
written of it goes, and the one before stays. The ledgers of leased data are copied before the order goes out, and the
places of static splits are asked for before it does, so whatever they call done is in the cut. A worker that is behind
the cut, as it may be under BSP, tells its places when it is there.

Workers that were told to end (SIGTERM) hold still between two iterations and say so: Holds. The checkpoint is cut at
the lowest clock of theirs, which no update can have passed; they are released when it is armed: HoldOver.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.control import kept
from windlass.control import messages as m
from windlass.control.events import SaveManifest, Timer
from windlass.control.leases import Saved as SavedLedger
from windlass.control.refusal import Wrong

if TYPE_CHECKING:
    from windlass.control.model import App, Member
    from windlass.control.state import State

ARM_SECONDS = 30.0  # for all servers to say that they are armed
SPLITS_SECONDS = 5.0  # for workers to say where their static splits are
HOLD_SECONDS = 0.5  # for all workers to hold, once one does
_KEPT_PER_RANK = 8
_INTERRUPTED = "the scheduler ended before it was complete"


@dataclasses.dataclass
class Save:
    """A checkpoint that is being taken."""

    number: int
    id: str
    app: str
    clock: int
    tag: str | None
    partial: bool
    objects: list[int]
    asker: int  #: incarnation of the worker; 0: nobody waits
    question: int
    servers: dict[int, int]  #: incarnations by number
    ledgers: dict[str, SavedLedger]
    extra: dict[int, bytes]
    notes: dict[str, bytes]
    world_size: int
    armed: set[int] = dataclasses.field(default_factory=set)
    indexes: dict[int, m.Saved] = dataclasses.field(default_factory=dict)
    captures: bool = False  #: servers have their orders
    writing: bool = False  #: the shell is at the manifest
    asked: set[int] = dataclasses.field(default_factory=set)  #: workers whose places are not known yet
    later: set[int] = dataclasses.field(default_factory=set)  #: those of them that are behind the cut
    places: dict[int, dict[str, m.SplitPlace]] = dataclasses.field(default_factory=dict)  #: of static splits, by rank
    held: bool = False  #: for workers that hold
    operators: list["Asked"] = dataclasses.field(default_factory=list)  #: who waits until it is complete


class Asked(NamedTuple):
    """An operator's question that is answered when a checkpoint is complete."""

    operator: int
    question: int
    tag: str | None


class Last(NamedTuple):
    """A complete checkpoint."""

    id: str
    clock: int
    at: float  #: seconds since 1970


class Saves:
    """See the head of this file."""

    def __init__(self, state: "State") -> None:
        self._state = state
        self.next = 1  #: the number of the next one
        self.going: Save | None = None
        self._kept: dict[str, dict[int, list[tuple[int, bytes]]]] = {}  # by app and rank: clocks and what is kept
        self._asked: dict[str, list[Asked]] = {}  # by app; the checkpoint has not begun
        self._over_before: tuple[kept.Saving, bool] | None = None  # one of an earlier scheduler, and if it is complete
        resume = state.resuming.resume
        #: The newest complete one, by app.
        self.last: dict[str, Last] = (
            {} if resume is None else {resume.app: Last(resume.id, resume.clock, resume.created)}
        )
        self.failed: dict[str, str] = {}  #: why the one after it is not there, by app

    # -- asking ------------------------------------------------------------------------------------------------------

    def due(self, app: "App") -> None:
        """The lowest rank asks at its next tick; an app without workers is cut at once."""
        if app.workers:
            lowest = min(app.workers)
            for rank, number in app.workers.items():
                self._state.tell([number], m.SaveDue(rank == lowest))
        elif self.going is None:
            self.begin(m.Save(0, clock=0), app, asker=0)

    def asked(self, question: m.SaveNow, app: "App", operator: int) -> None:
        """An operator wants one. Raises Wrong."""
        self._check_place(app)
        if question.wait:
            asked = Asked(operator, question.number, question.tag)
            known = [*self._asked.get(app.name, []), *([] if self.going is None else self.going.operators)]
            if asked in known:  # it was away, and asks again
                return
            self._asked.setdefault(app.name, []).append(asked)
        else:
            self._state.tell([operator], m.Answer(question.number))
        if self.going is None:  # else when that one is over
            self.due(app)

    def _take_asked(self, app: "App", tag: str | None) -> tuple[str | None, list[Asked]]:
        """The tag of the checkpoint that begins, and the operators whose it is."""
        waiting = self._asked.pop(app.name, [])
        tag = tag if tag is not None else next((one.tag for one in waiting if one.tag is not None), None)
        if others := [one for one in waiting if one.tag not in (None, tag)]:
            self._asked[app.name] = others
        return tag, [one for one in waiting if one.tag in (None, tag)]

    def _answer(self, operators: list[Asked], id: str, error: str = "", why: str = "") -> None:
        for one in operators:
            if one.operator in self._state.members:
                self._state.tell([one.operator], m.Answer(one.question, error, why[: m.TEXT_CHARS_MAX], saved=id))

    def ask_again(self, app: "App") -> None:
        """A worker is gone: it may have been the one that was to ask."""
        if self._asked.get(app.name) and self.going is None:
            self.due(app)

    def _check_place(self, app: "App") -> None:
        if not self._state.terms.saves:
            what = f"checkpoint of app {app.name!r}"
            raise Wrong("InvalidArgument", f"{what}: there is no place for it; start with --checkpoint-dir DIR")
        if self._state.lost:
            lost = min(self._state.lost)
            raise Wrong("ServerLost", f"checkpoint of app {app.name!r}: server {lost} is lost, and what it held")

    def keep(self, app: "App", rank: int, kept: m.Keep) -> None:
        """What a worker wants back."""
        of = self._kept.setdefault(app.name, {}).setdefault(rank, [])
        of.append((kept.clock, kept.extra))
        del of[:-_KEPT_PER_RANK]

    def begin(self, question: m.Save, app: "App", asker: int) -> None:
        """Raises Wrong."""
        try:
            self._begin(question, app, asker)
        except Wrong as wrong:
            if self.going is None:  # it would be no other way the next time
                self._answer(self._asked.pop(app.name, []), "", wrong.error, str(wrong))
            raise

    def _begin(self, question: m.Save, app: "App", asker: int) -> None:
        state, what = self._state, f"checkpoint of app {app.name!r}"
        self._check_place(app)
        if self.going is not None:
            raise Wrong("InvalidArgument", f"{what}: another one, {self.going.id}, is being taken")
        own = {o.name.partition("/")[2]: o.number for o in state.objects.values() if o.app == app.name}
        if question.only is not None and (missing := sorted(set(question.only) - set(own))):
            raise Wrong("NotFound", f"{what}: there is no object {missing[0]!r}")
        objects = sorted(own.values() if question.only is None else (own[name] for name in question.only))
        if any(v.object in objects for v in state.moves.going.values()):
            raise Wrong("InvalidArgument", f"{what}: shards of it are moving; try again")
        if state.resuming.loads(objects):
            raise Wrong("InvalidArgument", f"{what}: an object is being loaded; try again")
        rank = state.members[asker].index if asker else 0
        extra = {}
        for other, values in self._kept.get(app.name, {}).items():
            fitting = [value for clock, value in values if clock <= question.clock]
            if fitting:
                extra[other] = fitting[-1]
        if question.extra:
            extra[rank] = question.extra
        tag, operators = (question.tag, []) if question.only is not None else self._take_asked(app, question.tag)
        number, self.next = self.next, self.next + 1
        going = self.going = Save(
            number,
            f"{(state.terms.cluster + number) % 2**64:016x}",
            app.name,
            question.clock,
            tag,
            question.only is not None,
            objects,
            asker,
            question.number,
            dict(state.servers),
            {name: ledger.saved() for (of, name), ledger in state.ledgers.items() if of == app.name},
            extra,
            {f"{app.name}/{name}": note for name, note in question.notes.items() if own.get(name) in objects},
            app.world_size,
            operators=operators,
        )
        state.log("info", f"checkpoint {going.id} of app {app.name!r} at clock {going.clock}")
        state.note("saving", number)
        state.note("cluster")
        going.asked = {worker for worker in app.workers.values() if state.members[worker].splits}
        if going.asked:
            state.tell(going.asked, m.SplitsDue(number, going.clock))
            state.act(Timer("save", SPLITS_SECONDS))
        else:
            self._capture(going)

    def _capture(self, going: Save) -> None:
        """The cut begins."""
        state = self._state
        going.captures = True
        if missing := [object for object in going.objects if object not in state.objects]:
            self.give_up(f"object {missing[0]} was deleted")
            return
        state.tell(going.servers.values(), self._order(going))
        state.act(Timer("save", ARM_SECONDS))

    def _order(self, going: Save) -> m.Capture:
        placed = [self._state.objects[object].placed() for object in going.objects if object in self._state.objects]
        return m.Capture(going.number, going.id, going.app, going.clock, placed)

    # -- what workers say --------------------------------------------------------------------------------------------

    def splits(self, worker: int, rank: int, message: m.Splits) -> None:
        """Where a worker's static splits are at the cut."""
        going = self.going
        if going is None or going.number != message.save or worker not in going.asked:
            return
        if message.later:
            going.later.add(worker)
        else:
            going.asked.discard(worker)
            going.later.discard(worker)
            going.places[rank] = dict(message.places)
        self._go_on(going)

    def worker_gone(self, worker: int) -> None:
        """Its places are not known, and nobody waits for it."""
        if (going := self.going) is not None and worker in going.asked:
            going.asked.discard(worker)
            going.later.discard(worker)
            self._go_on(going)

    def _go_on(self, going: Save) -> None:
        if not going.captures and going.asked == going.later:
            self._capture(going)
        self._finish(going)

    def holds(self, app: "App") -> None:
        """A worker holds: when all do, or soon, there is a checkpoint."""
        state = self._state
        holding = [hold.clock for worker in app.workers.values() if (hold := state.members[worker].holds) is not None]
        if not holding:
            return
        if self.going is not None and self.going.held and self.going.app == app.name:
            if min(holding) < self.going.clock and not self.going.indexes:
                self.going.held = False  # nobody is released: there is another one at once
                self.give_up(f"a worker holds at clock {min(holding)}")
            else:
                return
        if len(holding) == len(app.workers):
            self.take_held(app.name)
        else:
            state.act(Timer(f"hold:{app.name}", HOLD_SECONDS))

    def take_held(self, name: str) -> None:
        """Cuts at the lowest clock at which a worker holds. They end without it if it cannot be taken."""
        state = self._state
        app = state.apps.get(name)
        state.act(Timer(f"hold:{name}", None))
        if app is None or (self.going is not None and self.going.app == name and self.going.held):
            return
        holding = {w: hold for w in app.workers.values() if (hold := state.members[w].holds) is not None}
        if not holding:
            return
        if self.going is not None:  # the one that is under way ends first
            state.act(Timer(f"hold:{name}", HOLD_SECONDS))
            return
        for worker, hold in holding.items():
            if hold.extra:
                self.keep(app, state.members[worker].index, m.Keep(hold.clock, hold.extra))
        notes = {name: note for hold in holding.values() for name, note in hold.notes.items()}
        try:
            self.begin(m.Save(0, min(hold.clock for hold in holding.values()), notes=notes), app, asker=0)
        except Wrong as wrong:
            state.log("warning", f"no checkpoint before the end: {wrong}")
            self._release(name)
            return
        if (going := self.going) is not None:
            going.held = True
            for worker, hold in holding.items():
                going.places[state.members[worker].index] = dict(hold.places)
                self.worker_gone(worker)  # it has said all

    def _release(self, name: str) -> None:
        """Workers that hold may end."""
        state = self._state
        app = state.apps.get(name)
        for worker in () if app is None else app.workers.values():
            if state.members[worker].holds is not None:
                state.tell([worker], m.HoldOver())

    # -- what servers and the shell say ------------------------------------------------------------------------------

    def armed(self, server: int, message: m.Armed) -> None:
        going = self.going
        if going is None or going.number != message.save:
            return
        if message.error:
            self.give_up(message.error)
            return
        going.armed.add(server)
        if len(going.armed) < len(going.servers):
            return
        self._state.act(Timer("save", None))
        if going.asker:
            self._state.tell([going.asker], m.Answer(going.question, saved=going.id))
            going.question = 0
            self._state.note("saving", going.number)
        if going.held:
            self._release(going.app)

    def saved(self, server: int, message: m.Saved) -> None:
        going = self.going
        if going is None or going.number != message.save:
            return
        if message.error:
            self.give_up(message.error)
            return
        going.indexes[server] = message
        self._finish(going)

    def _finish(self, going: Save) -> None:
        """All servers are done: all workers are at the cut, and have said so or will not."""
        if self.going is not going or going.writing or len(going.indexes) < len(going.servers):
            return
        if going.asked:
            self._state.act(Timer("save", SPLITS_SECONDS))
            return
        going.writing = True
        self._state.act(Timer("save", None))
        self._state.act(SaveManifest(going))

    def written(self, number: int, error: str, at: float) -> None:
        """The shell has written the manifest, or could not."""
        going = self.going
        if going is None or going.number != number:
            return
        if error:
            self.give_up(error)
            return
        if not going.partial:
            self.last[going.app] = Last(going.id, going.clock, at)
        self.failed.pop(going.app, None)
        self._state.note("saves", going.app)
        self._state.log("info", f"checkpoint {going.id} of app {going.app!r} is complete")
        self._over("", complete=True)

    def give_up(self, why: str) -> None:
        """There will be no such checkpoint."""
        going = self.going
        if going is None:
            return
        self.failed[going.app] = why
        self._state.note("saves", going.app)
        self._state.log("error", f"checkpoint {going.id} of app {going.app!r} was given up: {why}")
        self._over(why, complete=False)

    def late(self) -> None:
        """Not all workers, or not all servers, have answered in time."""
        if (going := self.going) is None:
            return
        if going.asked and (not going.captures or len(going.indexes) == len(going.servers)):
            names = ", ".join(str(self._state.members[w].index) for w in going.asked if w in self._state.members)
            self._state.log("warning", f"checkpoint {going.id}: it is not known how far workers {names} have got")
            going.asked.clear()
            going.later.clear()
            self._go_on(going)
        elif len(going.armed) < len(going.servers):
            missing = sorted(set(going.servers) - going.armed)
            self.give_up(f"server {missing[0]} had not begun after {ARM_SECONDS:g} s")

    def server_gone(self, index: int, why: str) -> None:
        if (going := self.going) is not None and index in going.servers and index not in going.indexes:
            self.give_up(f"server {index} is gone: {why}")

    # -- when the scheduler has begun again --------------------------------------------------------------------------

    def put_last(self, app: str, id: str | None, clock: int, at: float, failed: str | None) -> None:
        """For kept.restore()."""
        if id is not None:
            self.last[app] = Last(id, clock, at)
        if failed is not None:
            self.failed[app] = failed

    def end_interrupted(self, one: "kept.Saving", at: float | None) -> None:
        """A checkpoint was being taken. It counts if its manifest is there, written at that time."""
        state = self._state
        self._over_before = one, at is not None
        if at is not None and not one.partial:
            self.last[one.app] = Last(one.id, one.clock, at)
            self.failed.pop(one.app, None)
        elif at is None:
            self.failed[one.app] = _INTERRUPTED
            state.log("error", f"checkpoint {one.id} of app {one.app!r} was given up: {_INTERRUPTED}")
        state.note("saves", one.app)
        state.note("saving", one.number)

    def catch_up(self, member: "Member") -> None:
        """What somebody who was away may have missed."""
        state, number = self._state, member.join.incarnation
        going = self.going
        waits = going is not None and going.captures and member.index not in going.indexes
        if waits and going is not None and going.servers.get(member.index) == number:
            state.tell([number], self._order(going))
        if self._over_before is None:
            return
        one, complete = self._over_before
        if member.join.role == "server":
            state.tell([number], m.CaptureOver(one.number, complete))
        elif one.asker == number and not one.question:
            state.tell([number], m.SaveOver(one.id, *(() if complete else ("CheckpointFailed", _INTERRUPTED))))

    def status(self) -> dict[str, Any]:
        """For people: what is being taken; the newest complete one; why the one after it is not there."""
        going, resuming = self.going, self._state.resuming
        resume = resuming.resume
        resumed = None
        if resume is not None:
            resumed = {"id": resume.id, "app": resume.app, "clock": resume.clock, "said": list(resuming.said)}
        return {
            "going": None if going is None else self._status_of(going),
            "last": {app: {"id": one.id, "clock": one.clock, "at": one.at} for app, one in self.last.items()},
            "failed": dict(self.failed),
            "resumed": resumed,
        }

    def _status_of(self, going: Save) -> dict[str, object]:
        reports = [
            self._state.members[number].report for number in going.servers.values() if number in self._state.members
        ]
        return {
            "id": going.id,
            "app": going.app,
            "clock": going.clock,
            "bytes": sum(report.saved_bytes for report in reports),
            "bytes_all": self._state.object_bytes(going.objects),
        }

    def _over(self, error: str, *, complete: bool) -> None:
        going, self.going = self.going, None
        assert going is not None
        state = self._state
        state.note("saving", going.number)
        state.act(Timer("save", None))
        if going.asker in state.members:
            if going.question and error:
                state.tell([going.asker], m.Answer(going.question, "CheckpointFailed", error))
            else:
                text = error[: m.TEXT_CHARS_MAX]
                state.tell([going.asker], m.SaveOver(going.id, "CheckpointFailed" if error else "", text))
        if going.held and error:
            self._release(going.app)
        self._answer(going.operators, going.id, "CheckpointFailed" if error else "", error)
        there = [number for index, number in going.servers.items() if state.servers.get(index) == number]
        state.tell(there, m.CaptureOver(going.number, complete))
        for name in list(self._asked):  # who asked meanwhile
            if (app := state.apps.get(name)) is not None and app.started:
                self.due(app)
        state.level.look()
        state.end_if_saved(going.app)
        state.end_if_done()
