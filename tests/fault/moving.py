"""Servers inside the test's process whose shards can be moved, without a scheduler."""

import collections
import contextlib
import os
import random
import secrets
import socket
import threading
import time
from typing import Any

import windlass as wl
from windlass import _core
from windlass._net.address import Address, dial
from windlass._net.move import send_shard
from windlass._net.serve import serve

TOKEN = b"a token for moves"


class Server:
    """One host behind its door."""

    def __init__(self, kind: str, memory_bytes_max: int = 2**64 - 1, threads: int = 2) -> None:
        self.host = _core.Host(threads, memory_bytes_max, 2**40)
        name = f"unix://@windlass-moving-{secrets.token_hex(8)}"
        listen = Address.parse("tcp://127.0.0.1:0" if kind == "tcp" else name)
        self._read, self._write = os.pipe()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(listen,), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _serve(self, listen: Address) -> None:
        serve([listen], TOKEN, self.host, self._listening, self._read)

    def _listening(self, addresses: list[Address], stop: object) -> None:
        self.address = addresses[0]
        self._ready.set()

    def close(self) -> None:
        """Ends it as if it had been killed: connections break, and nothing is handed over."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1
            self._thread.join(20)
            assert not self._thread.is_alive()
            os.close(self._read)


class Cutter:
    """Stands between a source and a target, and ends or stops the connection after so many bytes in one direction."""

    def __init__(self, target: Address, direction: str, after: int, *, hangs: bool = False) -> None:
        self._target, self._after, self._hangs = target, {direction: after}, hangs
        self.passed = {"up": 0, "down": 0}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address.parse("tcp://{}:{}".format(*self._listener.getsockname()))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            source, _ = self._listener.accept()
        except OSError:  # nobody came
            return
        with source, dial(self._target, time.monotonic() + 5) as target:
            up = threading.Thread(target=self._pass, args=("up", source, target), daemon=True)
            up.start()
            self._pass("down", target, source)
            up.join()

    def _pass(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        left = self._after.get(direction, 1 << 62)
        with contextlib.suppress(OSError):
            while left and (data := source.recv(min(left, 1 << 16))):
                self.passed[direction] += len(data)  # first: who gets it may look
                target.sendall(data)
                left -= len(data)
        if self._hangs and not left:
            self._over.wait(30)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Cutter":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


class Moving:
    """Several servers, and who has which shard as a scheduler would know it. kind: "tcp", "unix" or "arena"."""

    def __init__(self, kind: str, count: int = 3, **options: Any) -> None:
        self.kind = kind
        self.servers = [Server("tcp" if kind == "tcp" else "unix", **options) for _ in range(count)]
        self.terms: collections.Counter[tuple[int, int]] = collections.Counter()
        self.moves = 0

    def __enter__(self) -> "Moving":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.close()

    @property
    def addresses(self) -> list[str]:
        return [str(server.address) for server in self.servers]

    def connect(self, **arguments: Any) -> wl.Cluster:
        transport = "arena" if self.kind == "arena" else "socket"
        return wl.connect(
            **{"servers": self.addresses, "token": TOKEN, "timeout": 30, "transport": transport, **arguments}
        )

    def owner(self, object: int, shard: int) -> int:
        """The server that has it: the highest term counts."""
        known = []
        for server in self.servers:
            with contextlib.suppress(wl.NotFound):
                known.append(server.host.whereabouts(object, shard))
        return max(known, key=lambda at: at[1])[0]

    def move(self, object: int, shard: int, to: int, *, seconds: float = 20.0, address: Address | None = None) -> int:
        """Moves a shard from wherever it is, and returns its term."""
        source = self.owner(object, shard)
        self.terms[object, shard] = max(self.terms[object, shard], 1) + 1
        send_shard(
            self.servers[source].host,
            object,
            shard,
            to=address or self.servers[to].address,
            token=TOKEN,
            server=to,
            term=self.terms[object, shard],
            deadline=time.monotonic() + seconds,
        )
        self.moves += 1
        return self.terms[object, shard]

    def shuffle(self, shards: list[tuple[int, int]], source: random.Random, moves: int, pause: float = 0.0) -> None:
        """Moves some of these shards about."""
        for _ in range(moves):
            object, shard = source.choice(shards)
            here = self.owner(object, shard)
            self.move(object, shard, source.choice([i for i in range(len(self.servers)) if i != here]))
            time.sleep(pause)

    def spoil(self, _: object) -> None:
        """Of a witness.Network; here nothing fails but what a test makes fail."""
