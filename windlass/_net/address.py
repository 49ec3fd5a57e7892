"""Where a server is: ``tcp://127.0.0.1:4000`` or, on one machine, ``unix://@name`` (an abstract Unix socket)."""

import contextlib
import dataclasses
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Literal

from windlass._errors import InvalidArgument, ServerLost, Timeout

_EXPECTED = "expected tcp://HOST:PORT, tcp://[IPV6]:PORT or unix://@NAME"
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*\.?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NAME_BYTES_MAX = 107  # what the kernel's sockaddr_un holds behind the leading NUL
_JOIN_SECONDS = 0.005
_WAIT_SECONDS_MAX = 86400.0  # infinity is no timeout that a socket takes
_LOOPBACK_WINDOW_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Address:
    """A server's address. ``str()`` of it is the canonical text, which ``parse()`` reads back."""

    kind: Literal["tcp", "unix"]
    host: str = ""
    port: int = 0
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads an address; ``HOST:PORT`` and ``unix:@NAME`` will do."""
        for prefix in ("unix://", "unix:"):
            if text.startswith(prefix):
                return cls("unix", name=_name(text, text.removeprefix(prefix)))
        host, colon, port = text.removeprefix("tcp://").rpartition(":")
        if not colon or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 2**16):
            raise InvalidArgument(f"address {text!r}: {_EXPECTED}, the port between 0 and 65535")
        return cls("tcp", host=_host(text, host), port=int(port))

    @classmethod
    def of(cls, name: Any) -> "Address":
        """The address for what ``getsockname()`` or ``getpeername()`` gave."""
        if isinstance(name, tuple):
            return cls("tcp", host=name[0], port=name[1])
        return cls("unix", name=(name if isinstance(name, bytes) else name.encode()).decode(errors="replace")[1:])

    @property
    def loopback(self) -> bool:
        """Whether only processes of this machine can reach it."""
        return self.kind == "unix" or self.host == "localhost" or _is(self.host, "is_loopback")

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix://@{self.name}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def _name(text: str, name: str) -> str:
    if not name.startswith("@"):
        raise InvalidArgument(f"address {text!r}: {_EXPECTED}; sockets in the file system are not supported")
    if not name[1:].isprintable() or not 1 <= len(name[1:].encode()) <= _NAME_BYTES_MAX:
        raise InvalidArgument(f"address {text!r}: the name must be 1 to {_NAME_BYTES_MAX} bytes of printable text")
    return name[1:]


def _host(text: str, host: str) -> str:
    """The host in canonical form. An empty host, ``*`` and ``0``, which C libraries take for 0.0.0.0, are refused."""
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        host = host.lower()
        if not bracketed and _HOST.fullmatch(host) and not _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
            return host
    else:
        if bracketed == (ip.version == 6):
            return str(ip)
    raise InvalidArgument(f"address {text!r}: {_EXPECTED}, but its host is {host!r}")


def _is(host: str, what: Literal["is_loopback", "is_unspecified"]) -> bool:
    """Whether the host is a literal IP address of that kind."""
    try:
        return bool(getattr(ipaddress.ip_address(host), what))
    except ValueError:
        return False


def _resolve(address: Address) -> list[tuple[socket.AddressFamily, Any]]:
    """Families and socket addresses. Refuses a name that leads beyond what ``loopback`` says, or to every interface."""
    if address.kind == "unix":
        return [(socket.AF_UNIX, b"\0" + address.name.encode())]
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for _, _, _, _, (ip, *_) in found:
        if address.loopback and not _is(str(ip), "is_loopback"):
            raise InvalidArgument(f"address {address}: {address.host} is {ip} here, which is not loopback")
        if _is(str(ip), "is_unspecified") and not _is(address.host, "is_unspecified"):
            raise InvalidArgument(f"address {address}: {address.host} is {ip} here, which is every interface")
    return [(family, target) for family, _, _, _, target in found]


def is_here(address: Address) -> bool:
    """Whether it is an address of this host, one that a socket of ours can bind."""
    try:
        for family, target in _resolve(address):
            if family == socket.AF_UNIX:
                return True
            with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.bind((target[0], 0, *target[2:]))
                return True
    except (OSError, InvalidArgument):  # dial() reports what is wrong with it
        pass
    return False


def seconds_left(deadline: float) -> float:
    """Seconds until the deadline, a time of ``time.monotonic()``. Raises TimeoutError once it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, _WAIT_SECONDS_MAX)


