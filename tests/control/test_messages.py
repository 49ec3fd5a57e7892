"""What members and the scheduler say: any bytes are read or refused, and nothing that is read can hurt."""

import math
import random

import msgspec
import pytest
from brain import Brain, started
from specs import table_spec, tensor_spec

from windlass.control import messages as m
from windlass.control.events import Came, Said

MUTATIONS, MUTATIONS_LONG = 100_000, 10_000_000

SAMPLES: list[m.Message] = [
    m.Join("worker", 2**63, "default", 1, 2, 7, ["tcp://1.2.3.4:5"], "host", 4711, 1),
    m.Join("server", 2**64 - 1, addresses=["tcp://1.2.3.4:5", "unix://@x"]),
    m.Join("worker", 7, "default", 0, 1, on_worker_loss="wait"),
    m.Join("operator", 900),
    m.Ready(),
    m.Leave(True, "why not"),
    m.Report(3, 4, 5, 6, 7, 8, {"default": 9}),
    m.Report(sync={"default": m.SyncReport(10, [9, 1], 2, 0.5, {3: 0.25, 0: 0.25}, 1)}),
    m.Report(clock=7, values={"loss": 0.25, "x" * 64: None}, pulls=m.PullReport(3, 1, 0.5)),
    m.Report(tables={1: (2**40, 2**63), 2**32 - 1: (0, 0)}),
    m.Open(1, tensor_spec("default/w", (1000,), "sgd", dtype=0)),
    m.Open(2, table_spec("default/t", 64)),
    m.Forget(3, b"spec", 1),
    m.Delete(3, 1),
    m.List(4),
    m.Move(5, "default/w", 0, 1),
    m.Moved(1, ""),
    m.Stop(6, "enough"),
    m.Arrive(7, 3),
    m.Arrive(8, 2**48 - 1, False),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message: m.Message):
    assert m.read_member(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.Welcome(1, 2, 10.0, 1.0),
        m.Welcome(1, 2, 10.0, 1.0, 3),
        m.Refused("Timeout", "x" * 5000),
        m.Waiting(["server 1"]),
        m.View("default", 3, 2, [m.Peer(0, 1, since=2)], [m.Peer(0, 2, "tcp://h:1")], 2, [1]),
        m.Gone(1, "why"),
        m.Objects([m.Placed(1, b"spec", [(0, 1, 1)]), m.Placed(2, b"", [(0, 0, 1), (4, 1, 2)])]),
        m.Forgotten(3),
        m.MoveShard(1, 2, 3, 4, "tcp://h:1", 5, b"spec", [(0, 1, 1), (2, 0, 3)]),
        m.CancelMove(1, 2, 3, 4, 5),
        m.ShardMoved(1, 2, 3, 4),
        m.Quota("default", 5),
        m.Shutdown("why"),
        m.Answer(1, placed=[m.Placed(1, b"spec", [(0, 1, 1), (5, 0, 2)])]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_scheduler_says_is_read_as_it_was_written(message: m.Message):
    assert m.read_scheduler(m.encode(message)) == message


HUGE = [b"\xcf" + b"\xff" * 8, b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
NUMBERS = [0, 1, 2, 7, 200, 900, 2**31, 2**32 - 1, 2**32, 2**64 - 1, -1, None, True, 1.5]
TEXTS = ["", "x", "default", "default/w", "other", "a/b", "x" * 2000, "\0", "worker", "server", "reader", b"", b"spec"]
SPECS = [tensor_spec("default/v", (7,)), table_spec("default/t", 8), tensor_spec("a/b", (2**60,))]
VALUES: list[object] = [*NUMBERS, *TEXTS, *SPECS, [], ["tcp://1.2.3.4:5"], ["x"] * 20, {}, [1]]


def mutated(rng: random.Random) -> bytes:
    """A message with other values in its fields, or with other bytes."""
    if rng.random() < 0.6:
        fields = msgspec.to_builtins(rng.choice(SAMPLES), builtin_types=(bytes,))
        for _ in range(rng.choice([0, 1, 1, 2])):
            fields[rng.choice(list(fields))] = rng.choice(VALUES)
        return msgspec.msgpack.encode(fields)
    data = bytearray(m.encode(rng.choice(SAMPLES)))
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        kind, at = rng.randrange(5), rng.randrange(len(data) + 1)
        if kind == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        elif kind == 3:
            data[at:at] = rng.choice(HUGE)
        elif data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
    return bytes(data)


def hurt(count: int, seed: int) -> dict[str, int]:
    """Mutated messages of every role to a scheduler at work; it lives, and says of each what it thinks."""
    rng, brain = random.Random(seed), started(linger=True)
    seen = {"malformed": 0, "read": 0}
    for number in range(count):
        if number % 500 == 0:
            brain = started(linger=True)
            brain.join("operator", 900)
        try:
            message = m.read_member(mutated(rng))
        except m.Malformed:
            seen["malformed"] += 1
            continue
        seen["read"] += 1
        if isinstance(message, m.Join):
            brain.feed(Came(10_000 + number, message))
        else:
            brain.feed(Said(rng.choice([100, 101, 200, 201, 900]), message))
        sane(brain)
    return seen


def sane(brain: Brain) -> None:
    """What must hold whatever was said."""
    state = brain.state
    assert set(state.servers.values()) == {n for n, x in state.members.items() if x.join.role == "server"}
    for app in state.apps.values():
        assert all(state.members[number].index == rank for rank, number in app.workers.items())
        assert not app.waited & set(app.workers)
        assert app.started or not app.waited
    for there in state.objects.values():
        assert len(there.owners) == len(there.terms) == len(there.shard_bytes)
    assert all(load >= 0 for load in state.load_bytes.values())


def test_a_hundred_thousand_mutated_messages_do_no_harm():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    seen = hurt(MUTATIONS, seed)
    print(seen)
    assert seen["malformed"] > MUTATIONS / 10
    assert seen["read"] > MUTATIONS / 10


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_million_mutated_messages_do_no_harm():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    hurt(MUTATIONS_LONG, seed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\x80",
        m.encode(m.Welcome(1, 1, 1.0, 1.0)),
        b"\x82\xa2is\xa4Join\xa4role\xa6worker",
        b"\x83\xa2is\xa4List\xa6number\x01\xa5extra\x01",
        b"\x82\xa2is\xa4List\xa6number\xff",
        b"\x91" * 2000,
        m.encode(m.Join("worker", 7, on_worker_loss="panic")),  # type: ignore[arg-type]
        m.encode(m.Report(sync={"a": m.SyncReport(staleness=[0] * 17)})),
        m.encode(m.Report(sync={"a": m.SyncReport(waited_seconds=-1.0)})),
        m.encode(m.Report(sync={"a": m.SyncReport(waited_for={0: math.nan})})),
        m.encode(m.Report(sync={"a": m.SyncReport(waited_for=dict.fromkeys(range(1025), 0.0))})),
        m.encode(m.Report(sync={str(i): m.SyncReport() for i in range(1025)})),
        m.encode(m.Report(pulls=m.PullReport(waited_seconds=-1.0))),
        m.encode(m.Report(tables=dict.fromkeys(range(m.TABLES_MAX + 1), (0, 0)))),
        m.encode(m.Report(tables={1: (-1, 0)})),
        m.encode(m.Report(values={"loss": math.nan})),
        m.encode(m.Report(values={"loss": -math.inf})),
        m.encode(m.Report(values={"x" * 65: 0.0})),
        m.encode(m.Report(values={"": 0.0})),
        m.encode(m.Report(values={str(i): 0.0 for i in range(33)})),
    ],
)
def test_bytes_that_are_no_message_are_malformed(data: bytes):
    with pytest.raises(m.Malformed, match="no message of version 1"):
        m.read_member(data)


def test_a_message_that_is_too_long_is_not_even_decoded():
    with pytest.raises(m.Malformed, match=f"at most {m.MESSAGE_BYTES_MAX} are read"):
        m.read_member(bytes(m.MESSAGE_BYTES_MAX + 1))
