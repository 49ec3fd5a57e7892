"""A client made by hand, which can say anything: the handshake is right, the frames are the test's."""

import dataclasses
import random
import socket
import struct
import time
from typing import Any

from windlass import _core
from windlass._net.address import Address, dial
from windlass._net.handshake import greet
from windlass._net.token import own_token

HELLO, GOODBYE, ASK, OPEN, ATTACH, LIST, PUSH, PULL, PUSH_PULL, ERASE, ROWS, FINGERPRINT, SCAN = range(1, 14)
DETACH, STEP, TICK, ENTER, QUERY = 14, 16, 18, 19, 22
CLOSES, EMPTY, CREATES, WHOLE = 1, 2, 4, 8
AS_BEFORE, HAS_VALUE, HAS_VALUES, WAITED = 256, 1024, 8192, 16384
CONTROL = {HELLO, GOODBYE, ASK, OPEN, ATTACH, LIST, DETACH, ENTER}
MAGIC, VERSION = 0x31464C57, 2
HEADER, BLOCK = struct.Struct("<IBBHQQQIIQIBBHI"), struct.Struct("<IBBBBHHIQIIQIIIII")
EXCEPTION = struct.Struct("<IBBHIIQ")


def padded(data: bytes) -> bytes:
    """Filled up to a multiple of 64."""
    return data + bytes(-len(data) % 64)


