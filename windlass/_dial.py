"""Makes a client's connections, and makes them again when they break.

The native links say which lane of which server wants a connection; a thread here dials, proves that it knows the token,
and hands the socket over. A server that stays out of reach for `failure_timeout` seconds is given up: whatever is on
its way there fails with ServerLost.
"""

import threading
import time

from windlass import _core
from windlass._address import Address, dial
from windlass._errors import ERRORS, AccessDenied, InvalidArgument, ProtocolError, ServerLost, WindlassError
from windlass._handshake import greet

_ATTEMPT_SECONDS = 2.0
_PAUSE_SECONDS = (0.005, 0.2)  # between attempts: the first, and the most it grows to


class Dialer:
    """The thread that dials for one set of links. It ends when the links do."""

    def __init__(self, links: _core.Links, servers: list[Address], token: bytes, failure_timeout: float) -> None:
        self._links = links
        self._servers = servers
        self._token = token
        self._failure_timeout = failure_timeout
        self._keys: list[bytes | None] = [None] * len(servers)  # of the session at each server
        self._locks = [threading.Lock() for _ in servers]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="windlass-dial", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After the links have been stopped."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        while (wanted := self._links.need_dial()) is not None:
            if not self._try(*wanted, time.monotonic()):
                # Others must not wait for one that is slow to come back.
                threading.Thread(target=self._insist, args=wanted, name="windlass-redial", daemon=True).start()
        self._closed.set()

    def _insist(self, server: int, lane: int) -> None:
        begun, pause = time.monotonic(), _PAUSE_SECONDS[0]
        while not self._closed.wait(pause) and not self._try(server, lane, begun):
            pause = min(2 * pause, _PAUSE_SECONDS[1])

    def _try(self, server: int, lane: int, begun: float) -> bool:
        """One attempt. True when there is nothing more to do."""
        address = self._servers[server]
        left = begun + self._failure_timeout - time.monotonic()
        deadline = time.monotonic() + min(_ATTEMPT_SECONDS, max(left, 0.01))
        try:
            with self._locks[server]:  # the second lane joins the session of the first
                sock = dial(address, deadline)
                try:
                    self._keys[server] = greet(sock, self._token, self._keys[server], deadline)
                except BaseException:
                    sock.close()
                    raise
            self._links.attach(server, lane, sock.detach())
        except (AccessDenied, ProtocolError, InvalidArgument) as error:
            self._links.lost(server, ERRORS.index(type(error)), str(error))
        except WindlassError as error:
            self._links.trouble(server, str(error))
            if time.monotonic() - begun < self._failure_timeout:
                return False
            message = f"{address} has been out of reach for {self._failure_timeout:g} s: {error}"
            self._links.lost(server, ERRORS.index(ServerLost), message)
        return True
