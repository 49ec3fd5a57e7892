"""What members and the scheduler say to each other: msgpack in the binary messages of a WebSocket.

    member -> scheduler   Join, Leave, Report, and questions with a number: Open, List, Lease, Arrive, ...
    scheduler -> member   Welcome or Refused, View, Waiting, Gone, Objects, Forgotten, MoveShard, CancelMove,
                          ShardMoved, Quota, Recall, Shutdown, and Answers

Every message is checked as it is decoded: unknown fields, wrong types and numbers out of range are Malformed.
"""

import sys
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from windlass._client.reports import VALUE_NAME_CHARS_MAX, VALUES_MAX

VERSION = 1
MESSAGE_BYTES_MAX = 64 << 20  # a map of 100,000 shards is 2 MB
TEXT_CHARS_MAX = 1024
SPEC_BYTES_MAX = 8192
APPS_MAX = 1 << 10  # in a report
RANKS_MAX = 1 << 10  # of one app in a report
TABLES_MAX = 1 << 16  # likewise
STALENESS_MAX = 15  # and above it: the last bucket of a histogram
RANGES_MAX = 1 << 20  # of an epoch
EPOCHS_MAX = 1 << 20
REDUCE_BYTES_MAX = 1 << 20  # of an array that a worker gives to an all-reduce
DIMS_MAX = 64  # that it has
EXTRA_BYTES_MAX = 1 << 20  # of one worker in a checkpoint
NOTE_BYTES_MAX = 1 << 20  # on one object in a checkpoint
NOTES_MAX = 1024
OBJECTS_IN_SAVE_MAX = 1 << 16
SPLITS_MAX = 1 << 10  # static splits of a worker
HELD_MAX = 4096  # ranges that one worker holds of one ledger

U32 = Annotated[int, Meta(ge=0, lt=2**32)]
U64 = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
ValueName = Annotated[str, Meta(min_length=1, max_length=VALUE_NAME_CHARS_MAX)]
OnWorkerLoss = Literal["continue", "wait"]
ReduceOp = Literal["sum", "mean", "max", "min"]
ReduceDtype = Literal["float32", "float64", "int64"]
Tag = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z][0-9A-Za-z_.-]{0,127}\Z")]
Run = tuple[U32, U32, U32]  # first shard, server, term
Notes = Annotated[dict[Name, Annotated[bytes, Meta(max_length=NOTE_BYTES_MAX)]], Meta(max_length=NOTES_MAX)]
Ranges = tuple[U32, U32, U32]  # epoch, first range, how many
Used = tuple[U32, U32, U64]  # epoch, range, how many of its samples


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=False, tag_field="is", tag=True):
    """The root of every message; its class is its tag."""


# -- what members say ------------------------------------------------------------------------------------------------


class Reduced(Message, frozen=True):
    """The result of an all-reduce; its shape is that of what each worker gave."""

    workers: U32 = 0  #: that gave something
    dtype: ReduceDtype = "float32"
    data: bytes = b""  #: little-endian, in C order
    error: str = ""  #: the name of a class in windlass._errors, where nothing could be made of what they gave
    why: str = ""


class Join(Message, frozen=True):
    """The first message of every connection. The same incarnation again: a connection that was re-made."""

    role: Name
    incarnation: U64
    app: Annotated[str, Meta(max_length=256)] = ""  #: of workers and readers
    rank: U32 | None = None  #: the rank of a worker, the number of a server; None: the scheduler chooses
    world_size: U32 = 1
    cluster: U64 = 0  #: the cluster it belongs to; 0: any
    addresses: Annotated[list[Text], Meta(max_length=8)] = []  #: of servers, for clients; the first counts
    host: Text = ""
    pid: U32 = 0
    version: U32 = VERSION
    on_worker_loss: OnWorkerLoss = "continue"  #: of workers; the same for all of an app
    barrier: U64 = 0  #: of a worker that comes back: the number of its next barrier
    reduced: Reduced | None = None  #: likewise: what it got at the one before, if that was an all-reduce
    home: Text = ""  #: where `pid` means this process: the same for all whom the scheduler's kernel can tell it of
    tasks: U32 = 0  #: of an operator that is a task of an engine: how many of them are workers, of which it is `rank`


