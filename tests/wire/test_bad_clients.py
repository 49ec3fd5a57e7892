"""S5 and S7: lengths are checked before memory is taken, and a wrong but authenticated client corrupts nobody."""

import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import raw
from specs import table_spec, tensor_spec

import windlass as wl
from windlass.testing import Servers

KINDS = ["tcp", "unix"]
CODES = {e.__name__: {i for i, other in enumerate(wl._errors.ERRORS) if other is e} for e in wl._errors.ERRORS}
MIB = 1 << 20


@contextlib.contextmanager
def one_server(kind: str, *breaks: str) -> Iterator[Servers]:
    """One server: a list of two would do the same twice. `breaks` are mechanisms to switch off."""
    before = os.environ.get("WINDLASS_BREAK")
    os.environ["WINDLASS_BREAK"] = ",".join(breaks)
    try:
        with Servers(1, kind=kind) as servers:
            yield servers
    finally:
        os.environ.pop("WINDLASS_BREAK", None) if before is None else os.environ.update(WINDLASS_BREAK=before)


# -- S5 --------------------------------------------------------------------------------------------------------------


def huge_claims(address: str) -> list[bytes]:
    """Frames that claim more than there is, or than there may be."""
    with raw.RawClient(address, app="claims") as client:
        number = client.open(tensor_spec("claims/w", (100,)))
        table = client.open(table_spec("claims/t", 1 << 20))
        frames = []
        for claim in (2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 64):
            frames.append(client.frame(raw.PUSH, [], object=number, length=claim, blocks=1))
            frames.append(client.frame(raw.PULL, [], object=number, length=claim, blocks=2**20))
            part = raw.Part(sequence=1, numbers_bytes=min(claim, 2**32 - 64))
            frames.append(client.frame(raw.PUSH, [part], object=number, length=2**40))
        for claim in (2**28, 2**31, 2**32 - 1):
            part = raw.Part(items_bytes=claim, count=claim // 8)
            frames.append(client.frame(raw.PULL, [part], object=table, length=2**40))
            frames.append(client.frame(raw.OPEN, [part], length=2**40))
        part = raw.Part(sequence=1, numbers_bytes=2**30)  # as much as there may be, and it never comes
        frames.append(client.frame(raw.PUSH, [part], object=number, length=64 + 2**30))
        # rows x dim: 2^17 keys of 2^20 numbers each, asked for in a frame of 1 MiB
        keys = np.arange(1 << 17, dtype=np.uint64).tobytes()
        frames.append(client.frame(raw.PULL, [raw.Part(items=keys)], object=table))
        return frames


def rss_after_claims(servers: Servers) -> int:
    """By how much the server's memory grows while every claim is held open at once."""
    frames = huge_claims(servers.addresses[0])
    with servers.connect(app="witness") as witness:
        w = witness.tensor("w", 4, rule=wl.Sum(), dtype=np.int64)
        w.push(np.ones(4, np.int64)).wait()
        clients = [raw.RawClient(servers.addresses[0], app="claims") for _ in frames]
        for client in clients:  # what a connection costs is not what it claims
            client.ask(raw.PULL, [raw.Part(flags=raw.WHOLE)], object=1, dtype_out=2)
        before = servers.rss_bytes(0)
        try:
            for client, frame in zip(clients, frames, strict=True):
                # The session and app of who sends it, and the header's checksum to fit.
                head = bytearray(frame[:60])
                struct.pack_into("<Q", head, 24, client.session)
                struct.pack_into("<I", head, 32, client.app)
                with contextlib.suppress(ConnectionError):
                    client.sock.sendall(bytes(head) + struct.pack("<I", wl._core.crc32c(bytes(head))) + frame[64:])
            time.sleep(0.3)
            grown = servers.rss_bytes(0) - before
            assert w.pull().tolist() == [1, 1, 1, 1]
        finally:
            for client in clients:
                client.close()
    return grown


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_that_is_claimed_takes_no_memory(kind: str):
    with one_server(kind) as servers:
        grown = rss_after_claims(servers)
        print(f"{grown / MIB:.2f} MiB")
        assert grown <= MIB


def test_the_check_of_lengths_notices_memory_that_is_taken_too_early():
    with one_server("tcp", "lengths") as servers:
        assert rss_after_claims(servers) > 20 * MIB


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_that_breaks_the_rules_is_answered_and_the_connection_closed(kind: str):
    with one_server(kind) as servers:
        for wrong in (
            {"magic": 1},
            {"version": 1},
            {"version": 3},
            {"op": 77},
            {"op": 0},
            {"length": 100},
            {"length": 2**63},
            {"blocks": 2**31},
            {"request": 0},
            {"session": 5},
            {"app": 77},
        ):
            with raw.RawClient(servers.addresses[0]) as client:
                client.send(raw.LIST, [], **wrong)
                (answer,) = client.read()
                assert answer.request == 0, wrong
                assert answer.status in CODES["ProtocolError"], wrong
                assert answer.items, wrong
                assert client.hung_up()


def test_nothing_but_hello_is_heard_before_hello():
    with one_server("tcp") as servers:
        for op in range(raw.GOODBYE, raw.SCAN + 1):
            with raw.RawClient(servers.addresses[0], hello=False) as client:
                client.send(op, [raw.Part()])
                (answer,) = client.read()
                assert answer.status in CODES["ProtocolError"]
                assert b"before hello" in answer.items


# -- S7 --------------------------------------------------------------------------------------------------------------


COUNT = bytes([1]) + bytes(23)
QUERIES = [  # that make no sense
    b"",
    b"\x01",
    bytes(24),
    bytes([255]) + bytes(23),
    COUNT + b"\x00",
    struct.pack("<BBHIIIQ", 1, 0, 0, 2**32 - 1, 2**32 - 1, 0, 0),
    struct.pack("<BBHIIIQ", 1, 0, 0, 1, 0, 0, 0) + b"\xff",
    struct.pack("<BBHIIIQ", 1, 0, 0, 17, 0, 0, 0) + b"\x03" * 17,
    struct.pack("<BBHIIIQ", 11, 1, 0, 0, 1, 0, 1_000_001) + b"\x0b",
    struct.pack("<BBHIIIQ", 11, 1, 0, 0, 1, 0, 2**64 - 1) + b"\x0b",
    struct.pack("<BBHIIIQ", 10, 0, 0, 0, 0, 0, 2**61),
    struct.pack("<BBHIIIQdd", 10, 0, 0, 0, 0, 0, 2, 1.0, float("nan")),
    b"\x01" * 70_000,
]


def attempts(client: raw.RawClient | None) -> list[tuple[str, bytes]]:
    """Requests that must be refused, by the name of the error they must be refused with."""
    client, number, strict, table = client or raw.RawClient.__new__(raw.RawClient), 1, 2, 3
    if not hasattr(client, "app"):  # only to be counted
        client.app, client.session, client.request = 0, 0, 1
    one = np.ones(100, np.int64).tobytes()
    floats = np.ones(100, np.float32)
    nan, inf = floats.copy(), floats.copy()
    nan[3], inf[99] = np.nan, -np.inf
    sgd = raw.hyper(0.1)
    f32 = {"object": strict, "dtype_in": 0, "dtype_out": 0}

    def i64(op: int, *parts: raw.Part, number: int = number) -> bytes:
        return client.frame(op, list(parts), object=number, dtype_in=2, dtype_out=2, hyper=raw.hyper())

    def whole(**fields: object) -> raw.Part:
        given = {"numbers": one, "flags": raw.WHOLE, "sequence": 1, **fields}
        return raw.Part(**given)  # type: ignore[arg-type]

    def spans(*pairs: tuple[int, int], numbers: bytes = b"") -> raw.Part:
        items = b"".join(struct.pack("<QQ", *p) for p in pairs)
        return raw.Part(items=items, count=len(pairs), numbers=numbers, sequence=1 if numbers else 0)

    key = int(np.uint64(12345))
    return [
        ("NotFound", i64(raw.PUSH, whole(), number=77)),
        ("NotFound", i64(raw.PULL, whole(numbers=b"", sequence=0), number=0)),
        ("StaleMap", i64(raw.PUSH, whole(term=0))),
        ("StaleMap", i64(raw.PUSH, whole(term=7))),
        ("StaleMap", i64(raw.PUSH, whole(shard=1))),
        ("StaleMap", i64(raw.PUSH, whole(shard=2**32 - 1))),
        ("ProtocolError", i64(raw.PUSH, whole(numbers_crc=1))),
        ("ProtocolError", i64(raw.PUSH, raw.Part(items=bytes(16), items_crc=5, numbers=one[:8], sequence=1))),
        ("ShapeMismatch", i64(raw.PUSH, whole(numbers=one[:-8]))),
        ("ShapeMismatch", i64(raw.PUSH, whole(numbers=one + one))),
        ("ShapeMismatch", i64(raw.PUSH, whole(numbers=b""))),
        ("ShapeMismatch", i64(raw.PUSH, spans((99, 2), numbers=one[:16]))),
        ("ShapeMismatch", i64(raw.PUSH, spans((2**63, 2**63), numbers=one[:16]))),
        ("ShapeMismatch", i64(raw.PUSH, spans((0, 2**64 - 1), numbers=one[:16]))),
        ("ShapeMismatch", i64(raw.PUSH, spans((0, 100), (0, 1), numbers=one + one[:8]))),
        ("ShapeMismatch", i64(raw.PULL, spans((100, 1)))),
        ("ShapeMismatch", client.frame(raw.PUSH, [whole()], object=number, dtype_in=0, hyper=raw.hyper())),
        ("ShapeMismatch", client.frame(raw.PULL, [whole(numbers=b"", sequence=0)], object=number, dtype_out=4)),
        ("NonFinite", client.frame(raw.PUSH, [whole(numbers=nan.tobytes())], hyper=sgd, **f32)),
        ("NonFinite", client.frame(raw.PUSH, [whole(numbers=inf.tobytes(), sequence=1)], hyper=sgd, **f32)),
        ("InvalidArgument", client.frame(raw.PUSH, [whole(numbers=floats.tobytes())], **f32)),
        ("InvalidArgument", i64(raw.ROWS, raw.Part())),
        ("InvalidArgument", i64(raw.ERASE, raw.Part(items=struct.pack("<Q", key), sequence=1))),
        ("InvalidArgument", client.frame(raw.SCAN, [raw.Part(items=struct.pack("<Q", 2**60))], object=table)),
        *(
            ("InvalidArgument", client.frame(raw.QUERY, [raw.Part(items=q)], object=of))
            for q in QUERIES
            for of in (1, 3)
        ),
        *(
            ("InvalidArgument", client.frame(raw.SCAN, [raw.Part(items=struct.pack("<QII", *head) + where)], object=3))
            for head, where in [
                ((5, 4, 0), b""),
                ((5, 3, 0), b""),
                ((5, 0, 1), b""),
                ((5, 1, 0), b"\x30"),
                ((0, 1, 0), b"\x03"),
            ]
        ),
        ("InvalidArgument", i64(raw.SCAN, raw.Part(items=struct.pack("<QII", 5, 0, 0)))),
        ("ShapeMismatch", client.frame(raw.QUERY, [raw.Part(items=COUNT, numbers=bytes(8))], object=table)),
        (
            "InvalidArgument",  # a key of another shard
            client.frame(
                raw.PUSH,
                [raw.Part(items=struct.pack("<Q", key), numbers=bytes(16), sequence=1, shard=s) for s in range(2)],
                object=table,
                hyper=raw.hyper(),
            ),
        ),
    ]


def refusals(servers: Servers) -> tuple[list[str], bool]:
    """What was not refused as it should be, and whether everything of the others stayed as it was."""
    with servers.connect(app="victim") as victim:
        w = victim.tensor("w", 100, rule=wl.Sum(), dtype=np.int64)
        strict = victim.tensor("strict", 100, rule=wl.SGD(lr=0.1), reject_nonfinite=True)
        rows = victim.table("rows", 4, rule=wl.Sum())
        w.push(np.arange(100)).wait()
        strict.push(np.ones(100, np.float32)).wait()
        rows.push([1, 2, 3], np.ones((3, 4), np.float32)).wait()
        before = victim.fingerprint()
        wrong = []
        for i in range(len(attempts(None))):
            with raw.RawClient(servers.addresses[0]) as client:  # a session of its own: its first push is number 1
                expected, frame = attempts(client)[i]
                client.sock.sendall(frame)
                codes = {a.status for a in client.read()}
                if not codes & CODES[expected]:
                    wrong.append(f"{expected}, saw {codes}")
        same = victim.fingerprint() == before
        total = w.pull().sum()
        w.push(np.ones(100, np.int64)).wait()  # and everything goes on
        assert w.pull().sum() == total + 100
    return wrong, same


@pytest.mark.parametrize("kind", KINDS)
def test_what_makes_no_sense_is_refused_by_its_type_and_changes_nothing(kind: str):
    with one_server(kind) as servers:
        wrong, same = refusals(servers)
        assert wrong == []
        assert same


@pytest.mark.parametrize("broken", ["terms", "nonfinite"])
def test_the_check_of_refusals_notices_a_mechanism_that_is_off(broken: str):
    with one_server("tcp", broken) as servers:
        wrong, same = refusals(servers)
        assert wrong
        assert not same


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_never_reads_stops_nobody(kind: str):
    with one_server(kind) as servers, servers.connect(app="other") as other:
        w = other.tensor("w", 1000, rule=wl.Sum(), dtype=np.int64)
        with raw.RawClient(servers.addresses[0]) as client:
            number = client.open(tensor_spec("raw/big", (8_000_000,)))  # 64 MB in 64 shards
            parts = [raw.Part(shard=s, flags=raw.WHOLE) for s in range(61)]
            frame = client.frame(raw.PULL, parts, object=number, dtype_out=2)
            client.sock.settimeout(0.5)

            def flood() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        client.sock.sendall(frame)  # until the server stops reading as well

            thread = threading.Thread(target=flood)
            thread.start()
            time.sleep(0.3)
            before = servers.rss_bytes(0)
            start = time.monotonic()
            for _ in range(200):
                w.push_pull(np.ones(1000, np.int64), timeout=5)
            assert time.monotonic() - start < 5
            assert servers.rss_bytes(0) - before < 8 * MIB
            thread.join(5)
        assert w.pull().tolist() == [200] * 1000
