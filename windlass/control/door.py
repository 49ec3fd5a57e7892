"""Who is at the scheduler's port without having proved anything yet: few, not for long, and with little to say.

An HTTP server waits for as long as a stranger takes to say something, and keeps what it says until it is whole. This
closes whoever has not been let in after 5 seconds or has said more than a member would, and the oldest of them when
there are too many. (The event loop accepts all that have come before it closes any: for that moment there may be more.)

    accepted ---> Stranger [-> TLS] ---> HTTP, WebSocket ---> let in: its bytes take the direct way from then on
                  counts bytes, has a deadline
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

STRANGERS_MAX = 256
TLS_STRANGERS_MAX = 32  # each takes 200 KB
STRANGER_SECONDS = 5.0
HEAD_BYTES_MAX = 16 << 10  # of requests, those of browsers and tools included
PROOF_BYTES_MAX = 4 << 10  # of WebSocket frames, the answer to the challenge included


class _Stranger(asyncio.Protocol):
    """Between a connection that has not been let in and the protocol that it speaks."""

    def __init__(self, door: "Door", inner: asyncio.Protocol) -> None:
        self._door = door
        self._inner = inner
        self._left = HEAD_BYTES_MAX
        self._aborted = False
        self._accepted: asyncio.Transport | None = None
        self._transport: asyncio.Transport | None = None  # the same, or TLS over it
        self._securing: asyncio.Task[None] | None = None
        self.timer = asyncio.get_running_loop().call_later(STRANGER_SECONDS, door.drop, inner)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It was accepted."""
        self._accepted = cast(asyncio.Transport, transport)
        if self._aborted:  # others have come meanwhile
            self._accepted.abort()
        elif self._door.tls is None:
            self._begin(self._accepted)
        else:
            self._accepted.pause_reading()  # until TLS does that
            self._securing = asyncio.get_running_loop().create_task(self._secure(self._accepted, self._door.tls))

    def _begin(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)

    async def _secure(self, accepted: asyncio.Transport, tls: ssl.SSLContext) -> None:
        await asyncio.sleep(0)  # of many that come at once, most are closed again before they cost memory
        if self._aborted:
            return
        try:
            secure = await asyncio.get_running_loop().start_tls(accepted, self, tls, server_side=True)
        except OSError:
            self._door.drop(self._inner)
        else:
            if secure is not None:
                self._begin(secure)

    def expect_proof(self) -> None:
        """What comes next is a WebSocket's."""
        self._left = PROOF_BYTES_MAX

    def let_in(self) -> None:
        """Steps aside."""
        if self._transport is not None:
            self._transport.set_protocol(self._inner)

    def abort(self) -> None:
        """Ends the connection at once."""
        self._aborted = True
        if self._accepted is not None:
            self._accepted.abort()

    def data_received(self, data: bytes) -> None:
        """Passed on, up to a limit."""
        self._left -= len(data)
        if self._left < 0:
            self._door.drop(self._inner)
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Passed on."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is a stranger no more."""
        self._door.forget(self._inner)
        if self._transport is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Passed on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Passed on."""
        self._inner.resume_writing()


class Door:
    """Watches connections from the moment they are accepted. Lives in one event loop.

    make: the protocol of a new connection. tls: what it is spoken over, if it is.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self._make = make
        self._strangers: dict[asyncio.BaseProtocol, _Stranger] = {}  # by what they speak, the oldest first

    def __call__(self) -> asyncio.Protocol:
        """A protocol for a connection that is being accepted."""
        inner = self._make()
        stranger = self._strangers[inner] = _Stranger(self, inner)
        if len(self._strangers) > (STRANGERS_MAX if self.tls is None else TLS_STRANGERS_MAX):
            self.drop(next(iter(self._strangers)))
        return stranger

    def expect_proof(self, inner: asyncio.BaseProtocol) -> None:
        """It has become a WebSocket, whose first message is to prove something."""
        if (stranger := self._strangers.get(inner)) is not None:
            stranger.expect_proof()

    def let_in(self, inner: asyncio.BaseProtocol) -> None:
        """It has proved what it had to."""
        if (stranger := self.forget(inner)) is not None:
            stranger.let_in()

    def forget(self, inner: asyncio.BaseProtocol) -> _Stranger | None:
        """It is let in or gone."""
        if (stranger := self._strangers.pop(inner, None)) is not None:
            stranger.timer.cancel()
        return stranger

    def drop(self, inner: asyncio.BaseProtocol) -> None:
        """It has had its time, or its say."""
        if (stranger := self.forget(inner)) is not None:
            stranger.abort()

    def close(self) -> None:
        """Whoever has not been let in by now will not be."""
        while self._strangers:
            self.drop(next(iter(self._strangers)))
