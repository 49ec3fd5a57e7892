"""How every figure is measured: sides take turns, and every call is timed.

::

    round        1                  2                  3
    ours    |||||||||          |||||||||          |||||||||
    limit            |||||||            |||||||            |||||||

A turn is many calls in a row, since a training makes them so: what is measured is what can be sustained. Turns
alternate, since the machine's speed changes by the second and both sides should see the same of it. A side's first
turns find out how many calls make a turn; they warm up and are not counted. What counts is the median over all calls.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

#: Makes so many calls in a row and returns the seconds of each.
Side = Callable[[int], list[float]]

T = TypeVar("T")
CALLS_MAX = 20_000  # in a turn
_PROBE_CALLS = 3  # of the first turn whose length is looked at
_GROWTH_MAX = 10  # from one probe to the next: the first calls may be far from typical


@dataclasses.dataclass(frozen=True)
class Length:
    """How long to measure.

    A turn has at least `calls` calls and takes at least `seconds`, whichever is more; but from `seconds_max` on, 3
    calls are enough. `warm_up` is False for runs of many steps, which warm up by themselves; a turn is then `calls`.
    """

    rounds: int
    calls: int
    seconds: float
    seconds_max: float = 2.0
    warm_up: bool = True

    def calls_of(self, each: float) -> int:
        """In a turn, if each takes so many seconds."""
        each = max(each, 1e-9)
        wanted = max(self.calls, math.ceil(self.seconds / each))
        least = min(_PROBE_CALLS, self.calls)
        return min(wanted, max(least, int(self.seconds_max / each)), CALLS_MAX)


FULL = Length(rounds=7, calls=30, seconds=0.2)
SHORT = Length(rounds=2, calls=3, seconds=0.0, seconds_max=0.1)  # to see that it works, not how fast
RUNS = Length(rounds=4, calls=1, seconds=0.0, warm_up=False)  # whole trainings
SHORT_RUNS = dataclasses.replace(RUNS, rounds=1)


@dataclasses.dataclass(frozen=True)
class Times:
    """What a side took: the seconds of every call, by round."""

    rounds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.rounds or not all(self.rounds):
            raise ValueError(f"Times: every round must have at least one call, not {[len(r) for r in self.rounds]}")

    @property
    def calls(self) -> int:
        """How many were timed."""
        return sum(map(len, self.rounds))

    @property
    def median(self) -> float:
        """Of all calls, in seconds."""
        return statistics.median(self._all())

    @property
    def p99(self) -> float:
        """Of all calls: the least that 99 in 100 did not exceed."""
        ordered = sorted(self._all())
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    @property
    def medians(self) -> list[float]:
        """Of each round."""
        return [statistics.median(seconds) for seconds in self.rounds]

    def shared_by(self, workers: int) -> "Times":
        """Of calls that so many workers made at once: what a call takes of the time that they share."""
        return Times(tuple(tuple(seconds / workers for seconds in turn) for turn in self.rounds))

    def _all(self) -> list[float]:
        return [seconds for turn in self.rounds for seconds in turn]


def in_turns(*sides: Side, length: Length = FULL, clock: Callable[[], float] = time.perf_counter) -> tuple[Times, ...]:
    """The times of every side. In each round each of them has one turn, in the order given."""
    calls = [_calls_of_turn(side, length, clock) if length.warm_up else length.calls for side in sides]
    rounds = [[side(n) for side, n in zip(sides, calls, strict=True)] for _ in range(length.rounds)]
    return tuple(Times(tuple(tuple(turn) for turn in turns)) for turns in zip(*rounds, strict=True))


def _calls_of_turn(side: Side, length: Length, clock: Callable[[], float]) -> int:
    """Warms up with ever more calls until a turn is as long as it should be."""
    side(1)  # touches memory for the first time
    calls = min(_PROBE_CALLS, length.calls)
    while True:
        start = clock()
        side(calls)
        wanted = length.calls_of((clock() - start) / calls)
        if wanted <= 2 * calls:
            return wanted
        calls = min(wanted, _GROWTH_MAX * calls)


def timed(call: Callable[[], object], pause: float = 0.0) -> Side:
    """A side that calls this, each time after a pause in seconds."""

    def turn(calls: int) -> list[float]:
        took = []
        for _ in range(calls):
            if pause:
                time.sleep(pause)
            start = time.perf_counter()
            call()
            took.append(time.perf_counter() - start)
        return took

    return turn


def timed_over(inputs: Iterator[T], call: Callable[[T], object]) -> Side:
    """A side that calls this with the next input, which is drawn before the clock starts."""

    def turn(calls: int) -> list[float]:
        took = []
        for _ in range(calls):
            value = next(inputs)
            start = time.perf_counter()
            call(value)
            took.append(time.perf_counter() - start)
        return took

    return turn


def loop_over(inputs: Iterator[T], loop: Callable[[T], list[float]]) -> Side:
    """A side of a limit that times itself, with the next input for every call."""
    return lambda calls: [seconds for _ in range(calls) for seconds in loop(next(inputs))]


def scatter(values: Sequence[float]) -> float:
    """Half the interquartile range, relative to the median: one disturbed round in four does not change it."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0
