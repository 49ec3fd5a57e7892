"""Servers elsewhere, by a list of their addresses."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from windlass import _core
from windlass._client.cluster import Cluster
from windlass._errors import InvalidArgument
from windlass._net.address import Address, is_here
from windlass._net.dial import Dialer
from windlass._objects.arrays import is_whole
from windlass._rules.sync import Sync

Transport = Literal["auto", "arena", "socket"]


@dataclasses.dataclass(frozen=True)
class Remote:
    """How to reach servers elsewhere; further workers use it, too."""

    servers: tuple[Address, ...]
    app: str
    token: bytes = dataclasses.field(repr=False)
    failure_timeout: float
    checksums: bool | None
    transport: Transport
    sync: Sync | None  #: of its objects

    @classmethod
    def of(
        cls,
        servers: Sequence[str],
        app: str,
        token: bytes,
        failure_timeout: float,
        checksums: bool | None,
        transport: Transport,
        sync: Sync | None,
    ) -> "Remote":
        """Checks what connect() was given."""
        if isinstance(servers, str) or not all(isinstance(s, str) for s in servers) or not servers:
            raise InvalidArgument(f"connect: servers must be a list of addresses, not {servers!r}")
        addresses = tuple(Address.parse(text) for text in servers)
        if len(set(addresses)) != len(addresses):
            raise InvalidArgument(f"connect: servers has an address twice: {[str(a) for a in addresses]}")
        if not isinstance(app, str) or not app.isprintable() or "/" in app or not 1 <= len(app.encode()) <= 256:
            raise InvalidArgument(f"connect: app must be 1 to 256 bytes of printable text without '/', not {app!r}")
        if not failure_timeout > 0:
            raise InvalidArgument(f"connect: failure_timeout must be above 0 seconds, not {failure_timeout}")
        if transport == "arena" and (far := [str(address) for address in addresses if not is_here(address)]):
            raise InvalidArgument(f'connect: transport="arena" needs servers on this host, not {far}')
        return cls(addresses, app, token, failure_timeout, checksums, transport, sync)

    def cluster(self, rank: int, world_size: int, timeout: float, arena_of: "_core.Engine | None" = None) -> Cluster:
        """A cluster on the servers, once all connections are up; in a world of 0 it is a reader."""
        if not (is_whole(rank) and is_whole(world_size) and 0 <= rank < max(world_size, 1) < 2**32):
            raise InvalidArgument(f"connect: rank {rank!r} is not in a world of {world_size!r}")
        sums = -1 if self.checksums is None else int(self.checksums)
        shares = self.transport != "socket" and any(map(is_here, self.servers))
        links = _core.Links([str(a) for a in self.servers], self.app, rank, world_size, sums, shares)
        engine = _core.Engine.on(links, arena_of)
        dialer = Dialer(links, list(self.servers), self.token, self.failure_timeout, self.transport)
        try:
            links.wait_ready(timeout)
            session = _core.Session(engine, rank, world_size)
            session.enter(timeout)
        except BaseException:
            links.stop()
            dialer.close()
            raise
        return Cluster(engine, session, dialer, timeout, self, sync=self.sync)
