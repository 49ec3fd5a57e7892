"""The door of a server: who is let in, at what cost, and when the server ends.

    accept -> handshake (Python, at most 256 at once, 5 s each) -> host.adopt(fd) (native, from then on)
                                                                -> Arrivals: another server that brings a shard

A server on TCP also has a side door: an abstract Unix socket with a random name, which a welcome over TCP contains.
Clients on the same host come in there and share memory.

A stranger costs one socket and one small task until its time is up. When the door is full, the oldest handshake makes
room for the newcomer: a client that knows the token needs milliseconds, so slow strangers never lock others out.
"""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from windlass._errors import InvalidArgument, Timeout
from windlass._net.address import Address, bound_to, caused_by, peer_of, why
from windlass._net.address import listen as listen_on
from windlass._net.handshake import DOOR_BYTES, NO_DOOR, SERVER, Denied, Malformed, Silent, receive, side_door
from windlass._net.move import Arrivals, refusal
from windlass._net.move import Host as MovingHost
from windlass._rules.sync import OVERDUE_SECONDS
from windlass.launch import is_echo

HANDSHAKE_SECONDS = 5.0
HANDSHAKES_MAX = 256
CLOSE_SECONDS = 5.0
_OVERDUE_EVERY_SECONDS = 1.0
_BACKLOG = 1024
_PAUSE_SECONDS = 0.1
_PARTING_SECONDS = 1.0  # for a source to read that its shard is refused
_QUIET_SECONDS = 30.0  # strangers do not fill the log
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger("windlass")
Stop = Callable[[int], None]


class Host(MovingHost, Protocol):
    """What the door needs of a server's native part."""

    def adopt(self, fd: int, peer: str, session_key: bytes) -> None:
        """Takes over the socket; it belongs to the host even when this raises."""

    def overdue(self, seconds: float) -> list[str]:
        """A line for each client that has waited for so long since the last such line."""

    def close(self, timeout: float) -> None:
        """Ends all connections."""


class Doorman:
    """Accepts connections, shakes hands and hands over to the host. Lives in one event loop."""

    def __init__(self, listeners: list[socket.socket], token: bytes | None, host: Host, door: bytes = NO_DOOR) -> None:
        self._listeners = listeners
        self._door = door
        self._token = token
        self._host = host
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}  # the oldest first
        self._quiet_until = 0.0
        self._arrivals = Arrivals(host)

    async def run(self) -> None:
        """Runs until it is cancelled. The listening sockets stay the caller's; handshakes under way are dropped."""
        try:
            async with asyncio.TaskGroup() as group:
                for listener in self._listeners:
                    listener.setblocking(False)
                    group.create_task(self._accept(listener))
        finally:
            while self._handshakes:
                await self._drop_oldest()
            self._arrivals.close(CLOSE_SECONDS)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                await self._wait_for_room(error)
                continue
            task = loop.create_task(self._meet(sock, listener))
            self._handshakes[task] = sock
            task.add_done_callback(self._finish)
            while len(self._handshakes) > HANDSHAKES_MAX:
                await self._drop_oldest()
            await asyncio.sleep(0)  # accepting does not suspend while somebody waits: give other tasks a turn

    async def _wait_for_room(self, error: OSError) -> None:
        """After a failed accept. Running out of files is a full door, too; other errors are the newcomer's alone."""
        if error.errno in _FULL:
            now = asyncio.get_running_loop().time()
            if now >= self._quiet_until:
                _log.warning("server: cannot accept a connection: %s", why(error))
                self._quiet_until = now + _QUIET_SECONDS
            if self._handshakes:
                await self._drop_oldest()
                return
        await asyncio.sleep(_PAUSE_SECONDS)  # the listener stays readable: without a pause this would spin

    async def _drop_oldest(self) -> None:
        task = next(iter(self._handshakes))
        task.cancel()
        await asyncio.wait({task})  # _finish came first, so its socket is closed now

    def _finish(self, task: asyncio.Task[None]) -> None:
        # Here rather than in the task: a task that is cancelled before its first step runs none of its code.
        self._handshakes.pop(task).close()  # a socket that was handed over is detached: nothing happens
        if not task.cancelled() and (error := task.exception()):
            _log.error("server: a handshake failed in an unforeseen way", exc_info=error)

    async def _meet(self, sock: socket.socket, listener: socket.socket) -> None:
        peer, uid = _peer(sock, listener)
        admit = self._token is not None or uid is None or uid in (0, os.geteuid())
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                loop, door = asyncio.get_running_loop(), self._door if uid is None else NO_DOOR
                guest = await receive(loop, sock, self._token or b"", admit=admit, door=door)
        except TimeoutError:
            _log.info("handshake with %s: not done within %g s", peer, HANDSHAKE_SECONDS, extra=caused_by(peer))
            return
        except (Malformed, Denied, OSError) as error:
            level = logging.DEBUG if isinstance(error, Silent) else logging.INFO
            _log.log(level, "handshake with %s: %s", peer, error, extra=caused_by(peer))
            return
        try:
            if guest.role != SERVER:
                self._host.adopt(sock.detach(), peer, guest.key)
            elif not self._arrivals.take(sock, peer):
                await _refuse_shard(sock)
        except Exception as error:  # a limit, for example: it ends this connection, not the door
            _log.warning("server: %s is not taken on: %s", peer, error, extra=caused_by(peer))


