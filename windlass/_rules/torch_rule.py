"""Optimizers of torch.optim as rules.

The servers run the optimizer itself, once per shard and update, on a parameter that is the shard. Its state is stored
with the shard: arrays of the parameter's shape as state arrays, everything else as numbers of the shard.

    state of Adafactor, of a (300, 20) tensor:   step ()   row_var (300, 1)   col_var (1, 20)     321 numbers
"""

import copy
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass._errors import InvalidArgument
from windlass._extras import need_torch
from windlass._rules.rule import Rule
from windlass._rules.user_rules import Layout, UserRule

if TYPE_CHECKING:
    from windlass._rules.user_code import RunningCall

#: These update every element by itself, so that they work under any cut.
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_NEVER = {"LBFGS": "it calls the model itself", "SparseAdam": "it needs sparse gradients"}
_TRIED = 5  # elements of the parameter for a trial


@dataclasses.dataclass(frozen=True, init=False)
class TorchRule(UserRule):
    """An optimizer of torch.optim as a rule: ``wl.TorchRule(torch.optim.Adafactor, lr=0.01)``. For tensors.

    whole: whether it needs all of the tensor, which is then one shard (default: unless every element is updated by
    itself, as in torch.optim.Adam). All other options are the optimizer's own and fixed when the tensor is made; only
    ``lr`` travels with a push. Servers in processes of their own must allow the module ``torch.optim``.
    """

    lr: float
    optimizer: str
    options: str  #: as JSON
    whole: bool

    def __init__(self, optimizer: Any, *, lr: float | None = None, whole: bool | None = None, **options: Any) -> None:
        torch = need_torch("TorchRule")
        name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", repr(optimizer))
        found = getattr(torch.optim, name, None)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or (
            found is not optimizer and name != optimizer
        ):
            raise InvalidArgument(f"TorchRule: expected a class of torch.optim, not {optimizer!r}")
        if name in _NEVER:
            raise InvalidArgument(f"TorchRule: torch.optim.{name} cannot be a rule: {_NEVER[name]}")
        ours = {field.name: options.pop(field.name, field.default) for field in dataclasses.fields(Rule)}
        if lr is None:
            lr = inspect.signature(found).parameters["lr"].default
        try:
            text = json.dumps(options, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"TorchRule: options must be numbers, texts and lists: {error}") from None
        values = {**ours, "lr": _step_size(lr), "optimizer": name, "options": text}
        values["whole"] = name not in ELEMENTWISE if whole is None else bool(whole)
        for field, value in values.items():
            object.__setattr__(self, field, value)
        self._check_options()
        _try_out(found, _read(text), (_TRIED,) if not self.whole else (2, 3), f"TorchRule: torch.optim.{name}")

    def _with(self, changes: Mapping[str, float]) -> "TorchRule":
        if unknown := sorted(set(changes) - {"lr"}):
            raise InvalidArgument(
                f"TorchRule: {unknown[0]} is fixed at creation and cannot travel with a push; these can: lr"
            )
        changed = copy.copy(self)  # there are many pushes: no further trial
        object.__setattr__(changed, "lr", _step_size(changes.get("lr", self.lr)))
        return changed

    def _numbers(self) -> tuple[float, ...]:
        return (self.lr,)

    def _name(self, shape: tuple[int, ...]) -> str:
        about: dict[str, Any] = {"options": json.loads(self.options)}
        if self.whole:
            about["shape"] = list(shape)
        return f"torch.optim:{self.optimizer} {json.dumps(about, separators=(',', ':'))}"

    def _kept(self, shape: tuple[int, ...]) -> "_Kept":
        return _kept(self._found, _read(self.options), shape if self.whole else None)

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        return self._kept(shape).layout(self.whole)

    @property
    def _state(self) -> tuple[str, ...]:
        return ()  # its names depend on the shape: _state_shapes()

    def _state_shapes(self, shape: tuple[int, ...], shards: int) -> dict[str, tuple[int, ...]]:
        kept = self._kept(shape)
        return dict.fromkeys(kept.arrays, shape) | {"shard_state": (shards, kept.size)}

    @property
    def _found(self) -> Any:
        return getattr(need_torch("TorchRule").optim, self.optimizer)


