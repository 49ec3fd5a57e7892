"""Which parameters lie where in a flat tensor: a note that travels with checkpoints, for their export."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from windlass._checkpoint.layout import ParameterNote, TensorNote
from windlass.torch._device import strides_of

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster


def note(cluster: "Cluster", tensor: str, places: Iterable[tuple[str, Any, int]]) -> None:
    """names, parameters or buffers, and where each begins in the tensor."""
    parameters = []
    for name, param, first in places:
        plain = param.is_contiguous() or param.numel() < 2
        strides = None if plain else [int(stride) for stride in strides_of(param)]
        parameters.append(ParameterNote(name, [int(n) for n in param.shape], first, strides))
    cluster._notes[tensor] = msgspec.json.encode(TensorNote(parameters))
