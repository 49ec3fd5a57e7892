"""Gates in the simulation: what servers keep of clocks, and workers that close, wait and go on.

Who is waited for follows from the views that a server has heard (`_core.Workers`), and what a pull waits for from the
closes that have come (`_core.Gate`): the very code that ships. What is checked is the promise: when a gate opens, and
when an update is made, every worker of the server's view has closed enough, as the workers themselves know it; and once
faults stop nobody waits for ever.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass import _core
from windlass.control import messages as m

if TYPE_CHECKING:
    from windlass.testing.simulation import Server, Worker, World

GATED = 2  # so many shards have gates
POLICIES = ((1, 0), (2, 0), (2, 2))  # BSP, SSP(0), SSP(2), as the core counts them
RETRY_SECONDS = 0.5
PACE_SECONDS = 0.3  # what an iteration takes


class ClockReport(NamedTuple):
    """What a server says of a worker's clock."""

    own: int
    own_highest: int
    lowest: int | None
    highest: int
    waited: bool
    starts: bool


class Gates:
    """Of a server."""

    def __init__(self, app: str, world: "World") -> None:
        self.workers = _core.Workers(app)
        self.world = world
        self.policy = world.policy
        self.gates: dict[int, _core.Gate] = {}

    def hear(self, view: m.View) -> None:
        """As a server process tells its host."""
        workers = [(peer.index, peer.incarnation, peer.since == view.started) for peer in view.workers]
        waited = [*view.waited, *(peer.index for peer in view.workers if peer.instead)]
        if self.workers.set_view(view.number, workers, waited):
            self._tell()

    def hold(self, shard: int, gate: _core.Gate | None = None) -> None:
        """A shard is here from now on; with the gate it had elsewhere."""
        if shard < GATED:
            self.gates[shard] = _core.Gate(*self.policy) if gate is None else gate
            self._tell()

    def enter(self, rank: int, incarnation: int, clock: int | None) -> ClockReport:
        """A worker begins at a clock, or asks where it would."""
        if clock is not None and self.workers.enter(rank, incarnation, clock):
            self._tell()
        owns = [max(gate.clock_of(rank), gate.made) for gate in self.gates.values()]
        clocks = [clock for gate in self.gates.values() for rank, clock in self._clocks(gate)]
        highest = max([gate.highest for gate in self.gates.values()], default=0)
        return ClockReport(
            min(owns, default=2**60),
            max(owns, default=0),
            min(clocks, default=None),
            highest,
            self.workers.waits_for(rank),
            self.workers.starts(rank),
        )

    def close(self, shard: int, rank: int, clock: int) -> None:
        """A worker has closed everything before this clock."""
        if self.gates[shard].close(rank, clock):
            self._make(shard)

    def ranks(self) -> list[int]:
        """Who is waited for."""
        return [rank for rank, _ in self.workers.view()]

    def _clocks(self, gate: _core.Gate) -> list[tuple[int, int]]:
        return [(rank, gate.clock_of(rank)) for rank in self.ranks()]

    def _tell(self) -> None:
        for shard, gate in self.gates.items():
            gate.set_view(self.workers.view())
            self._make(shard)

    def _make(self, shard: int) -> None:
        """Under BSP: the updates that are complete, which everybody in the view must have closed."""
        gate, complete = self.gates[shard], self.gates[shard].complete()
        if self.policy[0] != 1 or complete == gate.made:
            return
        gate.advance(complete)
        self.world.counts["updates"] += 1
        for rank in self.ranks():
            if self.world.closed[rank, shard] < complete:
                closed = self.world.closed[rank, shard]
                self.world.violated(f"shard {shard} makes update {complete - 1}; rank {rank} has closed {closed}")


