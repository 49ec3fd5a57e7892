"""What a training loop keeps beside the weights: states of random numbers, of schedulers, of a GradScaler.

It travels in a checkpoint as JSON. What JSON lacks is a list of one dictionary with its kind; nothing else is read
back, and nothing is executed:

    [{"tensor": "uint8", "shape": [5056], "data": BASE64}]   tensors; arrays are "array"
    [{"tuple": [...]}]  [{"dict": [[KEY, VALUE], ...]}]  [{"bytes": BASE64}]  [{"float": "inf"}]
"""

import base64
import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from windlass._client.saving import Resumed
from windlass._errors import InvalidArgument
from windlass.torch._optimizer import ServerOptimizer

_RANDOM = "random"
_log = logging.getLogger("windlass")


class TrainingState:
    """What ``training_state()`` returns: called, it gives what is to be kept; ``load()`` puts it back."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise InvalidArgument(
                    f"training_state: {name}: expected something with state_dict() and load_state_dict(), not "
                    f"{type(part).__name__}"
                )
        self._parts = dict(parts)

    def __call__(self) -> dict[str, Any]:
        """Everything as it is now, in a form that JSON can say: for ``cluster.keep()`` or ``save(extra=)``."""
        kept = {name: _written(_kept(part), name) for name, part in self._parts.items()}
        return {_RANDOM: {name: _written(get(), name) for name, (get, _) in _generators().items()}, **kept}

    def load(self, resumed: "Resumed | Mapping[str, Any] | None") -> bool:
        """Puts back what ``cluster.resumed`` has, or what a call gave. False: there is nothing.

        What the checkpoint lacks stays as it is, which the log says.
        """
        extra = resumed.extra if isinstance(resumed, Resumed) else resumed
        if extra is None:
            return False
        if not isinstance(extra, Mapping) or _RANDOM not in extra:
            raise InvalidArgument("training_state: expected what training_state() gave; give that part of your extra")
        for name, part in self._parts.items():
            if name in extra:
                _put_back(part, _read(extra[name], name), name)
            else:
                _log.warning("training_state: the checkpoint has no %r; it begins anew", name)
        generators = _generators()
        for name, state in extra[_RANDOM].items():
            if name in generators:
                generators[name][1](_read(state, name))
            else:
                _log.warning("training_state: %s is not here; its random numbers begin anew", name)
        return True

    def __repr__(self) -> str:
        return f"<training state: {', '.join([_RANDOM, *self._parts])}>"


def _kept(part: Any) -> dict[str, Any]:
    """Its state, and the numbers of the groups of the optimizer that it is or steers, such as "lr"."""
    of = part if isinstance(part, ServerOptimizer) else getattr(part, "optimizer", None)
    kept: dict[str, Any] = {} if of is part else {"state": part.state_dict()}
    if isinstance(of, torch.optim.Optimizer):
        own = ("params", "param_names", "rule")
        kept["groups"] = [{k: v for k, v in group.items() if k not in own} for group in of.param_groups]
    return kept


def _put_back(part: Any, kept: Any, name: str) -> None:
    if not isinstance(kept, dict):
        raise InvalidArgument(f"training_state: {name}: the checkpoint has something else there")
    if "state" in kept:
        part.load_state_dict(kept["state"])
    of = part if isinstance(part, ServerOptimizer) else getattr(part, "optimizer", None)
    if isinstance(of, torch.optim.Optimizer):
        groups = kept.get("groups", [])
        if len(groups) != len(of.param_groups):
            raise InvalidArgument(
                f"training_state: {name}: expected {len(of.param_groups)} groups of parameters, saw {len(groups)}"
            )
        for group, numbers in zip(of.param_groups, groups, strict=True):
            group.update(numbers)


def training_state(**parts: Any) -> TrainingState:
    """Collects what a rank wants back after a restart, and puts it back: random numbers and whatever has a state. ::

        state = wl.torch.training_state(scheduler=scheduler, scaler=scaler)
        state.load(cluster.resumed)  # where the checkpoint was cut, if there was one
        cluster.keep(state)  # called when a checkpoint is due

    Random numbers are those of Python's ``random``, numpy's global generator, torch and each CUDA device. parts:
    learning-rate schedulers, a GradScaler, samplers: anything with ``state_dict()`` and ``load_state_dict()``, under
    names of yours. Of a ServerOptimizer, which schedulers bring along, it has the numbers of groups such as "lr": its
    parameters and the rule's state are on the servers, and in the checkpoint already.
    """
    if _RANDOM in parts:
        raise InvalidArgument(f"training_state: {_RANDOM!r} is the name of the random numbers' state; choose another")
    return TrainingState(parts)


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """By name: what gets the state, and what sets it."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "python": (random.getstate, random.setstate),
        "numpy": (np.random.get_state, np.random.set_state),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
    return found


def _written(value: Any, what: str) -> Any:
    """As JSON can say it."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else [{"float": str(value)}]
        case bytes():
            return [{"bytes": base64.b64encode(value).decode()}]
        case list():
            return [{"list": [_written(one, what) for one in value]}]
        case tuple():
            return [{"tuple": [_written(one, what) for one in value]}]
        case Mapping():
            return [{"dict": [[_written(k, what), _written(v, f"{what}.{k}")] for k, v in value.items()]}]
        case torch.Tensor():
            array = value.detach().cpu().contiguous()
            raw = array.reshape(-1).view(torch.uint8).numpy().tobytes()
            dtype = str(array.dtype).removeprefix("torch.")
            return [{"tensor": dtype, "shape": list(array.shape), "data": base64.b64encode(raw).decode()}]
        case np.ndarray() if value.dtype.kind in "biuf":
            raw = np.ascontiguousarray(value).tobytes()
            return [{"array": value.dtype.str, "shape": list(value.shape), "data": base64.b64encode(raw).decode()}]
        case np.generic():
            return _written(value.item(), what)
        case _:
            raise InvalidArgument(
                f"training_state: {what}: expected numbers, texts, arrays, and lists and dictionaries of such, saw "
                f"{type(value).__name__}"
            )


def _read(value: Any, what: str) -> Any:
    """What was written. Raises InvalidArgument."""
    if not isinstance(value, list):
        return value
    try:
        (about,) = value
        match about:
            case {"list": list(items)}:
                return [_read(one, what) for one in items]
            case {"tuple": list(items)}:
                return tuple(_read(one, what) for one in items)
            case {"dict": list(items)}:
                return {_read(key, what): _read(one, what) for key, one in items}
            case {"float": str(text)}:
                return float(text)
            case {"bytes": str(data)}:
                return base64.b64decode(data, validate=True)
            case {"tensor": str(dtype), "shape": list(shape), "data": str(data)}:
                kind = getattr(torch, dtype)
                if not isinstance(kind, torch.dtype):
                    raise ValueError(f"dtype {dtype!r}")
                raw = bytearray(base64.b64decode(data, validate=True))
                numbers = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
                return numbers.reshape(shape)
            case {"array": str(dtype), "shape": list(shape), "data": str(data)}:
                if np.dtype(dtype).kind not in "biuf":
                    raise ValueError(f"dtype {dtype!r}")
                return np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(shape).copy()
        raise ValueError(f"{about!r}"[:80])
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidArgument(f"training_state: {what}: the checkpoint has something else there: {error}") from error