class Ready(Message, frozen=True):
    """A server that knows its cluster and lets clients in."""


class Leave(Message, frozen=True):
    """A member that is done; nobody waits for it any more."""

    failed: bool = False
    why: Text = ""


class SyncReport(Message, frozen=True):
    """What the policies of an app's objects did on a server, since its start. A pull reads many shards."""

    reads: U64 = 0  #: of shards
    staleness: Annotated[list[U64], Meta(max_length=STALENESS_MAX + 1)] = []  #: reads by how stale they were
    waits: U64 = 0  #: reads that waited
    waited_seconds: Seconds = 0.0
    waited_for: Annotated[dict[U32, Seconds], Meta(max_length=RANKS_MAX)] = {}  #: seconds, by rank
    late: U64 = 0  #: pushes that came after their update was made, and were dropped


class PullReport(Message, frozen=True):
    """The pulls and push_pulls that a worker or reader has made and that were answered."""

    calls: U64 = 0
    waits: U64 = 0  #: calls that waited
    waited_seconds: Seconds = 0.0


class Report(Message, frozen=True):
    """What a member measures, every now and then."""

    clock: U64 = 0  #: of workers
    memory_bytes: U64 = 0
    sessions: U64 = 0  #: of servers, as are those below
    requests: U64 = 0
    bytes_in: U64 = 0
    bytes_out: U64 = 0
    quotas_used: Annotated[dict[Name, U64], Meta(max_length=APPS_MAX)] = {}  #: by tables of apps that have one
    sync: Annotated[dict[Name, SyncReport], Meta(max_length=APPS_MAX)] = {}  #: by app
    values: Annotated[dict[ValueName, Finite | None], Meta(max_length=VALUES_MAX)] = {}  #: of workers: cluster.report()
    memory_bytes_max: U64 = 0  #: of servers
    tables: Annotated[dict[U32, tuple[U64, U64]], Meta(max_length=TABLES_MAX)] = {}  #: of servers: rows and bytes
    pulls: PullReport = PullReport()  #: of workers and readers
    saved_bytes: U64 = 0  #: of servers: captured for the checkpoint that is being taken


class Question(Message, frozen=True):
    """A message that is answered under its number."""

    number: U64


class Open(Question, frozen=True):
    """Creates or opens an object. The answer is its map."""

    spec: Annotated[bytes, Meta(max_length=SPEC_BYTES_MAX)]


class Forget(Question, frozen=True):
    """An object that could not be made everywhere: its name is free again."""

    spec: Annotated[bytes, Meta(max_length=SPEC_BYTES_MAX)]
    object: U32


class Delete(Question, frozen=True):
    """An object is no more wanted: its name is free again, and the servers free what they have of it."""

    object: U32


class List(Question, frozen=True):
    """All objects of all apps."""


class Move(Question, frozen=True):
    """Moves a shard to another server; answered when it is there."""

    name: Text  #: app/name
    shard: U32
    server: U32


class Drain(Question, frozen=True):
    """An operator wants a server emptied, which then ends; answered when it is empty. May be asked again."""

    server: U32


class KnowsServers(Message, frozen=True):
    """A worker or reader has room for so many servers, and reaches those that it needs: shards may move there."""

    servers: U32


class Leaving(Message, frozen=True):
    """A server was told to end (SIGTERM). Answered with Retire: when it is empty, or at once if all end."""


class Moved(Message, frozen=True):
    """A server's word on a MoveShard or a CancelMove: `error` is empty when the shard has moved."""

    move: U64
    error: Text = ""


class Stop(Question, frozen=True):
    """Ends the cluster."""

    why: Text = ""
    failed: bool = False


