"""What shows that a member's process is gone, and not only its connection.

    on the scheduler's host   the kernel says so: a pidfd, opened when the member joins
    elsewhere, of a server    its own port refuses connections, asked while its heartbeat is away

A worker on another host leaves no such evidence: it has failure_timeout to come back.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable

from windlass._errors import InvalidArgument
from windlass._net.address import Address
from windlass.control import messages as m
from windlass.control.member import home

_PROBE_SECONDS = 0.5  # what one question takes at most, and the time between two


class Evidence:
    """Watches the processes of members. Lives in one event loop.

    gone: called with a member whose process is gone, and how that is known.
    """

    def __init__(self, gone: Callable[[int, str], None]) -> None:
        self._gone = gone
        self._here = home()
        self._processes: dict[int, int] = {}  # pidfds, by member
        self._ports: dict[int, Address] = {}  # by member, where there is no pidfd
        self._probes: dict[int, asyncio.Task[None]] = {}

    def watch(self, member: int, join: m.Join) -> None:
        """It has joined, or has come back."""
        if member in self._processes or member in self._ports:
            return
        if join.home == self._here and join.pid:
            with contextlib.suppress(OSError):  # it has ended already, or there are no more files
                self._processes[member] = os.pidfd_open(join.pid)
                asyncio.get_running_loop().add_reader(self._processes[member], self._ended, member, join.pid)
                return
        if join.addresses:
            with contextlib.suppress(InvalidArgument):  # clients will complain of it
                self._ports[member] = Address.parse(join.addresses[0])

    def expect(self, member: int, join: m.Join) -> None:
        """It was a member of an earlier scheduler. The number of its process may be another's by now; but if there is
        none of that number, it is gone."""
        if join.home == self._here and join.pid:
            try:
                os.close(os.pidfd_open(join.pid))
            except ProcessLookupError:
                self._gone(member, f"its process {join.pid} has ended")
            except OSError:
                pass

    def forget(self, member: int) -> None:
        """It is no member any more."""
        if (pidfd := self._processes.pop(member, None)) is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._ports.pop(member, None)
        if (probe := self._probes.pop(member, None)) is not None:
            probe.cancel()

    def close(self) -> None:
        """Nobody is watched any more."""
        for member in [*self._processes, *self._ports]:
            self.forget(member)

    def suspect(self, members: Iterable[int]) -> None:
        """These have no heartbeat at the moment: their ports are asked."""
        for member in members:
            if member in self._ports and member not in self._probes:
                probe = self._probe(member, self._ports[member])
                self._probes[member] = asyncio.get_running_loop().create_task(probe)

    def _ended(self, member: int, pid: int) -> None:
        asyncio.get_running_loop().remove_reader(self._processes[member])
        self._gone(member, f"its process {pid} has ended")

    async def _probe(self, member: int, address: Address) -> None:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                _, writer = await _connect(address)
                writer.transport.abort()
        except ConnectionRefusedError:
            self._gone(member, f"{address} refuses connections")
        except OSError:  # out of reach, or too slow to answer: that proves nothing
            pass
        await asyncio.sleep(_PROBE_SECONDS)
        self._probes.pop(member, None)


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.kind == "tcp":
        return await asyncio.open_connection(address.host, address.port)
    return await asyncio.open_unix_connection("\0" + address.name)
