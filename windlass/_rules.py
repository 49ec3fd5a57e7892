"""Rules: what a server does with a push.

A rule object is a value: its class and structure are fixed when a tensor or table is created, its numbers are
defaults that travel with every push and can be given anew there: ``w.push(g, lr=0.01)``.
"""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import ClassVar

from windlass import _core
from windlass._errors import InvalidArgument

_FLOAT32_MAX = 3.4028234e38
_NUMBERS_MAX = 8  # that travel with a push


@dataclasses.dataclass(frozen=True)
class Rule:
    """Base of all rules. Sum, Assign, Max and Average have no numbers; the optimizers are torch.optim's by name."""

    # Fields that are fixed at creation; every other field is a hyperparameter and travels with the push.
    _structure: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                self._require(isinstance(value, bool), field.name, "True or False")
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not abs(float(value)) <= _FLOAT32_MAX:
                raise InvalidArgument(f"{type(self).__name__}: {field.name} must be a finite float32, not {value!r}")
            object.__setattr__(self, field.name, float(value))
        self._check()

    def _check(self) -> None:
        """Raises InvalidArgument for numbers outside their range."""

    def _require(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise InvalidArgument(f"{type(self).__name__}: {name} must be {expected}, not {getattr(self, name)!r}")

    def _check_staleness(self) -> None:
        self._require(getattr(self, "staleness") >= 0, "staleness", "at least 0")  # noqa: B009

    @property
    def _kind(self) -> _core.RuleKind:
        raise NotImplementedError

    @property
    def _initial_state(self) -> float:
        return 0.0

    @property
    def _state(self) -> tuple[str, ...]:
        """What it keeps beside the weights, by torch.optim's names, in the core's order."""
        return ()

    def _state_shapes(self, shape: tuple[int, ...], shards: int) -> dict[str, tuple[int, ...]]:
        """What it keeps of a tensor of that shape, in the core's order."""
        return dict.fromkeys(self._state, shape)

    def _spec(self, shape: tuple[int, ...]) -> _core.RuleSpec:
        """What is fixed when an object of that shape is made; of a table, that of a row."""
        return _core.RuleSpec(self._kind, self._initial_state)

    def _numbers(self) -> tuple[float, ...]:
        """The hyperparameters in the core's order (the rule's `enum Number` in csrc/rule/)."""
        return ()

    def _sent(self) -> tuple[float, ...]:
        """The same as they travel: the correction by staleness comes last, where there is one."""
        numbers, power = self._numbers(), getattr(self, "staleness", 0.0)
        return numbers if power == 0 else (*numbers, *[0.0] * (_NUMBERS_MAX - 1 - len(numbers)), power)

    def _with(self, changes: Mapping[str, float]) -> "Rule":
        """This rule with other hyperparameters, for one push."""
        names = {f.name for f in dataclasses.fields(self)}
        known = ", ".join(sorted(names - self._structure)) or "none"
        for name in changes:
            if name not in names:
                raise InvalidArgument(f"{type(self).__name__} has no hyperparameter {name!r}; it has: {known}")
            if name in self._structure:
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
class SGD(Rule):
    """Stochastic gradient descent, with momentum if asked for: torch.optim.SGD."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    staleness: float = 0.0

    def _check(self) -> None:
        self._check_staleness()
        self._require(self.lr >= 0, "lr", "at least 0")
        self._require(self.momentum >= 0, "momentum", "at least 0")
        self._require(self.weight_decay >= 0, "weight_decay", "at least 0")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise InvalidArgument("SGD: nesterov needs a momentum and no dampening")

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.MOMENTUM if self.momentum != 0 else _core.RuleKind.SGD

    @property
    def _state(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum != 0 else ()

    def _numbers(self) -> tuple[float, ...]:
        if self.momentum == 0:
            return (self.lr, self.weight_decay)
        return (self.lr, self.weight_decay, self.momentum, self.dampening, float(self.nesterov))


@dataclasses.dataclass(frozen=True)
class Adagrad(Rule):
    """torch.optim.Adagrad: each weight's step shrinks with the sum of its squared gradients."""

    lr: float = 0.01
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    staleness: float = 0.0
    _structure: ClassVar[frozenset[str]] = frozenset({"initial_accumulator_value"})

    def _check(self) -> None:
        self._check_staleness()
        for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            self._require(getattr(self, name) >= 0, name, "at least 0")

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.ADAGRAD

    @property
    def _state(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    def _initial_state(self) -> float:
        return self.initial_accumulator_value

    def _numbers(self) -> tuple[float, ...]:
        return (self.lr, self.lr_decay, self.weight_decay, self.eps)


@dataclasses.dataclass(frozen=True)
class RowAdagrad(Rule):
    """Adagrad with one accumulator per row, the mean of the row's squared gradients: 4 bytes of state per row."""

    lr: float = 0.01
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    staleness: float = 0.0
    _structure: ClassVar[frozenset[str]] = frozenset({"initial_accumulator_value"})

    def _check(self) -> None:
        self._check_staleness()
        for name in ("lr", "initial_accumulator_value", "eps"):
            self._require(getattr(self, name) >= 0, name, "at least 0")

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.ROW_ADAGRAD

    @property
    def _state(self) -> tuple[str, ...]:
        return ("sum",)

    def _state_shapes(self, shape: tuple[int, ...], shards: int) -> dict[str, tuple[int, ...]]:
        return {"sum": shape[:1]}

    @property
    def _initial_state(self) -> float:
        return self.initial_accumulator_value

    def _numbers(self) -> tuple[float, ...]:
        return (self.lr, self.eps)


@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """torch.optim.Adam. On a table, a row counts its own updates."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    staleness: float = 0.0

    def _check(self) -> None:
        self._check_staleness()
        for name in ("lr", "eps", "weight_decay"):
            self._require(getattr(self, name) >= 0, name, "at least 0")
        for name in ("beta1", "beta2"):
            self._require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.ADAM

    @property
    def _state(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _numbers(self) -> tuple[float, ...]:
        return (self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)


@dataclasses.dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW: Adam with the weight decay outside of the gradient."""

    weight_decay: float = 0.01

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.ADAMW


@dataclasses.dataclass(frozen=True)
class Sum(Rule):
    """Adds what is pushed. For float32, float64 and int64."""

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.SUM


@dataclasses.dataclass(frozen=True)
class Assign(Rule):
    """Puts what is pushed in place of what is there. For float32, float64 and int64."""

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.ASSIGN


@dataclasses.dataclass(frozen=True)
class Max(Rule):
    """Keeps the larger of what is there and what is pushed; NaN wins. For float32, float64 and int64."""

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.MAX


@dataclasses.dataclass(frozen=True)
class Average(Rule):
    """Puts the mean of what is pushed in place of what is there. For float32.

    The mean is over what belongs to one update: the gradients of a repeated key, and under BSP what all workers pushed.
    Where every push is an update of its own, it is what was pushed last.
    """

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.AVERAGE