def _step_size(lr: Any) -> float:
    if isinstance(lr, bool) or not isinstance(lr, (int, float, np.floating)) or not np.isfinite(lr) or lr < 0:
        raise InvalidArgument(f"TorchRule: lr must be a number of at least 0, not {lr!r}")
    return float(lr)


def _read(text: str) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The state that an optimizer keeps of one parameter."""

    arrays: tuple[str, ...]  #: of the parameter's shape
    others: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """How many numbers per shard, including the one that says whether there is any state yet."""
        return 1 + sum(int(np.prod(shape, dtype=np.int64)) for _, shape in self.others)

    def layout(self, whole: bool) -> Layout:
        return (len(self.arrays), 0, self.size, whole, False, False)


def _try_out(optimizer: Any, options: dict[str, Any], shape: tuple[int, ...], what: str) -> dict[str, Any]:
    """The state after two steps."""
    import torch

    param = torch.nn.Parameter(torch.zeros(shape))
    try:
        opt = optimizer([param], lr=0.01, **options)
        for _ in range(2):
            param.grad = torch.ones(shape)
            opt.step()
    except Exception as error:
        raise InvalidArgument(f"{what}: {type(error).__name__}: {error}") from error
    return dict(opt.state[param])


def _kept(optimizer: Any, options: dict[str, Any], shape: tuple[int, ...] | None) -> _Kept:
    import torch

    tried = (_TRIED,) if shape is None else shape
    state = _try_out(optimizer, options, tried, f"TorchRule: torch.optim.{optimizer.__name__}")
    arrays, others = [], []
    for name, value in sorted(state.items()):
        if value is None:
            continue
        own = tuple(value.shape) if torch.is_tensor(value) else ()
        if own == tried and own != ():
            arrays.append(name)
        else:
            others.append((name, own))
    return _Kept(tuple(arrays), tuple(others))


def run_optimizer(
    optimizer: Any, options: dict[str, Any], layout: Layout, what: str
) -> "Callable[[RunningCall], None]":
    """The function that answers calls for a tensor."""
    import torch

    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise InvalidArgument(f"{what}: there is no such optimizer in torch.optim here")
    shape = tuple(int(d) for d in options["shape"]) if layout[3] else None
    given = _read(json.dumps(options.get("options", {})))
    kept = _kept(optimizer, given, shape)
    if kept.layout(layout[3]) != layout:
        raise InvalidArgument(
            f"{what}: torch.optim.{optimizer.__name__} keeps {kept.layout(layout[3])} here (arrays, numbers per row "
            f"and shard), and {layout} where the tensor is made: the two have different versions of torch"
        )

    def apply(running: "RunningCall") -> None:
        call = running.native
        own = shape if shape is not None else (call.rows * call.row,)
        param = torch.nn.Parameter(torch.from_numpy(call.w).view(own))
        param.grad = torch.from_numpy(call.g).view(own)
        opt = optimizer([param], lr=call.hyper[0], **given)
        arrays = {name: torch.from_numpy(a).view(own) for name, a in zip(kept.arrays, call.state, strict=True)}
        numbers = torch.from_numpy(call.shard_scalars)
        del call
        places, at = {}, 1
        for name, of in kept.others:
            size = int(np.prod(of, dtype=np.int64))
            places[name] = numbers[at : at + size].view(of)
            at += size
        if numbers[0] != 0:
            opt.state[param] = arrays | places
        opt.step()
        state = opt.state[param]
        for name, place in (arrays | places).items():
            now = state[name]
            if not torch.is_tensor(now) or now.data_ptr() != place.data_ptr():
                place.copy_(torch.as_tensor(now))
        numbers[0] = 1

    return apply
