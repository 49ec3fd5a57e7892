"""What the scheduler keeps: members, apps, objects."""

import dataclasses

from windlass._settings import SETTINGS
from windlass.control import messages as m
from windlass.control.barrier import Barrier
from windlass.control.placement import runs_of

FIRST_TERM = 1


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the cluster was started with."""

    cluster: int  #: a random number: members of another cluster are refused
    servers: int = 1  #: how many are expected
    failure_timeout: float = SETTINGS["failure_timeout"].default
    start_timeout: float = SETTINGS["start_timeout"].default
    missing_seconds: float = 5.0  #: how often it is said who is missing
    linger: bool = False  #: stay when all workers have left
    tasks: int = 0  #: of an engine, one for each worker: the cluster stays until they are over. 0: nobody knows of any
    on_server_loss: str = SETTINGS["on_server_loss"].default
    quotas: dict[str, int] = dataclasses.field(default_factory=dict)  #: bytes, by app
    saves: bool = False  #: there is a place for checkpoints
    save_seconds: float | None = None  #: between two checkpoints; neither: only when somebody asks
    save_iterations: int | None = None  #: likewise, of the lowest rank

    @property
    def beat_seconds(self) -> float:
        """The period of a heartbeat."""
        return self.failure_timeout / 10


@dataclasses.dataclass
class Member:
    """Who is there."""

    join: m.Join
    index: int  #: the number of a server, the rank of a worker
    ready: bool = False  #: a server that lets clients in
    report: m.Report = dataclasses.field(default_factory=m.Report)
    since: int = 0  #: the number of the first view that a worker was in
    instead: bool = False  #: a worker that took the place of one that was lost
    splits: bool = False  #: a worker that goes through a static split
    knows_servers: int = 0  #: how many a worker or reader has room for
    holds: m.Holds | None = None  #: a worker that was told to end and waits for a checkpoint

    @property
    def name(self) -> str:
        """For people."""
        join = self.join
        who = {
            "server": f"server {self.index}",
            "worker": f"worker {self.index} of app {join.app!r}",
            "reader": f"reader of app {join.app!r}",
        }.get(join.role, join.role)
        return f"{who} (process {join.pid} on {join.host})" if join.pid else who

    def peer(self) -> m.Peer:
        """As others see it."""
        address = self.join.addresses[0] if self.join.addresses else ""
        return m.Peer(self.index, self.join.incarnation, address, self.since, self.instead)


@dataclasses.dataclass
class App:
    """A group of workers that trains together."""

    name: str
    world_size: int
    barrier: Barrier  #: that its workers stand at, or will
    workers: dict[int, int] = dataclasses.field(default_factory=dict)  #: incarnations by rank
    readers: dict[int, None] = dataclasses.field(default_factory=dict)  #: incarnations
    view: int = 0
    size_in_view: int = 0  #: world_size when that view was made; who gathers for a new start may have another
    started: bool = False
    first_view: int = 0  #: the number of the view with which it started, the last time it did
    gathered: bool = False  #: workers have come for a start, and a timer runs until which all are to have come
    on_worker_loss: m.OnWorkerLoss = "continue"
    clock: int = 0  #: at which it started
    save_at: int = 0  #: the clock at which the next checkpoint is due
    lost: int = 0  #: workers, since the first view
    not_replaced: set[int] = dataclasses.field(default_factory=set)  #: ranks that were lost, and nobody came
    waited: set[int] = dataclasses.field(default_factory=set)  #: ranks whose replacement is waited for
    ranks_up_to: int = 0  #: below it none is free
    left: dict[int, m.Report] = dataclasses.field(default_factory=dict)  #: the last word of workers that went, by rank
    pulls_before: m.PullReport = dataclasses.field(default_factory=m.PullReport)  #: of workers that went
    at_barrier: dict[int, m.Arrive] = dataclasses.field(default_factory=dict)  #: to be answered, by incarnation

    @property
    def busy(self) -> bool:
        """Whether anybody is at work or waited for."""
        return bool(self.workers or self.waited)

    def free_rank(self) -> int:
        """The lowest that is waited for, else the lowest, or world_size."""
        if self.waited:
            return min(self.waited)
        while self.ranks_up_to in self.workers:
            self.ranks_up_to += 1
        return self.ranks_up_to


@dataclasses.dataclass
class Object:
    """A tensor or a table, and who has its shards."""

    number: int
    name: str  #: app/name
    spec: bytes
    description: str
    is_table: bool
    shard_bytes: list[int]
    owners: list[int]
    terms: list[int]
    group: str = ""  #: app/name of the tensor that it lies like, or its own: such shards lie and move together
    form: str = ""  #: of a tensor: dtype and shape
    settled: str = ""  #: see Spec
    sync: str = ""
    runs: list[m.Run] = dataclasses.field(default_factory=list)  #: where it was placed first

    @property
    def app(self) -> str:
        """Whose it is."""
        return self.name.partition("/")[0]

    def placed(self) -> m.Placed:
        """Where it is."""
        return m.Placed(self.number, self.spec, runs_of(self.owners, self.terms))


@dataclasses.dataclass
class Moving:
    """A shard on its way."""

    object: int
    shard: int
    source: int
    target: int
    term: int
    asker: int  #: 0: the scheduler itself
    question: int
    gone: str = ""  #: why the target is, if it is: whether the shard has left for it is the source's to say
    ordered: bool = False  #: its source knows of it; others wait until there is room at the target


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the bytes of a spec say."""

    name: str
    is_table: bool
    description: str
    shard_bytes: list[int]
    like: str = ""  #: the name, within its app, of the tensor that it lies like; "": of none
    form: str = ""  #: of a tensor: dtype and shape
    settled: str = ""  #: what a run that goes on from a checkpoint cannot change: all but the rule and the policy
    sync: str = ""  #: the policy

    @property
    def app(self) -> str:
        """Whose it is."""
        return self.name.partition("/")[0]

    @property
    def group(self) -> str:
        """app/name of the tensor that it lies like, or its own."""
        return f"{self.name.partition('/')[0]}/{self.like}" if self.like else self.name
