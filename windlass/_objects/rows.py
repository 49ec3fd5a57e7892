"""Rows of a tensor: which of them ``t[10:20]`` and ``t[[3, 1, 4]]`` are."""

from typing import Any, TypeAlias

import numpy as np

from windlass._errors import InvalidArgument
from windlass._objects.arrays import is_torch, is_whole

Rows: TypeAlias = "tuple[int, int] | np.ndarray[Any, Any]"  #: from one to before another, or their numbers


def chosen_rows(rows: Any, rows_max: int, what: str) -> tuple[Rows, int]:
    """Which rows of `rows_max` an index means, and how many they are."""
    if isinstance(rows, slice):
        begin, end, step = rows.indices(rows_max)
        if step != 1:
            raise InvalidArgument(f"{what}: a slice of rows has step 1, not {step}")
        end = max(begin, end)
        return (begin, end), end - begin
    if isinstance(rows, tuple):  # of numpy's arrays it would be one element, or a block
        meant = f"for rows {list(rows)} use t[{list(rows)}]" if all(map(is_whole, rows)) else "columns cannot be chosen"
        raise InvalidArgument(f"{what}: rows are a slice or a list of integers, not {rows!r}; {meant}")
    if is_torch(rows):
        rows = rows.numpy()
    try:
        array = np.asarray(rows)
    except ValueError:
        array = np.asarray(None)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(f"{what}: rows are a slice or a list of integers, not {rows!r}; for one row use t[i:i+1]")
    if array.size and not -rows_max <= int(array.min()) <= int(array.max()) < rows_max:
        wrong = next(int(i) for i in array if not -rows_max <= int(i) < rows_max)
        raise InvalidArgument(f"{what}: row {wrong} of {rows_max}")
    listed = array.astype(np.int64)  # a copy: the caller's list may change
    listed[listed < 0] += rows_max
    return listed, len(listed)
