"""A cluster in one thread, with a time, a network and a fate that follow from a seed.

The scheduler's state machine, its liveness and the session logic are the very code that ships; members, servers and the
network are models. Faults: control connections that break, data frames that are dropped, duplicated and reordered,
partitions, crashes, restarts, processes that stand still and are reset meanwhile, a scheduler whose time jumps, and one
that in every second history is killed and begins again with its journal, which must have all that anybody was told; in
every second history servers join, and are drained. In
every second history the workers that remain wait for a replacement of one that was lost; in every third one workers
lease data; in all of them workers meet at barriers, the app grows by a worker, and there is a second tensor, like the
first, whose shards move with those. In the end faults stop, the cluster settles, and everything that was promised is
checked. The same seed gives the same history, to the last event.

    python -m windlass.testing.simulation --seeds 200
"""

import argparse
import collections
import dataclasses
import functools
import hashlib
import heapq
import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from windlass import _core
from windlass.control import messages as m
from windlass.control.barrier import Barrier
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
)
from windlass.control.kept import Key
from windlass.control.kept import rows as rows_of
from windlass.control.liveness import Liveness
from windlass.control.model import Member as Known
from windlass.control.model import Moving, Spec, Terms
from windlass.control.moves import Moves
from windlass.control.state import State
from windlass.testing.simulated_barriers import BARRIERS, FIRST_QUESTION, Arriving, check_barriers, check_passing
from windlass.testing.simulated_gates import GATED, POLICIES, Clock, Gates
from windlass.testing.simulated_leases import LEDGERS, Leasing, NotedLedger, check_leases

CLUSTER = 7
SHARDS = 6
SERVERS, SERVERS_MAX = 3, 5  # expected, and with those that join
FAULTS_SECONDS = 60.0
SETTLE_SECONDS = 60.0
FAILURE_SECONDS = 5.0  # failure_timeout
APP = "default"
RETRY_SECONDS = 0.5  # a client asks after requests that have no answer
COPY_SECONDS = 0.05  # a shard's way from one server to another
CHECK_EVERY = 100  # events, between two looks whether the journal is the state
LATE_KEEPS = 40  # events whose rows are not on disk yet, where the journal is broken


class Violation(AssertionError):
    """A promise that was not kept."""


def _spec(data: bytes) -> Spec:
    like = "w" if data == b"d" else ""
    return Spec(f"{APP}/{data.decode()}", False, data.decode(), [1000] * SHARDS, like)


def _like_nothing(data: bytes) -> Spec:
    return dataclasses.replace(_spec(data), like="")