class LeaseTerms(Message, frozen=True):
    """What a ledger is about; the same for all who lease from it."""

    samples: Annotated[int, Meta(ge=1, lt=2**48)]
    batch: Annotated[int, Meta(ge=1, lt=2**48)]
    range: Annotated[int, Meta(ge=1, lt=2**48)]  #: samples, a whole number of batches; the last may be smaller
    epochs: Annotated[int, Meta(ge=1, le=EPOCHS_MAX)]
    shuffle: bool
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Lease(Question, frozen=True):
    """All that a worker has to say of a ledger: what it holds, what it has done, what it wants. May be asked again."""

    name: Name
    terms: LeaseTerms
    epoch: U32  #: that it is in
    hungry: bool  #: it has nothing to do in that epoch
    want: Annotated[int, Meta(ge=0, le=HELD_MAX)]  #: ranges that it would hold
    complete: U32  #: epochs that it knows to be done
    held: Annotated[list[Ranges], Meta(max_length=HELD_MAX)] = []  #: and not begun
    begun: Annotated[list[Ranges], Meta(max_length=HELD_MAX)] = []
    first: U64 = 0  #: the number of the first of `done`
    done: Annotated[list[Used], Meta(max_length=2 * RANGES_MAX)] = []
    whole: bool = False  #: `done` is all that it still knows


class Numbers(Message, frozen=True):
    """What a worker gives to an all-reduce."""

    op: ReduceOp
    dtype: ReduceDtype
    shape: Annotated[list[U32], Meta(max_length=DIMS_MAX)]
    data: Annotated[bytes, Meta(max_length=REDUCE_BYTES_MAX)]  #: little-endian, in C order


class Arrive(Question, frozen=True):
    """A worker stands at a barrier; answered when all do. May be asked again."""

    barrier: Annotated[int, Meta(ge=1, lt=2**48)]
    waits: bool = True  #: False: answered at once, with Timeout and who is missing where not all have arrived
    numbers: Numbers | None = None  #: what it gives to the all-reduce that the barrier is, if it is one


class Save(Question, frozen=True):
    """A worker asks for a checkpoint at its clock; answered when nothing of the cut can be lost any more."""

    clock: U64
    tag: Tag | None = None
    only: Annotated[list[Name], Meta(max_length=OBJECTS_IN_SAVE_MAX)] | None = None  #: names without the app; None: all
    extra: Annotated[bytes, Meta(max_length=EXTRA_BYTES_MAX)] = b""  #: the asker's, JSON
    notes: Notes = {}  #: what is known of objects, by their names: JSON


class SaveNow(Question, frozen=True):
    """An operator asks for a checkpoint of an app. Answered at once, or when it is complete, with its id."""

    app: Name
    tag: Tag | None = None
    wait: bool = False


class Keep(Message, frozen=True):
    """What a worker wants back when it is started again from a checkpoint that is cut at this clock or later: JSON."""

    clock: U64
    extra: Annotated[bytes, Meta(max_length=EXTRA_BYTES_MAX)]


class SplitPlace(Message, frozen=True):
    """How far a worker has got with a static split: what the split is, and the next of its own batches."""

    samples: Annotated[int, Meta(ge=1, lt=2**48)]
    batch: Annotated[int, Meta(ge=1, lt=2**48)]
    epochs: Annotated[int, Meta(ge=1, le=EPOCHS_MAX)]
    shuffle: bool
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    epoch: Annotated[int, Meta(ge=0, le=EPOCHS_MAX)]
    batches: Annotated[int, Meta(ge=0, lt=2**48)]  #: of that epoch that it has used


Places = Annotated[dict[Name, SplitPlace], Meta(max_length=SPLITS_MAX)]  # by the split's name


class HasSplit(Message, frozen=True):
    """A worker that goes through a static split: a checkpoint asks it for its place."""


class Splits(Message, frozen=True):
    """A worker's word on SplitsDue: its places at the cut; later: it has not got that far, and tells then."""

    save: U64
    places: Places = {}
    later: bool = False


class Holds(Message, frozen=True):
    """A worker that was told to end, and waits between two iterations until a checkpoint at this clock is armed."""

    clock: U64
    extra: Annotated[bytes, Meta(max_length=EXTRA_BYTES_MAX)] = b""  #: what it keeps
    places: Places = {}
    notes: Notes = {}


class Armed(Message, frozen=True):
    """A server's word on a Capture: nothing of the cut can be lost there; or why it cannot be taken."""

    save: U64
    error: Text = ""


class Saved(Message, frozen=True):
    """A server's word on a Capture: its part is on disk, under this index; or why not."""

    save: U64
    error: Text = ""
    name: Text = ""
    bytes: U64 = 0
    crc32c: U32 = 0
    blocks: U32 = 0
    block_bytes: U64 = 0


