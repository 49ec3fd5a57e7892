"""The native core of windlass."""

from collections.abc import Callable, Sequence
import enum
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


def set_errors(errors: list) -> None:
    """
    The exception class of every code, in order; the caller keeps the list.
    """

def quiet_leaks() -> None:
    """
    For the child of a fork: what the parent's other threads held is nobody's there.
    """

def isa() -> str:
    """The instruction set the kernels use."""

def isa_complaint() -> str:
    """What is wrong with WINDLASS_ISA, or nothing."""

def crc32c(data: object, so_far: int = 0) -> int:
    """
    The checksum that frames and files carry, of a contiguous buffer; so_far: that of the bytes before it.
    """

def cores() -> int:
    """Cores this process may run on."""

class UserCall:
    """A function of the user's that is to be called."""

    @property
    def finds(self) -> bool:
        """Whether only its name is asked for."""

    @property
    def reads(self) -> bool:
        """Whether it is a function that reads."""

    @property
    def arguments(self) -> bytes: ...

    @property
    def numbers(self) -> object:
        """What a function reads: rows, as a copy."""

    @property
    def keys(self) -> object:
        """Of a table's rows; else None."""

    @property
    def shard(self) -> int: ...

    def give(self, result: bytes) -> None:
        """What a function that reads has found."""

    @property
    def text(self) -> str: ...

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for it any more."""

    @property
    def what(self) -> str: ...

    @property
    def function(self) -> int: ...

    @function.setter
    def function(self, arg: int, /) -> None: ...

    @property
    def layout(self) -> tuple[int, int, int, bool, bool, bool]: ...

    @property
    def row(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def w(self) -> NDArray[numpy.float32]: ...

    @property
    def g(self) -> NDArray[numpy.float32]: ...

    @property
    def state(self) -> list: ...

    @property
    def row_scalars(self) -> NDArray[numpy.float32]: ...

    @property
    def shard_scalars(self) -> NDArray[numpy.float32]: ...

    @property
    def counts(self) -> object: ...

    @property
    def first(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def hyper(self) -> list[float]: ...

class UserCode:
    """Calls of functions of the user's, which one thread of Python's runs."""

    def __init__(self, seconds: float) -> None: ...

    def next(self, seconds: float) -> UserCall | None:
        """The next call; None when there is none for so long, or never again."""

    def end(self, call: UserCall, error: int = 0, message: str = '') -> None:
        """How it went: 0, or the number of an error in windlass._errors.ERRORS."""

    def wait_given_up(self, seconds: float) -> bool:
        """Whether a call that runs was given up."""

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...

class Dtype(enum.Enum):
    FLOAT32 = 0

    FLOAT64 = 1

    INT64 = 2

    BFLOAT16 = 3

    FLOAT16 = 4

class RuleKind(enum.Enum):
    SGD = 0

    MOMENTUM = 1

    ADAGRAD = 2

    ROW_ADAGRAD = 3

    ADAM = 4

    ADAMW = 5

    SUM = 6

    ASSIGN = 7

    MAX = 8

    AVERAGE = 9

    FOREIGN = 10

    RMSPROP = 11

    RMSPROP_MOMENTUM = 12

    RMSPROP_CENTERED = 13

    RMSPROP_CENTERED_MOMENTUM = 14

    ADADELTA = 15

    ADAMAX = 16

    NADAM = 17

    LION = 18

    FTRL = 19

    MIN = 20

class RuleSpec:
    """What is fixed of a rule when an object is made."""

    def __init__(self, kind: RuleKind, initial_state: float = 0.0, clip: float = 0.0, lowest: float = float('-inf'), highest: float = float('inf'), schedule: tuple[int, int, int, float] = (0, 0, 0, 0.0), foreign: tuple[str, int, int, int, bool, bool, bool] = ('', 0, 0, 0, False, False, False)) -> None: ...

    @property
    def kind(self) -> RuleKind: ...

    @property
    def schedule(self) -> tuple[int, int, int, float]: ...

    @property
    def foreign(self) -> tuple[str, int, int, int, bool, bool, bool]: ...

    def same(self, other: RuleSpec) -> bool: ...

class InitKind(enum.Enum):
    ZEROS = 0

    CONSTANT = 1

    UNIFORM = 2

    NORMAL = 3

class Engine:
    """One server and one arena inside this process."""

    def __init__(self, threads: int, memory_bytes_max: int) -> None: ...

    @staticmethod
    def on(links: Links, arena_of: Engine | None) -> Engine:
        """On servers elsewhere."""

    def set_overdue(self, seconds: float) -> None:
        """
        Whoever waits at a gate inside the process for so long logs for whom, and again after as long.
        """

    def set_user_code(self, code: UserCode) -> None:
        """Who runs rules and functions of the user's. Before any object is made."""

    def empty(self, shape: Sequence[int], dtype: Dtype) -> NDArray:
        """A registered array, not zeroed."""

    def registered(self, array: Annotated[NDArray, dict(device='cpu', writable=False)]) -> bool: ...

    def renewals(self) -> int:
        """
        How often registered arrays have got fresh pages under their addresses; waits for those that are getting them.
        """

    def wait_returned(self, array: Annotated[NDArray, dict(device='cpu', writable=False)], timeout: float) -> bool:
        """Until no request uses the array; False when the time is up."""

    def close(self, timeout: float) -> None: ...

    def check(self) -> None:
        """Raises unless the engine can be used."""

    @property
    def closed(self) -> bool: ...

    @property
    def forked(self) -> bool: ...

    @property
    def remote(self) -> bool: ...

    @property
    def threads(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

class Session:
    """One worker on an engine."""

    def __init__(self, engine: Engine, rank: int, world_size: int) -> None: ...

    def tick(self, timeout: float) -> None:
        """Closes everything that is open."""

    def settle(self, timeout: float) -> None:
        """Waits until all that was pushed and closed has arrived."""

    def remove(self, name: str, timeout: float) -> None:
        """Deletes an object on all servers."""

    def enter(self, timeout: float) -> None:
        """Begins at a clock that fits the others', where they have begun."""

    @property
    def begun(self) -> int:
        """
        How much of the present iteration of BSP objects was pushed or closed: 0 none, 1 some, 2 all.
        """

    @property
    def only_rounds(self) -> bool:
        """Whether all objects that it has used are under BSP."""

    @property
    def iteration(self) -> int:
        """
        That the next push belongs to: beyond the clock where a push_pull has closed its object.
        """

    @property
    def has_open_pushes(self) -> bool:
        """Whether pushes wait for an iteration it has not closed."""

    def leave(self, timeout: float) -> None:
        """It is waited for no more."""

    def close(self) -> None:
        """
        Ends this worker alone; whatever it asks for from then on raises Closed.
        """

    @property
    def closed(self) -> bool: ...

    def check(self) -> None:
        """Raises unless the worker can be used."""

    def raise_unseen(self) -> None:
        """Raises the error of a dropped future."""

    def fingerprint(self, timeout: float) -> int: ...

    def objects(self, counts: bool, timeout: float) -> list[tuple[bytes, int]]:
        """
        The specs of all objects of all apps; counts: and how many rows each table has.
        """

    @property
    def pull_stats(self) -> tuple[int, int, float]:
        """
        Pulls and push_pulls that were answered, how many of them waited at a gate, and for how long.
        """

    @property
    def clock(self) -> int: ...

    @property
    def settled_clock(self) -> int:
        """
        The clock below which everything that this worker has pushed and closed is answered.
        """

    def await_settled(self, clock: int, timeout: float) -> bool:
        """
        Waits until all that was begun before this clock is answered; false if that takes longer.
        """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def incarnation(self) -> int: ...

class Step:
    """Requests that leave together."""

    def __init__(self, session: Session) -> None: ...

    def run(self, timeout: float) -> None: ...

class Future:
    """A request under way."""

    def done(self) -> bool: ...

    def cancel(self) -> bool: ...

    def seen(self) -> tuple[int, int, float, int]:
        """
        The clock asked for, the clock seen, seconds waited at the gate, and for which rank.
        """

    def wait(self, timeout: float) -> None: ...

class Hold:
    """Keeps the turn of a shard, for tests."""

    def release(self) -> None: ...

def hold_tensor(tensor: Tensor, shard: int) -> Hold: ...

def hold_table(table: Table, shard: int) -> Hold: ...

class TensorKeys:
    """Walks the numbers of rows in chunks."""

    def next(self, most: int, timeout: float) -> NDArray[numpy.uint64]: ...

class VectorOp(enum.Enum):
    """What is done with a tensor and another that is like it."""

    DOT = 1

    AXPY = 2

    SCALE = 3

    COPY = 4

    ADD = 5

    MULTIPLY = 6

    FILL = 7

class Tensor:
    """A session's handle on a tensor."""

    def __init__(self, session: Session, name: str, shape: Sequence[int], dtype: Dtype, rule: RuleSpec, init: InitKind, a: float, b: float, seed: int, reject_nonfinite: bool, sync: tuple[int, int, float], like: str, timeout: float, rule_text: str = '') -> None: ...

    def call_now(self, grad: object | None, out: object | None, rows: object | None, hyper: object | None, weight: float, timeout: float) -> None:
        """
        Pull, push or push_pull, by which of grad and out are given; returns when done.
        """

    def call_later(self, grad: object | None, out: object | None, rows: object | None, hyper: object | None, weight: float, timeout: float, priority: int = 0, only: object | None = None) -> Future:
        """The same as a future; `only`: shards, all others are left out."""

    def add_to(self, step: Step, grad: object | None, out: object | None, rows: object | None, hyper: object | None, weight: float, only: object | None = None) -> None:
        """The same as part of a step; out must outlive it."""

    def pull_newer(self, out: object, rows: object | None, newer_than: bytes | None, timeout: float) -> tuple[bytes, bool]:
        """
        The versions of its shards that it saw, as bytes, and whether any was newer.
        """

    def call(self, name: str, arguments: bytes, timeout: float) -> list[bytes]:
        """A function of the user's, called with every shard: its results."""

    def snapshot(self, arrays: list, updates: object, timeout: float) -> None:
        """Weights, state arrays and counts of updates, written into these."""

    def counts(self, timeout: float) -> list[int]:
        """How many updates the rule has made, of each shard."""

    def put(self, arrays: list, updates: object | None, timeout: float) -> None:
        """The same the other way; None is left out."""

    def vector(self, operation: VectorOp, other: Tensor | None, number: object, timeout: float) -> object:
        """
        A vector operation with another tensor that is like this one; returns what dot gives, else None.
        """

    def fingerprint(self, timeout: float) -> int: ...

    @staticmethod
    def add_many(step: Step, cluster: object, tensors: list, grads: list, outs: list, begin: int) -> int:
        """
        Adds whole tensors to a step, up to the first that is not plain; returns where that is.
        """

    @property
    def object(self) -> int:
        """Its number on servers elsewhere."""

    def owner(self, shard: int) -> tuple[int, int]:
        """
        The server that has a shard, as this client knows, and since which term.
        """

    @property
    def shards(self) -> int: ...

    @property
    def shard_elements(self) -> int:
        """Elements of a shard; the last may have fewer."""

    def query(self, query: bytes, timeout: float) -> bytes:
        """The answer to a query, as bytes."""

    def keys(self, where: bytes) -> TensorKeys:
        """The numbers of rows for which an expression holds."""

    @property
    def remote(self) -> bool: ...

def sum_bags(rows: object, offsets: object | None, grads: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], out: object, order: object | None = None) -> None:
    """
    out[row] = the gradients of the bags that the row was summed in, added up. No offsets: every id is a bag.
    """

