"""What servers refuse of a reader that does not ask itself whether it may."""

import struct
from collections.abc import Iterator

import numpy as np
import pytest
import raw
from helpers import new_app
from specs import table_spec, tensor_spec

import windlass as wl
from windlass import _core
from windlass._errors import ERRORS
from windlass.testing import Servers

CLOSE, PUT, SNAPSHOT, VECTOR, DOT, SETTLE = 17, 20, 21, 23, 25, 26
TICKS = 4  # a flag of the header
ONES = np.ones(100, np.int64).tobytes()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(1, kind="tcp", threads=2) as one:
        yield one


@pytest.fixture
def app() -> str:
    return new_app()


@pytest.fixture
def worker(servers: Servers, app: str) -> Iterator[wl.Cluster]:
    with servers.connect(app=app) as cluster:
        yield cluster


@pytest.fixture
def reader(servers: Servers, app: str, worker: wl.Cluster) -> Iterator[raw.RawClient]:
    with raw.RawClient(servers.addresses[0], app=app, world_size=0) as client:
        yield client


def what(answer: raw.Answer) -> tuple[type[wl.WindlassError] | None, str]:
    return (ERRORS[answer.status] if answer.status else None), answer.items.decode(errors="replace").strip("\0")


def test_whatever_would_change_a_tensor_is_refused_with_its_name_and_the_operation(
    worker: wl.Cluster, reader: raw.RawClient
):
    w = worker.tensor("w", 100, rule=wl.Sum(), dtype="int64", sync="ssp:3")
    number, before = w._core.object, worker.fingerprint()
    whole, put = raw.WHOLE, struct.pack("<IIQ", 1, 0, 0)
    vector = struct.pack("<B3xIIIQq", 3, 0, 0, 0, 0, 2)  # scale by 2
    asked = {
        "push": (raw.PUSH, raw.Part(sequence=1, flags=whole, numbers=ONES)),
        "push_pull": (raw.PUSH_PULL, raw.Part(sequence=2, flags=whole | raw.CLOSES, numbers=ONES)),
        "put": (PUT, raw.Part(sequence=3, items=put, count=0, numbers=ONES)),
        "vector": (VECTOR, raw.Part(sequence=4, items=vector, count=0)),
        "close": (CLOSE, raw.Part(sequence=4, clock=1, flags=raw.CLOSES, items=bytes(8), count=0)),
    }
    for name, (op, part) in asked.items():
        (answer,) = reader.ask(op, [part], object=number, dtype_in=2, dtype_out=2)
        error, text = what(answer)
        assert (name, error) == (name, wl.AccessDenied), text
        assert f"tensor 'w': {name}: a reader only reads" in text
    # A refused one has used its number up, as any other does: what waits for it does not wait for ever.
    (answer,) = reader.ask(raw.PULL, [raw.Part(sequence=4, flags=whole)], object=number, dtype_in=2, dtype_out=2)
    assert (answer.status, answer.sequence, np.frombuffer(answer.numbers, np.int64).tolist()) == (0, 4, [0] * 100)
    # A repeat is refused again.
    (answer,) = reader.ask(raw.PUSH, [asked["push"][1]], object=number, dtype_in=2, dtype_out=2)
    assert what(answer)[0] is wl.AccessDenied
    assert (worker.fingerprint(), w.pull().sum()) == (before, 0)