class Loaded(Message, frozen=True):
    """A server's word on a Load: its shards are as in the checkpoint, but for what is said; or why not."""

    error: Text = ""
    said: Annotated[list[Text], Meta(max_length=1024)] = []
    load: U64 = 0


# -- what the scheduler says -----------------------------------------------------------------------------------------


class Peer(Message, frozen=True):
    """A member, as others see it."""

    index: U32  #: the number of a server, the rank of a worker
    incarnation: U64
    address: str = ""  #: of a server
    since: U64 = 0  #: of a worker: the number of the first view that it was in
    instead: bool = False  #: of a worker: it took the place of one that was lost


class Welcome(Message, frozen=True):
    """The answer to a Join."""

    cluster: U64
    index: U32  #: the number of a server, the rank of a worker
    failure_timeout: float
    beat_seconds: float
    barrier: U64 = 1  #: the number of the next barrier of a worker that joins
    resumed: str = ""  #: to a worker that starts with its app: the id of the checkpoint that it goes on from
    resumed_clock: U64 = 0
    extra: bytes = b""  #: what its rank kept there
    places: Places = {}  #: where its static splits go on
    places_why: str = ""  #: why they begin their epochs again, if they do
    saves: bool = False  #: there is a place for checkpoints
    generation: U64 = 0  #: how often a scheduler has begun with this one's journal; 0: it has none
    linger: bool = False  #: the cluster stays when nobody uses it


class Refused(Message, frozen=True):
    """The last message of a connection."""

    error: str  #: the name of a class in windlass._errors
    why: str
    retry_seconds: float = 0.0  #: for how long it may be worth joining again, since the reason may go away


class Waiting(Message, frozen=True):
    """Who has not come yet. Whoever hears that servers load a checkpoint gives them time."""

    missing: list[str]
    loading: bool = False


class View(Message, frozen=True):
    """Who trains together, from now on. The first one is what connect() waits for.

    A worker that is in it since the view `started` begins at clock 0; any other came later.
    """

    app: Name
    number: U64
    world_size: U32
    workers: list[Peer]
    servers: list[Peer]
    started: U64 = 0  #: the number of the view with which the app started, the last time it did
    waited: list[U32] = []  #: ranks that were lost and whose replacement is waited for
    clock: U64 = 0  #: at which it started: 0, or where its checkpoint was cut
    lost: U64 = 0  #: how many workers were lost since the view `started`


class Servers(Message, frozen=True):
    """To workers and readers: all servers, in the order of their numbers, since there is one more."""

    servers: list[Peer]


class Gone(Message, frozen=True):
    """A server that is no more."""

    index: U32
    why: str


class MoveShard(Message, frozen=True):
    """An order to the server that has the shard. It may be the first that the server hears of the object."""

    move: U64
    object: U32
    shard: U32
    server: U32
    address: str
    term: U32
    spec: bytes
    runs: list[Run]


class CancelMove(Message, frozen=True):
    """An order that is not to be carried out any more: its target is gone. What became of it is answered with Moved."""

    move: U64
    object: U32
    shard: U32
    server: U32
    term: U32


class ShardMoved(Message, frozen=True):
    """A shard that has a new owner."""

    object: U32
    shard: U32
    server: U32
    term: U32


class Quota(Message, frozen=True):
    """What the tables of an app may take on this server."""

    app: Name
    bytes: U64


class Placed(Message, frozen=True):
    """Where an object is."""

    object: U32
    spec: bytes
    runs: list[Run]


class Capture(Message, frozen=True):
    """To a server: these objects are to be saved as they are at a cut. Two answers: Armed, and Saved."""

    save: U64
    id: Text
    app: Name
    clock: U64
    objects: list[Placed]


class CaptureOver(Message, frozen=True):
    """To a server: a checkpoint is complete, or was given up; then what was written of it goes."""

    save: U64
    complete: bool


class Load(Message, frozen=True):
    """To a server: its shards of these objects are to be as in a checkpoint. Answered with Loaded."""

    id: Text
    app: Name
    clock: U64
    objects: list[Placed]
    load: U64 = 0  #: 0: what the cluster begins with; else an object that was opened with another rule or policy


class SaveDue(Message, frozen=True):
    """To workers: a checkpoint is due. Each says what it keeps, at its next tick; the lowest rank asks for it then."""

    asks: bool