def gather_rows(rows: object, places: object, out: object) -> None:
    """out[i] = rows[places[i]]"""

def unique(keys: Annotated[NDArray, dict(device='cpu', writable=False)], sorted: bool = False) -> tuple:
    """
    Each key once, as uint64, and for every key its place there. Sorted: ascending, as signed numbers.
    """

class Scanned(enum.Enum):
    """What an export returns."""

    ROWS = 0

    KEYS = 1

    ROWS_WITH_STATE = 2

class Export:
    """Walks a table in chunks."""

    def next(self, most: int, timeout: float) -> tuple: ...

class Table:
    """A session's handle on a table."""

    def __init__(self, session: Session, name: str, dim: int, rule: RuleSpec, init: InitKind, a: float, b: float, seed: int, reject_nonfinite: bool, sync: tuple[int, int, float], timeout: float, rule_text: str = '') -> None: ...

    def call_now(self, keys: Annotated[NDArray, dict(device='cpu', writable=False)], grads: object | None, out: object | None, hyper: object | None, weight: float, create: bool, timeout: float) -> None:
        """
        Pull, push or push_pull, by which of grads and out are given; returns when done.
        """

    def call_later(self, keys: Annotated[NDArray, dict(device='cpu', writable=False)], grads: object | None, out: object | None, hyper: object | None, weight: float, create: bool, timeout: float, priority: int = 0, only: object | None = None) -> Future:
        """The same as a future; `only`: shards, all others are left out."""

    def add_to(self, step: Step, keys: Annotated[NDArray, dict(device='cpu', writable=False)], grads: object | None, out: object | None, hyper: object | None, weight: float, create: bool, only: object | None = None) -> None:
        """The same as part of a step; out must outlive it."""

    def call(self, name: str, arguments: bytes, timeout: float) -> list[bytes]:
        """A function of the user's, called with every shard: its results."""

    def put(self, keys: Annotated[NDArray, dict(device='cpu', writable=False)], parts: list, updates: object | None, timeout: float) -> None:
        """
        Sets rows: weights, then the arrays of state; None is left out and starts anew.
        """

    def erase(self, keys: Annotated[NDArray, dict(device='cpu', writable=False)], where: bytes, timeout: float) -> int:
        """
        Takes rows out, or those for which an expression holds; returns how many.
        """

    def query(self, query: bytes, timeout: float) -> bytes:
        """The answer to a query, as bytes."""

    def rows(self, timeout: float) -> int: ...

    def fingerprint(self, timeout: float) -> int: ...

    @property
    def object(self) -> int:
        """Its number on servers elsewhere."""

    def owner(self, shard: int) -> tuple[int, int]:
        """
        The server that has a shard, as this client knows, and since which term.
        """

    def export(self, where: bytes, what: Scanned) -> Export:
        """All rows, or those for which an expression holds."""