def test_rows_are_neither_pushed_nor_deleted_nor_made(worker: wl.Cluster, reader: raw.RawClient):
    t = worker.table("t", 1, rule=wl.Sum())
    t.push([5], [[1.0]]).wait()
    number = t._core.object
    shards = {i: reader.ask(raw.ROWS, [raw.Part(shard=i)], object=number)[0].value for i in range(256)}
    (shard,) = [i for i, rows in shards.items() if rows]
    key = struct.pack("<Q", 5)
    one = np.ones(1, np.float32).tobytes()
    asked = (("push", raw.PUSH, one), ("push_pull", raw.PUSH_PULL, one), ("delete", raw.ERASE, b""))
    for i, (name, op, numbers) in enumerate(asked):
        part = raw.Part(shard=shard, sequence=i + 1, items=key, numbers=numbers, flags=raw.CREATES)
        (answer,) = reader.ask(op, [part], object=number)
        error, text = what(answer)
        assert (name, error) == (name, wl.AccessDenied), text
        assert f"table 't': {name}: a reader only reads" in text
    pulled = 0
    for other in range(6, 5000):  # those of other shards are refused
        part = raw.Part(shard=shard, sequence=3, items=struct.pack("<Q", other), flags=raw.CREATES)
        (answer,) = reader.ask(raw.PULL, [part], object=number)
        pulled += answer.status == 0 and answer.numbers == bytes(4)
    assert pulled > 0
    assert (len(t), t.pull([5]).tolist()) == (1, [[1.0]])


def test_a_reader_makes_no_objects_and_forgets_none(worker: wl.Cluster, reader: raw.RawClient, app: str):
    w = worker.tensor("w", 100, rule=wl.Sum(), dtype="int64")
    there, new = tensor_spec(f"{app}/w", (100,)), tensor_spec(f"{app}/v", (100,))
    (opened,) = reader.ask(raw.OPEN, [raw.Part(items=there)])
    assert opened.status == 0
    assert reader.ask(raw.ATTACH, [raw.Part(items=opened.items + there)])[0].status == 0
    for op, body in (
        (raw.OPEN, new),
        (raw.OPEN, table_spec(f"{app}/t", 4)),
        (raw.OPEN, tensor_spec("another/v", (100,))),
        (raw.ATTACH, _core.write_map(w._core.object + 1000, [(0, 0, 1)]) + new),
    ):
        error, text = what(reader.ask(op, [raw.Part(items=body)])[0])
        assert (error, "is not there, and a reader makes no objects" in text) == (wl.AccessDenied, True), text
    error, text = what(reader.ask(raw.DETACH, [raw.Part(items=opened.items + there)])[0])
    assert (error, "detach of 'w': a reader only reads" in text) == (wl.AccessDenied, True), text
    assert [info.name for info in worker.objects() if "/" not in info.name] == ["w"]


def test_a_reader_has_no_clock_to_tell(worker: wl.Cluster, reader: raw.RawClient):
    w = worker.tensor("w", 100, rule=wl.Sum(), dtype="int64", sync="ssp:3")
    number = w._core.object
    for name, op, part, more in (
        ("tick", raw.TICK, raw.Part(clock=7), {}),
        ("enter", raw.ENTER, raw.Part(items=struct.pack("<Q", 7)), {}),
        ("tick", raw.PULL, raw.Part(flags=raw.WHOLE, clock=7), {"flags": 1 | TICKS, "object": number, "dtype_out": 2}),
    ):
        error, text = what(reader.ask(op, [part], **more)[0])
        assert (error, f"{name}: a reader has no clock" in text) == (wl.AccessDenied, True), text
    assert w.push_pull(np.ones(100, np.int64)).sum() == 100


def test_what_reads_is_served(worker: wl.Cluster, reader: raw.RawClient):
    w = worker.tensor("w", 100, rule=wl.Sum(), dtype="int64")
    w.push(np.arange(100)).wait()
    number = w._core.object
    for op, part in (
        (raw.PULL, raw.Part(flags=raw.WHOLE)),
        (raw.FINGERPRINT, raw.Part()),
        (SNAPSHOT, raw.Part()),
        (SETTLE, raw.Part()),
        (DOT, raw.Part(items=struct.pack("<B3xIIIQq", 1, number, 1, 0, 0, 0), count=0)),
        (raw.QUERY, raw.Part(items=struct.pack("<BBHIIIQ", 2, 0, 0, 0, 0, 0, 0), count=0)),
    ):
        (answer,) = reader.ask(op, [part], object=number, dtype_in=2, dtype_out=2)
        assert answer.status == 0, (op, answer.items)