class SplitsDue(Message, frozen=True):
    """To workers with static splits: their places at this clock are asked for. Answered with Splits."""

    save: U64
    clock: U64


class HoldOver(Message, frozen=True):
    """To a worker that holds: it may end."""


class SaveOver(Message, frozen=True):
    """To the worker that asked: the checkpoint is complete, or why there is none."""

    id: Text
    error: str = ""
    why: Text = ""


class Retire(Message, frozen=True):
    """To a server: it ends. `drained`: nothing is lost with it."""

    why: str
    drained: bool


class Shutdown(Message, frozen=True):
    """The cluster ends."""

    why: str
    unfinished: bool = False  #: before its work was done


class Objects(Message, frozen=True):
    """To a server: objects that exist, and where their shards are by now. It makes none that it was not told of."""

    placed: list[Placed]


class Forgotten(Message, frozen=True):
    """To a server: an object that was deleted, or could not be made everywhere, and is no more."""

    object: U32


class Leased(Message, frozen=True):
    """What a worker holds from now on; what it is not told of any more was taken back, or done by another."""

    held: list[Ranges]
    complete: U32  #: epochs that are done, from the first on
    known: U64  #: how many of what the worker has done were counted
    ended: bool = False  #: nothing of the worker's epoch is left for it
    again: bool = False  #: nothing is known of this worker: it says all that it knows
    duplicates: U64 = 0  #: samples that this worker used and that another's work was counted for


class Recall(Message, frozen=True):
    """What the worker holds of a ledger has become less: it asks what is left."""

    name: Name


class Answer(Message, frozen=True):
    """To a question: an error's name and message, or what was asked for."""

    number: U64
    error: str = ""
    why: str = ""
    placed: list[Placed] = []
    leased: Leased | None = None
    reduced: Reduced | None = None
    saved: str = ""  #: the id of a checkpoint


FromMember = (
    Join
    | Ready
    | Leave
    | Report
    | Open
    | Forget
    | Delete
    | List
    | Move
    | Drain
    | KnowsServers
    | Leaving
    | Moved
    | Stop
    | Lease
    | Arrive
    | Save
    | SaveNow
    | Keep
    | HasSplit
    | Splits
    | Holds
    | Armed
    | Saved
    | Loaded
)
FromScheduler = (
    Welcome
    | Refused
    | Waiting
    | View
    | Servers
    | Gone
    | Objects
    | Forgotten
    | MoveShard
    | CancelMove
    | ShardMoved
    | Quota
    | Recall
    | Capture
    | CaptureOver
    | Load
    | SaveDue
    | SplitsDue
    | HoldOver
    | SaveOver
    | Retire
    | Shutdown
    | Answer
)

#: Which roles may say what, once they have joined.
MAY_SAY: dict[str, tuple[type, ...]] = {
    "server": (Ready, Leave, Leaving, Report, Moved, Armed, Saved, Loaded),
    "worker": (
        *(Leave, Report, KnowsServers, Open, Forget, Delete, List, Lease, Arrive, Save, Keep),
        *(HasSplit, Splits, Holds),
    ),
    "reader": (Leave, Report, KnowsServers, Open, List),
    "operator": (Leave, List, Move, Drain, Stop, SaveNow),
}
ROLES = tuple(MAY_SAY)


T = TypeVar("T")


class Malformed(Exception):
    """Bytes that are no message. The text says what was expected."""


_encoder = msgspec.msgpack.Encoder()
_from_member: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)
_from_scheduler: msgspec.msgpack.Decoder[FromScheduler] = msgspec.msgpack.Decoder(FromScheduler)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def read_member(data: bytes) -> FromMember:
    """What a member said. Raises Malformed."""
    return _read(_from_member, data)


def read_scheduler(data: bytes) -> FromScheduler:
    """What the scheduler said. Raises Malformed."""
    return _read(_from_scheduler, data)


def _read(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    if len(data) > MESSAGE_BYTES_MAX:
        raise Malformed(f"a message of {len(data)} bytes; at most {MESSAGE_BYTES_MAX} are read")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError, OverflowError) as error:
        raise Malformed(f"no message of version {VERSION}: {error}") from error
