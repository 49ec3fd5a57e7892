"""Who is alive. Pure: the time is told.

A member beats over a connection of its own, and is dead when it has been silent for failure_timeout. If the connection
breaks, it has the same time to make another: a reset says nothing of the process behind it, which may only stand still
for a moment. Where the process is known to be gone (windlass/control/evidence.py), it is dead after a quarter of a
second, in which its last words can be read. If it was we who slept, everybody gets the time to be heard again.

If more than half are silent at once and no connection broke, it is more likely that we are cut off than that they are
dead: then nobody is given up for silence before three times failure_timeout.
"""

import dataclasses

GRACE_SECONDS = 0.25  # for the last words of a process that is gone
_MANY = 3  # fewer members than these say nothing of the network
_PATIENCE = 3  # times failure_timeout, while we may be cut off


@dataclasses.dataclass
class _Pulse:
    heard: float
    connections: int = 0
    broken: float | None = None  # since when, if it is
    gone: tuple[float, str] | None = None  # since when the process is known to be gone, and how


class Liveness:
    """The heartbeats of all members."""

    def __init__(self, failure_timeout: float) -> None:
        self._timeout = failure_timeout
        self._pulses: dict[int, _Pulse] = {}
        self._looked: float | None = None
        self.cut_off = False  #: by the last look(), we may be

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
        pulse.heard, pulse.broken, pulse.gone = now, None, None
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
                pulse.heard = pulse.broken = now

    def gone(self, member: int, how: str, now: float) -> None:
        """Its process is known to be gone."""
        if (pulse := self._pulses.get(member)) is not None and pulse.gone is None:
            pulse.gone = (now, how)

    def look(self, now: float) -> list[tuple[int, str]]:
        """Who is dead, and why."""
        late = 0.0 if self._looked is None else now - self._looked - self.period
        self._looked = now
        if late > self._timeout / 4:
            for pulse in self._pulses.values():
                pulse.heard = now
                pulse.broken = None if pulse.broken is None else now
                pulse.gone = None if pulse.gone is None else (now, pulse.gone[1])
        # Beats do not come at the same moment: who has missed half of the time is silent, too.
        silent = sum(pulse.connections > 0 and now - pulse.heard > self._timeout / 2 for pulse in self._pulses.values())
        self.cut_off = len(self._pulses) >= _MANY and 2 * silent > len(self._pulses)
        dead = []
        for member, pulse in self._pulses.items():
            if pulse.gone is not None and now - pulse.gone[0] > GRACE_SECONDS:
                dead.append((member, pulse.gone[1]))
            elif now - pulse.heard > (patience := self._patience(pulse)):
                what = "its connection broke and was not made again within" if pulse.broken else "no heartbeat for"
                dead.append((member, f"{what} {patience:g} s"))
        return dead

    def _patience(self, pulse: _Pulse) -> float:
        return self._timeout * (_PATIENCE if self.cut_off and pulse.connections > 0 else 1)

    def ages(self, now: float) -> dict[int, float]:
        """Seconds since each member was last heard of."""
        return {member: now - pulse.heard for member, pulse in self._pulses.items()}

    def away(self, now: float) -> dict[int, float]:
        """Seconds since the connection broke of each member that has none."""
        return {member: now - pulse.broken for member, pulse in self._pulses.items() if pulse.broken is not None}
