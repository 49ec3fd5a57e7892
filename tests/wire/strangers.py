"""What the tests of the door share: servers to knock at, and eyes on them."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import windlass as wl
from windlass import _core
from windlass._net.address import Address, dial
from windlass._net.handshake import greet
from windlass._net.serve import serve

LOCAL = Address.parse("tcp://127.0.0.1:0")


class FakeHost:
    """Stands in for the native host: notes whom it is given, and hangs up."""

    def __init__(self, threads: int = 1, memory_bytes_max: int = 0) -> None:
        self.adopted: list[tuple[str, bytes]] = []
        self.closed: list[float] = []

    def adopt(self, fd: int, peer: str, session_key: bytes) -> None:
        os.close(fd)
        self.adopted.append((peer, session_key))

    def arrive(self) -> None:
        raise wl.ResourceExhausted("no shards here")

    def overdue(self, seconds: float) -> list[str]:
        return []

    def close(self, timeout: float) -> None:
        self.closed.append(timeout)


def main() -> None:
    """The command ``windlass``, with a stand-in where the native host is not built."""
    from windlass._cli import main as windlass

    if not hasattr(_core, "Host"):
        _core.Host = FakeHost
    windlass()


@contextlib.contextmanager
def door(
    token: bytes | None = None, *listen: Address, host: FakeHost | None = None
) -> Iterator[tuple[list[Address], FakeHost]]:
    """A door in a thread of this process: its addresses and its host. Ends with the block."""
    host, opened, addresses = host or FakeHost(), threading.Event(), []
    end, hold = os.pipe()

    def ready(bound: list[Address], stop: object) -> None:
        addresses.extend(bound)
        opened.set()

    thread = threading.Thread(target=serve, args=(list(listen) or [LOCAL], token, host, ready, end), daemon=True)
    thread.start()
    try:
        assert opened.wait(10)
        yield addresses, host
    finally:
        os.close(hold)
        thread.join(10)
        os.close(end)
        assert not thread.is_alive()


@dataclasses.dataclass
class Process:
    """A ``windlass server`` process."""

    popen: subprocess.Popen[str]
    log: pathlib.Path
    addresses: list[Address] = dataclasses.field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def anonymous_bytes(self) -> int:
        """Its resident memory, less what is files."""
        lines = pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    def cpu_seconds(self) -> float:
        fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def sockets(self) -> list[str]:
        """The inodes of its sockets."""
        found = []
        for fd in pathlib.Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.append(os.readlink(fd))
        return [link[len("socket:[") : -1] for link in found if link.startswith("socket:[")]


@contextlib.contextmanager
def process(tmp_path: pathlib.Path, *arguments: str, prelude: str = "", **env: str) -> Iterator[Process]:
    """``windlass server`` in a process of its own, after `prelude`. Ends with the block, or with this process."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS")}
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-W", "error", "-c", f"{prelude}\nimport strangers\nstrangers.main()"]
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        popen = subprocess.Popen(
            [*command, "server", "--exit-with-stdin", *arguments],
            env={**clean, "PYTHONPATH": here, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    started = Process(popen, log)
    assert popen.stdout is not None
    try:
        for _ in range(max(1, arguments.count("--listen"))):
            line = popen.stdout.readline()
            assert line.startswith("windlass server listening on "), line + log.read_text()
            started.addresses.append(Address.parse(line.split()[-1]))
        yield started
    finally:
        with contextlib.suppress(OSError):
            popen.communicate(timeout=60)  # the end of its stdin
        popen.kill()
        popen.wait()


def enter(address: Address, token: bytes, key: bytes | None = None, seconds: float = 5.0) -> bytes:
    """Goes through the door as a client does; the session's key."""
    deadline = time.monotonic() + seconds
    with dial(address, deadline) as sock:
        return greet(sock, token, key, deadline).key


def knock(address: Address) -> socket.socket:
    """A connection on which nothing has been said."""
    return dial(address, time.monotonic() + 5.0)


def read_to_end(sock: socket.socket, seconds: float = 5.0) -> bytes:
    """Everything that the other end says before it closes."""
    sock.settimeout(seconds)
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(4096):
            said += more
    return said
