"""The state machine with a notebook: who was told what."""

import collections
from typing import TypeVar

from specs import tensor_spec

from windlass import _core
from windlass.control import kept
from windlass.control import messages as m
from windlass.control.events import (
    Action,
    Admit,
    Came,
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
from windlass.control.model import Terms
from windlass.control.resume import Resume
from windlass.control.scheduler import read_spec
from windlass.control.state import State

CLUSTER = 0xC0FFEE
T = TypeVar("T", bound=m.Message)


class Brain:
    """Feeds events and notes what follows."""

    def __init__(
        self,
        servers: int = 2,
        resume: Resume | None = None,
        journal: dict[kept.Key, bytes] | None = None,
        written: float | None = None,
        keeps: bool = True,
        **terms: object,
    ) -> None:
        self.state = State(Terms(CLUSTER, servers, **terms), read_spec, _core.same_spec, resume)  # type: ignore[arg-type]
        self.state.keeps, self.state.generation = keeps, 1
        self.journal = {} if journal is None else journal
        self.actions: list[Action] = []
        self.deferred: list[int] = []
        if journal:
            self.state.generation = 2
            self.state.restore(dict(journal), lambda saving: written)
        self.told: dict[int, list[m.Message]] = collections.defaultdict(list)
        self.refused: dict[int, m.Refused] = {}
        self.admitted: dict[int, int] = {}
        self.timers: dict[str, float | None] = {}
        self.logs: list[str] = []
        self.end: End | None = None
        self._connection = 0
        self._note(self.state.begin())

    def feed(self, event: Event) -> None:
        self._note(self.state.handle(event))

    def _note(self, actions: list[Action]) -> None:
        self.actions += actions
        for action in actions:
            match action:
                case Keep(table, key, value):
                    self.journal.pop((table, key), None)
                    if value is not None:
                        self.journal[table, key] = value
                case Defer(connection):
                    self.deferred.append(connection)
                case Admit(connection, member):
                    self.admitted[connection] = member
                case Refuse(connection, message):
                    self.refused[connection] = message
                case Tell(member, message):
                    self.told[member].append(message)
                case Timer(name, seconds):
                    self.timers[name] = seconds
                case Log(level, text):
                    self.logs.append(f"{level} {text}")
                case End():
                    self.end = action

    def join(self, role: str, incarnation: int, **fields: object) -> m.Refused | None:
        """What it was refused with, if it was."""
        if role == "server":
            fields = {"addresses": [f"tcp://10.0.0.{incarnation % 250}:{1000 + incarnation}"], **fields}
        if role in ("worker", "reader"):
            fields = {"app": "default", **fields}
        return self.come(m.Join(role, incarnation, pid=incarnation % 2**31, host="h", **fields))  # type: ignore[arg-type]

    def come(self, join: m.Join) -> m.Refused | None:
        """The same, with all that it says."""
        self._connection += 1
        self.feed(Came(self._connection, join))
        if join.role == "server" and self._connection in self.admitted:
            self.say(join.incarnation, m.Ready())
        return self.refused.get(self._connection)

    def servers(self, count: int = 2) -> None:
        for i in range(count):
            assert self.join("server", 100 + i) is None

    def workers(self, count: int = 2, app: str = "default", first: int = 200, **fields: object) -> None:
        for rank in range(count):
            assert self.join("worker", first + rank, rank=rank, world_size=count, app=app, **fields) is None

    def say(self, member: int, message: m.Message) -> None:
        self.feed(Said(member, message))

    def die(self, member: int, why: str = "killed") -> None:
        self.feed(Died(member, why))

    def fire(self, timer: str) -> None:
        assert self.timers.get(timer) is not None, f"nobody set {timer}"
        self.feed(Fired(timer))

    def last(self, member: int, kind: type[T]) -> T:
        found = [message for message in self.told[member] if isinstance(message, kind)]
        assert found, f"{member} was never told a {kind.__name__}"
        return found[-1]

    def ask(self, member: int, question: m.Question) -> m.Answer:
        self.say(member, question)
        return self.last(member, m.Answer)

    def open(
        self, member: int, name: str = "default/w", size: int = 1 << 20, number: int = 1, like: str = ""
    ) -> m.Answer:
        return self.ask(member, m.Open(number, tensor_spec(name, (size,), "sgd", dtype=0, like=like)))


def started(servers: int = 2, workers: int = 2, on_worker_loss: str = "continue", **terms: object) -> Brain:
    """A cluster whose app has started."""
    brain = Brain(servers, **terms)
    brain.servers(servers)
    brain.workers(workers, on_worker_loss=on_worker_loss)
    return brain