async def _refuse_shard(sock: socket.socket) -> None:
    """Says why, and reads what comes until the source has it: to close a connection with unread bytes would lose it."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_PARTING_SECONDS):
            await loop.sock_sendall(sock, refusal())
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 1 << 16):
                pass


def _peer(sock: socket.socket, listener: socket.socket) -> tuple[str, int | None]:
    """Who is at the other end, for messages, and on a Unix socket the user it runs as."""
    if sock.family != socket.AF_UNIX:
        return peer_of(sock), None
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return f"{bound_to(listener)} (process {pid})", uid


def check_reach(addresses: list[Address], token: bytes | None) -> None:
    """Raises if strangers on other machines could get in."""
    for address in addresses:
        if token is None and not address.loopback:
            raise InvalidArgument(
                f"listen on {address}: beyond loopback a token is required, and there is none (--no-token, "
                "WINDLASS_NO_TOKEN); without that setting one is made"
            )


def serve(
    listen: list[Address],
    token: bytes | None,
    host: Host,
    ready: Callable[[list[Address], Stop], None],
    until_eof: int | None = None,
    stays: Callable[[], bool] | None = None,
) -> int:
    """Serves until SIGINT, SIGTERM or the end of the file `until_eof`, then closes the host, also when it raises.

    ready: called with the addresses, ports filled in, once clients can connect, and with a function that ends the
    server from any thread with an exit code, which is returned. Signals count in the main thread only. stays: asked at
    the first SIGTERM whether the server ends by itself, when it has done what it must.
    """
    return asyncio.run(_serve(listen, token, host, ready, until_eof, stays))


async def _serve(
    addresses: list[Address],
    token: bytes | None,
    host: Host,
    ready: Callable[[list[Address], Stop], None],
    until_eof: int | None,
    stays: Callable[[], bool] | None,
) -> int:
    stop, codes = asyncio.Event(), [0]
    loop = asyncio.get_running_loop()

    def end(code: int) -> None:
        codes.append(code)
        with contextlib.suppress(RuntimeError):  # it has ended already
            loop.call_soon_threadsafe(stop.set)

    listeners: list[socket.socket] = []
    with told_by_signal(stop, stays):
        try:
            check_reach(addresses, token)
            for address in addresses:
                listeners.append(listen_on(address, _BACKLOG))
            open_to = [bound_to(listener) for listener in listeners]
            door = NO_DOOR
            if any(address.kind == "tcp" for address in addresses):
                door = secrets.token_bytes(DOOR_BYTES)
                listeners.append(listen_on(side_door(door), _BACKLOG))
            with told_by_end_of(until_eof, stop), _says_who_is_waited_for(host):
                ready(open_to, end)  # all that the server needs for itself is there
                await _until(stop, Doorman(listeners, token, host, door))
        finally:
            for listener in listeners:
                listener.close()
            _close(host)  # with the signals still caught: a second Ctrl-C does no harm
    return max(codes)


async def _until(stop: asyncio.Event, doorman: Doorman) -> None:
    door, told = asyncio.create_task(doorman.run()), asyncio.create_task(stop.wait())
    await asyncio.wait({door, told}, return_when=asyncio.FIRST_COMPLETED)
    if not door.done():
        door.cancel()
        await asyncio.wait({door})
    if not door.cancelled():
        door.result()  # it never ends by itself, so this raises
    told.cancel()


def _close(host: Host) -> None:
    try:
        host.close(CLOSE_SECONDS)
    except Timeout as error:
        _log.warning("server: %s", error)


@contextlib.contextmanager
def _says_who_is_waited_for(host: Host) -> Iterator[None]:
    """Logs pulls that wait for long, and whom they wait for; the host repeats each after a while."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_OVERDUE_EVERY_SECONDS):
            for line in host.overdue(OVERDUE_SECONDS):
                _log.warning("server: %s", line)

    thread = threading.Thread(target=watch, name="windlass-overdue", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(CLOSE_SECONDS)


@contextlib.contextmanager
def told_by_signal(stop: asyncio.Event, stays: Callable[[], bool] | None = None) -> Iterator[None]:
    """Sets the event at SIGINT and SIGTERM, in the main thread; at the first SIGTERM unless `stays()`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    asked: float | None = None

    def terminate() -> None:
        nonlocal asked
        if asked is not None and is_echo(asked):
            return
        first, asked = asked is None, time.monotonic()
        if not (first and stays is not None and stays()):
            stop.set()

    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def told_by_end_of(fd: int | None, stop: asyncio.Event) -> Iterator[None]:
    """Sets the event at the end of a file."""
    if fd is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def readable() -> None:
        try:
            ended = not os.read(fd, 65536)
        except BlockingIOError:
            return
        except OSError:  # a terminal that went away
            ended = True
        if ended:
            loop.remove_reader(fd)
            stop.set()

    try:
        loop.add_reader(fd, readable)
    except OSError as error:
        raise InvalidArgument(
            f"file descriptor {fd}: expected a pipe, a socket or a terminal to wait for its end: {why(error)}"
        ) from error
    try:
        yield
    finally:
        loop.remove_reader(fd)
