"""Joins a cluster that has a scheduler, asks its catalogue, and listens to the scheduler during training."""

import dataclasses
import json
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable

import msgspec

from windlass import _core
from windlass._client.cluster import Cluster
from windlass._client.remote import Remote, Transport
from windlass._client.reports import Reports
from windlass._client.saving import Resumed, Saver
from windlass._data.places import Places
from windlass._errors import ERRORS, Closed, InternalError, InvalidArgument, ServerLost, Timeout, WindlassError
from windlass._net.address import Address, is_here
from windlass._net.dial import Dialer
from windlass._objects.arrays import is_whole
from windlass._release import owns_native
from windlass._rules.sync import Sync
from windlass.control import messages as m
from windlass.control.member import Member, here, new_incarnation

_log = logging.getLogger("windlass")
_OPEN, _LIST, _DETACH, _DELETE = 4, 6, 14, 27  # operations of the wire
_FOREVER_SECONDS = 1e6
_LOADING_SECONDS = 30.0  # from one word of servers that load a checkpoint to the next, at most
_LAST_WORD_SECONDS = 1.0  # for the scheduler to say who is missing, once time is up


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """How to reach a cluster through its scheduler; further workers use it, too."""

    address: Address
    app: str
    token: bytes = dataclasses.field(repr=False)
    checksums: bool | None
    transport: Transport
    reader: bool
    cluster_id: int
    tls: ssl.SSLContext | None
    sync: Sync | None  #: of the app's objects
    on_worker_loss: m.OnWorkerLoss

    def attend(self, rank: int | None, world_size: int, timeout: float) -> "Attendance":
        """Joins and waits for the first view. Raises Timeout with the names of missing members."""
        deadline = time.monotonic() + timeout
        attendance = Attendance(self, rank, world_size)
        try:
            attendance.begin(deadline)
        except BaseException:
            attendance.close(failed=True)
            raise
        return attendance


