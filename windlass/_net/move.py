"""A shard on its way from one server to another: the bytes between two servers.

    source -> target   handshake, role 2
    source -> target   chunks of the shard (docs/formats/shard.md), the last ones while it is frozen
    target -> source   one answer: it has all of it, or why not

The native part reads and writes shards (csrc/server/move/); sockets and their deadlines are here. The source decides:
if the answer does not come in time the shard stays where it was, and a copy at the target does not count.
"""

import contextlib
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

from windlass import _core
from windlass._errors import ERRORS, ProtocolError, ResourceExhausted, ServerLost, Timeout, WindlassError
from windlass._net.address import Address, caused_by, dial, peer_of, seconds_left, why
from windlass._net.handshake import SERVER, greet

FROZEN_SECONDS = 5.0  # how long a shard may be frozen
STALL_SECONDS = 5.0  # how long a source may send nothing
ARRIVALS_MAX = 8
_HEAD_BYTES = 64
_DRAIN_SECONDS = 1.0
_MESSAGE_BYTES_MAX = 4096
_MAGIC = b"WLSA"
_ANSWER = struct.Struct("<4sIII")  # magic, code, bytes of the message, checksum of the three
_log = logging.getLogger("windlass")


class Host(Protocol):
    """What arrivals need of a server's native part."""

    def arrive(self) -> "_core.Arrival":
        """A shard that is about to come."""


# -- the source ------------------------------------------------------------------------------------------------------


def send_shard(
    host: _core.Host,
    object: int,
    shard: int,
    *,
    to: Address,
    token: bytes | None,
    server: int,
    term: int,
    deadline: float,
    cancelled: threading.Event | None = None,
) -> None:
    """Moves a shard from this server's host to another server, and returns when it is there.

    object, shard: their numbers. to, server: the other server's address, and its number in the list. term: higher than
    the shard's is now, and never used for another target. deadline: a time of ``time.monotonic()``. cancelled: once it
    is set the shard stays, unless it has just left.

    When it raises, the shard is still here, under its old term. A move that was made already is not made again.
    """
    departure = host.depart(object, shard, server, term)
    if departure is None:
        return
    what = f"move of object {object}, shard {shard} to {to}"
    try:
        with dial(to, deadline) as sock:
            greet(sock, token or b"", None, deadline, role=SERVER)
            _send(departure, sock, deadline)
            if cancelled is not None and cancelled.is_set():
                raise ServerLost("the other server was given up meanwhile")
            departure.commit()
    except WindlassError as error:  # first, since some of them are errors of the system, too
        raise type(error)(f"{what}: {error}") from error
    except TimeoutError as error:
        raise Timeout(f"{what}: not acknowledged in time") from error
    except OSError as error:
        raise ServerLost(f"{what}: {why(error)}") from error
    finally:
        departure.abort()


def _send(departure: "_core.Departure", sock: socket.socket, deadline: float) -> None:
    frozen = False
    try:
        while (chunk := departure.next()) is not None:
            if departure.frozen and not frozen:
                frozen, deadline = True, min(deadline, time.monotonic() + FROZEN_SECONDS)
            if select.select([sock], [], [], 0)[0]:  # only a refusal comes before the end
                break
            for piece in chunk:
                sock.settimeout(seconds_left(deadline))
                sock.sendall(piece)
    except OSError as error:
        if not isinstance(error, TimeoutError):
            _hear_last(sock, min(deadline, time.monotonic() + _DRAIN_SECONDS))
        raise
    _hear(sock, deadline)
    if chunk is not None:
        raise ProtocolError("an answer before the end")


def _hear(sock: socket.socket, deadline: float) -> None:
    """Raises the error with which the target refused the shard."""
    head = bytearray(_ANSWER.size)
    _fill(sock, memoryview(head), deadline)
    magic, code, size, checksum = _ANSWER.unpack(head)
    if magic != _MAGIC or checksum != _core.crc32c(bytes(head[:-4])) or code >= len(ERRORS):
        raise ProtocolError(f"expected an answer of {peer_of(sock)}, saw {bytes(head)!r}")
    text = bytearray(min(size, _MESSAGE_BYTES_MAX))
    _fill(sock, memoryview(text), deadline)
    if code != 0:
        raise ERRORS[code](text.decode(errors="replace"))