def why(error: OSError) -> str:
    """The reason in plain words."""
    return error.strerror or str(error) or type(error).__name__


class Attempts:
    """Connections that threads are making, so that another thread can end their wait for a host that says nothing."""

    def __init__(self) -> None:
        self._under_way: set[socket.socket] = set()

    def add(self, sock: socket.socket) -> None:
        """It is about to be connected."""
        self._under_way.add(sock)

    def discard(self, sock: socket.socket) -> None:
        """It is made, or has failed."""
        self._under_way.discard(sock)

    def end(self, threads: Iterable[threading.Thread], deadline: float) -> None:
        """Waits for threads that make no further attempts once the present one has failed, and lets that one fail."""
        others = [thread for thread in threads if thread is not threading.current_thread()]
        while any(thread.is_alive() for thread in others) and time.monotonic() < deadline:
            for sock in list(self._under_way):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in others:
                thread.join(_JOIN_SECONDS)


def dial(address: Address, deadline: float, attempts: Attempts | None = None) -> socket.socket:
    """A blocking socket that is connected to the server. `deadline`: a time of ``time.monotonic()``.

    attempts: has the socket from before it is connected until the caller takes it out.
    """
    if address.kind == "tcp" and address.port == 0:
        raise InvalidArgument(f"connect to {address}: port 0 is for listening; expected the one the server printed")
    error: OSError = OSError("there is no such address")
    try:
        for family, target in _resolve(address):
            try:
                return _connected(family, target, deadline, Attempts() if attempts is None else attempts)
            except OSError as e:
                error = e
    except OSError as e:  # of the resolver
        error = e
    if time.monotonic() >= deadline:
        raise Timeout(f"connect to {address}: no answer within the time allowed") from error
    raise ServerLost(f"connect to {address}: {why(error)}") from error


def _connected(family: socket.AddressFamily, target: Any, deadline: float, attempts: Attempts) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    attempts.add(sock)
    try:
        _suit_loopback(sock, target)
        while True:
            sock.settimeout(seconds_left(deadline))
            try:
                sock.connect(target)
                break
            except BlockingIOError:  # a Unix socket whose server has a full backlog: there is no event to wait for
                time.sleep(0.002)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sock.getsockname() == sock.getpeername():  # without a listener, a socket may connect to itself
                raise ConnectionRefusedError("nobody listens there")
        sock.settimeout(None)
        return sock
    except BaseException:
        attempts.discard(sock)
        sock.close()
        raise


def _suit_loopback(sock: socket.socket, target: Any) -> None:
    """Sets options for loopback, which has no congestion and too little delay to learn how large a window should be.

    BBR, where it is the default, would set a timer for every segment. A window that the kernel chooses may stay so
    small that the sender waits for it half of the time. Both must be set before there is a connection.
    """
    if sock.family != socket.AF_UNIX and _is(str(target[0]), "is_loopback"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_WINDOW_BYTES)
        with contextlib.suppress(OSError):  # the kernel may have been built without it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def listen(address: Address, backlog: int) -> socket.socket:
    """A listening socket; port 0 lets the kernel choose one. Accepted sockets have TCP_NODELAY, too."""
    try:
        family, target = _resolve(address)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _suit_loopback(sock, target)
            if family == socket.AF_INET6:  # whoever writes [::] has not written 0.0.0.0
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(target)
            sock.listen(backlog)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise InvalidArgument(f"listen on {address}: {why(error)}") from error


def bound_to(sock: socket.socket) -> Address:
    """Where a listening socket listens."""
    return Address.of(sock.getsockname())


def caused_by(peer: str) -> dict[str, str]:
    """For ``extra=`` of a line in the log: the peer's host, whatever port it comes from. Its lines are limited."""
    return {"source": peer.rpartition(":")[0] if peer.startswith("tcp://") else peer.partition(" ")[0]}


def peer_of(sock: socket.socket) -> str:
    """Who is at the other end, for messages."""
    try:
        return str(Address.of(sock.getpeername()))
    except OSError:  # gone already
        return "an unknown peer"
