"""Schedules of the step size that a server runs by itself."""

import dataclasses
import numbers
import operator

from windlass._errors import InvalidArgument

_DECAYS = (None, "linear", "cosine", "inverse_root", "steps")  # in the order of the core's Schedule::Kind
_UPDATES_MAX = 2**62


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A factor for the step size of each update, from the count of updates of its shard. ::

        wl.SGD(lr=0.1, schedule=wl.Schedule(warmup=1000, decay="cosine", updates=100_000, end=0.01))

    warmup: how many updates it takes to grow to 1; update n of them has n / warmup.
    decay: then "linear" and "cosine" fall to `end` over `updates` and stay there; "inverse_root" is
        1 / sqrt(1 + t / updates) after t updates, and never below `end`; "steps" multiplies by `factor` after every
        `updates`; None stays at 1.
    updates: the length of the decay. "inverse_root" needs none: it takes that of the warm-up.
    """

    warmup: int = 0
    decay: str | None = None
    updates: int = 0
    end: float = 0.0
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.decay not in _DECAYS:
            known = ", ".join(repr(d) for d in _DECAYS[1:])
            raise InvalidArgument(f"Schedule: decay must be one of {known} or None, not {self.decay!r}")
        for name in ("warmup", "updates"):
            object.__setattr__(self, name, self._count(name))
        for name in ("end", "factor"):
            object.__setattr__(self, name, self._number(name, 1.0 if name == "factor" else 1e30))
        if self.decay in ("linear", "cosine", "steps") and self.updates == 0:
            raise InvalidArgument(f"Schedule: decay={self.decay!r} needs updates of at least 1, not 0")
        if self.decay is None and self.warmup == 0:
            raise InvalidArgument("Schedule: expected a warmup, a decay or both, saw neither")
        if self.decay is None and self.updates != 0:
            raise InvalidArgument(f"Schedule: updates are those of a decay, and there is none; saw {self.updates}")

    def _count(self, name: str) -> int:
        value = getattr(self, name)
        try:
            count = operator.index(value)
        except TypeError:
            count = -1
        if isinstance(value, bool) or not 0 <= count <= _UPDATES_MAX:
            raise InvalidArgument(f"Schedule: {name} must be a whole number of at least 0, not {value!r}")
        return count

    def _number(self, name: str, most: float) -> float:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= most:
            raise InvalidArgument(f"Schedule: {name} must be a number from 0 to {most:g}, not {value!r}")
        return float(value)

    def _spec(self) -> tuple[int, int, int, float]:
        """As the core takes it."""
        kind = _DECAYS.index(self.decay)
        end = self.factor if self.decay == "steps" else self.end if self.decay is not None else 0.0
        return (kind, self.warmup, self.updates, end)
