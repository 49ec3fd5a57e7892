"""Helpers for keys."""

from typing import Any

import numpy as np

from windlass import _core
from windlass._objects.arrays import ArrayLike, as_keys, as_torch, is_torch


def unique(keys: ArrayLike, *, sorted: bool = False) -> tuple[Any, Any]:
    """Each key once, and for every key its place there: ``unique[inverse] == keys``.

    Unlike numpy's and torch's, the result is not sorted unless asked for; its order depends on the keys alone. Sorted
    keys ascend as signed numbers. The dtype is that of the keys.
    """
    array = as_keys(keys, "unique")
    found, inverse = _core.unique(array, sorted)
    if is_torch(keys):
        return as_torch(found.view(np.int64)).to(array.dtype), as_torch(inverse)
    return (found.astype(array.dtype) if array.dtype.itemsize == 4 else found.view(array.dtype)), inverse
