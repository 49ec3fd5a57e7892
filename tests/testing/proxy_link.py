"""Plain sockets on both sides of a proxy, and frames to send."""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from windlass._net.address import Address, bound_to, dial, listen
from windlass.testing import Faults, Proxy

GREETING, HELLO, WELCOME = os.urandom(48), os.urandom(96), os.urandom(64)
PUSH = 7
TCP = Address("tcp", "127.0.0.1")
KINDS = pytest.mark.parametrize("kind", ["tcp", "unix"])


def frame(request: int, length: int = 64, operation: int = PUSH) -> bytes:
    """A header as the wire has it, without its checksum, and numbers that follow from the request's."""
    header = struct.pack("<4sBBHQQ", b"WLF1", 1, operation, 0, length, request).ljust(64, b"\0")
    return header + random.Random(request).randbytes(length)


def requests_of(data: bytes) -> list[int]:
    """The numbers of the frames in there, which must be whole and unspoiled."""
    found = []
    while data:
        length, request = struct.unpack_from("<8xQQ", data)
        assert data.startswith(frame(request, length))
        data = data[64 + length :]
        found.append(request)
    return found


class Link:
    """A proxy, and a server behind it that does what the test says. New pairs of sockets come from pair()."""

    def __init__(self, kind: str, faults: Faults | None) -> None:
        self.listener = listen(Address("unix", name=f"test-{os.urandom(8).hex()}") if kind == "unix" else TCP, 16)
        self.listener.settimeout(5)
        self.proxy = Proxy(str(bound_to(self.listener)), faults)
        self.sockets: list[socket.socket] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """(client, server), behind a handshake."""
        client = dial(Address.parse(self.proxy.address), time.monotonic() + 5)
        server, _ = self.listener.accept()
        self.sockets += [client, server]
        for end in (client, server):
            end.settimeout(20)
        for source, sink, blob in ((server, client, GREETING), (client, server, HELLO), (server, client, WELCOME)):
            source.sendall(blob)
            assert read(sink, len(blob)) == blob
        return client, server


@contextlib.contextmanager
def link(kind: str = "tcp", faults: Faults | None = None) -> Iterator[Link]:
    made = Link(kind, faults)
    with made.listener, made.proxy:
        try:
            yield made
        finally:
            for end in made.sockets:
                end.close()


def read(source: socket.socket, size: int | None = None) -> bytes:
    """So many bytes, or all until the end, which may be a reset."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while (left := min(1 << 20, (1 << 30 if size is None else size) - len(data))) and (piece := source.recv(left)):
            data += piece
    return bytes(data)


def through(
    faults: Faults | None, frames: list[bytes], kind: str = "tcp", direction: str = "up"
) -> tuple[bytes, Proxy]:
    """What arrives of the frames, sent on a new connection and closed behind them."""
    with link(kind, faults) as made:
        source, sink = made.pair()[:: 1 if direction == "up" else -1]
        sender = threading.Thread(target=send, args=[source, frames])
        sender.start()
        arrived = read(sink)
        sender.join()
    return arrived, made.proxy


def send(source: socket.socket, frames: list[bytes]) -> None:
    """All of them and the end, or as much as the other side takes."""
    with contextlib.suppress(OSError):
        for data in frames:
            source.sendall(data)
        source.shutdown(socket.SHUT_WR)


def small(count: int) -> list[bytes]:
    return [frame(i) for i in range(1, count + 1)]
