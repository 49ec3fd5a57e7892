"""Policies of consistency: what a pull waits for, and when a push is applied.

A policy is a value, and has a short form for settings: ``BSP(spare=1)`` is "bsp:1".

    bsp, bsp:1      every worker in step; 1: without the slowest one
    ssp:3           nobody is more than 3 iterations ahead of the slowest
    asp             nobody waits
    maxdelay:0.5    waits only for a slower worker whose iteration has been open for more than half a second
"""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable
from typing import TypeVar

from windlass._errors import InvalidArgument

T = TypeVar("T")
OVERDUE_SECONDS = 30.0  # a wait of this length is logged, and again after the same time
_WHOLE_MAX = 2**32 - 1
_EXAMPLES = "bsp, bsp:1, ssp:3, asp or maxdelay:0.5"
_ASP, _BSP, _SSP, _MAX_DELAY = range(4)  # as the core counts them


@dataclasses.dataclass(frozen=True)
class Sync:
    """Base of all policies of consistency."""

    def _spec(self) -> tuple[int, int, float]:
        """For the core: which policy, its whole number, its seconds."""
        raise NotImplementedError

    def _whole(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) <= _WHOLE_MAX:
            expected = f"a whole number between 0 and {_WHOLE_MAX}"
            raise InvalidArgument(f"{type(self).__name__}: {name} must be {expected}, not {value!r}")
        object.__setattr__(self, name, int(value))


@dataclasses.dataclass(frozen=True)
class ASP(Sync):
    """Nobody waits: a push is applied when it arrives, a pull sees what is there."""

    def __str__(self) -> str:
        return "asp"

    def _spec(self) -> tuple[int, int, float]:
        return (_ASP, 0, 0.0)


@dataclasses.dataclass(frozen=True)
class BSP(Sync):
    """All in step: an update is made once, from what every worker pushed in the iteration, and then pulled.

    spare: how many of the slowest workers nobody waits for; their late pushes are dropped, and counted.
    """

    spare: int = 0

    def __post_init__(self) -> None:
        self._whole("spare")

    def __str__(self) -> str:
        return f"bsp:{self.spare}" if self.spare else "bsp"

    def _spec(self) -> tuple[int, int, float]:
        return (_BSP, self.spare, 0.0)


@dataclasses.dataclass(frozen=True)
class SSP(Sync):
    """A push is applied when it arrives; a pull waits while the slowest worker is more than `staleness` behind."""

    staleness: int

    def __post_init__(self) -> None:
        self._whole("staleness")

    def __str__(self) -> str:
        return f"ssp:{self.staleness}"

    def _spec(self) -> tuple[int, int, float]:
        return (_SSP, self.staleness, 0.0)


@dataclasses.dataclass(frozen=True)
class MaxDelay(Sync):
    """A push is applied when it arrives; a pull waits while a slower worker's iteration is open for longer."""

    seconds: float

    def __post_init__(self) -> None:
        value = self.seconds
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
            raise InvalidArgument(f"MaxDelay: seconds must be a finite number of at least 0, not {value!r}")
        object.__setattr__(self, "seconds", float(value))

    def __str__(self) -> str:
        return f"maxdelay:{self.seconds!r}".removesuffix(".0")

    def _spec(self) -> tuple[int, int, float]:
        return (_MAX_DELAY, 0, self.seconds)


def sync_of(kind: int, number: int, seconds: float) -> Sync:
    """The policy that the core knows by these."""
    if kind == _BSP:
        return BSP(number)
    if kind == _SSP:
        return SSP(number)
    return MaxDelay(seconds) if kind == _MAX_DELAY else ASP()


def parse_sync(value: "Sync | str | None", default: Sync, what: str) -> Sync:
    """A policy, given as one, by its short form, or as None for the default. `what` begins error messages."""
    if value is None:
        return default
    if isinstance(value, Sync) and type(value) is not Sync:
        return value
    if not isinstance(value, str):
        hint = f"; did you mean {value.__name__}(...)?" if isinstance(value, type) and issubclass(value, Sync) else ""
        raise InvalidArgument(f"{what}: expected a policy such as BSP() or one of {_EXAMPLES}, not {value!r}{hint}")
    name, colon, number = value.strip().lower().partition(":")
    try:
        match name:
            case "asp" if not colon:
                return ASP()
            case "bsp" if not colon:
                return BSP()
            case "bsp":
                return BSP(_read(int, number, "bsp:SPARE with a whole number"))
            case "ssp":
                return SSP(_read(int, number, "ssp:STALENESS with a whole number, such as ssp:3"))
            case "maxdelay":
                return MaxDelay(_read(float, number, "maxdelay:SECONDS with a number, such as maxdelay:0.5"))
            case "asp":
                raise InvalidArgument("expected asp without a number")
    except InvalidArgument as error:
        raise InvalidArgument(f"{what}: {error}; seen: {value!r}") from None
    close = difflib.get_close_matches(name, ["bsp", "ssp", "asp", "maxdelay"], 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise InvalidArgument(f"{what}: expected one of {_EXAMPLES}, not {value!r}{hint}")


def _read(kind: Callable[[str], T], text: str, expected: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise InvalidArgument(f"expected {expected}") from None
