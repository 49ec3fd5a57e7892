"""A proxy between clients and one server that makes faults, frame by frame and by seed."""

import contextlib
import socket
import threading
import time
from secrets import token_hex
from types import TracebackType
from typing import Literal

from windlass._errors import InvalidArgument
from windlass._net.address import Address, bound_to, dial, listen
from windlass.testing._relay import Connection, Control
from windlass.testing.faults import Direction, Faults

DIAL_S = 2.0
BACKLOG = 128


class Proxy:
    """Listens on loopback and passes connections on to one server, with faults. A context manager.

    ::

        with Servers(1) as servers, Proxy(servers.addresses[0], Faults(drop=0.1, seed=7)) as proxy:
            cluster = windlass.connect(servers=[proxy.address])

    Handshakes pass untouched; everything behind them goes frame by frame. What does not look like frames passes as
    bytes. Connections that are passed on are numbered 0, 1, 2, ...; the number is part of what makes the faults.

    kind: "tcp" or "unix"; by default what the target has. Files that travel over a Unix socket are not passed on.
    """

    def __init__(
        self, target: str, faults: Faults | None = None, *, kind: Literal["tcp", "unix"] | None = None
    ) -> None:
        if kind not in (None, "tcp", "unix"):
            raise InvalidArgument(f'Proxy: kind must be "tcp" or "unix", not {kind!r}')
        self._target = Address.parse(target)
        self._kind = kind or self._target.kind
        self._control = Control(faults if faults is not None else Faults())
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._cuts: dict[Direction, int] = {}
        self._number = 0
        self._refusing = self._closing = False
        self._listener: socket.socket | None = None
        self._address = ""

    def __enter__(self) -> "Proxy":
        unix = Address("unix", name=f"windlass-proxy-{token_hex(8)}")
        self._listener = listen(Address("tcp", "127.0.0.1") if self._kind == "tcp" else unix, BACKLOG)
        self._address = str(bound_to(self._listener))
        self._thread = threading.Thread(target=self._accept, args=[self._listener], name="windlass-proxy", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections, and the threads behind them."""
        if self._listener is None:
            return
        with self._lock:
            self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._thread.join()
        self._listener.close()
        self._listener = None
        self.resume()
        for connection in self._connections:
            connection.cut()
        for connection in self._connections:
            for pump in connection.pumps:
                pump.join()
        self._connections.clear()

    @property
    def address(self) -> str:
        """What clients connect to."""
        return self._address

    @property
    def target(self) -> str:
        """The server that new connections are passed on to; may be changed, as after a restart."""
        return str(self._target)

    @target.setter
    def target(self, address: str) -> None:
        self._target = Address.parse(address)

    @property
    def counts(self) -> dict[str, int]:
        """How many faults were made so far, by kind; also "cut_at", and "refused" connections."""
        with self._control.lock:
            return dict(self._control.made)

    @property
    def frames(self) -> dict[Direction, int]:
        """How many frames came so far, by direction, whatever was done to them."""
        with self._control.lock:
            return dict(self._control.frames)

    @property
    def connections(self) -> int:
        """How many connections were passed on so far."""
        return self._number

    def set(self, faults: Faults) -> None:
        """Makes these faults from the next frames on; their random streams start anew."""
        self._control.faults = faults

    def cut_at(self, direction: Direction, byte: int) -> None:
        """Cuts the next new connection when so many bytes behind the handshake have passed in that direction."""
        if direction not in ("up", "down") or byte < 0:
            raise InvalidArgument(f'cut_at: needs "up" or "down" and a byte of at least 0, not {direction!r}, {byte!r}')
        with self._lock:
            self._cuts[direction] = byte

    def pause(self) -> None:
        """Stops the flow. Nothing is closed, new connections wait; once this returns no byte is passed on."""
        self._control.flow.clear()
        with self._lock:
            pumps = [pump for connection in self._connections for pump in connection.pumps]
        for pump in pumps:
            with pump.sending:
                pass

    def resume(self) -> None:
        """Lets it flow again."""
        self._control.flow.set()

    def cut(self) -> None:
        """Cuts the connections there are."""
        with self._lock:
            for connection in self._connections:
                connection.cut()

    def refuse(self) -> None:
        """Closes new connections at once. Those there are go on."""
        self._refusing = True

    def accept(self) -> None:
        """Ends refuse()."""
        self._refusing = False

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                client, _ = listener.accept()
            except OSError:  # closing; or too many files are open
                time.sleep(0.01)
                continue
            self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        """Passes a new connection on, or closes it where it is not wanted or the server cannot be reached."""
        server: socket.socket | None = None
        if self._refusing:
            self._control.count("refused")
        else:
            with contextlib.suppress(OSError):
                server = dial(self._target, time.monotonic() + DIAL_S)
        if server is None:
            client.close()
            return
        with self._lock:
            self._connections = [c for c in self._connections if any(pump.is_alive() for pump in c.pumps)]
            cuts, self._cuts = self._cuts, {}
            number, self._number = self._number, self._number + 1
            self._connections.append(Connection(self._control, number, client, server, cuts))
