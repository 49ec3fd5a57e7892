"""Between a flat's state on the servers and torch's state by parameter."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from windlass._errors import InvalidArgument
from windlass._objects.snapshot import state_shapes, take
from windlass._rules.optimizers import NAdam
from windlass.torch._flat import Flat, Segment

WEIGHT = "weight"  #: beside the names of torch's: the float32 that servers keep


def state_of(flat: Flat) -> dict[Any, dict[str, Any]]:
    """By parameter: its weight, the arrays of the rule's state under torch's names, and its count of updates."""
    taken = take(flat.tensor, flat.tensor._cluster._timeout)
    found = {}
    for segment in flat:
        own = {WEIGHT: _like(taken.weights, segment)}
        own |= {name: _like(array, segment) for name, array in taken.state.items()}
        if taken.state:
            step = int(taken.updates[segment.first // flat.tensor.shard_elements])
            own["step"] = torch.tensor(float(step))
            if isinstance(flat.tensor.rule, NAdam):
                own["mu_product"] = torch.tensor(_mu_product(flat.tensor.rule, step))
        found[segment.param] = own
    return found


def load_state(flat: Flat, state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Puts it on the servers. Parameters without a state begin with none; those without a weight keep theirs."""
    flat.collect()
    names = list(state_shapes(flat.tensor))
    weights = np.zeros(flat.n, np.float32)
    arrays = {name: np.zeros(flat.n, np.float32) for name in names}
    updates = np.zeros(flat.tensor.shards, np.int64)
    for segment in flat:
        own = state.get(segment.param, {})
        _write(weights, segment, own.get(WEIGHT, segment.weight), flat.what, WEIGHT)
        for name, array in arrays.items():
            if own.get(name) is not None:
                _write(array, segment, own[name], flat.what, name)
        per_shard = flat.tensor.shard_elements
        shards = slice(segment.first // per_shard, max(segment.end - 1, segment.first) // per_shard + 1)
        updates[shards] = np.maximum(updates[shards], int(own.get("step", 0)))
    flat.tensor.put(weights, state=arrays or None, updates=updates)


@functools.lru_cache(maxsize=64)  # parameters of a group have made the same steps
def _mu_product(rule: NAdam, step: int) -> float:
    """What torch's NAdam keeps beside its step, and servers compute from it."""
    product = 1.0
    for t in range(1, step + 1):
        product *= rule.beta1 * (1.0 - 0.5 * 0.96 ** (t * rule.momentum_decay))
        if product < 1e-45:  # below what a float32 can be
            return 0.0
    return product


def _like(array: "np.ndarray[Any, Any]", segment: Segment) -> Any:
    """A copy of a segment of an array, in the parameter's shape."""
    made = torch.empty_strided(segment.weight.shape, segment.weight.stride(), dtype=torch.float32)
    flat = torch.from_numpy(array[segment.first : segment.end])
    return made.copy_(flat.as_strided(made.shape, made.stride()))


def _write(array: "np.ndarray[Any, Any]", segment: Segment, value: Any, what: str, name: str) -> None:
    if tuple(value.shape) != tuple(segment.weight.shape):
        raise InvalidArgument(
            f"{what}: {name} of {segment.name!r} has shape {tuple(value.shape)}, expected {tuple(segment.weight.shape)}"
        )
    to = torch.from_numpy(array[segment.first : segment.end])
    to.as_strided(segment.weight.shape, segment.weight.stride()).copy_(value.detach())
