"""Initialisers: the values that weights start with.

A value depends on the seed, the object's name, and its position (tensors) or its key (table rows), and on nothing
else: not on the cut, the server, the order of requests, or the machine.
"""

import dataclasses
import math
import numbers

from windlass import _core
from windlass._errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class Init:
    """Base of all initialisers."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise InvalidArgument(f"{type(self).__name__}: {field.name} must be a finite number, not {value!r}")

    def _spec(self) -> tuple[_core.InitKind, float, float]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Zeros(Init):
    """All zero."""

    def _spec(self) -> tuple[_core.InitKind, float, float]:
        return (_core.InitKind.ZEROS, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Constant(Init):
    """All the same value."""

    value: float

    def _spec(self) -> tuple[_core.InitKind, float, float]:
        return (_core.InitKind.CONSTANT, float(self.value), 0.0)


@dataclasses.dataclass(frozen=True)
class Uniform(Init):
    """Even between low and high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low <= self.high:
            raise InvalidArgument(f"Uniform: low must not be above high, not {self.low!r} and {self.high!r}")

    def _spec(self) -> tuple[_core.InitKind, float, float]:
        return (_core.InitKind.UNIFORM, float(self.low), float(self.high))


@dataclasses.dataclass(frozen=True)
class Normal(Init):
    """Normally distributed."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise InvalidArgument(f"Normal: std must be at least 0, not {self.std!r}")

    def _spec(self) -> tuple[_core.InitKind, float, float]:
        return (_core.InitKind.NORMAL, float(self.mean), float(self.std))


def init_of(kind: _core.InitKind, a: float, b: float) -> Init:
    """The initialiser that the core knows by these."""
    match kind:
        case _core.InitKind.CONSTANT:
            return Constant(a)
        case _core.InitKind.UNIFORM:
            return Uniform(a, b)
        case _core.InitKind.NORMAL:
            return Normal(a, b)
    return Zeros()
