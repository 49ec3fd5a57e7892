"""Rules: what a server does with a push. The base of all of them, and those that have no numbers.

A rule object is a value: its class and structure are fixed when a tensor or table is created, its numbers are
defaults that travel with every push and can be overridden there: ``w.push(g, lr=0.01)``.
"""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any, ClassVar

from windlass import _core
from windlass._errors import InvalidArgument
from windlass._rules.schedule import Schedule

_FLOAT32_MAX = 3.4028234e38
_FLOAT32_MIN = 2.0**-126  # above 0, without losing digits
_NUMBERS_MAX = 8  # that travel with a push
OPTIONS = ("clip_value", "clip_weights", "schedule")  #: of any rule


def _is_float32(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(float(value)) <= _FLOAT32_MAX


@dataclasses.dataclass(frozen=True)
class Rule:
    """Base of all rules. Sum, Assign, Max, Min and Average have no numbers; the optimizers are torch.optim's by name.

    Any rule has these options, fixed at creation:

    clip_value: clips each number of the gradient to ``-clip_value`` and ``clip_value``; under BSP that is the mean over
        workers. NaN stays NaN.
    clip_weights: ``(lowest, highest)``; clips weights after each update.
    schedule: a factor for the step size of each update, which depends on the count of updates alone.
    """

    clip_value: float | None = dataclasses.field(default=None, kw_only=True)
    clip_weights: tuple[float, float] | None = dataclasses.field(default=None, kw_only=True)
    schedule: Schedule | None = dataclasses.field(default=None, kw_only=True)

    # Fields that are fixed at creation; every other field is a hyperparameter and travels with the push.
    _structure: ClassVar[frozenset[str]] = frozenset()
    #: Whether its first number is a step size that a schedule may change.
    _steps: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Rule.__repr__  # type: ignore[method-assign]  # before dataclasses would make one

    def __repr__(self) -> str:
        own = [f for f in dataclasses.fields(self) if f.name not in OPTIONS]
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in own if f.repr]
        shown += [f"{name}={getattr(self, name)!r}" for name in OPTIONS if getattr(self, name) is not None]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __post_init__(self) -> None:
        self._check_options()
        for field in dataclasses.fields(self):
            if field.name in OPTIONS:
                continue
            value = getattr(self, field.name)
            if field.type is bool:
                self._require(isinstance(value, bool), field.name, "True or False")
                continue
            if not _is_float32(value):
                raise InvalidArgument(f"{type(self).__name__}: {field.name} must be a finite float32, not {value!r}")
            object.__setattr__(self, field.name, float(value))
        self._check()

    def _check(self) -> None:
        """Raises InvalidArgument for numbers outside their range."""

    def _check_options(self) -> None:
        clip, bounds, schedule = self.clip_value, self.clip_weights, self.schedule
        if clip is not None:
            self._require(_is_float32(clip) and clip >= _FLOAT32_MIN, "clip_value", "a finite float32 above 0, or None")
            object.__setattr__(self, "clip_value", float(clip))
        if bounds is not None:
            two = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(_is_float32(x) for x in bounds)
            self._require(
                two and bounds[0] <= bounds[1],
                "clip_weights",
                "(lowest, highest), two finite float32 in order, or None",
            )
            object.__setattr__(self, "clip_weights", (float(bounds[0]), float(bounds[1])))
        if schedule is not None:
            self._require(isinstance(schedule, Schedule), "schedule", "a windlass.Schedule or None")
            if not self._steps:
                raise InvalidArgument(
                    f"{type(self).__name__}: expected no schedule, since it has no step size; saw {schedule}"
                )

    def _require(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise InvalidArgument(f"{type(self).__name__}: {name} must be {expected}, not {getattr(self, name)!r}")

    @property
    def _kind(self) -> _core.RuleKind:
        raise NotImplementedError

    @property
    def _initial_state(self) -> float:
        return 0.0

    @property
    def _state(self) -> tuple[str, ...]:
        """The state that it keeps beside the weights, by torch.optim's names, in the core's order."""
        return ()

    def _state_shapes(self, shape: tuple[int, ...], shards: int) -> dict[str, tuple[int, ...]]:
        """The state that it keeps of a tensor of that shape, in the core's order."""
        return dict.fromkeys(self._state, shape)

    def _spec(self, shape: tuple[int, ...]) -> _core.RuleSpec:
        """What is fixed when an object is made. `shape` is the tensor's, or that of a table's row."""
        return _core.RuleSpec(self._kind, self._initial_state, **self._options())

    def _options(self) -> dict[str, Any]:
        """The options of any rule, as arguments of the core's RuleSpec."""
        options: dict[str, Any] = {}
        if self.clip_value is not None:
            options["clip"] = self.clip_value
        if self.clip_weights is not None:
            options["lowest"], options["highest"] = self.clip_weights
        if self.schedule is not None:
            options["schedule"] = self.schedule._spec()
        return options

    def _numbers(self) -> tuple[float, ...]:
        """The hyperparameters in the core's order (the rule's `enum Number` in csrc/rule/)."""
        return ()

    def _sent(self) -> tuple[float, ...]:
        """The same as they travel: the correction for staleness comes last, if there is one."""
        numbers, power = self._numbers(), getattr(self, "staleness", 0.0)
        return numbers if power == 0 else (*numbers, *[0.0] * (_NUMBERS_MAX - 1 - len(numbers)), power)

    def _with(self, changes: Mapping[str, Any]) -> "Rule":
        """This rule with other hyperparameters, for one push."""
        names = {f.name for f in dataclasses.fields(self)}
        fixed = self._structure | set(OPTIONS)
        known = ", ".join(sorted(names - fixed)) or "none"
        for name in changes:
            if name not in names:
                raise InvalidArgument(f"{type(self).__name__} has no hyperparameter {name!r}; it has: {known}")
            if name in fixed:
                raise InvalidArgument(
                    f"{type(self).__name__}: {name} is fixed at creation and cannot travel with a push; "
                    f"these can: {known}"
                )
        changed = dataclasses.replace(self, **changes)
        if changed._kind != self._kind:
            raise InvalidArgument(
                f"{type(self).__name__}: {', '.join(changes)} would change what is kept on the server; "
                "choose it when the object is created"
            )
        return changed


@dataclasses.dataclass(frozen=True)
class Sum(Rule):
    """Adds what is pushed. For float32, float64 and int64."""

    _steps: ClassVar[bool] = False

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.SUM


@dataclasses.dataclass(frozen=True)
class Assign(Rule):
    """Replaces the weights by what is pushed. For float32, float64 and int64."""

    _steps: ClassVar[bool] = False

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.ASSIGN


@dataclasses.dataclass(frozen=True)
class Max(Rule):
    """Keeps the larger of what is there and what is pushed; NaN wins. For float32, float64 and int64."""

    _steps: ClassVar[bool] = False

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.MAX


@dataclasses.dataclass(frozen=True)
class Min(Rule):
    """Keeps the smaller of what is there and what is pushed; NaN wins. For float32, float64 and int64."""

    _steps: ClassVar[bool] = False

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.MIN


@dataclasses.dataclass(frozen=True)
class Average(Rule):
    """Replaces the weights by the mean of what is pushed. For float32.

    The mean is over what belongs to one update: the gradients of a repeated key, and under BSP what all workers pushed.
    Where every push is an update of its own, the last push wins.
    """

    _steps: ClassVar[bool] = False

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.AVERAGE
