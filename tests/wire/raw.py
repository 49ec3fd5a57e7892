"""A client made by hand, which can say anything: the handshake is right, the frames are the test's."""

import dataclasses
import random
import socket
import struct
import time
from typing import Any

from windlass import _core
from windlass._address import Address, dial
from windlass._handshake import greet

HELLO, GOODBYE, ASK, OPEN, ATTACH, LIST, PUSH, PULL, PUSH_PULL, ERASE, ROWS, FINGERPRINT, SCAN = range(1, 14)
QUERY = 22
CLOSES, EMPTY, CREATES, WHOLE = 1, 2, 4, 8
MAGIC = 0x31464C57
HEADER, PART = struct.Struct("<IBBHQQQIIIBBBBIII"), struct.Struct("<IIQQIIQIIQHBB")


def padded(data: bytes) -> bytes:
    """Filled up to a multiple of 64."""
    return data + bytes(-len(data) % 64)


@dataclasses.dataclass
class Part:
    """One part of a frame. Any field can be wrong; what is None is filled in as it should be."""

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

    def encode(self) -> bytes:
        head = PART.pack(
            self.shard,
            self.term,
            self.sequence,
            self.clock,
            len(self.items) // 8 if self.count is None else self.count,
            len(self.items) if self.items_bytes is None else self.items_bytes,
            len(self.numbers) if self.numbers_bytes is None else self.numbers_bytes,
            _core.crc32c(self.items) if self.items_crc is None else self.items_crc,
            _core.crc32c(self.numbers) if self.numbers_crc is None else self.numbers_crc,
            self.value,
            self.flags,
            0,
            0,
        )
        return head + struct.pack("<I", _core.crc32c(head)) + padded(self.items) + padded(self.numbers)


@dataclasses.dataclass
class Answer:
    """A part of an answer."""

    request: int
    shard: int
    status: int
    sequence: int
    value: int
    items: bytes
    numbers: bytes


class RawClient:
    """One connection (one lane) to one server of a list."""

    def __init__(self, address: str, token: bytes = b"", **hello: Any) -> None:
        self.address = address
        self.session = random.getrandbits(64)
        self.app = 0
        self.request = 1
        deadline = time.monotonic() + 10
        self.sock: socket.socket = dial(Address.parse(address), deadline)
        self.key = greet(self.sock, token, None, deadline).key
        self.sock.settimeout(10)
        if hello.pop("hello", True):
            self.hello(**hello)

    def frame(self, op: int, body_parts: list[Part], /, *, extensions: bytes = b"", **fields: int) -> bytes:
        """A frame; any field of the header can be given."""
        body = b"".join(p.encode() for p in body_parts)
        extensions = padded(extensions)
        values = {  # in the order of the header
            "magic": MAGIC,
            "version": 1,
            "op": op,
            "flags": 1,
            "length": len(extensions) + len(body),
            "request": self.request,
            "session": self.session,
            "app": self.app,
            "object": 0,
            "deadline": 0,
            "lane": 0,
            "dtype_in": 0,
            "dtype_out": 0,
            "priority": 0,
            "parts": len(body_parts),
            "extension_bytes": len(extensions),
            "extension_crc": _core.crc32c(extensions) if extensions else 0,
            **fields,
        }
        self.request += 1
        head = HEADER.pack(*values.values())
        return head + struct.pack("<I", _core.crc32c(head)) + extensions + body

    def send(self, op: int, body_parts: list[Part], /, **fields: Any) -> None:
        self.sock.sendall(self.frame(op, body_parts, **fields))

    def ask(self, op: int, body_parts: list[Part], /, **fields: Any) -> list[Answer]:
        """Sends a request and reads one answer frame."""
        self.send(op, body_parts, **fields)
        return self.read()

    def read(self) -> list[Answer]:
        """One frame; EOFError when the server hung up."""
        head = HEADER.unpack(self._exactly(64)[:60])
        left, request, count = head[4], head[5], head[14]
        body = self._exactly(left)
        answers, at = [], head[15]
        for _ in range(count):
            p = PART.unpack(body[at : at + 60])
            at += 64
            items = body[at : at + p[5]]
            at += len(padded(items))
            numbers = body[at : at + p[6]]
            at += len(padded(numbers))
            answers.append(Answer(request, p[0], p[11], p[2], p[9], items, numbers))
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

    def hello(self, *, servers: list[str] | None = None, app: str = "raw", index: int = 0) -> None:
        names = servers or [self.address]
        body = struct.pack("<IIB3xIQQHH", 0, 1, 0, index, 0, 0, len(names), len(app)) + app.encode()
        for name in names:
            body += struct.pack("<H", len(name)) + name.encode()
        (answer,) = self.ask(HELLO, [Part(items=body)])
        assert answer.status == 0, answer
        self.app = struct.unpack("<QI", answer.items[:12])[1]

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
    """The extension with a push's hyperparameters."""
    numbers = (*values, *[0.0] * (8 - len(values)))
    return struct.pack("<HHI", 1, 64, 0) + struct.pack("<8d", *numbers)
