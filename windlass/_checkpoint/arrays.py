"""The arrays that a shard is made of, in the core's order, and their names in a checkpoint.

A tensor's shard: its weights, the rule's state arrays, its numbers per row, its numbers per shard. A table's: keys,
updates, touched, the rule's numbers per row, weights, state arrays. Who reads them relies on the order, not the names.
"""

import dataclasses
from typing import Any

import numpy as np

from windlass import _core
from windlass._rules.written import NotWritten, imported, read_rule

_F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Of the shards of one object."""

    name: str  #: app/name
    spec: bytes
    is_table: bool
    shape: tuple[int, ...]  #: of a tensor; of a table, that of one row
    dtype: str
    shards: int
    arrays: tuple[tuple[str, "np.dtype[Any]"], ...]
    widths: tuple[int, ...]  #: of a table: numbers of a row in each array
    initial_state: float  #: what the rule's state starts as

    def rows(self, data: "np.ndarray[Any, Any]", n: int) -> dict[str, "np.ndarray[Any, Any]"]:
        """The arrays of n rows of a table, which lie one behind the other."""
        found, at = {}, 0
        for (name, dtype), width in zip(self.arrays, self.widths, strict=True):
            end = at + n * width * dtype.itemsize
            array = data[at:end].view(dtype)
            found[name] = array if name in _HEADS else array.reshape(n, width)
            at = end
        return found

    def empty(self, shard: int, rows: int) -> dict[str, "np.ndarray[Any, Any]"]:
        """What a shard without numbers has."""
        if not self.is_table or rows:
            return {}
        return self.rows(np.empty(0, np.uint8), 0)


_HEADS = ("keys", "updates", "touched")


def parts_of(shelf: _core.Shelf, number: int, app: str | None = None) -> Parts:
    """Of an object that a server holds. app: whose files call it theirs, if it has another name here."""
    name, spec, is_table, shape, dtype, shards, vectors, row_numbers, shard_numbers, initial = shelf.describe(number)
    if app is not None:
        name = f"{app}/{name.partition('/')[2]}"
        spec = _core.renamed_spec(spec, name)
    state = state_names(spec, shards)
    if state is None or len(state) != vectors + bool(row_numbers) + bool(shard_numbers):
        state = [f"state{i}" for i in range(vectors)]
        state += ["row"] * bool(row_numbers) + ["shard"] * bool(shard_numbers)
    if not is_table:
        arrays: list[tuple[str, np.dtype[Any]]] = [("weights", np.dtype(dtype)), *((one, _F32) for one in state)]
        return Parts(name, spec, False, tuple(shape), dtype, shards, tuple(arrays), (), initial)
    heads: list[tuple[str, np.dtype[Any]]] = [
        ("keys", np.dtype(np.uint64)),
        ("updates", np.dtype(np.uint32)),
        ("touched", np.dtype(np.uint32)),
    ]
    per_row = [(one, _F32) for one in state[vectors:]]  # the rule's numbers per row come before the weights
    arrays = [*heads, *per_row, ("weights", _F32), *((one, _F32) for one in state[:vectors])]
    widths = [1, 1, 1, *[row_numbers] * bool(row_numbers), *[shape[0]] * (1 + vectors)]
    return Parts(name, spec, True, tuple(shape), dtype, shards, tuple(arrays), tuple(widths), initial)


def state_names(spec: bytes, shards: int) -> list[str] | None:
    """What users call the rule's state, in the core's order; None if the rule is not known here."""
    _, _, shape, _, rule, text, *_ = _core.read_object(spec)
    try:
        return list(read_rule(text, rule, tuple(shape), imported)._state_shapes(tuple(shape), shards))
    except NotWritten:
        return None