@owns_native("links", "session")
class Attendance:
    """One session's membership in its app."""

    def __init__(self, at: Scheduled, rank: int | None, world_size: int) -> None:
        join = m.Join(
            "reader" if at.reader else "worker",
            new_incarnation(),
            at.app,
            None if at.reader else rank,
            world_size,
            at.cluster_id,
            on_worker_loss=at.on_worker_loss,
            **here(),
        )
        self.at = at
        self.links: _core.Links | None = None
        self.dialer: Dialer | None = None
        self.session: _core.Session | None = None
        self.reports = Reports()  # the cluster's, once there is one
        self.member = Member(at.address, at.token, join, self._heard, at.tls)
        self.member.report = self._report
        self.member.again = self._say_barrier
        self.member.returned = self._say_again
        self.saver = Saver()
        self.recalls: dict[str, Callable[[], None]] = {}  # what to call at a Recall, by the lease's name
        self.places: Places | None = None  # the cluster's, once there is one
        self.loss_heard: list[Callable[[m.View, m.View], None]] = []  # what to call when a worker is lost
        self.also_closed: list[Callable[[], None]] = []  # what to call when this membership has ended
        self._barrier = 1  # the number of the next one
        self._reduced: m.Reduced | None = None  # what the last one gave
        self.holds: m.Holds | None = None  # what was said when the process was told to end
        self._changed = threading.Condition()  # of what follows
        self._view: m.View | None = None
        self._missing: list[str] = []
        self._loading_at = -math.inf  # when we heard last that servers load a checkpoint
        self._gone: dict[int, str] = {}
        self._servers: list[str] = []  # addresses, lost ones included
        self._over: WindlassError | None = None

    def begin(self, deadline: float) -> None:
        """Joins and waits for the first view."""
        self._barrier = self.member.start(deadline).barrier
        with self._changed:
            while self._view is None:
                if self._over is not None:
                    raise self._over
                left = self.until(deadline) - time.monotonic()
                if left <= 0:
                    who = ", ".join(self._missing) or "nobody that the scheduler has named"
                    where = f"at the scheduler {self.at.address}"
                    raise Timeout(f"connect: app {self.at.app!r} has not started {where}; missing: {who}")
                self._changed.wait(min(left, 1.0))
        deadline = self.until(deadline)
        # The caller may hold the GIL from now on, and a first heartbeat needs it.
        if not self.member.beating.wait(max(0.0, deadline - time.monotonic())):
            raise Timeout(f"connect: no heartbeat to the scheduler {self.at.address}")

    def until(self, deadline: float) -> float:
        """When we give up: the deadline, or later if servers load a checkpoint."""
        return max(deadline, self._loading_at + _LOADING_SECONDS)

    @property
    def over(self) -> WindlassError | None:
        """Why the membership has ended, if it has."""
        return self._over

    @property
    def resumed(self) -> Resumed | None:
        """The checkpoint that its app goes on from, for a worker that started with it."""
        welcome = self.member.welcome
        if not welcome.resumed:
            return None
        return Resumed(welcome.resumed, welcome.resumed_clock, json.loads(welcome.extra) if welcome.extra else None)

    @property
    def view(self) -> m.View:
        """Who trains together at the moment."""
        assert self._view is not None
        return self._view

    @property
    def incarnation(self) -> int:
        """The number this session is known by."""
        return self.member.join.incarnation

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.member.welcome.index

    @property
    def servers(self) -> list[Address]:
        """Where the servers are, in the order of their numbers."""
        return [Address.parse(address) for address in self._servers]

    def link(self, links: _core.Links, dialer: Dialer) -> None:
        """Passes on what the scheduler says of servers, from now on."""
        with self._changed:
            self.links, self.dialer = links, dialer
            gone = dict(self._gone)
        self._grow()
        for index, why in gone.items():
            links.lost(index, ERRORS.index(ServerLost), why)

    def shares(self) -> bool:
        """Whether memory may be shared with any of the servers."""
        return self.at.transport != "socket" and any(map(is_here, self.servers))

    # -- what the scheduler says -------------------------------------------------------------------------------------

    def _heard(self, message: m.Message) -> None:
        before = self._view
        with self._changed:
            match message:
                case m.View():
                    self._view = message
                    self._learn(message.servers)
                case m.Servers(servers):
                    self._learn(servers)
                case m.Waiting(missing, loading):
                    self._missing = missing
                    if loading:
                        self._loading_at = time.monotonic()
                case m.Gone(index, why):
                    self._gone[index] = why
                case m.Shutdown(why):
                    self._over = Closed(f"the cluster has ended: {why}")
                case m.Refused():
                    self._over = self.member.ended or InternalError("refused")
            self._changed.notify_all()
            links = self.links
        if isinstance(message, m.View | m.Servers):
            self._grow()
        if isinstance(message, m.View) and before is not None and message.lost > before.lost:
            for heard in self.loss_heard:
                heard(before, message)
        if self._over is not None and links is not None:  # we are no longer a member: all requests end
            for index in range(len(self._servers)):
                links.lost(index, ERRORS.index(type(self._over)), str(self._over))
        if isinstance(message, m.Gone) and links is not None:
            links.lost(message.index, ERRORS.index(ServerLost), message.why)
        match message:
            case m.SaveDue(asks):
                self.saver.ask(asks)
            case m.SaveOver():
                self.saver.over(message)
            case m.SplitsDue(save, clock):
                self._tell_places(save, clock)
            case m.HoldOver():
                from windlass._client.hold import over

                over()
        if self._over is not None:
            self.saver.end(self._over)
            from windlass._client import hold

            if hold.is_due():  # nobody will take the checkpoint that it waits for
                hold.over()
        if isinstance(message, m.Recall) and (recall := self.recalls.get(message.name)) is not None:
            recall()
        if isinstance(message, m.ShardMoved) and links is not None:
            links.moved(message.object, message.shard, message.server, message.term)

    def _say_barrier(self, join: m.Join) -> m.Join:
        """A scheduler that has begun again knows no barriers: that is for workers to say."""
        if join.role != "worker":
            return join
        return msgspec.structs.replace(join, barrier=self._barrier, reduced=self._reduced)

    def _say_again(self) -> None:
        """What a scheduler that has begun again does not know of us."""
        self._grow()
        if self.places:
            self.announce_split()
        if self.holds is not None:
            self.member.tell(self.holds)

    def _learn(self, servers: list[m.Peer]) -> None:
        """With the lock: there may be more than before. Numbers are given once, so what is known stays."""
        self._servers += [peer.address for peer in servers[len(self._servers) :]]

    def _grow(self) -> None:
        """Connections to servers that are new, and word of it: shards move there once everybody can follow."""
        with self._changed:
            links, dialer, servers = self.links, self.dialer, list(self._servers)
        if links is None or dialer is None:
            return
        dialer.grow([Address.parse(address) for address in servers])
        links.grow(servers)
        self.member.tell(m.KnowsServers(len(servers)))

    def announce_split(self) -> None:
        """Checkpoints ask this worker how far it has got."""
        self.member.tell(m.HasSplit())

    def _tell_places(self, save: int, clock: int) -> None:
        told = self.places is None or self.places.tell(clock, lambda at: self.member.tell(m.Splits(save, at)))
        if not told:
            self.member.tell(m.Splits(save, later=True))

    def _report(self) -> m.Report | None:
        session = self.session
        if session is None:
            return None
        if self.places is not None:
            self.places.look()
        return m.Report(clock=session.clock, values=self.reports.newest(), pulls=m.PullReport(*session.pull_stats))

    # -- what the core asks ------------------------------------------------------------------------------------------

    def catalogue(self, operation: int, body: bytes, seconds: float) -> tuple[int, list[bytes]]:
        """Where objects are: a code of the core and the answers, or an error message."""
        try:
            return 0, self._ask(operation, body, min(seconds, _FOREVER_SECONDS))
        except WindlassError as error:
            return ERRORS.index(type(error)) if type(error) in ERRORS else len(ERRORS) - 1, [str(error).encode()]

    def _ask(self, operation: int, body: bytes, seconds: float) -> list[bytes]:
        ask = self.member.ask
        if operation == _OPEN:
            placed = ask(lambda n: m.Open(n, body), "open", seconds).placed[0]
            return [_core.write_map(placed.object, placed.runs)]
        if operation == _LIST:
            answer = ask(m.List, "list", seconds)
            return [_core.write_map(placed.object, placed.runs) + placed.spec for placed in answer.placed]
        if operation == _DETACH:
            number, runs = _core.read_map(body)
            spec = body[len(_core.write_map(number, runs)) :]
            ask(lambda n: m.Forget(n, spec, number), "forget", seconds)
            return []
        if operation == _DELETE:
            number, _ = _core.read_map(body)
            ask(lambda n: m.Delete(n, number), "delete", seconds)
            return []
        raise InternalError(f"the catalogue was asked for operation {operation}")

    # -- barriers ----------------------------------------------------------------------------------------------------

    def arrive(self, deadline: float, numbers: m.Numbers | None) -> m.Reduced | None:
        """Stands at the next barrier until all do, and gives these numbers there. The result, where they made one."""
        number = self._barrier
        what = f"{'barrier' if numbers is None else 'all_reduce'} {number} of app {self.at.app!r}"
        ask = self.member.ask
        try:
            answer = ask(lambda n: m.Arrive(n, number, True, numbers), what, deadline - time.monotonic())
        except Timeout:
            if self.member.away:
                raise
            answer = ask(lambda n: m.Arrive(n, number, False, numbers), what, _LAST_WORD_SECONDS)  # names the missing
        self._barrier, self._reduced = number + 1, answer.reduced
        return answer.reduced

    def close(self, *, failed: bool = False, timeout: float = math.inf) -> None:
        """Leaves. timeout: what the scheduler has to take note of it."""
        self.member.close(failed=failed, timeout=timeout)
        if self.links is not None:
            self.links.set_catalogue(None)  # it refers to us: a cycle that the collector would not find
            self.links = self.dialer = self.session = None
        for close in self.also_closed:
            close()