class World:
    """Time, the network, and everybody."""

    def __init__(self, seed: int, *, servers: int = SERVERS, workers: int = 3, broken: str = "") -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.broken = broken  # which mechanism is off, to show that its check can fail
        self.on_worker_loss: m.OnWorkerLoss = "wait" if seed % 2 else "continue"
        self.policy = POLICIES[seed // 2 % len(POLICIES)]  # of the gates
        self.closed: collections.Counter[tuple[int, int]] = collections.Counter()  # by rank and shard, as workers say
        self.leases = seed % 3 == 0
        self.kills_scheduler = seed // 3 % 2 == 1 or broken == "journal"
        self.elastic = seed // 2 % 2 == 1  # servers join, and are drained
        self.leasing: list[Leasing] = []  # by all processes of workers
        self.reduced: dict[int, list[m.Reduced | None]] = collections.defaultdict(list)  # by the barrier's number
        self.stands: dict[int, int] = {}  # workers by incarnation, and the last barrier each has arrived at
        self.history = hashlib.sha256()
        self.counts: collections.Counter[str] = collections.Counter()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.cut_off: set[int] = set()  # incarnations that the network does not reach
        self.faulty = True
        self.servers: list[Server] = []
        self.workers: list[Worker] = []
        self.brain = Brain(self, servers)
        self.servers += [Server(self, i) for i in range(servers)]
        self.workers += [Worker(self, rank, workers) for rank in range(workers)]

    @property
    def everybody(self) -> "list[Server | Worker]":
        """Servers and workers."""
        return [*self.servers, *self.workers]

    def note(self, *what: object) -> None:
        """What happened, for the history."""
        self.history.update(repr((round(self.now, 6), *what)).encode())

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Later."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), do))

    def delay(self) -> float:
        """What a message takes: mostly little, now and then long."""
        return self.random.expovariate(1000) if self.random.random() < 0.95 else self.random.uniform(0, 0.5)

    def frame(self, sender: int, receiver: int, deliver: Callable[[], None]) -> None:
        """A frame of the data plane: dropped, duplicated and reordered as fate will have it."""
        copies = 1
        if self.faulty:
            fate = self.random.random()
            copies = 0 if fate < 0.05 else 2 if fate < 0.1 else 1
            self.counts["frames dropped" if copies == 0 else "frames duplicated" if copies == 2 else "frames"] += 1

        def arrive() -> None:
            if sender not in self.cut_off and receiver not in self.cut_off:
                deliver()

        for _ in range(copies):
            self.after(self.delay(), arrive)

    def run(self) -> None:
        """Everything, and the checks."""
        for member in [*self.servers, *self.workers]:
            member.begin()
        self.after(self.random.expovariate(1), self._fault)
        self.after(self.random.uniform(0, FAULTS_SECONDS), self._grow)
        self._until(FAULTS_SECONDS)
        self.faulty = False
        self.cut_off.clear()
        for member in [*self.servers, *self.workers]:
            member.still = False
        self.note("faults stop")
        self._until(FAULTS_SECONDS + SETTLE_SECONDS / 2)
        self._bring_together()
        half = {worker.incarnation: worker.clock.clock for worker in self.workers if worker.clock is not None}
        passed = {worker.incarnation: worker.arriving.passed for worker in self.workers if worker.arriving is not None}
        self._until(FAULTS_SECONDS + SETTLE_SECONDS)
        self.check()
        self._check_clocks(half)
        check_barriers(self, passed)
        check_leases(self, APP)

    def violated(self, what: str) -> None:
        """A promise was not kept."""
        raise Violation(what)

    def _check_clocks(self, before: dict[int, int]) -> None:
        """Nobody waits for ever, unless the scheduler takes a shard with a gate to be lost."""
        state = self.brain.state
        owners = [owner for object_ in state.objects.values() for owner in object_.owners[:GATED]]
        if any(owner in state.lost for owner in owners):
            return
        for worker in self.workers:
            if worker.alive and not worker.out and worker.clock is not None and worker.incarnation in before:
                if worker.clock.clock == before[worker.incarnation]:
                    raise Violation(f"{worker.name} waits for ever at clock {worker.clock.clock} under {self.policy}")
                self.counts["workers that go on"] += 1

    def _until(self, end: float) -> None:
        while self._queue and self._queue[0][0] <= end:
            self.now, _, do = heapq.heappop(self._queue)
            do()
        self.now = end

    def _fault(self) -> None:
        if not self.faulty:
            return
        who: Member = self.random.choice([*self.servers, *self.workers])
        kind = self.random.choices(
            [
                *("break", "beat", "crash", "blackout", "still", "partition", "move", "jump", "doomed move"),
                *("scheduler", "join", "drain"),
            ],
            [6, 3, 1, 0.5, 2, 2, 12, 1, 0.4, 0.8, 1.0, 1.0],
        )[0]
        self.counts[kind] += 1
        self.note("fault", kind, who.name)
        match kind:
            case "break":
                who.lose_control()
            case "beat":
                who.lose_beat()
            case "crash" if isinstance(who, Worker):  # without replicas a server's crash is the end of its shards
                who.crash()
                self.after(self.random.uniform(0.1, 20), who.begin)
            case "blackout":  # all workers, and soon after the servers' control connections
                for worker in self.workers:
                    worker.crash()
                    self.after(self.random.uniform(0.1, 20), worker.begin)
                for server in self.servers:
                    self.after(self.random.uniform(0.1, 0.5), server.lose_control)
            case "still":
                who.still = True
                if self.random.random() < 0.5:  # and its connections are reset meanwhile
                    self.counts["resets of who stands still"] += 1
                    who.lose_beat()
                    who.lose_control()
                self.after(self.random.uniform(0.5, 15), who.wake)
            case "partition":
                incarnation = who.incarnation
                self.cut_off.add(incarnation)
                self.after(self.random.uniform(0.1, 8), lambda: self.cut_off.discard(incarnation))
            case "move":
                self.brain.move(self.random.randrange(SHARDS), self.random.randrange(len(self.servers)))
            case "jump":
                self.brain.sleep(self.random.uniform(1, 30))
            case "doomed move":
                self._doom(self.random.choice(self.servers))
            case "join" if self._takes_another():
                self.servers.append(Server(self, len(self.servers)))
                self.servers[-1].begin()
            case "drain" if self.elastic:
                self.brain.drain(self.random.randrange(len(self.servers)))
            case "scheduler" if self.kills_scheduler:
                self.brain.die(self.random.choice([0.3, 2.0, 8.0]))
        self.after(self.random.expovariate(1), self._fault)

    def _takes_another(self) -> bool:
        """Whether a server may join: one after the other, so that each knows its number."""
        if not self.elastic or self.brain.down or not self.brain.state.ever_started:
            return False
        return len(self.servers) < SERVERS_MAX and all(server.joined or server.out for server in self.servers)

    def _grow(self) -> None:
        """One worker more than there were; it tries until the app has started and takes it."""
        size = len(self.workers) + 1
        self.workers.append(Worker(self, size - 1, size))
        self.workers[-1].begin()

    def _doom(self, target: "Server") -> None:
        """A shard is to move to a server that is given up and comes back before its owner gets to it."""
        incarnation = target.incarnation
        self.cut_off.add(incarnation)
        self.after(6.0, lambda: self.cut_off.discard(incarnation))

        def order() -> None:
            held = [(server, shard) for server in self.servers for shard in server.shards if server is not target]
            if held:
                source, shard = self.random.choice(held)
                shard %= SHARDS
                source.still = True
                self.after(4.5, source.wake)
                self.brain.move(shard, target.index)

        self.after(3.0, order)

    def check_death(self, incarnation: int, why: str) -> None:
        """Whoever lives is given up for silence alone, and not before its time is up."""
        for member in [*self.servers, *self.workers]:
            if member.alive and member.incarnation == incarnation:
                self.counts["living given up"] += 1
                if (silent := self.now - member.heard_at) < FAILURE_SECONDS:
                    raise Violation(f"{member.name} was given up after {silent:.2f} s of silence: {why}")

    def check(self) -> None:
        """Whether everything that was promised is so."""
        state = self.brain.state
        living = {w.rank: w.incarnation for w in self.workers if w.alive and not w.out}
        app = state.apps[APP]
        if app.world_size != len(self.workers):
            raise Violation(f"the app has {app.world_size} workers, but {len(self.workers)} have come")
        if app.workers != living:
            raise Violation(f"the view has {app.workers}, but {living} are there")
        for worker in self.workers:
            if worker.alive and not worker.out and worker.view != app.view and app.started:
                raise Violation(f"{worker.name} knows view {worker.view}, not {app.view}")
        self._check_servers_views()
        if not state.objects:
            return
        if state.moves.going:
            raise Violation(f"moves that nobody answers: {state.moves.going}")
        object_ = next(iter(state.objects.values()))
        for shard, (owner, term) in enumerate(zip(object_.owners, object_.terms, strict=True)):
            holders = [s.index for s in self.servers if s.alive and s.holds(shard)]
            if owner in state.lost:
                continue
            if holders != [owner]:
                raise Violation(f"shard {shard} is on {holders}; the map says {owner}, term {term}")
            self._check_pushes(shard, self.servers[owner])
            self.counts["shards checked"] += 1
        self._check_alike()

    def _bring_together(self) -> None:
        """An operator who sees that a move and the way back have both failed asks again."""
        objects = self.brain.state.objects
        for shard, owner in enumerate(objects[1].owners if objects else []):
            self.brain.awake(functools.partial(self.brain.move, shard, owner))

    def _check_alike(self) -> None:
        """What is like another tensor is where that one is."""
        state = self.brain.state
        if 2 not in state.objects:
            return
        first, second = state.objects[1], state.objects[2]
        for shard, (owner, other) in enumerate(zip(first.owners, second.owners, strict=True)):
            if {owner, other} & set(state.lost):
                continue
            if owner != other:
                raise Violation(f"shard {shard} of two tensors that are alike is on {owner} and {other}")
            holders = [s.index for s in self.servers if s.alive and s.holds(SHARDS + shard)]
            if second.terms[shard] > 1 and holders != [owner]:
                raise Violation(f"shard {shard} of the second tensor is on {holders}; the map says {owner}")
            self.counts["shards alike"] += second.terms[shard] > 1

    def _check_servers_views(self) -> None:
        """Every server knows the last view; who was lost has been replaced."""
        app = self.brain.state.apps[APP]
        if app.waited:
            raise Violation(f"ranks {sorted(app.waited)} are waited for, though all have come back")
        for server in self.servers:
            if not server.alive or server.out:
                continue
            if server.view is None or server.view.number != app.view:
                seen = None if server.view is None else server.view.number
                raise Violation(f"{server.name} knows view {seen}, not {app.view}")
            workers = {peer.index: peer.incarnation for peer in server.view.workers}
            if app.started and workers != app.workers:
                raise Violation(f"{server.name} knows {workers}, not {app.workers}")
            self.counts["views checked"] += 1

    def _check_pushes(self, shard: int, owner: "Server") -> None:
        total = 0
        for worker in self.workers:
            for incarnation, pushed in worker.pushed.items():
                values = pushed[shard]
                record = owner.shards[shard].records.get(incarnation)
                applied = 0 if record is None else record.sequence
                acknowledged = worker.acknowledged[incarnation][shard]
                if acknowledged > applied:
                    raise Violation(f"{worker.name}, shard {shard}: {acknowledged} acknowledged, {applied} applied")
                if worker.alive and not worker.out and incarnation == worker.incarnation and applied != len(values):
                    raise Violation(f"{worker.name}, shard {shard}: {applied} of {len(values)} pushes applied")
                total += sum(values[:applied])
        if total != owner.shards[shard].total:
            raise Violation(f"shard {shard} has {owner.shards[shard].total}, expected {total}")


class _Forgetful(State):
    """A state machine that does not tell a server which views it has missed."""

    def _catch_up_views(self, member: Known) -> None:
        if member.join.role != "server":
            super()._catch_up_views(member)


class _HastyMoves(Moves):
    """Takes a move to be off when its target is gone."""

    def _target_gone(self, move: int, v: Moving, why: str) -> None:
        self._over(move, why)


class _Hasty(State):
    """A state machine with such moves."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.moves = _HastyMoves(self)


class _Impatient(Liveness):
    """Takes a connection that is broken for a process that is gone."""

    def disconnected(self, member: int, now: float) -> None:
        super().disconnected(member, now)
        if member in self.away(now):
            self.gone(member, "its connection broke", now)


class Brain:
    """The scheduler process around the state machine."""

    def __init__(self, world: World, servers: int) -> None:
        self.world = world
        self._servers = servers
        self.alive = self._new_liveness()
        self.connections: dict[int, tuple[Member, int]] = {}  # by number: whose, and which of its connections
        self.of: dict[int, int] = {}  # the connection of each member
        self.lives = 0
        self._down = False
        self._journal: dict[Key, bytes] = {}
        self._latest: collections.deque[list[Keep]] = collections.deque()  # not on disk yet, where that is broken
        self._events = 0
        self._sleeps = 0
        self._late: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: dict[str, int] = {}  # the last of each name; earlier ones do not count any more
        self._numbers = itertools.count(1)
        self._operator = 999
        self._begin()
        self._look()

    def _new_liveness(self) -> Liveness:
        return (_Impatient if self.world.broken == "grace" else Liveness)(FAILURE_SECONDS)

    def _begin(self) -> None:
        """A scheduler process."""
        self.lives += 1
        kind = {"views": _Forgetful, "moves": _Hasty}.get(self.world.broken, State)
        read = _like_nothing if self.world.broken == "alike" else _spec
        terms = Terms(CLUSTER, self._servers, failure_timeout=FAILURE_SECONDS, linger=True)
        self.state = kind(terms, read, lambda a, b: a == b)
        self.state.keeps, self.state.generation = True, self.lives
        self.state.new_ledger = LEDGERS.get(self.world.broken, NotedLedger)
        self.state.new_barrier = BARRIERS.get(self.world.broken, Barrier)
        if self._journal:
            self.state.restore(dict(self._journal), lambda saving: None)
            there = {member.incarnation for member in self.world.everybody if member.alive}
            for member in self.state.returning:
                self.alive.add(member, self.world.now)
                if member not in there and member % 4 < 2:  # on its host, where there is no such process
                    self.alive.gone(member, "its process has ended", self.world.now)
        self._do(self.state.begin())
        self.feed(Came(next(self._numbers), m.Join("operator", self._operator)))

    def die(self, seconds: float) -> None:
        """It is killed, and another begins with its journal."""
        if self._down or self._sleeps:
            return
        self.world.counts["schedulers killed"] += 1
        self._check_journal()
        self._latest.clear()
        self._down = True
        self._timers.clear()
        self._late.clear()
        self.connections.clear()
        self.of.clear()
        self.alive = self._new_liveness()
        for member in self.world.everybody:
            member.lose_beat()
            member.lose_control()
        self.world.after(seconds, self._begin_again)

    def _begin_again(self) -> None:
        self._down = False
        self.world.note("scheduler", self.lives + 1)
        self._begin()

    @property
    def down(self) -> bool:
        """Whether there is none at the moment."""
        return self._down

    def _keep(self, actions: list[Action]) -> None:
        """What is kept is on disk before anything else happens; or the latest is not, where that is broken."""
        self._latest.append([action for action in actions if isinstance(action, Keep)])
        while len(self._latest) > (LATE_KEEPS if self.world.broken == "journal" else 0):
            for one in self._latest.popleft():
                if one.value is None:
                    self._journal.pop((one.table, one.key), None)
                else:
                    self._journal[one.table, one.key] = one.value
        self._events += 1
        if self._events % CHECK_EVERY == 0:
            self._check_journal()

    def _check_journal(self) -> None:
        """It is the state, row by row."""
        if self.world.broken == "journal":
            return
        rows = rows_of(self.state)
        if rows != self._journal:
            wrong = sorted(key for key in rows.keys() | self._journal.keys() if rows.get(key) != self._journal.get(key))
            raise Violation(f"the journal has other rows than the state: {wrong[:5]}")
        self.world.counts["journals checked"] += 1

    def feed(self, event: Event) -> None:
        self.world.note(event)
        app = self.state.apps.get(APP)
        barrier = 0 if app is None else app.barrier.number
        actions = self.state.handle(event)
        if app is not None and not isinstance(event, Came):  # who comes back may say that one was passed before
            check_passing(self.world, app, barrier)
        self._do(actions)

    def sleep(self, seconds: float) -> None:
        """It stands still: what arrives waits, in order."""
        self._sleeps += 1
        self.world.after(seconds, self._wake)

    def _wake(self) -> None:
        self._sleeps -= 1
        while self._late and not self._sleeps:
            self._late.popleft()()

    def awake(self, do: Callable[[], None]) -> None:
        """Now, or when it is awake again; never, if there is none."""
        if self._down:
            return
        if self._sleeps:
            self._late.append(do)
        else:
            do()

    def _look(self) -> None:
        def look() -> None:
            for member, why in self.alive.look(self.world.now):
                self.world.counts["deaths"] += 1
                self.world.check_death(member, why)
                self.feed(Died(member, why))

        self.awake(look)
        self.world.after(self.alive.period, self._look)

    def move(self, shard: int, server: int) -> None:
        if self.state.objects and not self._down:
            self.feed(Said(self._operator, m.Move(next(self._numbers), f"{APP}/w", shard, server)))

    def drain(self, server: int) -> None:
        if self.state.ever_started and not self._down:
            self.world.counts["drains asked for"] += 1
            self.feed(Said(self._operator, m.Drain(next(self._numbers), server)))

    def _do(self, actions: list[Action]) -> None:
        self._keep(actions)
        for action in actions:
            match action:
                case Admit(connection, member):
                    self.of[member] = connection
                    if member != self._operator:
                        self.alive.add(member, self.world.now)
                case Refuse(connection, message):
                    self._send(connection, message)
                case Defer(connection):
                    self.world.counts["joins that wait"] += 1
                    if (waits := self.connections.pop(connection, None)) is not None:
                        self.world.after(0.001, lambda there=waits: there[0].closed(there[1]))  # type: ignore[misc]
                case Tell(member, message) if member in self.of:
                    self._send(self.of[member], message)
                case Cut(member):
                    self.alive.remove(member)
                    if (there := self.connections.get(self.of.pop(member, 0))) is not None:
                        self.world.after(0.001, lambda there=there: there[0].closed(there[1]))  # type: ignore[misc]
                case Timer(name, seconds):
                    self._set_timer(name, seconds)
                case End():
                    raise Violation("the cluster ended")
                case Log(_, text):
                    self.world.counts["apps that grew"] += " grows from " in text
                case Tell() | Keep():
                    pass

    def _set_timer(self, name: str, seconds: float | None) -> None:
        number = self._timers[name] = next(self._numbers)

        def fire() -> None:
            if self._timers.get(name) == number:
                self.feed(Fired(name))

        if seconds is not None:
            self.world.after(seconds, lambda: self.awake(fire))

    def _send(self, connection: int, message: m.Message) -> None:
        if (there := self.connections.get(connection)) is None:
            return
        member, number = there
        data = m.encode(message)  # what arrives has been through the encoding
        self.world.after(0.0005, lambda: member.receive(number, m.read_scheduler(data)))

    # What members do to it.

    def accept(self, member: "Member", number: int, join: m.Join) -> None:
        connection = next(self._numbers)
        self.connections[connection] = (member, number)
        member.connection = connection
        self.awake(lambda: self.feed(Came(connection, join)) if connection in self.connections else None)

    def broke(self, connection: int, incarnation: int) -> None:
        self.connections.pop(connection, None)
        if self.of.get(incarnation) == connection:
            del self.of[incarnation]

    def said(self, connection: int, incarnation: int, message: m.Message) -> None:
        data = m.encode(message)

        def deliver() -> None:
            if self.of.get(incarnation) == connection:
                self.feed(Said(incarnation, m.read_member(data)))

        self.world.after(0.0005, lambda: self.awake(deliver))


class Member:
    """What servers and workers have in common: a control connection and a heartbeat."""

    role = ""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.incarnation = 0
        self.connection = 0
        self.alive = False
        self.out = False  # the scheduler refused it
        self.still = False
        self.joined = False
        self._number = 0  # of its connections
        self._inbox: collections.deque[tuple[int, m.Message]] = collections.deque()
        self._beating = False
        self.heard_at = 0.0  # by the scheduler

    def join(self) -> m.Join:
        raise NotImplementedError

    def begin(self) -> None:
        """A new process."""
        self.incarnation = self.world.random.getrandbits(63) | 1
        self.alive, self.out, self.still, self.joined = True, False, False, False
        self.world.note("begin", self.name, self.incarnation)
        self._connect()
        self._beat(self.incarnation)

    def crash(self) -> None:
        """All its connections break, and it knows nothing any more. On the scheduler's host the kernel tells of it."""
        self.alive = False
        self.lose_control()
        self.lose_beat()
        if self.incarnation % 4 < 2:  # on that host
            brain, incarnation = self.world.brain, self.incarnation
            self.world.counts["ends known"] += 1
            brain.awake(lambda: brain.alive.gone(incarnation, "its process has ended", self.world.now))

    @property
    def connections(self) -> int:
        """How many there were; also counts each that broke."""
        return self._number

    def wake(self) -> None:
        """After standing still."""
        self.still = False

    def reachable(self) -> bool:
        """Whether it lives, runs, and the network is with it."""
        return self.alive and not self.still and self.incarnation not in self.world.cut_off

    def _connect(self) -> None:
        if not self.alive or self.out:
            return
        if not self.reachable() or self.world.brain.down:
            self.world.after(0.2, self._connect)
            return
        self._number += 1
        self.world.brain.broke(self.connection, self.incarnation)  # it has one at a time
        self.world.brain.accept(self, self._number, self.join())

    def lose_control(self) -> None:
        """The control connection breaks."""
        self.world.brain.broke(self.connection, self.incarnation)
        self._number += 1
        self.world.after(self.world.random.uniform(0.01, 0.5), self._connect)

    def closed(self, number: int) -> None:
        """The scheduler has closed the connection, which is noticed when the network lets it through."""
        if number != self._number or not self.alive:
            return
        if self.reachable():
            self.lose_control()
        else:
            self.world.after(0.2, lambda: self.closed(number))

    def lose_beat(self) -> None:
        """The heartbeat's connection breaks; it is made again at once, if there is anybody to do that."""
        if self._beating:
            self._beating = False
            self.world.brain.alive.disconnected(self.incarnation, self.world.now)

    def _beat(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        if self.reachable() and self.joined:
            brain = self.world.brain

            def arrive() -> None:
                if not self._beating:
                    self._beating = brain.alive.connected(incarnation, self.world.now)
                brain.alive.heard(incarnation, self.world.now)
                self.heard_at = self.world.now

            brain.awake(arrive)
        self.world.after(0.1, lambda: self._beat(incarnation))

    def tell(self, message: m.Message) -> None:
        if self.reachable():
            self.world.brain.said(self.connection, self.incarnation, message)

    def receive(self, number: int, message: m.Message) -> None:
        """From the scheduler, over one of its connections: in order, and TCP keeps what cannot be read yet."""
        self._inbox.append((number, message))
        if len(self._inbox) == 1:
            self._read()

    def _read(self) -> None:
        while self._inbox:
            if self.alive and not self.reachable():
                self.world.after(0.2, self._read)
                return
            number, message = self._inbox.popleft()
            if number == self._number and self.alive:
                self._hear(message)

    def _hear(self, message: m.Message) -> None:
        if isinstance(message, m.Welcome):
            self.joined = True
        if isinstance(message, m.Refused):
            self.world.note("refused", self.name, message.error)
            self.out = True
            self.lose_beat()
            self.gone()
            return
        self.heard(message)

    def gone(self) -> None:
        """After a refusal."""

    def heard(self, message: m.Message) -> None:
        raise NotImplementedError


class Shard:
    """What a server has of a shard."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.total = 0
        self.records: dict[int, _core.Record] = {}
        self.frozen = False

    def copy(self, term: int, *, records: bool) -> "Shard":
        made = Shard(term)
        made.total = self.total
        for incarnation, record in self.records.items() if records else ():
            made.records[incarnation] = _core.Record()
            made.records[incarnation].sequence = record.sequence
        return made


class Server(Member):
    """Holds shards; applies each push once."""

    role = "server"

    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, f"server {index}")
        self.index = index
        self.shards: dict[int, Shard] = {}
        self.moved: dict[int, tuple[int, int]] = {}  # to which server, under which term
        self.view: m.View | None = None
        self.gates = Gates(APP, world)
        self._since: dict[int, int] = {}  # by incarnation
        self._cancelled: set[int] = set()  # moves
        self._moved: dict[int, str] = {}  # what became of moves

    def join(self) -> m.Join:
        rank = self.index if self.index < SERVERS else None  # who joins later takes the number that it is given
        return m.Join("server", self.incarnation, rank=rank, addresses=[f"unix://@{self.index}"], pid=1)

    def begin(self) -> None:
        self.shards.clear()
        self.moved.clear()
        self._moved.clear()
        self.gates = Gates(APP, self.world)
        super().begin()

    def is_gone(self) -> bool:
        """Whether it is no member, and will not be."""
        return self.index not in self.world.brain.state.servers and (self.out or not self.alive)

    def holds(self, shard: int) -> bool:
        return shard in self.shards and shard not in self.moved

    def heard(self, message: m.Message) -> None:
        match message:
            case m.Welcome(_, index):
                if index != self.index:
                    raise Violation(f"{self.name} was given number {index}")
                self.tell(m.Ready())
                self._will_know_the_view(self._number)
            case m.Retire():
                owners = [owner for object_ in self.world.brain.state.objects.values() for owner in object_.owners]
                if self.index in owners:
                    raise Violation(f"{self.name} is to end, and has shards")
                self.world.counts["servers drained"] += 1
                self.alive = False
                self.lose_beat()
            case m.MoveShard():
                self._move(message)
            case m.CancelMove():
                self._cancel(message)
            case m.View():
                self._see(message)

    def _will_know_the_view(self, connection: int) -> None:
        """Who has come back knows in a moment what it has missed."""
        state = self.world.brain.state
        number = 0 if APP not in state.apps else state.apps[APP].view

        def check() -> None:
            away = self._number != connection or not self.reachable() or self._inbox
            if away or self.incarnation not in state.members:
                return
            if number > (0 if self.view is None else self.view.number):
                raise Violation(f"{self.name} has come back and does not know view {number}")
            self.world.counts["servers back"] += number > 0

        self.world.after(0.05, check)

    def _see(self, view: m.View) -> None:
        """Numbers go up, and what a view says does not change; a connection that was re-made repeats the last one."""
        before, self.view = self.view, view
        self.gates.hear(view)
        same = before is not None and msgspec.structs.replace(view, servers=before.servers) == before
        if before is not None and (view.number < before.number or (view.number == before.number and not same)):
            raise Violation(f"{self.name} was shown view {view.number} after {before.number}")
        if before is not None and view.started < before.started:
            raise Violation(f"{self.name}: the app started with view {view.started} after {before.started}")
        for peer in view.workers:
            if not view.started <= peer.since <= view.number:
                raise Violation(f"view {view.number}, started with {view.started}: {peer}")
            if self._since.setdefault(peer.incarnation, peer.since) != peer.since:
                raise Violation(f"{self.name}: {peer} was in a view since {self._since[peer.incarnation]}")
        if view.waited and self.world.on_worker_loss == "continue":
            raise Violation(f"view {view.number} waits for {view.waited} in an app that continues")
        if set(view.waited) & {peer.index for peer in view.workers}:
            raise Violation(f"view {view.number} waits for {view.waited}, some of whom are in it")
        if before is None or view.number > before.number:
            self.world.counts["views that wait"] += bool(view.waited)
            self.world.counts["views of a start"] += view.started == view.number
            self.world.counts["views without workers"] += not view.workers

    def attach(self, runs: list[tuple[int, int, int]], object_: int = 1) -> None:
        """An object of which it has shards, as a client says. Those of the second are counted behind the first's."""
        for i, (first, server, term) in enumerate(runs):
            end = runs[i + 1][0] if i + 1 < len(runs) else SHARDS
            for index in range(first, end) if server == self.index and term == 1 else ():
                shard = index + SHARDS * (object_ - 1)
                if shard not in self.shards and shard not in self.moved:
                    self.shards[shard] = Shard(term)
                    if object_ == 1:
                        self.gates.hold(shard)

    def push(self, sender: "Worker", incarnation: int, shard: int, sequence: int, value: int, request: int) -> None:
        """A frame has arrived."""
        if not self.reachable():
            return

        def answer(status: str, *more: int) -> None:
            arrive = functools.partial(sender.answered, incarnation, request, status, *more)
            self.world.frame(self.incarnation, incarnation, arrive)

        there = self.shards.get(shard)
        if shard in self.moved:
            answer("moved", *self.moved[shard])
        elif there is None or there.frozen:
            return  # it is asked again
        else:
            record = there.records.setdefault(incarnation, _core.Record())
            admission = record.admit(sequence)
            if admission == _core.Admission.APPLY or self.world.broken == "sequence":
                record.sequence = max(record.sequence, sequence)
                there.total += value
            if admission != _core.Admission.GAP:
                answer("ok")

    def _move(self, order: m.MoveShard) -> None:
        if (over := self._moved.get(order.move)) is not None:
            self._answer(order.move, over)
            return
        self.attach(order.runs, order.object)
        shard = order.shard + SHARDS * (order.object - 1)
        there = self.shards.get(shard)
        if there is None or shard in self.moved:
            if self.moved.get(shard) == (order.server, order.term):
                self._answer(order.move)  # it was done, and the word of it was lost
            return
        if there.frozen:
            return
        there.frozen = True
        target = self.world.servers[order.server]
        mine = self.incarnation
        self.world.note("moving", shard, self.index, order.server)

        def arrive() -> None:
            ok = target.reachable() and self.reachable() and mine == self.incarnation
            ok = ok and order.move not in self._cancelled
            there.frozen = False
            if ok:
                target.shards[shard] = there.copy(order.term, records=self.world.broken != "records")
                target.moved.pop(shard, None)
                if self.world.broken != "crowd":
                    target.gates.workers.hear(self.gates.workers)
                if order.object == 1:
                    gate = self.gates.gates.pop(shard, None)
                    target.gates.hold(shard, None if self.world.broken == "clocks" else gate)
                self.moved[shard] = (order.server, order.term)
                del self.shards[shard]
                self.world.counts["moves done"] += 1
            self._moved[order.move] = "" if ok else "out of reach"
            self._answer(order.move, self._moved[order.move])

        self.world.after(COPY_SECONDS, arrive)

    def _cancel(self, order: m.CancelMove) -> None:
        """Who is at it says what became of it; else the shard has left or is here."""
        shard = order.shard + SHARDS * (order.object - 1)
        there = self.shards.get(shard)
        self._cancelled.add(order.move)
        self.world.counts["moves cancelled"] += 1
        if there is None or not there.frozen:
            left = self.moved.get(shard) == (order.server, order.term)
            self._answer(order.move, "" if left else "it stays")

    def _answer(self, move: int, error: str = "") -> None:
        """A connection keeps what is said until it can be sent."""
        if self.reachable():
            self.tell(m.Moved(move, error))
        elif self.alive:
            self.world.after(0.2, lambda: self._answer(move, error))


class Worker(Member):
    """Pushes numbers to shards, one after the other, and sends again what has no answer."""

    role = "worker"

    def __init__(self, world: World, rank: int, world_size: int) -> None:
        super().__init__(world, f"worker {rank}")
        self.rank = rank
        self.world_size = world_size
        self.pushed: dict[int, dict[int, list[int]]] = {}  # values by incarnation and shard
        self.acknowledged: dict[int, dict[int, int]] = {}
        self.view = 0
        self.clock: Clock | None = None
        self._leasing: Leasing | None = None
        self.arriving: Arriving | None = None
        self._starts = 0
        self._owners: list[int] = []
        self._terms: list[int] = []
        self._boxes: dict[int, _core.Outbox] = {}
        self._requests: dict[int, tuple[int, int, int]] = {}  # shard, sequence, value

    def join(self) -> m.Join:
        rank = self.rank if self._starts == 1 else None  # a replacement takes the rank that it is given
        loss, app = self.world.on_worker_loss, self.world.brain.state.apps.get(APP)
        size = max(self.world_size, 0 if app is None else app.world_size)  # who starts a worker knows what has grown
        join = m.Join("worker", self.incarnation, APP, rank, size, pid=1, on_worker_loss=loss)
        if self.arriving is None:
            return join
        return msgspec.structs.replace(join, barrier=self.arriving.number, reduced=self.arriving.reduced)

    def begin(self) -> None:
        if self.alive:
            return
        self.view = 0
        self.clock = None
        self.arriving = None
        self._starts += 1
        self._owners = []
        self._boxes.clear()
        self._requests.clear()
        super().begin()
        self.pushed[self.incarnation] = collections.defaultdict(list)
        self.acknowledged[self.incarnation] = collections.defaultdict(int)
        self._retry(self.incarnation)

    def gone(self) -> None:
        """The process ends, and somebody starts another."""
        self.alive = False
        self.world.after(1.0, self.begin)

    def heard(self, message: m.Message) -> None:
        match message:
            case m.Welcome(_, rank, barrier=barrier):
                self.rank = rank
                if self.view == 0:
                    self.arriving = Arriving(self, barrier)
            case m.View(_, number):
                if number < self.view:
                    raise Violation(f"{self.name} was shown view {number} after {self.view}")
                if self.rank not in [peer.index for peer in message.workers]:
                    raise Violation(f"{self.name} is not in the view that it is shown")
                if any(peer.incarnation for peer in message.workers):
                    raise Violation(f"{self.name} is told the incarnations of others")
                if len({peer.index for peer in message.workers}) != len(message.workers):
                    raise Violation("two workers have one rank")
                first, self.view = self.view == 0, number
                self.tell(m.KnowsServers(len(message.servers)))
                if first:
                    self._open()
                    self._push(self.incarnation)
                    self._lease()
                    if self.arriving is not None:
                        self.arriving.begin()
            case m.Answer(number) if number >= FIRST_QUESTION and self.arriving is not None:
                self.arriving.heard(message)
            case m.Answer() | m.Recall() if self._leasing is not None and not getattr(message, "placed", None):
                self._leasing.heard(message)
            case m.Answer(1, error, _, placed) if placed and not error and not self._owners:
                self._learn(placed[0].runs)
            case m.ShardMoved(1, shard, server, term) if self._owners:
                self.moved(shard, server, term)
            case m.Servers(servers):
                self.tell(m.KnowsServers(len(servers)))
            case m.Gone(index):
                self._go_on_elsewhere(index)

    def _open(self) -> None:
        self.tell(m.Open(1, b"w"))
        self.tell(m.Open(2, b"d"))

    def _lease(self) -> None:
        self._leasing = None
        if self.world.leases:
            self._leasing = Leasing(self)
            self.world.leasing.append(self._leasing)
            self._leasing.begin()

    def _learn(self, runs: list[tuple[int, int, int]]) -> None:
        for i, (first, server, term) in enumerate(runs):
            end = runs[i + 1][0] if i + 1 < len(runs) else SHARDS
            self._owners += [server] * (end - first)
            self._terms += [term] * (end - first)
        self._terms = self._terms[-SHARDS:]
        for server_ in self.world.servers:
            server_.attach(runs)
        self.clock = Clock(self)
        self.clock.begin()

    def owner_of(self, shard: int) -> int:
        """As far as it knows."""
        return self._owners[shard]

    def moved(self, shard: int, server: int, term: int) -> None:
        if term > self._terms[shard]:
            self._owners[shard], self._terms[shard] = server, term

    def _push(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive or self.out:
            return
        if self._owners and self.world.faulty and not self.still and len(self._requests) < 20:
            shard, value = self.world.random.randrange(SHARDS), self.world.random.randrange(1, 100)
            values = self.pushed[incarnation][shard]
            values.append(value)
            request = sum(map(len, self.pushed[incarnation].values()))
            self._requests[request] = (shard, len(values), value)
            self._box(self._owners[shard]).add(request, request)
            self.world.counts["pushes"] += 1
            self._send()
        self.world.after(self.world.random.expovariate(20), lambda: self._push(incarnation))

    def _go_on_elsewhere(self, server: int) -> None:
        """It is no more: what waited for it goes to whoever has the shards by now."""
        gone = self._boxes.pop(server, None)
        if gone is None:
            return
        for request, (shard, _, _) in self._requests.items():
            if gone.find(request) is not None and self._owners[shard] != server:
                self._box(self._owners[shard]).add(request, request)
        self._send()

    def _box(self, server: int) -> _core.Outbox:
        return self._boxes.setdefault(server, _core.Outbox())

    def _send(self) -> None:
        if not self.reachable():
            return
        for server, box in self._boxes.items():
            while (request := box.next()) is not None:
                shard, sequence, value = self._requests[request]
                self._frame(self.world.servers[server], shard, sequence, value, request)

    def _frame(self, server: Server, shard: int, sequence: int, value: int, request: int) -> None:
        incarnation = self.incarnation
        self.world.frame(
            incarnation,
            server.incarnation,
            lambda: server.push(self, incarnation, shard, sequence, value, request),
        )

    def _retry(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        if self.view and not self._owners:
            self._open()  # the question was lost, or its answer
        for box in self._boxes.values():
            box.lost()
        self._send()
        self.world.after(RETRY_SECONDS, lambda: self._retry(incarnation))

    def answered(self, incarnation: int, request: int, status: str, *more: int) -> None:
        """A frame has arrived."""
        if incarnation != self.incarnation or not self.reachable() or request not in self._requests:
            return
        shard, sequence, _ = self._requests[request]
        box = next((b for b in self._boxes.values() if b.find(request) is not None), None)
        if status == "moved":
            self.moved(shard, more[0], more[1])
            if box is not None and box is not self._box(self._owners[shard]):
                box.answered(request)
                self._box(self._owners[shard]).add(request, request)
                self._send()
            return
        acknowledged = self.acknowledged[incarnation]
        acknowledged[shard] = max(acknowledged[shard], sequence)
        del self._requests[request]
        if box is not None:
            box.answered(request)


def simulate(seed: int, broken: str = "") -> World:
    """One history. Raises Violation."""
    world = World(seed, broken=broken)
    world.run()
    return world


def main() -> int:
    """For the command line."""
    parser = argparse.ArgumentParser(description="Runs the control plane and the session logic under many fates.")
    parser.add_argument("--seeds", type=int, default=200, help="how many histories")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            counts += simulate(seed).counts
        except Violation as violation:
            print(f"seed {seed}: {violation}")
            return 1
    print(f"{arguments.seeds} histories from seed {arguments.seed}: {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
