"""Rows of a table with all that is kept of them: what ``table.export(state=True)`` returns and ``put()`` takes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windlass._errors import InvalidArgument, ShapeMismatch
from windlass._objects.arrays import ArrayLike, as_keys, is_torch
from windlass._objects.outputs import shown
from windlass._objects.snapshot import as_kept

if TYPE_CHECKING:
    from windlass._objects.table import Table

_UPDATES_MAX = 2**32 - 1


class ChunkWithState(NamedTuple):
    """Some rows of a table and the state of their rule: ``other.put(*chunk)`` sets them elsewhere."""

    keys: "np.ndarray[Any, np.dtype[np.uint64]]"  #: (n,)
    weights: "np.ndarray[Any, np.dtype[np.float32]]"  #: (n, dim)
    #: By the names of ``Snapshot.state``, (n, dim) each; "sum" of RowAdagrad is (n,), "row_state" of a rule of your
    #: own (n, how many).
    state: "dict[str, np.ndarray[Any, np.dtype[np.float32]]]"
    updates: "np.ndarray[Any, np.dtype[np.int64]]"  #: (n,): how often the rule has updated each row


def chunk_of(table: "Table", keys: Any, weights: Any, arrays: list[Any], updates: Any) -> ChunkWithState:
    """What the core has exported."""
    shapes = _state_shapes(table, len(keys))
    at = table._cluster
    state = {name: shown(at, array.reshape(shapes[name])) for name, array in zip(shapes, arrays, strict=True)}
    return ChunkWithState(shown(at, keys), shown(at, weights), state, shown(at, updates))


def put(
    table: "Table",
    keys: "ArrayLike",
    weights: "ArrayLike",
    state: "Mapping[str, ArrayLike] | None",
    updates: "int | ArrayLike | None",
    timeout: float,
) -> None:
    """Sets rows."""
    what = f"put of {table._what}"
    keyed = as_keys(keys, what)
    if keyed.ndim != 1:
        raise ShapeMismatch(f"{what}: expected keys in one dimension, saw an array of shape {tuple(keyed.shape)}")
    n = len(keyed)
    shapes = _state_shapes(table, n)
    state = {} if state is None else state
    if unknown := sorted(set(state) - set(shapes)):
        has = ", ".join(map(repr, shapes)) or "none"
        raise InvalidArgument(f"{what}: {table.rule} has no state {unknown[0]!r}; it has {has}")
    parts: list[Any] = [as_kept(weights, (n, table.dim), "float32", f"{what}, weights", rows=True)]
    for name, shape in shapes.items():
        given = state.get(name)
        parts.append(None if given is None else as_kept(given, shape, "float32", f"{what}, state {name!r}", rows=True))
    table._core.put(keyed, parts, None if updates is None else _counts(updates, n, f"{what}, updates"), timeout)


def _state_shapes(table: "Table", n: int) -> dict[str, tuple[int, ...]]:
    """The rule's state of n rows, in the core's order."""
    return table.rule._state_shapes((n, table.dim), 1)


def _counts(updates: "int | ArrayLike", n: int, what: str) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """A count for each row; `updates` is one for all or one for each."""
    array = updates.numpy() if is_torch(updates) else np.asarray(updates)  # type: ignore[union-attr]
    if array.shape not in ((), (n,)) or array.dtype.kind not in "iu":
        raise ShapeMismatch(
            f"{what}: expected a whole number or {n} of them, saw {array.dtype.name} of shape {array.shape}"
        )
    if wrong := array[(array < 0) | (array > _UPDATES_MAX)].ravel()[:1].tolist():
        raise InvalidArgument(f"{what}: expected 0 to 2**32 - 1, saw {wrong[0]}")
    return np.ascontiguousarray(np.broadcast_to(array, (n,)), np.int64)