def join(
    scheduled: Scheduled,
    rank: int | None,
    world_size: int,
    timeout: float,
    arena_of: _core.Engine | None = None,
    *,
    start_seconds: float | None = None,
) -> Cluster:
    """A cluster through its scheduler, once all members have come and all connections are up.

    timeout: of its calls. start_seconds: how long to wait for the members, if not as long.
    """
    start_seconds = timeout if start_seconds is None else start_seconds
    if not is_whole(world_size) or not 1 <= world_size < 2**32 or (rank is not None and not is_whole(rank)):
        raise InvalidArgument(f"connect: rank {rank!r} is not in a world of {world_size!r}")
    deadline = time.monotonic() + start_seconds
    attendance = scheduled.attend(rank, world_size, start_seconds)
    deadline = attendance.until(deadline)
    servers, welcome = attendance.servers, attendance.member.welcome
    sums = -1 if scheduled.checksums is None else int(scheduled.checksums)
    number = 0 if scheduled.reader else attendance.rank
    world = 0 if scheduled.reader else world_size
    links = _core.Links(
        [str(a) for a in servers],
        scheduled.app,
        number,
        world,
        sums,
        attendance.shares(),
        welcome.cluster,
        attendance.incarnation,
    )
    links.set_stall(welcome.failure_timeout)
    links.set_catalogue(attendance.catalogue)
    engine = _core.Engine.on(links, arena_of)
    dialer = Dialer(links, servers, scheduled.token, None, scheduled.transport)  # who is lost is the scheduler's to say
    try:
        attendance.link(links, dialer)
        links.wait_ready(max(0.0, deadline - time.monotonic()))
        session = _core.Session(engine, number, world)
        session.enter(max(0.0, deadline - time.monotonic()))
        attendance.session = session
    except BaseException:
        links.stop()
        dialer.close()
        attendance.close(failed=True)
        raise
    remote = Remote(
        tuple(servers),
        scheduled.app,
        scheduled.token,
        welcome.failure_timeout,
        scheduled.checksums,
        scheduled.transport,
        scheduled.sync,
    )
    cluster = Cluster(engine, session, dialer, timeout, remote, attendance, sync=scheduled.sync)
    if welcome.saves and not scheduled.reader:
        from windlass._client.hold import watch

        watch(cluster)
    return cluster