@dataclasses.dataclass
class Part:
    """A block of one entry. Any field can be wrong; what is None is filled in as it should be."""

    shard: int = 0
    term: int = 1
    sequence: int = 0
    clock: int = 0
    items: bytes = b""
    count: int | None = None
    items_bytes: int | None = None
    numbers: bytes = b""
    numbers_bytes: int | None = None
    items_crc: int | None = None
    numbers_crc: int | None = None
    value: int = 0
    flags: int = 0

    def encode(
        self, op: int, hyper: bytes, *, label: int, object: int = 0, dtype_in: int = 0, dtype_out: int = 0
    ) -> bytes:
        has_keys = op in (PUSH, PULL, PUSH_PULL, ERASE)
        flags = self.flags | (HAS_VALUE if self.value else 0) | (AS_BEFORE if label else 0)
        hyper = b"" if label else hyper
        body = (struct.pack("<Q", self.value) if self.value else b"") + hyper + self.items
        head = BLOCK.pack(
            object,
            op,
            dtype_in,
            dtype_out,
            len(hyper) // 8,
            flags,
            0 if op in CONTROL or op == TICK else 1,
            label,
            self.clock,
            self.term,
            self.shard,
            self.sequence,
            (len(self.items) // 8 if has_keys else 0) if self.count is None else self.count,
            len(body) if self.items_bytes is None else self.items_bytes,
            len(self.numbers) if self.numbers_bytes is None else self.numbers_bytes,
            _core.crc32c(body) if self.items_crc is None else self.items_crc,
            _core.crc32c(self.numbers) if self.numbers_crc is None else self.numbers_crc,
        )
        return head + struct.pack("<I", _core.crc32c(head)) + padded(body) + padded(self.numbers)


@dataclasses.dataclass
class Answer:
    """A block of an answer."""

    request: int
    label: int
    status: int
    sequence: int
    value: int
    items: bytes
    numbers: bytes


class RawClient:
    """One connection (one lane) to one server of a list."""

    def __init__(self, address: str, token: bytes | None = None, session: int | None = None, **hello: Any) -> None:
        self.address = address
        self.session = random.getrandbits(64) if session is None else session
        self.app = 0
        self.request = 1
        deadline = time.monotonic() + 10
        self.sock: socket.socket = dial(Address.parse(address), deadline)
        self.key = greet(self.sock, own_token() if token is None else token, None, deadline).key
        self.sock.settimeout(10)
        if hello.pop("hello", True):
            self.hello(**hello)

    def frame(self, op: int, body_parts: list[Part], /, *, hyper: bytes = b"", **fields: int) -> bytes:
        """A frame; any field of the header can be given, and what its blocks are about."""
        about = {name: fields.pop(name) for name in ("object", "dtype_in", "dtype_out") if name in fields}
        body = b"".join(p.encode(op, hyper, label=i, **about) for i, p in enumerate(body_parts))
        values = {  # in the order of the header
            "magic": MAGIC,
            "version": VERSION,
            "op": op if op in CONTROL else STEP,
            "flags": 1,
            "length": len(body),
            "request": self.request,
            "session": self.session,
            "app": self.app,
            "deadline": 0,
            "work": 0,
            "blocks": len(body_parts),
            "lane": 0,
            "priority": 0,
            "zero": 0,
            "zero_too": 0,
            **fields,
        }
        self.request += 1
        head = HEADER.pack(*values.values())
        return head + struct.pack("<I", _core.crc32c(head)) + body

    def send(self, op: int, body_parts: list[Part], /, **fields: Any) -> None:
        self.sock.sendall(self.frame(op, body_parts, **fields))

    def ask(self, op: int, body_parts: list[Part], /, **fields: Any) -> list[Answer]:
        """Sends a request and reads one answer frame."""
        self.send(op, body_parts, **fields)
        return self.read()

    def read(self) -> list[Answer]:
        """One frame; EOFError when the server hung up."""
        head = HEADER.unpack(self._exactly(64)[:60])
        left, request, count = head[4], head[5], head[10]
        frame = self._exactly(left)
        answers, at = [], 0
        for _ in range(count):
            b = BLOCK.unpack(frame[at : at + 60])
            at += 64
            flags, entries, label, low, high, sequence, exceptions = b[5], b[6], b[7], b[9], b[10], b[11], b[12]
            body = frame[at : at + b[13]]
            at += len(padded(body))
            numbers = frame[at : at + b[14]]
            at += len(padded(numbers))
            status, value, skip = 0, high << 32 | low, (16 if flags & WAITED else 0)
            skip += 8 * entries if flags & HAS_VALUES else 0
            body = body[skip:]
            for _ in range(exceptions):
                _, status, _, _, _, message, value = EXCEPTION.unpack(body[:24])
                body = body[24 : 24 + message] if status else body[24 + message + -message % 8 :]
            answers.append(Answer(request, label, status, sequence, value, body, numbers))
        return answers

    def hung_up(self) -> bool:
        """Whether the server has closed the connection (what it said before does not matter)."""
        try:
            while True:
                self.read()
        except (EOFError, ConnectionError):
            return True
        except TimeoutError:
            return False

    def hello(self, **who: Any) -> None:
        """Says hello and is let in."""
        answer = self.try_hello(**who)
        assert answer.status == 0, answer

    def try_hello(
        self,
        *,
        servers: list[str] | None = None,
        app: str = "raw",
        index: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cluster: int = 0,
    ) -> Answer:
        """Says hello; what the server answers."""
        names = servers or [self.address]
        body = struct.pack("<IIB3xIQQHH", rank, world_size, 0, index, 0, cluster, len(names), len(app)) + app.encode()
        for name in names:
            body += struct.pack("<H", len(name)) + name.encode()
        (answer,) = self.ask(HELLO, [Part(items=body)])
        if answer.status == 0:
            self.app = struct.unpack("<QI", answer.items[:12])[1]
        return answer

    def open(self, spec: bytes, runs: list[tuple[int, int, int]] | None = None) -> int:
        """Creates or opens an object; returns its number."""
        (answer,) = self.ask(OPEN, [Part(items=spec)])
        assert answer.status == 0, answer.items
        (done,) = self.ask(ATTACH, [Part(items=answer.items + spec)])
        assert done.status == 0, done.items
        return int(struct.unpack_from("<I", answer.items)[0])

    def _exactly(self, n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            more = self.sock.recv(min(n - len(data), 1 << 20))
            if not more:
                raise EOFError("the server hung up")
            data += more
        return bytes(data)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def hyper(*values: float) -> bytes:
    """A push's hyperparameters."""
    return struct.pack("<8d", *values, *[0.0] * (8 - len(values)))