class Clock:
    """Of one process of a worker: enters, and then closes and pulls, iteration by iteration."""

    def __init__(self, worker: "Worker") -> None:
        self.worker = worker
        self.incarnation = worker.incarnation
        self.clock = 0
        self._margin = 1

    def begin(self) -> None:
        """Asks where it stands."""
        self._ask_all(None, self._place)

    def _place(self, standing: ClockReport) -> None:
        rounds = self.worker.world.policy[0] == 1
        if standing.waited:
            clock = standing.own_highest if standing.starts else standing.own if standing.own < 2**60 else 0
        elif rounds:
            clock = standing.highest + self._margin
        else:
            clock = standing.highest if standing.lowest is None else standing.lowest
        in_place = standing.waited
        if in_place and clock == 0:
            self._iterate()
            return

        def entered(now: ClockReport) -> None:
            self.clock = clock
            if in_place or not rounds or now.highest <= clock:
                self._iterate()
            else:
                self._margin *= 2
                self._place(now._replace(waited=False))

        self._ask_all(clock, entered)

    def _ask_all(self, clock: int | None, then: Callable[[ClockReport], None]) -> None:
        """Every server, one after the other; then what they say together."""
        rank, said = self.worker.rank, list[ClockReport]()
        self._note(clock or 0)

        def ask(index: int) -> None:
            if index == len(self.worker.world.servers):
                then(_together(said))
                return

            def handle(server: "Server") -> ClockReport:
                return server.gates.enter(rank, self.incarnation, clock)

            def heard(standing: ClockReport | None) -> None:
                said.extend([] if standing is None else [standing])
                ask(index + 1)

            self._request(lambda: index, handle, heard, fixed=True)

        ask(0)

    def _iterate(self) -> None:
        world = self.worker.world
        world.after(world.random.uniform(0.1, 2) * PACE_SECONDS, self._close)

    def _close(self) -> None:
        target, left = self.clock + 1, set(range(GATED))
        self._note(target)

        def passed(shard: int) -> None:
            left.discard(shard)
            if not left:
                self.clock = target
                self.worker.world.counts["iterations"] += 1
                self._iterate()

        for shard in range(GATED):
            pull = functools.partial(self._pull, shard, target, functools.partial(passed, shard))
            self._at(shard, functools.partial(_close, shard, self.worker.rank, target), pull)

    def _pull(self, shard: int, clock: int, then: Callable[[], None]) -> None:
        self._at(shard, functools.partial(self._opens, shard, clock), then)

    def _opens(self, shard: int, clock: int, server: "Server") -> bool:
        """At a server: whether the pull need not wait. If so, the promise must be kept."""
        world, rank = self.worker.world, self.worker.rank
        if not server.gates.gates[shard].opens(rank, clock - 1 if world.broken == "gate" else clock):
            world.counts["waits"] += 1
            return False
        kind, number = world.policy
        ranks = server.gates.ranks()
        world.counts["pulls"] += rank in ranks
        if kind == 1 and server.gates.gates[shard].made < clock and rank in ranks:
            world.violated(f"{self.worker.name} pulls shard {shard} at clock {clock} before its update")
        for other in ranks if kind == 2 and rank in ranks else ():
            if other != rank and (closed := world.closed[other, shard]) < clock - number:
                world.violated(f"{self.worker.name} pulls at clock {clock} under SSP({number}); {other} is at {closed}")
        return True

    def _at(self, shard: int, handle: Callable[["Server"], bool], then: Callable[[], None]) -> None:
        """At the shard's owner, wherever that is by now; again until it is done."""

        def there(server: "Server") -> tuple[int, int] | bool | None:
            if shard in server.moved:
                return server.moved[shard]
            gone = shard not in server.shards or server.shards[shard].frozen
            return None if gone or server.gates.workers.given_up(self.incarnation) else handle(server) or None

        def heard(answer: tuple[int, int] | bool | None) -> None:
            if isinstance(answer, tuple):
                self.worker.moved(shard, *answer)
                self._at(shard, handle, then)
            else:
                then()

        self._request(lambda: self.worker.owner_of(shard), there, heard)

    def _request(
        self,
        whom: Callable[[], int],
        handle: Callable[["Server"], object],
        then: Callable[[Any], None],
        fixed: bool = False,
    ) -> None:
        """Sent until there is an answer; None if the server is lost. fixed: it is for that one alone."""
        worker, world = self.worker, self.worker.world
        done = False

        def attempt() -> None:
            if done or self.incarnation != worker.incarnation or not worker.alive or worker.out:
                return
            server = world.servers[whom()]
            if worker.reachable() and (server.index in world.brain.state.lost or (fixed and server.is_gone())):
                back(None)
                return
            if worker.reachable():
                world.frame(self.incarnation, server.incarnation, functools.partial(arrive, server))
            world.after(RETRY_SECONDS, attempt)

        def arrive(server: "Server") -> None:
            answer = handle(server) if server.reachable() and not server.out else None
            if answer is not None:
                world.frame(server.incarnation, self.incarnation, functools.partial(back, answer))

        def back(answer: object) -> None:
            nonlocal done
            if not done and self.incarnation == worker.incarnation and worker.reachable():
                done = True
                then(answer)

        attempt()

    def _note(self, clock: int) -> None:
        """What this process says it has closed."""
        closed = self.worker.world.closed
        for shard in range(GATED):
            closed[self.worker.rank, shard] = max(closed[self.worker.rank, shard], clock)


def _close(shard: int, rank: int, clock: int, server: "Server") -> bool:
    server.gates.close(shard, rank, clock)
    return True


def _together(said: list[ClockReport]) -> ClockReport:
    return ClockReport(
        min([one.own for one in said], default=2**60),
        max([one.own_highest for one in said], default=0),
        min([one.lowest for one in said if one.lowest is not None], default=None),
        max([one.highest for one in said], default=0),
        any(one.waited for one in said),
        any(one.starts for one in said),
    )
