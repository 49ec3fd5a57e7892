"""The scheduler's brain: events in, actions out. No time, no I/O, no randomness: the same events give the same actions.

    Came, Said, Died, Fired  ->  State.handle()  ->  Keep first; Admit, Refuse, Tell, Cut, Timer, Log, End

A member is known by its incarnation, a random number it chose when its process began. A connection that breaks and is
made again is the same member; one that was declared dead stays dead, whatever comes later under its number.

An app starts when the expected servers and all of its workers are there: then its first view goes out. From then on
every change of who trains together is a view with the next number. A worker that is lost is no more in the next one; in
an app that waits for a replacement, its rank is in the list of those waited for until somebody has come in its place.
An app that has started is as large as the largest world_size that a worker has joined it with.

What must outlive the scheduler's process is noted, and comes out as rows (control/kept.py) ahead of what follows from
the event. A state that was made from such rows goes on: whoever was a member comes back, and is told what it may have
missed. Until all workers of an app are back or dead, nobody new joins it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping

import msgspec

from windlass.control import all_reduce, kept
from windlass.control import messages as m
from windlass.control.barrier import NAMED_MAX, Barrier, named
from windlass.control.consistency import Total, added, totals
from windlass.control.events import (
    Action,
    Admit,
    Came,
    Cut,
    Defer,
    Died,
    End,
    Event,
    Fired,
    Keep,
    Log,
    Refuse,
    Said,
    Tell,
    Timer,
    Written,
)
from windlass.control.leases import BadLease, Ledger, said
from windlass.control.leases import Saved as SavedLedger
from windlass.control.level import Level
from windlass.control.model import FIRST_TERM, App, Member, Object, Spec, Terms
from windlass.control.moves import Moves
from windlass.control.placement import place, runs_of, spread
from windlass.control.refusal import Wrong
from windlass.control.resume import Resume, Resuming
from windlass.control.saves import Saves

OBJECTS_MAX = 1 << 16
OBJECTS_AT_ONCE = 1 << 10  # in a message
WORLD_MAX = 1 << 20
SERVERS_MAX = 4096
LEDGERS_MAX = 1 << 10
APPS_KEPT_MAX = 1 << 10  # of those that are done and have nothing, for people to read what became of them


class State:
    """See the head of this file. `read_spec` and `same_spec` are pure functions of the core."""

    def __init__(
        self,
        terms: Terms,
        read_spec: Callable[[bytes], Spec],
        same_spec: Callable[[bytes, bytes], bool],
        resume: Resume | None = None,
    ) -> None:
        self.terms = terms
        self.members: dict[int, Member] = {}  # by incarnation
        self.dead: dict[int, str] = {}  # why, by incarnation
        self.servers: dict[int, int] = {}  # incarnations, by number
        self.lost: dict[int, str] = {}  # servers that went while there was work: why
        self.shards_lost = 0  # with them
        self._tasks_over: set[int] = set()  # of an engine: ranks of workers whose task has ended
        self.lost_peers: dict[int, m.Peer] = {}  # they keep their places
        self._lost_reports: list[m.Report] = []  # what they counted has happened
        self.given_up: dict[str, str] = {}  # apps that waited in vain for a replacement: why
        self.done_without: dict[str, str] = {}  # apps that were done without workers that were lost: which
        self.apps: dict[str, App] = {}
        self._done: dict[str, None] = {}  # apps that nobody uses any more, the oldest first
        self.views_before = 0  # numbers of views that apps had which are forgotten: an app of the same name goes on
        self.objects: dict[int, Object] = {}
        self.by_name: dict[str, int] = {}
        self.load_bytes: dict[int, int] = {}  # placed, by server
        self.ledgers: dict[tuple[str, str], Ledger] = {}  # by app and name
        self.kept_ledgers: dict[tuple[str, str], SavedLedger] = {}  # what their workers could not say again
        self.new_ledger: Callable[[m.LeaseTerms], Ledger] = Ledger
        self.new_barrier: Callable[[], Barrier] = Barrier
        self.ever_started = False
        self.ended = False
        self.keeps = False  #: there is a journal
        self.generation = 0  #: of the scheduler, if there is
        self.returning: set[int] = set()  #: members that an earlier scheduler had, and that have not come back yet
        self._noted: dict[kept.Key, None] = {}  # rows that have changed
        self._told = False  # to end: so are workers that leave from then on, and nobody is to come in their place
        self.to_save: list[str] = []  #: the scheduler was told to end, and takes checkpoints of these apps first
        self._read_spec = read_spec
        self._same_spec = same_spec
        self.next_object = 1
        self._ready = 0  # servers that let clients in
        self.moves: Moves = Moves(self)
        self.level: Level = Level(self)
        self.retired: dict[int, str] = {}  # servers that were drained and have ended: why
        self.resuming: Resuming = Resuming(self, resume)
        self.saves: Saves = Saves(self)
        self._out: list[Action] = []

    def begin(self) -> list[Action]:
        """Before the first event."""
        if not self.returning and not self.ever_started:
            expected = f"{self.terms.servers} server{'s' if self.terms.servers != 1 else ''}"
            self._log("info", f"expecting {expected}, and as many workers as they say they are")
        self._out.append(Timer("missing", self.terms.missing_seconds))
        for table, key in kept.rows(self) if self.keeps and not self.returning else ():
            self.note(table, key)
        return self._take()

    def restore(self, rows: Mapping[kept.Key, bytes], written: Callable[[kept.Saving], float | None]) -> None:
        """Goes on from what an earlier scheduler has kept; before begin(). Raises kept.Unreadable.

        written: when the manifest of a checkpoint that was being taken was written, if it was.
        """
        kept.restore(self, rows)
        self.returning = set(self.members)
        self._log("info", f"goes on as generation {self.generation}; waits for {len(self.returning)} members to return")
        for there in self.objects.values():
            for server, size in zip(there.owners, there.shard_bytes, strict=True):
                if server in self.load_bytes:
                    self.load_bytes[server] += size
        if (saving := kept.saving_of(rows)) is not None:
            self.saves.end_interrupted(saving, written(saving))
        for app in self.apps.values():
            app.barrier.follow(app.workers, app.waited)
            if app.gathered and not app.started:
                self._out.append(Timer(f"start:{app.name}", self.terms.start_timeout))
            if app.started and not app.workers:
                self._out.append(Timer(f"replace:{app.name}", self.terms.start_timeout))
            if app.started and self.terms.save_seconds is not None:
                self._out.append(Timer(f"due:{app.name}", self.terms.save_seconds))
        if not self.returning:
            self._everybody_is_back()

    def put_server(self, member: Member) -> None:
        """For kept.restore()."""
        self.servers[member.index] = member.join.incarnation
        if member.ready:
            self.load_bytes[member.index] = 0
            self._ready += 1

    def put_object(self, number: int, spec_bytes: bytes, runs: list[m.Run]) -> None:
        """Likewise."""
        spec = self._read_spec(spec_bytes)
        owners, terms = spread(runs, len(spec.shard_bytes))
        self._know_object(self._object_of(number, spec, spec_bytes, owners, terms))

    def note(self, table: str, key: int | str = "") -> None:
        """This row has changed, or is no more: it is kept."""
        if self.keeps:
            self._noted[table, str(key)] = None

    def handle(self, event: Event) -> list[Action]:
        """What follows from an event."""
        if self.ended:
            return []
        match event:
            case Came(connection, join):
                try:
                    self._join(connection, join)
                except Wrong as wrong:
                    self._free_if_unused(join.app)
                    self._out.append(Refuse(connection, m.Refused(wrong.error, str(wrong), wrong.retry_seconds)))
                    self._log("warning", f"refused a {join.role} (process {join.pid} on {join.host}): {wrong}")
            case Said(number, message) if number in self.members:
                self._said(self.members[number], message)
            case Died(number, why) if number in self.members:
                member = self.members[number]
                self._log("info" if member.join.role == "operator" else "error", f"{member.name} is gone: {why}")
                self._give_up(member, why)
                self._remove(member, why, lost=True)
            case Fired("missing"):
                self._say_who_is_missing()
            case Fired("level"):
                self.level.go_on()
            case Fired("leaving"):
                self.level.decide()
            case Fired("save"):
                self.saves.late()
            case Fired("end"):
                self._end(failed=False, why="the scheduler was told to end", again=True)
            case Fired(timer) if timer.startswith("hold:"):
                self.saves.take_held(timer.removeprefix("hold:"))
            case Fired(timer) if timer.startswith("due:"):
                self._save_due(timer.removeprefix("due:"))
            case Written(number, error, at):
                self.saves.written(number, error, at)
            case Fired(timer) if timer.startswith("start:"):
                self._give_up_start(timer.removeprefix("start:"))
            case Fired(timer) if timer.startswith("replace:"):
                self._give_up_waiting(timer.removeprefix("replace:"))
        return self._take()

    def stop(self, why: str) -> list[Action]:
        """Ends the cluster."""
        if not self.ended:
            self._end(failed=False, why=why, again=True)
        return self._take()

    def terminate(self, seconds: float) -> list[Action]:
        """Ends the cluster after checkpoints of its apps, within so many seconds; a second time: at once."""
        running = [app for app in self.apps.values() if app.started and app.workers]
        if self.ended or self.to_save or not self.terms.saves or not running:
            return self.stop("the scheduler was told to end")
        self._log("info", f"told to end: takes a checkpoint first, within {seconds:g} s")
        self._told = True
        self.to_save = [app.name for app in running]
        self.saves.due(running[0])
        self._out.append(Timer("end", seconds))
        return self._take()

    def end_if_saved(self, name: str) -> None:
        """A checkpoint of an app is over: the next one, or the end that was asked for."""
        if name not in self.to_save:
            return
        self.to_save.remove(name)
        self.to_save = [other for other in self.to_save if self.apps[other].workers]
        if self.to_save:
            self.saves.due(self.apps[self.to_save[0]])
        else:
            self._out.append(Timer("end", 0.0))

    def _take(self) -> list[Action]:
        out, self._out = self._out, []
        rows = [Keep(table, key, kept.row(self, table, key)) for table, key in self._noted]
        self._noted.clear()
        return [*rows, *out]

    def tell(self, members: Iterable[int], message: m.Message) -> None:
        """For the parts of this state."""
        self._tell(members, message)

    def act(self, action: Action) -> None:
        """Likewise."""
        self._out.append(action)

    def log(self, level: str, text: str) -> None:
        """Likewise."""
        self._log(level, text)

    def end_if_done(self) -> None:
        """Likewise."""
        if self.ever_started:
            self._end_if_done()

    def _tell(self, members: Iterable[int], message: m.Message) -> None:
        self._out.extend(Tell(member, message) for member in members)

    def _log(self, level: str, text: str) -> None:
        self._out.append(Log(level, text))

    # -- joining -----------------------------------------------------------------------------------------------------

    def _join(self, connection: int, join: m.Join) -> None:
        if join.version != m.VERSION:
            raise Wrong("ProtocolError", f"expected version {m.VERSION} of the control protocol, saw {join.version}")
        if join.role not in m.ROLES:
            raise Wrong("InvalidArgument", f"role {join.role!r}: expected one of {', '.join(m.ROLES)}")
        if join.cluster not in (0, self.terms.cluster):
            raise Wrong(
                "AccessDenied", f"this is cluster {self.terms.cluster:016x}, not {join.cluster:016x}, which was meant"
            )
        if join.incarnation in self.dead:
            raise Wrong("Closed", f"this process was given up: {self.dead[join.incarnation]}")
        if (known := self.members.get(join.incarnation)) is not None:
            if (known.join.role, known.join.app, known.join.pid) != (join.role, join.app, join.pid):
                raise Wrong("ProtocolError", "another member has this incarnation")
            if join.role == "worker" and join.barrier:
                app = self.apps[join.app]
                app.barrier.came_back(join.barrier, join.reduced)
                self._answer_passed(app)
            self._welcome(connection, known)
            self._catch_up(known)
            self._back(join.incarnation)
            return
        there = self.apps[join.app].workers.values() if join.role == "worker" and join.app in self.apps else ()
        if self.returning.intersection(there):
            self._out.append(Defer(connection))
            return
        if join.tasks not in (0, self.terms.tasks):
            raise Wrong(
                "InvalidArgument",
                f"this task expects {join.tasks} workers, the first one {self.terms.tasks}: all tasks must have the "
                "same --servers",
            )
        match join.role:
            case "server":
                self._server_came(connection, join)
            case "worker":
                self._worker_came(connection, join)
            case "reader":
                self._reader_came(connection, join)
            case _:
                self._welcome(connection, self._add(join, 0))

    def _add(self, join: m.Join, index: int) -> Member:
        member = self.members[join.incarnation] = Member(msgspec.structs.replace(join, barrier=0, reduced=None), index)
        if join.role != "operator":
            self.note("members", join.incarnation)
        return member

    def _back(self, member: int) -> None:
        """Somebody whom an earlier scheduler had has come back, or never will."""
        if member in self.returning:
            self.returning.discard(member)
            if not self.returning:
                self._log("info", "all members have returned, or are given up")
                self._everybody_is_back()

    def _everybody_is_back(self) -> None:
        for app in self.apps.values():
            self._start_if_complete(app)

    def welcome_again(self, name: str) -> None:
        """To workers of an app that has not started: it resumes from another checkpoint than they were told."""
        if (app := self.apps.get(name)) is not None and not app.started:
            for number in app.workers.values():
                self._tell([number], self._welcome_of(self.members[number]))

    def _welcome(self, connection: int, member: Member) -> None:
        self._out.append(Admit(connection, member.join.incarnation))
        self._tell([member.join.incarnation], self._welcome_of(member))

    def _welcome_of(self, member: Member) -> m.Welcome:
        terms = self.terms
        barrier = self.apps[member.join.app].barrier.number if member.join.role == "worker" else 1
        beat = terms.beat_seconds
        welcome = m.Welcome(terms.cluster, member.index, terms.failure_timeout, beat, barrier)
        welcome = msgspec.structs.replace(welcome, generation=self.generation)
        if member.join.role == "worker" and not self.apps[member.join.app].started:
            app = self.apps[member.join.app]
            welcome = self.resuming.tell(welcome, app.name, member.index, app.world_size)
        return msgspec.structs.replace(welcome, saves=terms.saves, linger=terms.linger)

    def _catch_up(self, member: Member) -> None:
        """What somebody who was away may have missed."""
        number = member.join.incarnation
        self._catch_up_views(member)
        if member.join.role == "server":
            self.tell_objects([number], list(self.objects.values()))
            for forgotten in range(1, self.next_object):
                if forgotten not in self.objects:
                    self._tell([number], m.Forgotten(forgotten))
            self.resuming.catch_up(member)
        self.moves.catch_up(number)  # where shards are, before it hears that those who had them are gone
        self._tell_lost(member)
        self.saves.catch_up(member)

    def _catch_up_views(self, member: Member) -> None:
        """A server serves all apps, also those that are done: it need not keep anything for them."""
        if member.join.role == "server":
            views = [self._view(app) for app in self.apps.values() if app.first_view]
        else:
            apps = [app for app in self.apps.values() if app.name == member.join.app and app.started]
            views = [self._view_for_clients(app) for app in apps]
        for view in views:
            self._tell([member.join.incarnation], view)

    def _server_came(self, connection: int, join: m.Join) -> None:
        if not join.addresses:
            raise Wrong("InvalidArgument", "a server must say at which address it listens")
        index = self._server_number(join.rank)
        for other in self.servers.values():
            if self.members[other].join.addresses[0] == join.addresses[0]:
                raise Wrong("InvalidArgument", f"{self.members[other].name} listens on {join.addresses[0]} already")
        member = self._add(join, index)
        self.servers[index] = join.incarnation
        self._welcome(connection, member)
        self._catch_up_views(member)
        for app, quota in self.terms.quotas.items():
            self._tell([join.incarnation], m.Quota(app, -(-quota // self.terms.servers)))
        self.tell_objects([join.incarnation], list(self.objects.values()))

    def _server_number(self, wanted: int | None) -> int:
        """The lowest that is expected and free; when all of those have come, or are gone for good, the next one."""
        taken = {*self.servers, *self.lost, *self.retired}
        free = [i for i in range(self.terms.servers) if i not in taken]
        following = max(self.terms.servers, *(i + 1 for i in taken)) if taken else self.terms.servers
        if wanted in free:
            return wanted
        if wanted is None or (wanted == following and not free):
            number = free[0] if free else following
            if number >= SERVERS_MAX:
                raise Wrong("ResourceExhausted", f"at most {SERVERS_MAX} servers, those that are gone included")
            return number
        if wanted in self.servers:
            raise self._taken(f"server number {wanted}", self.servers[wanted])
        text = f"expected one of {', '.join(map(str, free))}" if free else f"the next one has number {following}"
        if wanted in taken:
            gone = "is lost with what it held" if wanted in self.lost else "was drained"
            text = f"server {wanted} {gone}, and numbers are not given again; {text}"
        raise Wrong("InvalidArgument", f"server number {wanted}: {text}")

    def server_peers(self) -> list[m.Peer]:
        """All, lost ones included, in the order of their numbers."""
        there = {index: self.members[number].peer() for index, number in self.servers.items()} | self.lost_peers
        return [there[i] for i in sorted(there)]

    def _server_ready(self, member: Member) -> None:
        if member.ready:
            return
        member.ready = True
        self._ready += 1
        self.load_bytes[member.index] = 0
        self.note("members", member.join.incarnation)
        come = f"{self._ready} of {max(self._ready, self.terms.servers)}"
        self._log("info", f"{member.name} has come, at {member.join.addresses[0]}: {come}")
        if self.ever_started:
            clients = [n for n, other in self.members.items() if other.join.role in ("worker", "reader")]
            self._tell(clients, m.Servers(self.server_peers()))
            self.level.joined(member.index)
        if self._servers_ready() and self.resuming.begin():
            self.begin_apps()

    def begin_apps(self) -> None:
        """What waited for the servers can begin."""
        if self._servers_ready():
            for app in self.apps.values():
                self._start_if_complete(app)
                if app.readers:
                    self._tell(app.readers, self._view_for_clients(app))

    def _servers_ready(self) -> bool:
        ready = {i for i, number in self.servers.items() if self.members[number].ready}
        return all(i in ready or i in self.lost or i in self.retired for i in range(self.terms.servers))

    def _worker_came(self, connection: int, join: m.Join) -> None:
        app = self._app(join)
        if not app.workers and not app.started:
            app.world_size = join.world_size
            app.on_worker_loss = join.on_worker_loss
        grows = app.started and join.world_size > app.world_size
        # Its launcher may not know that the app has grown since.
        replaces = join.rank in app.waited and join.world_size < app.world_size
        if join.world_size != app.world_size and not grows and not replaces:
            raise Wrong(
                "InvalidArgument", f"app {app.name!r} has {app.world_size} workers, not world_size={join.world_size}"
            )
        if join.on_worker_loss != app.on_worker_loss:
            raise Wrong(
                "InvalidArgument",
                f"app {app.name!r} has on_worker_loss={app.on_worker_loss!r}, not {join.on_worker_loss!r}: "
                "its workers must agree",
            )
        rank = join.rank
        if rank is None:
            rank = app.free_rank()
            if rank == join.world_size == len(app.workers):
                raise self._taken(f"each of the {rank} ranks of app {app.name!r}", *app.workers.values())
        if rank >= join.world_size:
            raise Wrong("InvalidArgument", f"rank {rank} is not in a world of {join.world_size} (app {app.name!r})")
        if rank in app.workers:
            raise self._taken(f"rank {rank}", app.workers[rank])
        if grows:
            self._log("info", f"app {app.name!r} grows from {app.world_size} to {join.world_size} workers")
            app.world_size = join.world_size
        member = self._add(join, rank)
        member.instead = rank in app.waited
        first = not app.workers
        app.workers[rank] = join.incarnation
        self.note("apps", app.name)
        self._welcome(connection, member)
        instead = ", in place of the one that was lost" if member.instead else ""
        self._log("info", f"{member.name} has come{instead}: {len(app.workers)} of {app.world_size}")
        if app.started:
            app.waited.discard(rank)
            app.not_replaced.discard(rank)
            app.left.pop(rank, None)
            self.note("left", f"{rank}/{app.name}")
            if first:
                self._out.append(Timer(f"replace:{app.name}", None))
            self._next_view(app)
            self._tell_lost(member)
        else:
            app.gathered = True
            if first:
                self._out.append(Timer(f"start:{app.name}", self.terms.start_timeout))
            self._start_if_complete(app)

    def _taken(self, what: str, *by: int) -> Wrong:
        """Whoever has it may be dead without our knowing it yet: a restarter can be quicker than failure_timeout."""
        names = [self.members[number].name for number in by[:NAMED_MAX]]
        more = f" and {len(by) - NAMED_MAX} more" if len(by) > NAMED_MAX else ""
        return Wrong("RankTaken", f"{what} is taken, by {', '.join(names)}{more}", self.terms.failure_timeout + 1.0)

    def _reader_came(self, connection: int, join: m.Join) -> None:
        app = self._app(join)
        member = self._add(join, 0)
        app.readers[join.incarnation] = None
        self.note("apps", app.name)
        self._welcome(connection, member)
        self._log("info", f"{member.name} has come")
        if self._servers_ready():
            self._tell([join.incarnation], self._view_for_clients(app))
            self._tell_lost(member)

    def _tell_lost(self, member: Member) -> None:
        for index, why in (*self.lost.items(), *self.retired.items()):
            self._tell([member.join.incarnation], m.Gone(index, f"server {index}: {why}"))

    def _app(self, join: m.Join) -> App:
        if not join.app.isprintable() or "/" in join.app or not 1 <= len(join.app.encode()) <= 256:
            raise Wrong(
                "InvalidArgument", f"app must be 1 to 256 bytes of printable text without '/', not {join.app!r}"
            )
        if not 1 <= join.world_size <= WORLD_MAX:
            raise Wrong("InvalidArgument", f"world_size must be between 1 and {WORLD_MAX}, not {join.world_size}")
        self._done.pop(join.app, None)
        if join.app not in self.apps:
            self.apps[join.app] = App(join.app, join.world_size, self.new_barrier(), view=self.views_before)
            self.note("apps", join.app)
        return self.apps[join.app]

    def _free_if_unused(self, name: str) -> None:
        """Of an app that has never started nothing is kept; of those that are done the latest."""
        if not self._unused(name):
            return
        if self.apps[name].first_view:
            self._done[name] = None
        else:
            self._free(name)
        while len(self._done) > APPS_KEPT_MAX:
            oldest = next(iter(self._done))
            del self._done[oldest]
            if self._unused(oldest):
                self._free(oldest)

    def _unused(self, name: str) -> bool:
        app = self.apps.get(name)
        if app is None or app.busy or app.readers or (app.gathered and not self.ever_started):
            return False
        return not any(o.app == name for o in self.objects.values())

    def _free(self, name: str) -> None:
        app = self.apps.pop(name)
        self.views_before = max(self.views_before, app.view)
        for rank in app.left:
            self.note("left", f"{rank}/{name}")
        self.note("apps", name)
        self.note("cluster")
        self._drop_ledgers(name)
        self._out.append(Timer(f"start:{name}", None))

    # -- views -------------------------------------------------------------------------------------------------------

    def _start_if_complete(self, app: App) -> None:
        if app.started or len(app.workers) < app.world_size or not self._servers_ready() or self.resuming.going:
            return
        app.started = self.ever_started = True
        app.gathered = False
        self._drop_ledgers(app.name)
        for key, ledger in self.resuming.take_ledgers(app.name, app.world_size).items():
            self.ledgers[key] = ledger
            self._keep_ledger(key)
        app.clock = self.resuming.take_clock(app.name)
        self._next_save(app.name)
        app.first_view = app.view + 1
        for rank in app.left:
            self.note("left", f"{rank}/{app.name}")
        app.left.clear()
        app.lost = 0
        app.not_replaced.clear()
        self.given_up.pop(app.name, None)
        self.done_without.pop(app.name, None)
        self.note("cluster")
        self._out.append(Timer(f"start:{app.name}", None))
        servers, workers = len(self.servers), app.world_size
        self._log("info", f"app {app.name!r} starts: {workers} worker(s) on {servers} server(s)")
        self._next_view(app)
        for number in app.workers.values():
            self._tell_lost(self.members[number])

    def _next_view(self, app: App) -> None:
        app.view += 1
        app.size_in_view = app.world_size
        self.note("apps", app.name)
        for number in app.workers.values():
            member = self.members[number]
            if not member.since:
                member.since = app.view
                self.note("members", number)
        view = self._view_for_clients(app)
        self._tell(app.workers.values(), view)
        self._tell(app.readers, view)
        self._tell(self.servers.values(), self._view(app))
        app.barrier.follow(app.workers, app.waited)
        self._answer_passed(app)

    def _view(self, app: App) -> m.View:
        ranks = sorted(app.workers) if app.started else []  # those who gather for a start are in no view yet
        workers = [self.members[app.workers[rank]].peer() for rank in ranks]
        servers = self.server_peers()
        waited = sorted(app.waited)
        size = app.size_in_view or app.world_size
        return m.View(app.name, app.view, size, workers, servers, app.first_view, waited, app.clock, app.lost)

    def _view_for_clients(self, app: App) -> m.View:
        """Without the workers' incarnations: who knows one could speak for its worker."""
        view = self._view(app)
        return msgspec.structs.replace(view, workers=[msgspec.structs.replace(p, incarnation=0) for p in view.workers])

    def missing(self) -> list[str]:
        """Who is expected and has not come."""
        ready = {i for i, number in self.servers.items() if self.members[number].ready}
        known = {*ready, *self.lost, *self.retired}
        names = [f"server {i}" for i in range(self.terms.servers) if i not in known]
        for app in self.apps.values():
            if app.started or not app.workers:
                continue
            ranks = (rank for rank in range(app.world_size) if rank not in app.workers)
            names += [f"worker {rank} of app {app.name!r}" for rank in itertools.islice(ranks, NAMED_MAX)]
            if (more := app.world_size - len(app.workers) - NAMED_MAX) > 0:
                names.append(f"{more} more workers of app {app.name!r}")
        if not self.members and not self.ever_started:
            names.append("any worker")
        names += [f"what server {i} loads from its checkpoint" for i in self.resuming.loading]
        return names

    def consistency(self) -> dict[str, Total]:
        """What policies did, by app."""
        there = [self.members[number].report for number in self.servers.values()]
        return totals(report.sync for report in [*there, *self._lost_reports])

    def pulls(self, app: App) -> m.PullReport:
        """Of all workers of an app since its start, those that went included."""
        return added([app.pulls_before, *(self.members[number].report.pulls for number in app.workers.values())])

    def table_sizes(self) -> dict[int, tuple[int, int]]:
        """Rows and bytes of tables over all servers that are there, by number."""
        sizes: dict[int, tuple[int, int]] = {}
        for number in self.servers.values():
            for table, (rows, size) in self.members[number].report.tables.items():
                before = sizes.get(table, (0, 0))
                sizes[table] = (before[0] + rows, before[1] + size)
        return sizes

    def object_bytes(self, numbers: list[int]) -> int:
        """What tensors take, and tables by servers' reports."""
        sizes = self.table_sizes()
        chosen = [self.objects[number] for number in numbers if number in self.objects]
        return sum(sizes.get(o.number, (0, 0))[1] if o.is_table else sum(o.shard_bytes) for o in chosen)

    def _waiting(self) -> list[int]:
        """Those that have come and cannot begin."""
        waiting = [n for app in self.apps.values() if not app.started for n in app.workers.values()]
        if not self._servers_ready():
            waiting += [n for app in self.apps.values() for n in app.readers]
        return waiting

    def _say_who_is_missing(self) -> None:
        if missing := self.missing():
            self._log("warning", f"still missing: {', '.join(missing)}")
            self._tell(self._waiting(), m.Waiting(missing, bool(self.resuming.loading)))
        for app in self.apps.values():
            if app.waited:
                self._log("warning", f"app {app.name!r} waits for a replacement of {named(app.waited)}")
        self._out.append(Timer("missing", self.terms.missing_seconds))

    def _give_up_start(self, name: str) -> None:
        app = self.apps.get(name)
        if app is None or app.started:
            return
        if self.resuming.loading:
            self._out.append(Timer(f"start:{name}", self.terms.start_timeout))
            return
        why = f"not all had come within {self.terms.start_timeout:g} s; missing: {', '.join(self.missing())}"
        self._log("error", f"app {name!r} cannot start: {why}")
        for number in list(app.workers.values()):
            self._tell([number], m.Refused("Timeout", why))
            self._out.append(Cut(number))
            self._give_up(self.members[number], why)
            del self.members[number]
            self._back(number)
        app.workers.clear()
        self.note("apps", name)
        app.at_barrier.clear()
        app.ranks_up_to = 0
        app.gathered = False
        self._free_if_unused(name)
        if not self.ever_started:
            self._end(failed=True, why=why)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _give_up(self, member: Member, why: str) -> None:
        """It is dead, whatever comes later under its number."""
        self.dead[member.join.incarnation] = why
        if member.join.role != "operator":
            self.note("dead", member.join.incarnation)
            self.note("members", member.join.incarnation)

    def _remove(self, member: Member, why: str, *, lost: bool) -> None:
        """`lost`: it did not leave in peace."""
        number = member.join.incarnation
        del self.members[number]
        self._back(number)
        self._out.append(Cut(number))
        match member.join.role:
            case "server":
                self._server_gone(member, why)
            case "worker":
                self._worker_gone(self.apps[member.join.app], member, lost)
            case "reader":
                del self.apps[member.join.app].readers[number]
            case "operator" if member.join.tasks and member.join.rank is not None:
                self._tasks_over.add(member.join.rank)
        self._free_if_unused(member.join.app)
        if self.terms.tasks and not self.ended:
            self._end_without_tasks()

    def _end_without_tasks(self) -> None:
        """Where the tasks of an engine are over, from which workers would come."""
        for app in self.apps.values():
            vain = app.waited & self._tasks_over
            if app.workers and not app.started and app.world_size == self.terms.tasks:
                vain = self._tasks_over - app.workers.keys()
            if vain:
                why = f"app {app.name!r} was lost: nobody can come in place of {named(vain)}, the task has ended"
                self._log("error", why)
                self._end(failed=True, why=why)
                return
        if self._no_more_tasks:
            self._end_if_done()

    @property
    def _no_more_tasks(self) -> bool:
        """Whether no worker can come any more."""
        return 0 < self.terms.tasks == len(self._tasks_over)

    def _worker_gone(self, app: App, member: Member, lost: bool) -> None:
        del app.workers[member.index]
        self.saves.worker_gone(member.join.incarnation)
        app.at_barrier.pop(member.join.incarnation, None)
        self._leases_of_the_gone(member)
        app.ranks_up_to = min(app.ranks_up_to, member.index)
        app.pulls_before = added([app.pulls_before, member.report.pulls])
        self.note("apps", app.name)
        if not app.started:
            return
        app.left[member.index] = member.report
        self.note("left", f"{member.index}/{app.name}")
        app.lost += lost
        if lost:
            app.not_replaced.add(member.index)
        if lost and app.on_worker_loss == "wait":
            app.waited.add(member.index)
            self._log("warning", f"app {app.name!r} waits for a replacement of {named(app.waited)}")
        if not app.busy:
            self._log("info", f"app {app.name!r} is done")
            self._app_over(app)
            return
        self._next_view(app)
        self.saves.ask_again(app)
        if not app.workers:
            self._out.append(Timer(f"replace:{app.name}", self.terms.start_timeout))

    def _give_up_waiting(self, name: str) -> None:
        """All workers were lost, and nobody has come in their place."""
        app = self.apps.get(name)
        if app is None or app.workers or not app.waited:
            return
        seconds = f"{self.terms.start_timeout:g} s"
        why = f"app {name!r} was lost: nobody came within {seconds} in place of {named(app.waited)}"
        self._log("error", why)
        self.given_up[name] = why
        self.note("cluster")
        app.waited.clear()
        self._app_over(app)
        self._free_if_unused(name)

    def _app_over(self, app: App) -> None:
        app.started = False
        if app.not_replaced and app.name not in self.given_up:
            ranks = named(app.not_replaced)
            self.done_without[app.name] = f"app {app.name!r} was done without {ranks}, lost and not replaced"
            self.note("cluster")
        app.barrier = self.new_barrier()
        app.view += 1
        self.note("apps", app.name)
        app.size_in_view = app.world_size
        self._tell(self.servers.values(), self._view(app))
        self._end_if_done()

    def _server_gone(self, member: Member, why: str) -> None:
        del self.servers[member.index]
        self._ready -= member.ready
        self.saves.server_gone(member.index, why)
        self.resuming.server_gone(member.index, why)
        self.load_bytes.pop(member.index, None)
        self.level.server_gone(member.index, why)
        self.moves.server_gone(member.index, f"server {member.index} is gone: {why}")
        self._lost_reports.append(member.report)
        if not self.ever_started:
            return
        self.lost[member.index] = why
        self.note("lost", member.index)
        self.note("cluster")
        self.lost_peers[member.index] = member.peer()
        shards = sum(o.owners.count(member.index) for o in self.objects.values())
        self.shards_lost += shards
        if shards:
            self._log("error", f"{shards} shards were on server {member.index} and are lost")
        clients = [n for n, other in self.members.items() if other.join.role in ("worker", "reader")]
        self._tell(clients, m.Gone(member.index, f"{member.name}: {why}"))
        if self.terms.on_server_loss == "end":
            self._end(failed=True, why=f"{member.name} was lost: {why}", again=True)

    def retire(self, index: int, why: str) -> None:
        """A server that is empty: it is a member no more, and its number is used up, but nothing was lost."""
        member = self.members[self.servers[index]]
        self._give_up(member, why)
        del self.members[member.join.incarnation], self.servers[index]
        self._back(member.join.incarnation)
        self._ready -= member.ready
        self.load_bytes.pop(index, None)
        self.retired[index] = why
        self.lost_peers[index] = member.peer()
        self._lost_reports.append(member.report)
        self.note("retired", index)
        self._out.append(Cut(member.join.incarnation))
        clients = [n for n, other in self.members.items() if other.join.role in ("worker", "reader")]
        self._tell(clients, m.Gone(index, f"{member.name}: {why}"))

    def _save_due(self, name: str) -> None:
        if (app := self.apps.get(name)) is not None and app.started:
            self.saves.due(app)
            self._next_save(name)

    def _save_due_at(self, member: Member) -> None:
        every = self.terms.save_iterations
        app = self.apps.get(member.join.app)
        if every is None or app is None or not app.started or member.index != min(app.workers, default=-1):
            return
        if member.join.role == "worker" and member.report.clock >= app.save_at:
            app.save_at = member.report.clock // every * every + every
            self.note("apps", app.name)
            self.saves.due(app)

    def _next_save(self, name: str) -> None:
        app = self.apps[name]
        if self.terms.save_iterations is not None:
            app.save_at = app.clock + self.terms.save_iterations
        if self.terms.save_seconds is not None:
            self._out.append(Timer(f"due:{name}", self.terms.save_seconds))

    def _end_if_done(self) -> None:
        if self.terms.linger or (self.terms.tasks and not self._no_more_tasks):
            return
        if any(app.busy for app in self.apps.values()) or self.saves.going is not None:
            return
        whys = list(self.given_up.values())
        if self.shards_lost:
            servers = ", ".join(map(str, sorted(self.lost)))
            whys.append(f"all workers have left, and {self.shards_lost} shards were lost with server {servers}")
        why = "; ".join([*(whys or ["all workers have left"]), *self.done_without.values()])
        self._end(failed=bool(whys), why=why, again=self._told)

    def _end(self, *, failed: bool, why: str, again: bool = False) -> None:
        self._log("info", f"the cluster ends: {why}")
        self.note("cluster")
        self._tell(self.members, m.Shutdown(why, failed or again))
        self._out.append(End(failed, why, bool(self.done_without) and not self._told, again))
        self.ended = True

    # -- what members say --------------------------------------------------------------------------------------------

    def _said(self, member: Member, message: m.Message) -> None:
        number = member.join.incarnation
        if not isinstance(message, m.MAY_SAY[member.join.role]):
            why = f"a {member.join.role} does not say {type(message).__name__}"
            self._log("warning", f"{member.name} broke the rules: {why}")
            self._tell([number], m.Refused("ProtocolError", why))
            self._give_up(member, why)
            self._remove(member, why, lost=True)
            return
        match message:
            case m.Leave(failed, why):
                self._log("warning" if failed else "info", f"{member.name} leaves{': ' + why if why else ''}")
                self._give_up(member, why or "it left")
                self._remove(member, why or "it left", lost=failed)
            case m.Ready():
                self._server_ready(member)
            case m.Report():
                member.report = message
                self._save_due_at(member)
            case m.Keep():
                self.saves.keep(self.apps[member.join.app], member.index, message)
            case m.HasSplit():
                member.splits = True
            case m.Splits():
                self.saves.splits(number, member.index, message)
            case m.Holds():
                member.holds = message
                self._hold(member)
            case m.Armed():
                self.saves.armed(member.index, message)
            case m.Saved():
                self.saves.saved(member.index, message)
            case m.Loaded():
                self.resuming.loaded(member.index, message)
            case m.KnowsServers(servers):
                member.knows_servers = servers
                self.level.look()
            case m.Leaving():
                self.level.says_leaving(member)
            case m.Moved(move, error):
                self.moves.said(member.index, move, error)
            case m.Question():
                try:
                    self._asked(number, message)
                except Wrong as wrong:
                    self._tell([number], m.Answer(message.number, wrong.error, str(wrong)))

    def _asked(self, asker: int, question: m.Question) -> None:
        match question:
            case m.Open(number, spec):
                join = self.members[asker].join
                opened = self._open(spec, join.app, makes=join.role != "reader")
                if not self.resuming.await_load(opened.number, asker, number):
                    self._tell([asker], m.Answer(number, placed=[opened.placed()]))
            case m.Forget(number, spec, object_):
                self._forget(spec, object_, self.members[asker].join.app)
                self._tell([asker], m.Answer(number))
            case m.Delete(number, object_):
                self._delete(object_, self.members[asker].join.app)
                self._tell([asker], m.Answer(number))
            case m.List(number):
                self._tell([asker], m.Answer(number, placed=[o.placed() for o in self.objects.values()]))
            case m.Move():
                self.moves.asked(asker, question)
            case m.Drain():
                self.level.asked(asker, question)
            case m.Lease(number):
                self._tell([asker], m.Answer(number, leased=self._lease(asker, question)))
            case m.Arrive():
                self._arrive(asker, question)
            case m.Save():
                self.saves.begin(question, self.apps[self.members[asker].join.app], asker)
            case m.SaveNow(_, name):
                if (app := self.apps.get(name)) is None or not app.started:
                    there = ", ".join(repr(one.name) for one in self.apps.values() if one.started) or "none"
                    raise Wrong("NotFound", f"no app {name!r} is training; those that are: {there}")
                self.saves.asked(question, app, asker)
            case m.Stop(number, why):
                self._tell([asker], m.Answer(number))
                self._end(failed=question.failed, why=why or "an operator asked for it")

    def _hold(self, member: Member) -> None:
        """A worker waits for a checkpoint before it ends."""
        if self.terms.saves and not self.resuming.going:
            self.saves.holds(self.apps[member.join.app])
        else:
            self._tell([member.join.incarnation], m.HoldOver())

    # -- leases ------------------------------------------------------------------------------------------------------

    def _lease(self, asker: int, question: m.Lease) -> m.Leased:
        app = self.apps[self.members[asker].join.app]
        ledger = self.ledgers.get(key := (app.name, question.name))
        if ledger is None:
            if len(self.ledgers) >= LEDGERS_MAX:
                raise Wrong("ResourceExhausted", f"lease {question.name!r}: at most {LEDGERS_MAX} ledgers")
            ledger = self.new_ledger(question.terms)
            if ledger.ranges > m.RANGES_MAX:
                raise Wrong("InvalidArgument", f"lease {question.name!r}: at most {m.RANGES_MAX} ranges in an epoch")
            self.ledgers[key] = ledger
        if ledger.terms != question.terms:
            raise Wrong(
                "SpecMismatch",
                f"lease {question.name!r} exists with other terms\n  there: {said(ledger.terms)}\n"
                f"  asked: {said(question.terms)}",
            )
        try:
            leased = ledger.ask(asker, len(app.workers), question)
        except BadLease as error:
            raise Wrong("InvalidArgument", f"lease {question.name!r}: {error}") from error
        self._recall(question.name, ledger)
        return leased

    def _recall(self, name: str, ledger: Ledger) -> None:
        self._tell(sorted(ledger.recalled), m.Recall(name))
        ledger.recalled.clear()

    def _leases_of_the_gone(self, member: Member) -> None:
        for (app, name), ledger in self.ledgers.items():
            if app == member.join.app:
                ledger.left(member.join.incarnation)
                self._keep_ledger((app, name))
                self._recall(name, ledger)

    def _keep_ledger(self, key: tuple[str, str]) -> None:
        if self.keeps:
            self.kept_ledgers[key] = self.ledgers[key].kept()
            self.note("ledgers", "/".join(key))

    def _drop_ledgers(self, app: str) -> None:
        for key in [key for key in self.ledgers if key[0] == app]:
            del self.ledgers[key]
            self.kept_ledgers.pop(key, None)
            self.note("ledgers", "/".join(key))

    # -- barriers ----------------------------------------------------------------------------------------------------

    def _arrive(self, asker: int, question: m.Arrive) -> None:
        app = self.apps[self.members[asker].join.app]
        before = min(app.barrier.number, question.barrier)
        what = f"{'barrier' if question.numbers is None else 'all_reduce'} {question.barrier} of app {app.name!r}"
        if question.numbers is not None and question.barrier >= app.barrier.number:
            self._check_numbers(app, question.numbers, what)
        app.barrier.arrive(asker, question.barrier, question.numbers)
        app.at_barrier[asker] = question
        if app.barrier.number > before:
            self._answer_passed(app)
        if question.waits or asker not in app.at_barrier:
            return
        del app.at_barrier[asker]
        who = app.barrier.complaint() if app.started else f"it has not started; missing: {', '.join(self.missing())}"
        self._tell([asker], m.Answer(question.number, "Timeout", f"{what}: {who}"))

    def _check_numbers(self, app: App, numbers: m.Numbers, what: str) -> None:
        """Raises for an array that is none, or for which there is no room."""
        if wrong := all_reduce.complaint(numbers):
            raise Wrong("InvalidArgument", f"{what}: {wrong}")
        workers = len(app.workers) + len(app.waited) if app.started else app.world_size
        size, most = len(numbers.data), all_reduce.ROUND_BYTES_MAX
        if size * workers > most:
            raise Wrong(
                "InvalidArgument",
                f"{what}: {size} bytes from each of {workers} workers, at most {most} together; for more use a tensor "
                "under BSP with the rule Sum",
            )
        held, most = sum(other.barrier.held_bytes for other in self.apps.values()), all_reduce.HELD_BYTES_MAX
        if held + size > most:
            raise Wrong("ResourceExhausted", f"{what}: all apps together hold {held} bytes here, of at most {most}")

    def _answer_passed(self, app: App) -> None:
        for asker, question in list(app.at_barrier.items()):
            if question.barrier < app.barrier.number:
                del app.at_barrier[asker]
                reduced = app.barrier.reduced(question.barrier, question.numbers)
                self._tell([asker], m.Answer(question.number, reduced=reduced))

    # -- objects -----------------------------------------------------------------------------------------------------

    def tell_objects(self, servers: Iterable[int], objects: list[Object]) -> None:
        """In the order of their numbers: what a server has not been told of by then does not exist."""
        told = list(servers)
        for at in range(0, len(objects), OBJECTS_AT_ONCE):
            self._tell(told, m.Objects([there.placed() for there in objects[at : at + OBJECTS_AT_ONCE]]))

    def _open(self, spec_bytes: bytes, app: str, makes: bool) -> Object:
        try:
            spec = self._read_spec(spec_bytes)
        except Exception as error:
            raise Wrong(type(error).__name__, str(error)) from error
        own_name = spec.name.partition("/")[2]
        self.resuming.check(spec.name)
        if spec.name in self.by_name:
            there = self.objects[self.by_name[spec.name]]
            if not self._same_spec(there.spec, spec_bytes):
                if makes and spec.app == app and self.resuming.may_change(there, spec):
                    return self.resuming.change(there, spec_bytes, spec)
                raise Wrong(
                    "SpecMismatch",
                    f"{own_name!r} exists with another spec\n  there: {there.description}\n  asked: {spec.description}",
                )
            self.resuming.opened(there.number)
            return there
        if not makes:
            raise Wrong("AccessDenied", f"{own_name!r} is not there, and a reader makes no objects")
        if spec.app != app:
            raise Wrong("NotFound", f"{spec.name!r}: there is no such object, and only app {spec.app!r} can make it")
        if self.next_object > OBJECTS_MAX:
            raise Wrong("ResourceExhausted", f"{own_name!r}: at most {OBJECTS_MAX} objects")
        if not self.servers:
            raise Wrong("ServerLost", f"{own_name!r}: there is no server")
        self._check_quota(spec)
        owners = self._place_like(spec) if spec.like else self._place(spec)
        return self._add_object(spec, spec_bytes, owners)

    def _add_object(self, spec: Spec, spec_bytes: bytes, owners: list[int], terms: list[int] | None = None) -> Object:
        terms = [FIRST_TERM] * len(owners) if terms is None else terms
        made = self._object_of(self.next_object, spec, spec_bytes, list(owners), list(terms))
        self.next_object += 1
        self._know_object(made)
        self.note("objects", made.number)
        self.note("cluster")
        for server, size in zip(owners, spec.shard_bytes, strict=True):
            self.load_bytes[server] += size
        self.tell_objects(self.servers.values(), [made])
        self.moves.follow(made)
        return made

    @staticmethod
    def _object_of(number: int, spec: Spec, spec_bytes: bytes, owners: list[int], terms: list[int]) -> Object:
        return Object(
            number,
            spec.name,
            spec_bytes,
            spec.description,
            spec.is_table,
            spec.shard_bytes,
            owners,
            terms,
            spec.group,
            spec.form,
            spec.settled,
            spec.sync,
            runs_of(owners, terms),
        )

    def _know_object(self, made: Object) -> None:
        self.objects[made.number] = made
        self.by_name[made.name] = made.number

    def place_anew(self, spec: bytes, app: str) -> Object:
        """An object of a checkpoint."""
        return self._open(spec, app, makes=True)

    def replace(self, there: Object, spec_bytes: bytes) -> Object:
        """Makes an object again, with another rule or policy, where it was."""
        spec = self._read_spec(spec_bytes)
        self._object_over(there, "was made again")
        if len(spec.shard_bytes) == len(there.owners):
            return self._add_object(spec, spec_bytes, there.owners, there.terms)
        return self._add_object(spec, spec_bytes, self._place(spec))

    def remove_object(self, there: Object) -> None:
        """It is no more."""
        self._object_over(there, "is no more")

    def fail(self, why: str) -> None:
        """The cluster cannot begin."""
        self._log("error", why)
        self._end(failed=True, why=why)

    def _place(self, spec: Spec) -> list[int]:
        stays = {server: load for server, load in self.load_bytes.items() if server not in self.level.drains}
        if not stays:
            raise Wrong("ServerLost", f"{spec.name.partition('/')[2]!r}: there is no server")
        return place(spec.shard_bytes, stays)

    def _place_like(self, spec: Spec) -> list[int]:
        """Every shard where that of another tensor is."""
        what = f"{spec.name.partition('/')[2]!r}: like {spec.like!r}"
        there = self.objects.get(self.by_name.get(spec.group, 0))
        if there is None or there.is_table:
            raise Wrong("NotFound", f"{what}: there is no such tensor")
        if there.group != there.name:
            raise Wrong("InvalidArgument", f"{what}: that one is like {there.group!r} itself, which is to be named")
        if there.form != spec.form:
            raise Wrong("InvalidArgument", f"{what}: expected {there.form}, saw {spec.form}")
        if len(there.owners) != len(spec.shard_bytes):  # a rule may want all of a tensor in one
            shards = f"{len(there.owners)} shards, saw {len(spec.shard_bytes)}"
            raise Wrong("InvalidArgument", f"{what}: expected {shards}")
        for shard, server in enumerate(there.owners):
            if server not in self.servers:
                raise Wrong("ServerLost", f"{what}: its shard {shard} was on server {server}, which is lost")
        return list(there.owners)

    def _check_quota(self, spec: Spec) -> None:
        app = spec.name.partition("/")[0]
        quota = self.terms.quotas.get(app)
        if quota is None:
            return
        taken = sum(sum(o.shard_bytes) for o in self.objects.values() if o.app == app)
        taken += sum(self.members[n].report.quotas_used.get(app, 0) for n in self.servers.values())  # by tables
        if taken + sum(spec.shard_bytes) > quota:
            raise Wrong(
                "ResourceExhausted",
                f"{spec.name!r} needs {sum(spec.shard_bytes)} bytes; app {app!r} has {taken} of its {quota} taken",
            )

    def _forget(self, spec: bytes, number: int, app: str) -> None:
        there = self.objects.get(number)
        if there is not None and there.spec == spec and there.app == app:
            self._object_over(there, "could not be made everywhere, and is no more")

    def _delete(self, number: int, app: str) -> None:
        """Whether or not it is there still: the answer to an earlier question may have been lost."""
        there = self.objects.get(number)
        if there is None:
            if not 0 < number < self.next_object:
                raise Wrong("NotFound", f"object {number}: there is no such object")
            return
        if there.app != app:
            raise Wrong("AccessDenied", f"only app {there.app!r} may delete its objects")
        alike = sorted(o.name.partition("/")[2] for o in self.objects.values() if o.group == there.name != o.name)
        if alike:
            names = ", ".join(map(repr, alike))
            why = f"it lies where others are placed like it, and they must be deleted first: {names}"
            raise Wrong("InvalidArgument", why)
        self._log("info", f"{there.name!r} is deleted")
        self._object_over(there, "was deleted")

    def _object_over(self, there: Object, why: str) -> None:
        number = there.number
        del self.objects[number], self.by_name[there.name]
        self.note("objects", number)
        self._tell(self.servers.values(), m.Forgotten(number))
        for server, size in zip(there.owners, there.shard_bytes, strict=True):
            if server in self.load_bytes:
                self.load_bytes[server] -= size
        self.moves.object_over(number, f"{there.name!r} {why}")
