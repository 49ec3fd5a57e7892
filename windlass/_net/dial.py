"""Makes a client's connections, and makes them again when they break.

The native links say which lane of which server wants a connection; a thread here dials, proves that it knows the token,
and hands the socket over. It gives up a server that stays out of reach for `failure_timeout` seconds: requests on their
way there fail with ServerLost. Where a scheduler says who is lost (`failure_timeout=None`) it never does: the server
may be there for others, or somebody else may listen at its address for a while.
"""

import atexit
import contextlib
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator

from windlass import _core
from windlass._errors import ERRORS, AccessDenied, InvalidArgument, ProtocolError, ServerLost, Timeout, WindlassError
from windlass._net.address import Address, Attempts, dial, peer_of
from windlass._net.handshake import NO_DOOR, greet, side_door
from windlass._release import owns_native

_ATTEMPT_SECONDS = 2.0
_CLOSE_SECONDS = 5.0
_PAUSE_SECONDS = (0.005, 0.2)  # between attempts: the first, and the most it grows to
_dialers: "weakref.WeakSet[Dialer]" = weakref.WeakSet()


class _NotHere(InvalidArgument):
    """What the caller asked for cannot be, however often it is tried."""


@owns_native("_links")
class Dialer:
    """The thread that dials for one set of links. It ends when the links do."""

    def __init__(
        self,
        links: _core.Links,
        servers: list[Address],
        token: bytes,
        failure_timeout: float | None,
        transport: str = "socket",
    ) -> None:
        self._links = links
        self._transport = transport
        self._servers = list(servers)
        self._token = token
        self._failure_timeout = failure_timeout
        self._keys: list[bytes | None] = [None] * len(servers)  # of the session at each server
        self._locks = [threading.Lock() for _ in servers]
        self._closed = threading.Event()
        self._attempts = Attempts()
        self._process = os.getpid()
        self._lost: set[int] = set()  # servers that were given up
        self._insisting: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._run, name="windlass-dial", daemon=True)
        self._thread.start()
        _dialers.add(self)

    def grow(self, servers: list[Address]) -> None:
        """There are more; to be called before the links know."""
        for address in servers[len(self._servers) :]:
            self._keys.append(None)
            self._locks.append(threading.Lock())
            self._servers.append(address)

    def abandon(self, server: int) -> None:
        """Gives up a server: requests on their way there fail, and nobody dials it any more."""
        self._give_up(server, ServerLost(f"{self._servers[server]} was abandoned"))

    def close(self) -> None:
        """Ends the thread. Stop the links first."""
        self._closed.set()
        self._attempts.end((self._thread, *list(self._insisting)), time.monotonic() + _CLOSE_SECONDS)

    def _run(self) -> None:
        while (wanted := self._links.need_dial()) is not None:
            begun = time.monotonic()
            if not self._try(*wanted, begun):
                # A server that is slow to come back must not delay the others.
                again = threading.Thread(
                    target=self._insist, args=(*wanted, begun), name="windlass-redial", daemon=True
                )
                self._insisting.add(again)
                again.start()
        self._closed.set()

    def _insist(self, server: int, lane: int, begun: float) -> None:
        pause = _PAUSE_SECONDS[0]
        while not self._closed.wait(pause) and not self._try(server, lane, begun):
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        self._insisting.discard(threading.current_thread())

    def _try(self, server: int, lane: int, begun: float) -> bool:
        """One attempt. True when there is nothing more to do."""
        if server in self._lost:
            return True
        address = self._servers[server]
        patience = math.inf if self._failure_timeout is None else self._failure_timeout
        deadline = time.monotonic() + min(_ATTEMPT_SECONDS, max(begun + patience - time.monotonic(), 0.01))
        try:
            with self._turn(server, deadline):
                sock, self._keys[server], door = self._meet(address, self._keys[server], deadline)
                if door != NO_DOOR and self._transport != "socket":
                    sock = self._by_side_door(sock, door, self._keys[server], deadline)
            self._links.attach(server, lane, sock.detach())
        except _NotHere as error:
            self._give_up(server, InvalidArgument(str(error)))
        except WindlassError as error:
            if isinstance(error, (AccessDenied, ProtocolError, InvalidArgument)) and patience < math.inf:
                self._give_up(server, error)
                return True
            self._links.trouble(server, str(error))
            if time.monotonic() - begun < patience:
                return False
            message = f"{address} has been out of reach for {patience:g} s: {error}"
            self._give_up(server, ServerLost(message))
        return True

    def _meet(self, address: Address, key: bytes | None, deadline: float) -> tuple[socket.socket, bytes, bytes]:
        """A connection that the server let in, the session's key, and the server's side door."""
        sock = dial(address, deadline, self._attempts)
        try:
            if self._closed.is_set():
                raise ServerLost(f"connect to {address}: the cluster has been closed")
            return sock, *greet(sock, self._token, key, deadline)
        except BaseException:
            sock.close()
            raise
        finally:
            self._attempts.discard(sock)

    def _by_side_door(self, sock: socket.socket, door: bytes, key: bytes | None, deadline: float) -> socket.socket:
        """A connection by the side door instead, if it is on this host and open to us."""
        try:
            beside, _, _ = self._meet(side_door(door), key, deadline)
        except WindlassError as error:
            if self._transport != "arena":
                return sock
            with sock:
                raise _NotHere(f'transport="arena": {peer_of(sock)} is not on this host: {error}') from error
        sock.close()
        return beside

    @contextlib.contextmanager
    def _turn(self, server: int, deadline: float) -> Iterator[None]:
        """One lane at a time: the second joins the session of the first."""
        if not self._locks[server].acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise Timeout(f"connect to {self._servers[server]}: no welcome within the time allowed")
        try:
            yield
        finally:
            self._locks[server].release()

    def _give_up(self, server: int, error: WindlassError) -> None:
        self._lost.add(server)
        self._links.lost(server, ERRORS.index(type(error)), str(error))


os.register_at_fork(after_in_child=_core.quiet_leaks)


@atexit.register
def _end_all() -> None:
    """Ends the threads of clusters that nobody closed.

    The interpreter would otherwise end them inside our native code, and that ends the process.
    """
    for dialer in list(_dialers):
        if dialer._process == os.getpid():
            dialer._links.stop()
            dialer.close()
