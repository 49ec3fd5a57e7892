"""Somebody who looks at a cluster or changes it, and trains nothing."""

import ssl
import time
from types import TracebackType

from windlass._errors import InvalidArgument
from windlass._net.address import Address
from windlass._settings import Settings, token_of
from windlass.control import messages as m
from windlass.control.member import Member, here, new_incarnation
from windlass.launch import rundir


def find(settings: Settings, run: str | None = None, *, changes: bool = False) -> tuple[Address, bytes]:
    """The scheduler that is meant, and its token: the one that was named, else that of the only run on this machine.

    changes: it is about to be changed, so it must be named.
    """
    if run is not None:
        if settings.sources["address"] == "flag":
            raise InvalidArgument(f"either --address {settings.address} or --run {run}")
        one = rundir.named(run)
        return Address.parse(one.address), one.token()
    if settings.address is not None:
        return Address.parse(settings.address), token_of(settings) or b""
    runs = rundir.runs()
    if len(runs) != 1 or changes:
        names = ", ".join(repr(one.name) for one in runs)
        found = f"these run on this machine: {names}" if runs else "no `windlass run` is on this machine"
        raise InvalidArgument(f"which cluster? {found}; name it with --run NAME or --address (or WINDLASS_ADDRESS)")
    return Address.parse(runs[0].address), runs[0].token()


class Operator:
    """A connection to the scheduler; a context manager."""

    def __init__(
        self,
        address: Address,
        token: bytes,
        timeout: float = 10.0,
        tls: ssl.SSLContext | None = None,
        *,
        join: m.Join | None = None,
        once: bool = False,
    ) -> None:
        """join: what it says of itself, if it is more than that. once: without another attempt if nobody is there."""
        join = m.Join("operator", new_incarnation(), **here()) if join is None else join
        self._member = Member(address, token, join, lambda message: None, tls, beats=join.tasks > 0)
        self._member.start(time.monotonic() + timeout, once=once)

    @property
    def address(self) -> Address:
        """Where the scheduler is."""
        return self._member.address

    @property
    def over(self) -> bool:
        """Whether the cluster has ended."""
        return self._member.over

    def __enter__(self) -> "Operator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def move(self, name: str, shard: int, server: int, timeout: float) -> None:
        """Moves a shard, and waits until it is there."""
        self._member.ask(lambda n: m.Move(n, name, shard, server), f"move shard {shard} of {name}", timeout)

    def drain(self, server: int, timeout: float) -> None:
        """Empties a server, which then ends; waits until it is empty."""
        self._member.ask(lambda n: m.Drain(n, server), f"drain server {server}", timeout)

    def save(self, app: str, tag: str | None, timeout: float, *, wait: bool = False) -> str:
        """Asks for a checkpoint, which is taken between two iterations of the app's lowest rank. With wait, until it is
        complete; returns its id."""
        return self._member.ask(lambda n: m.SaveNow(n, app, tag, wait), f"checkpoint of app {app!r}", timeout).saved

    def stop(self, why: str, timeout: float, *, failed: bool = False) -> None:
        """Ends the cluster."""
        self._member.ask(lambda n: m.Stop(n, why, failed), "stop", timeout)

    def close(self) -> None:
        """Leaves."""
        self._member.close()
