"""Who is at the scheduler's port without having proved anything yet: few, and not for long.

An HTTP server waits for as long as a stranger takes to say something. This closes whoever has not been let in after 5
seconds, and the oldest of them when there are too many. (The event loop accepts all that have come before it
closes any: for that moment there may be more.)
"""

import asyncio
from collections.abc import Callable

STRANGERS_MAX = 256
STRANGER_SECONDS = 5.0


class Door:
    """Watches connections from the moment they are accepted. Lives in one event loop."""

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make
        self._strangers: dict[asyncio.Protocol, asyncio.TimerHandle] = {}  # the oldest first

    def __call__(self) -> asyncio.Protocol:
        """A protocol for a connection that is being accepted."""
        protocol = self._make()
        loop = asyncio.get_running_loop()
        self._strangers[protocol] = loop.call_later(STRANGER_SECONDS, self._drop, protocol)
        if len(self._strangers) > STRANGERS_MAX:
            self._drop(next(iter(self._strangers)))
        return protocol

    def let_in(self, protocol: asyncio.Protocol) -> None:
        """It has proved what it had to."""
        if (timer := self._strangers.pop(protocol, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Whoever has not been let in by now will not be."""
        while self._strangers:
            self._drop(next(iter(self._strangers)))

    def _drop(self, protocol: asyncio.Protocol) -> None:
        self.let_in(protocol)
        transport = getattr(protocol, "transport", None)
        if transport is not None:
            transport.abort()