class Departure:
    """A shard that leaves for another server."""

    def next(self) -> tuple[memoryview, memoryview] | None:
        """
        The next chunk, its header and its body, good until the next call; None when that was the last.
        """

    def commit(self) -> None:
        """The other server has all of it: from now on it is there."""

    def abort(self) -> None:
        """It stays, unless it has left."""

    @property
    def frozen(self) -> bool: ...

class Arrival:
    """A shard that comes from another server."""

    @staticmethod
    def body_bytes(head: bytes) -> int:
        """How many bytes follow a chunk's header."""

    def take(self, head: bytes, body: object) -> None:
        """The next chunk."""

    def close(self) -> None:
        """Leaves nothing behind of what is not complete."""

    @property
    def complete(self) -> bool: ...

class Host:
    """The native part of a server process."""

    def __init__(self, threads: int, memory_bytes_max: int, arena_bytes_max: int, staging_bytes_max: int = 536870912) -> None: ...

    def adopt(self, fd: int, peer: str, session_key: bytes) -> None:
        """Takes an authenticated socket, also when it raises."""

    def close(self, timeout: float) -> None: ...

    def set_user_code(self, code: UserCode) -> None:
        """
        Who runs rules and functions of the user's. Before the first connection.
        """

    def set_cluster(self, cluster: int, index: int) -> None:
        """
        Which cluster this server belongs to, and its number there: clients of another are refused.
        """

    def know_object(self, map_and_spec: bytes) -> None:
        """The scheduler's word on an object: clients may attach it from now on."""

    def hold(self, map_and_spec: bytes, index: int) -> None:
        """Makes an object that no client has attached yet."""

    def forget_object(self, object: int) -> None:
        """Likewise: it could not be made everywhere, and is no more."""

    def attach(self, map_and_spec: bytes) -> None:
        """
        An object of which some shards are here; it is made, unless it is known already.
        """

    def depart(self, object: int, shard: int, server: int, term: int) -> Departure | None:
        """
        Begins to move a shard to another server; None when it is there already.
        """

    def arrive(self) -> Arrival:
        """A shard that is about to come."""

    def whereabouts(self, object: int, shard: int) -> tuple[int, int]:
        """The server that has a shard, as this one knows, and its term."""

    def set_view(self, app: str, number: int, workers: Sequence[tuple[int, int, bool]], waited: Sequence[int], clock: int = 0) -> None:
        """
        Who trains together: (rank, incarnation, whether it starts with the app); ranks whose place is kept; the clock at which the app starts.
        """

    def sync_stats(self) -> list[tuple[str, int, list[int], int, float, dict[int, float], int]]:
        """
        Per app: shards that were read, how many of them how stale, how many reads waited, seconds, seconds by the rank waited for, and pushes that came too late.
        """

    def overdue(self, seconds: float) -> list[str]:
        """
        A line for everybody who has waited for so long since it was last said.
        """

    def set_quota(self, app: str, table_bytes_max: int) -> None:
        """What the tables of an app may take here, from now on."""

    @property
    def quotas_used(self) -> dict[str, int]:
        """What the tables of apps that have a quota take, by app."""

    @property
    def traffic(self) -> tuple[int, int, int]:
        """Requests, bytes received and bytes sent, since the start."""

    @property
    def table_sizes(self) -> dict[int, tuple[int, int]]:
        """
        Rows and bytes of tables, as far as they are here, by the numbers of the objects.
        """

    @property
    def incarnation(self) -> int: ...

    @property
    def lanes(self) -> int: ...

    @property
    def sessions(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

class Links:
    """A client's connections to its servers. Python makes them."""

    def __init__(self, servers: Sequence[str], app: str, rank: int, world_size: int, checksums: int, shares: bool, cluster: int = 0, incarnation: int = 0) -> None: ...

    def set_stall(self, seconds: float) -> None:
        """
        How long a server may acknowledge nothing before its connection counts as broken.
        """

    def set_catalogue(self, ask: Callable | None) -> None:
        """
        Who is asked where objects are: ask(operation, body, seconds) gives a code and the answers, or a message. None, when the cluster is closed: nobody is asked any more.
        """

    def need_dial(self) -> tuple[int, int] | None:
        """
        Waits for a connection to be wanted: (server, lane); None when the links are closed.
        """

    def attach(self, server: int, lane: int, fd: int) -> None:
        """Takes an authenticated socket."""

    def lost(self, server: int, code: int, message: str) -> None:
        """
        The server is out of reach for good: everything on its way there fails.
        """

    def grow(self, servers: Sequence[str]) -> None:
        """
        All servers of a cluster, in the order of their numbers: those that are new are dialled.
        """

    def trouble(self, server: int, why: str) -> None:
        """Why it cannot be reached at the moment."""

    def wait_ready(self, timeout: float) -> None: ...

    def moved(self, object: int, shard: int, server: int, term: int) -> None:
        """
        A shard has a new server: what waits for one that is out of reach goes on.
        """

    def stop(self) -> None: ...

    @property
    def incarnation(self) -> int: ...

def read_spec(spec: bytes) -> tuple[str, bool, str, list[int], str, str]:
    """
    (app/name, whether it is a table, a description, bytes per shard; of a tensor the one that it is like, if any, and its dtype and shape in words)
    """

def read_object(spec: bytes) -> tuple[str, bool, list[int], Dtype, RuleSpec, str, tuple[InitKind, float, float], int, bool, tuple[int, int, float], str, str, int]:
    """
    All of a spec: app/name, whether it is a table, shape (of a table: of a row), dtype, rule, its maker's text on it, initialiser, seed, reject_nonfinite, policy, the tensor it is like, a description, bytes per row of a table.
    """

def same_spec(a: bytes, b: bytes) -> bool:
    """Whether an object of the one spec can be opened with the other."""

def write_map(object: int, runs: Sequence[tuple[int, int, int]]) -> bytes:
    """The bytes of a map; runs are (first shard, server, term)."""

def read_map(bytes: bytes) -> tuple[int, list[tuple[int, int, int]]]:
    """The object and the runs of a map, which other bytes may follow."""

class Heartbeat:
    """Writes the same bytes every period, from a thread without the GIL."""

    def __init__(self, fd: int, beat: bytes, seconds: float) -> None: ...

    def wait(self, timeout: float) -> bool:
        """
        Until the connection is broken or stopped; False when time is up first.
        """

    def stop(self) -> None: ...

class Shelf:
    """The objects of a server, as checkpoints see them."""

    @overload
    def __init__(self, host: Host) -> None: ...

    @overload
    def __init__(self, engine: Engine) -> None: ...

    def set_bytes_max(self, bytes: int) -> None:
        """Limits what writers set aside; beyond it they wait."""

    @property
    def aside_bytes(self) -> int:
        """What writers have set aside and nobody has taken yet."""

    @property
    def aside_presses(self) -> bool:
        """
        Whether so much is set aside that taking it comes before everything else.
        """

    def objects(self) -> list[tuple[int, str]]:
        """Numbers and names, app/name."""

    def describe(self, object: int) -> tuple[str, bytes, bool, list[int], str, int, int, int, int, float]:
        """
        app/name, spec, whether it is a table, shape (of a table: of a row), dtype, shards; of its rule: state arrays, numbers per row, numbers per shard, what they start as.
        """

    def make(self, spec: bytes) -> int:
        """
        Makes an object on the server inside the process, or finds it; returns its number.
        """

    def begin_at(self, clock: int) -> None:
        """Workers inside the process begin at this clock from now on."""

    def piece(self, object: int, shard: int, piece: int, at: int, from_: object) -> None:
        """Writes bytes of one of a tensor's arrays."""

    def rows(self, object: int, shard: int, rows: int, from_: Sequence[object], in_all: int = 0) -> None:
        """
        Writes rows of a table: arrays of keys, updates, touched, numbers per row, weights, state arrays. in_all: how many the shard will have, which may come in the order in which a capture had them.
        """

    def counts(self, object: int, shard: int, version: int, count: int, made: int) -> int:
        """The rest of a shard; returns its fingerprint."""

def spec_facts(spec: bytes) -> tuple[str, bool, list[int], str, int, str, str]:
    """
    app/name, whether it is a table, shape (of a table: of a row), dtype, shards, all in words, its policy in words.
    """

def fingerprint_of_name(name: str) -> int:
    """
    What an object without numbers has as its fingerprint: those of its shards are added to it.
    """

def renamed_spec(spec: bytes, name: str) -> bytes:
    """The same object under another name, app/name."""

def cut_of(spec: bytes) -> list[int]:
    """
    Of a tensor, the first element of each shard, and how many there are; of a table nothing.
    """

def same_rule(a: bytes, b: bytes) -> bool:
    """Whether two specs have the same rule."""

class Capture:
    """The shards of an object that are here, as they were at a cut."""

    def __init__(self, shelf: Shelf, object: int, clock: int, part: int = 0, parts: int = 1) -> None:
        """Of the shards here, each parts-th, beginning with number `part`."""

    def arm(self) -> None:
        """From now on nothing of the cut can be lost."""

    def next(self, bytes_most: int) -> tuple | None:
        """
        What is captured next: ("piece", shard, array, byte, bytes), ("rows", shard, rows, bytes), then per shard ("shard", shard, version, count, made, rows, fingerprint, [(rank, incarnation, sequence, clock)]); ("wait",) while the rest has not reached the cut; None at the end.
        """

    @property
    def aside_bytes(self) -> int:
        """What writers have set aside of it and nobody has taken yet."""

    @property
    def shards(self) -> int:
        """How many it captures."""

class Admission(enum.Enum):
    """What becomes of a push."""

    APPLY = 0

    REPEAT = 1

    GAP = 2

class Record:
    """What a shard remembers of one session."""

    def __init__(self) -> None: ...

    @property
    def sequence(self) -> int: ...

    @sequence.setter
    def sequence(self, arg: int, /) -> None: ...

    @property
    def clock(self) -> int: ...

    @clock.setter
    def clock(self, arg: int, /) -> None: ...

    def admit(self, pushed: int) -> Admission: ...

    def close(self, closed: int) -> None: ...

class Gate:
    """
    Whom a pull at a shard waits for, and when an update there is complete.
    """

    def __init__(self, kind: int, number: int = 0) -> None: ...

    def set_view(self, workers: Sequence[tuple[int, int]]) -> None:
        """Who is waited for: ranks, ascending, and the least clock of each."""

    def close(self, rank: int, clock: int) -> bool: ...

    def opens(self, rank: int, clock: int) -> bool: ...

    def clock_of(self, rank: int) -> int: ...

    def waits_for(self, rank: int) -> bool: ...

    def has_closed(self, rank: int, iteration: int) -> bool: ...

    def complete(self) -> int: ...

    def advance(self, made: int) -> None: ...

    @property
    def made(self) -> int: ...

    @property
    def highest(self) -> int: ...

class Workers:
    """The workers of an app as a server knows them."""

    def __init__(self, app: str) -> None: ...

    def set_view(self, number: int, workers: Sequence[tuple[int, int, bool]], waited: Sequence[int]) -> bool: ...

    def enter(self, rank: int, incarnation: int, clock: int) -> bool: ...

    def view(self) -> list[tuple[int, int]]:
        """Ranks and clocks of who is waited for."""

    def hear(self, other: Workers) -> bool:
        """What another server has heard of them; whether that says anything new."""

    def waits_for(self, rank: int) -> bool: ...

    def starts(self, rank: int) -> bool: ...

    def given_up(self, incarnation: int) -> bool: ...

class Outbox:
    """The requests of one lane that have no answer yet."""

    def __init__(self) -> None: ...

    def add(self, id: int, what: int, priority: int = 0) -> None: ...

    def next(self) -> int | None:
        """The next to be sent, which counts as sent then."""

    def find(self, id: int) -> int | None: ...

    def answered(self, id: int) -> bool: ...

    def lost(self) -> None: ...

    def again(self, id: int) -> None: ...

    def to_ask(self, most: int) -> list[int]: ...

    def heard(self, asked: Sequence[int], held: Sequence[int]) -> int: ...

    def __len__(self) -> int: ...