def _hear_last(sock: socket.socket, deadline: float) -> None:
    """The same after the connection has broken: the target's answer may still be there, and tells more."""
    try:
        _hear(sock, deadline)
    except WindlassError:
        raise
    except OSError:
        pass


def _fill(sock: socket.socket, to: memoryview, deadline: float) -> None:
    while to:
        sock.settimeout(seconds_left(deadline))
        if (n := sock.recv_into(to)) == 0:
            raise ConnectionError("the connection ended")
        to = to[n:]


# -- the target ------------------------------------------------------------------------------------------------------


def refusal() -> bytes:
    """What a source is told for whose shard there is no room now."""
    return _answer(ERRORS.index(ResourceExhausted), f"at most {ARRIVALS_MAX} shards arrive at once")


def _answer(code: int, message: str) -> bytes:
    text = message.encode()[:_MESSAGE_BYTES_MAX]
    head = struct.pack("<4sII", _MAGIC, code, len(text))
    return head + struct.pack("<I", _core.crc32c(head)) + text


def receive_shard(arrival: "_core.Arrival", sock: socket.socket, arrived: Callable[[], None]) -> None:
    """Takes a shard from a source that was let in, and answers. Raises OSError when the source is gone.

    arrived: called when all of it is here, before the source knows.
    """
    head, buffer = bytearray(_HEAD_BYTES), bytearray()
    try:
        while not arrival.complete:
            _fill(sock, memoryview(head), time.monotonic() + STALL_SECONDS)
            size = arrival.body_bytes(bytes(head))
            if len(buffer) < size:
                buffer = bytearray(size)
            with memoryview(buffer) as view, view[:size] as body:
                _fill(sock, body, time.monotonic() + STALL_SECONDS)
                arrival.take(bytes(head), body)
    except WindlassError as error:
        arrival.close()
        _refuse(sock, error)
        raise
    arrived()
    sock.settimeout(STALL_SECONDS)
    sock.sendall(_answer(0, ""))


def _refuse(sock: socket.socket, error: WindlassError) -> None:
    """Sends the reason, and reads until the source has it: closing a connection with unread bytes would lose it."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    with contextlib.suppress(OSError):
        sock.settimeout(_DRAIN_SECONDS)
        sock.sendall(_answer(ERRORS.index(type(error)), str(error)))
        sock.shutdown(socket.SHUT_WR)
        while time.monotonic() < deadline and sock.recv(1 << 16):
            pass


class Arrivals:
    """The shards that are on their way to this server, each with a thread of its own; few at once."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._under_way: dict[threading.Thread, socket.socket] = {}
        self._places: set[threading.Thread] = set()  # of those whose shard is not all here yet
        self._closed = False

    def take(self, sock: socket.socket, peer: str) -> bool:
        """Takes the socket of another server. False: there is no room, and it stays the caller's; see refusal()."""
        with self._lock:
            if self._closed or len(self._places) >= ARRIVALS_MAX:
                return False
            try:
                taken = sock.dup()
            except OSError:
                return False
            thread = threading.Thread(target=self._run, args=(taken, peer), name="windlass-arrival", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread to be had
                taken.close()
                return False
            self._under_way[thread] = taken
            self._places.add(thread)
        sock.close()
        return True

    def close(self, timeout: float) -> None:
        """Ends the moves under way; incomplete shards leave nothing behind."""
        with self._lock:
            self._closed = True
            threads = list(self._under_way)
            for sock in self._under_way.values():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, sock: socket.socket) -> "_core.Arrival":
        try:
            return self._host.arrive()
        except WindlassError as error:
            _refuse(sock, error)
            raise

    def _run(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.setblocking(True)
            arrival = self._begin(sock)
            try:
                receive_shard(arrival, sock, self._make_room)  # who hears the answer may send the next one
            finally:
                arrival.close()
        except WindlassError as error:  # first, since some of them are errors of the system, too
            _log.warning("server: a shard from %s: %s", peer, error, extra=caused_by(peer))
        except TimeoutError:
            _log.warning("server: a shard from %s: nothing came for %g s", peer, STALL_SECONDS, extra=caused_by(peer))
        except OSError as error:
            _log.warning("server: a shard from %s: %s", peer, why(error), extra=caused_by(peer))
        finally:
            self._make_room()
            with self._lock:
                del self._under_way[threading.current_thread()]
            sock.close()

    def _make_room(self) -> None:
        with self._lock:
            self._places.discard(threading.current_thread())
