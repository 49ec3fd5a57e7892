"""All-reduces: what the workers give at a barrier becomes one array, which all of them get. No time, no I/O.

    rank 0   sum of float32 (3,)   1 2 3
    rank 2   sum of float32 (3,)   1 1 1      ->   of 2 workers   2 3 4

The arrays are combined once and in the order of ranks, so all who get a result get the same bits. Sums of float32 are
made in float64 and rounded once; those of int64 wrap around. If ranks do not give the same kind of array for the same
operation, or some are at a plain barrier, nothing is combined: all of them get an error that names two that differ.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from windlass.control import messages as m

ROUND_BYTES_MAX = 64 << 20  # of all workers of an app together
HELD_BYTES_MAX = 256 << 20  # in the scheduler, of all apps

Given: TypeAlias = "m.Numbers | None"  #: None: a plain barrier


#: The result of a round that an earlier scheduler made.
LOST = m.Reduced(
    error="ServerLost", why="its result was lost with the scheduler that made it; another call is made anew"
)


def nbytes(given: Given) -> int:
    """What it takes in memory."""
    return 0 if given is None else len(given.data)


def complaint(numbers: m.Numbers) -> str:
    """What is wrong with an array that has come from elsewhere; "" if nothing is."""
    import numpy as np  # here, since most schedulers never need it, and begin sooner without

    expected = math.prod(numbers.shape) * np.dtype(numbers.dtype).itemsize
    return (
        "" if len(numbers.data) == expected else f"expected {expected} bytes of {said(numbers)}, saw {nbytes(numbers)}"
    )


def said(given: Given) -> str:
    """For people."""
    return "nothing (barrier)" if given is None else f"{given.dtype} of shape {tuple(given.shape)} for op={given.op!r}"


def reduced_of(given: Mapping[int, Given]) -> m.Reduced | None:
    """What all are told, of what workers gave by rank; there is at least one. None: it was a plain barrier."""
    ranks = sorted(given)
    first = given[ranks[0]]
    for rank in ranks[1:]:
        if kind_of(given[rank]) != kind_of(first):
            return _differ(ranks[0], first, rank, given[rank])
    if first is None:
        return None
    return combined([x for rank in ranks if (x := given[rank]) is not None])


def kind_of(given: Given) -> tuple[Any, ...] | None:
    """What must be the same for all ranks."""
    return None if given is None else (given.op, given.dtype, tuple(given.shape))


def _differ(one: int, ones: Given, other: int, others: Given) -> m.Reduced:
    shapes_alone = ones is not None and others is not None and (ones.op, ones.dtype) == (others.op, others.dtype)
    error = "ShapeMismatch" if shapes_alone else "InvalidArgument"
    return m.Reduced(error=error, why=f"rank {one} gave {said(ones)}, rank {other} {said(others)}")


def combined(arrays: list[m.Numbers]) -> m.Reduced:
    """All of one kind, in the order of their ranks."""
    import numpy as np

    op, name = arrays[0].op, arrays[0].dtype
    stored = np.dtype(name)
    each = (np.frombuffer(x.data, stored.newbyteorder("<")) for x in arrays)
    with np.errstate(all="ignore"):  # infinity and NaN are numbers like others
        if op in ("max", "min"):
            total = next(each).copy()
            choose = np.maximum if op == "max" else np.minimum
            for array in each:
                choose(total, array, out=total)
        else:
            total = next(each).astype(np.int64 if op == "sum" and stored.kind == "i" else np.float64)
            for array in each:
                total += array
            if op == "mean":
                total /= len(arrays)
                name = "float64" if name == "int64" else name
        data = total.astype(np.dtype(name).newbyteorder("<")).tobytes()
    return m.Reduced(len(arrays), name, data)
