"""Rules that are optimizers: each is torch.optim's of the same name, where torch has one."""

import dataclasses
from typing import ClassVar

from windlass import _core
from windlass._errors import InvalidArgument
from windlass._rules.rule import Rule


class Optimizer(Rule):
    """Base of rules that move weights against a gradient; each has `lr` and `staleness`."""

    def _check(self) -> None:
        self._at_least_0("staleness")

    def _at_least_0(self, *names: str) -> None:
        for name in names:
            self._require(getattr(self, name) >= 0, name, "at least 0")

    def _below_1(self, *names: str) -> None:
        for name in names:
            self._require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")

    def _at_most_1(self, *names: str) -> None:
        for name in names:
            self._require(0 <= getattr(self, name) <= 1, name, "at least 0 and at most 1")


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if asked for: torch.optim.SGD."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    staleness: float = 0.0

    def _check(self) -> None:
        super()._check()
        self._at_least_0("lr", "momentum", "weight_decay")
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
class Adagrad(Optimizer):
    """torch.optim.Adagrad: each weight's step shrinks with the sum of its squared gradients."""

    lr: float = 0.01
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    staleness: float = 0.0
    _structure: ClassVar[frozenset[str]] = frozenset({"initial_accumulator_value"})

    def _check(self) -> None:
        super()._check()
        self._at_least_0("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

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
class RowAdagrad(Optimizer):
    """Adagrad with one accumulator per row, the mean of the row's squared gradients: 4 bytes of state per row."""

    lr: float = 0.01
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    staleness: float = 0.0
    _structure: ClassVar[frozenset[str]] = frozenset({"initial_accumulator_value"})

    def _check(self) -> None:
        super()._check()
        self._at_least_0("lr", "initial_accumulator_value", "eps")

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
class Adam(Optimizer):
    """torch.optim.Adam. On a table, a row counts its own updates."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    staleness: float = 0.0

    def _check(self) -> None:
        super()._check()
        self._at_least_0("lr", "eps", "weight_decay")
        self._below_1("beta1", "beta2")

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
class RMSProp(Optimizer):
    """torch.optim.RMSprop. Keeps state arrays for momentum and for `centered` only if they are used."""

    lr: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    staleness: float = 0.0
    _structure: ClassVar[frozenset[str]] = frozenset({"centered"})

    def _check(self) -> None:
        super()._check()
        self._at_least_0("lr", "eps", "weight_decay", "momentum")
        self._at_most_1("alpha")

    @property
    def _kind(self) -> _core.RuleKind:
        if self.centered:
            return _core.RuleKind.RMSPROP_CENTERED_MOMENTUM if self.momentum != 0 else _core.RuleKind.RMSPROP_CENTERED
        return _core.RuleKind.RMSPROP_MOMENTUM if self.momentum != 0 else _core.RuleKind.RMSPROP

    @property
    def _state(self) -> tuple[str, ...]:
        mean = ("grad_avg",) if self.centered else ()
        return ("square_avg", *mean, *(("momentum_buffer",) if self.momentum != 0 else ()))

    def _numbers(self) -> tuple[float, ...]:
        numbers = (self.lr, self.alpha, self.eps, self.weight_decay)
        return numbers if self.momentum == 0 else (*numbers, self.momentum)


@dataclasses.dataclass(frozen=True)
class Adadelta(Optimizer):
    """torch.optim.Adadelta: scales steps by the ratio of past steps to past gradients."""

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    staleness: float = 0.0

    def _check(self) -> None:
        super()._check()
        self._at_least_0("lr", "eps", "weight_decay")
        self._at_most_1("rho")

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.ADADELTA

    @property
    def _state(self) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def _numbers(self) -> tuple[float, ...]:
        return (self.lr, self.rho, self.eps, self.weight_decay)


@dataclasses.dataclass(frozen=True)
class Adamax(Optimizer):
    """torch.optim.Adamax: Adam by the largest gradient. On a table, a row counts its own updates."""

    lr: float = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    staleness: float = 0.0

    def _check(self) -> None:
        super()._check()
        self._at_least_0("lr", "eps", "weight_decay")
        self._below_1("beta1", "beta2")

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.ADAMAX

    @property
    def _state(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    def _numbers(self) -> tuple[float, ...]:
        return (self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)


@dataclasses.dataclass(frozen=True)
class NAdam(Optimizer):
    """torch.optim.NAdam: Adam with Nesterov's momentum. On a table, a row counts its own updates.

    The momentum of an update depends on how many there were. Torch multiplies what each update had; here it is as if
    all had had this update's beta1 and momentum_decay, which is the same unless they change.
    """

    lr: float = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 0.004
    decoupled_weight_decay: bool = False
    staleness: float = 0.0

    def _check(self) -> None:
        super()._check()
        self._at_least_0("lr", "eps", "weight_decay", "momentum_decay")
        self._below_1("beta1", "beta2")

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.NADAM

    @property
    def _state(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _numbers(self) -> tuple[float, ...]:
        apart = float(self.decoupled_weight_decay)
        return (self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.momentum_decay, apart)


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    """Every weight moves by lr, in the direction of a mean of its gradients; the weight decay is outside of it."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    staleness: float = 0.0

    def _check(self) -> None:
        super()._check()
        self._at_least_0("lr", "weight_decay")
        self._below_1("beta1", "beta2")

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.LION

    @property
    def _state(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def _numbers(self) -> tuple[float, ...]:
        return (self.lr, self.beta1, self.beta2, self.weight_decay)


@dataclasses.dataclass(frozen=True)
class FTRL(Rule):
    """FTRL-proximal with L1 and L2 (McMahan and others 2013): weights that matter little are exactly zero.

    ``lr`` is what its paper calls alpha. Weights are a function of the state and of the numbers, so they should start
    at zero, and another lr than before changes them all when they are next updated: it has no schedule.
    """

    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    _steps: ClassVar[bool] = False

    def _check(self) -> None:
        self._require(self.lr > 0, "lr", "above 0")
        for name in ("beta", "l1", "l2"):
            self._require(getattr(self, name) >= 0, name, "at least 0")

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.FTRL

    @property
    def _state(self) -> tuple[str, ...]:
        return ("z", "n")

    def _numbers(self) -> tuple[float, ...]:
        return (self.lr, self.beta, self.l1, self.l2)
