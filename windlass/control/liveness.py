"""Who is alive. Pure: the time is told.

A member beats over a connection of its own. It is dead when that connection is broken and not made again within a
quarter of a second, or when it has been silent for failure_timeout. If it was we who slept, everybody gets the time to
be heard again.
"""

import dataclasses

GRACE_SECONDS = 0.25  # in which a broken heartbeat can be made again


@dataclasses.dataclass
class _Pulse:
    heard: float
    connections: int = 0
    broken: float | None = None  # since when, if it is


class Liveness:
    """The heartbeats of all members."""

    def __init__(self, failure_timeout: float) -> None:
        self._timeout = failure_timeout
        self._pulses: dict[int, _Pulse] = {}
        self._looked: float | None = None

    @property
    def period(self) -> float:
        """How often look() wants to be called, in seconds."""
        return min(self._timeout / 20, GRACE_SECONDS / 2)

    def add(self, member: int, now: float) -> None:
        """From now on it is expected to beat. Again: nothing."""
        self._pulses.setdefault(member, _Pulse(now))

    def remove(self, member: int) -> None:
        """Nobody listens for it any more."""
        self._pulses.pop(member, None)

    def connected(self, member: int, now: float) -> bool:
        """A connection for its beats. False: nobody expects it."""
        pulse = self._pulses.get(member)
        if pulse is None:
            return False
        pulse.connections += 1
        pulse.heard, pulse.broken = now, None
        return True

    def heard(self, member: int, now: float) -> None:
        """A beat."""
        if (pulse := self._pulses.get(member)) is not None:
            pulse.heard = now

    def disconnected(self, member: int, now: float) -> None:
        """One of its connections has ended."""
        pulse = self._pulses.get(member)
        if pulse is not None and pulse.connections > 0:
            pulse.connections -= 1
            if pulse.connections == 0:
                pulse.broken = now

    def look(self, now: float) -> list[tuple[int, str]]:
        """Who is dead, and why."""
        late = 0.0 if self._looked is None else now - self._looked - self.period
        self._looked = now
        if late > self._timeout / 4:
            for pulse in self._pulses.values():
                pulse.heard = now
                pulse.broken = None if pulse.broken is None else now
        dead = []
        for member, pulse in self._pulses.items():
            if now - pulse.heard > self._timeout:
                dead.append((member, f"no heartbeat for {self._timeout:g} s"))
            elif pulse.broken is not None and now - pulse.broken > GRACE_SECONDS:
                dead.append((member, f"its connection broke and was not made again within {GRACE_SECONDS:g} s"))
        return dead

    def ages(self, now: float) -> dict[int, float]:
        """Seconds since each member was last heard of."""
        return {member: now - pulse.heard for member, pulse in self._pulses.items()}
