"""Questions that servers answer where the numbers are: large data stays there, small answers come back."""

import math
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windlass._errors import InvalidArgument
from windlass._net.value_codec import pack
from windlass._objects import expressions
from windlass._objects.expressions import Expression, Row
from windlass._objects.outputs import shown
from windlass._release import owns_native
from windlass._rules.functions import Function

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster, Patience

COUNT, SUM, MEAN, SQUARES, ABSOLUTES, MIN, MAX, ABSMAX, NONZERO, HISTOGRAM, TOP = range(1, 12)
HEAD = struct.Struct("<BBxxIIxxxxQ")
BY = {name: getattr(expressions.row, name)() for name in ("norm", "sum", "mean", "max", "min", "absmax")}

Keys = np.ndarray[Any, np.dtype[np.uint64]]


class TopK(NamedTuple):
    """What ``top_k()`` returns: rows and their scores, the best first."""

    keys: Any  #: (n,) of uint64; in torch int64
    scores: Any  #: (n,) of float64


class Histogram(NamedTuple):
    """What ``histogram()`` returns, as ``numpy.histogram`` does."""

    counts: Any  #: (bins,) of int64
    edges: Any  #: (bins + 1,) of float64


@owns_native("_core")
class Walk:
    """Goes through rows in chunks; iterators over keys or rows hold one."""

    __slots__ = ("_core",)

    def __init__(self, core: Any) -> None:
        self._core = core

    def next(self, most: int, timeout: float) -> Any:
        """At most so many further rows."""
        return self._core.next(most, timeout)


class Queries:
    """What tensors and tables can be asked.

    Every shard answers at its turn and the answers are merged here: a shard's answer is of one moment, the object's
    need not be. An answer sees everything that this worker has pushed, waits for other workers as a pull does, and does
    not depend on the number of servers, to the last bit. `where`, the first argument of each, or the second behind one
    that cannot be left out, is a condition of ``wl.key`` and ``wl.row``.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _cluster: Cluster
        _patience: Patience
        _what: str

    def _ask(self, query: bytes, timeout: float) -> bytes:
        """The servers' answer, as bytes."""
        raise NotImplementedError

    def _call(self, name: str, arguments: bytes, timeout: float) -> list[bytes]:
        """What the user's function returns for each shard."""
        raise NotImplementedError

    def _row_numbers(self) -> int:
        """How many numbers a row has."""
        raise NotImplementedError

    def _is_whole(self) -> bool:
        """Whether the numbers are int64."""
        return False

    def _check_query(self, what: str) -> None:
        """Raises if the object cannot be asked."""

    def call(self, function: Function, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Has the servers call a function with ``@wl.function``, with some rows at a time; the results, merged.

        It sees this worker's own pushes, and does not wait for those of others.
        """
        what = f"call of {self._what}"
        if not isinstance(function, Function):
            raise InvalidArgument(f"{what}: expected a function with @wl.function, not {function!r}")
        arguments = pack((args, kwargs), f"{what}: arguments of {function.name!r}")
        self._cluster._know(function.name, function)
        seconds = self._cluster._timeout if timeout is None else timeout
        return function._gather(self._call(function.name, arguments, seconds), what)

    # -- rows ------------------------------------------------------------------------------------------------------

    def count(self, where: Expression | None = None, *, timeout: float | None = None) -> int:
        """How many rows there are, or for how many of them the condition holds."""
        return int(struct.unpack("<Q", self._query("count", COUNT, where, timeout))[0])

    def top_k(
        self,
        k: int,
        where: Expression | None = None,
        *,
        by: "str | int | Expression" = "norm",
        largest: bool = True,
        timeout: float | None = None,
    ) -> TopK:
        """The `k` rows with the largest score, or the smallest; fewer where there are fewer.

        `by` is "norm", "sum", "mean", "max", "min" or "absmax" of the row, the number of a column, or an expression. Of
        equal scores the smaller key comes first; NaN is behind everything.
        """
        what = f"top_k of {self._what}"
        if not expressions._is_integer(k) or k < 1:
            raise InvalidArgument(f"{what}: k must be a whole number, at least 1, not {k!r}")
        if isinstance(by, str):
            if by not in BY:
                raise InvalidArgument(
                    f"{what}: by must be one of {', '.join(BY)}, a column or an expression, not {by!r}"
                )
            by = BY[by]
        elif expressions._is_integer(by):
            by = expressions.row[by]  # type: ignore[index]
        score = expressions.encode(by, "number", self._row_numbers(), f"{what}, by")
        answer = self._query("top_k", TOP, where, timeout, largest=largest, number=min(int(k), 1 << 62), score=score)
        pairs = np.frombuffer(answer, np.dtype([("key", "<u8"), ("score", "<f8")]))
        return TopK(shown(self._cluster, pairs["key"].copy()), shown(self._cluster, pairs["score"].copy()))

    def keys(
        self, where: Expression | None = None, *, chunk_rows: int = 65536, timeout: float | None = None
    ) -> Iterator[Any]:
        """The keys of all rows for which the condition holds, in arrays of at most `chunk_rows`.

        Training may continue meanwhile, and this waits for nobody. A row that is there from start to end, and for which
        the condition holds all the time, comes exactly once. `timeout` is that of one chunk.
        """
        self._check_chunk("keys", chunk_rows)
        condition = self._condition("keys", where)
        self._cluster._session.check()
        chunks = self._key_chunks(condition, chunk_rows, self._cluster._timeout if timeout is None else timeout)
        return (shown(self._cluster, keys) for keys in chunks)

    def _key_chunks(self, where: bytes, chunk_rows: int, timeout: float) -> Iterator[Keys]:
        walk = self._walk_keys(where)
        while len(keys := self._next_keys(walk, chunk_rows, timeout)):
            yield keys

    def _walk_keys(self, where: bytes) -> Walk:
        raise NotImplementedError

    def _next_keys(self, walk: Walk, most: int, timeout: float) -> Keys:
        raise NotImplementedError

    # -- numbers ---------------------------------------------------------------------------------------------------

    def sum(self, where: Expression | None = None, *, timeout: float | None = None) -> "float | int":
        """The sum of all numbers in float64, for int64 a whole number that wraps around; 0 for an empty selection."""
        return self._number("sum", SUM, where, timeout)[1]

    def mean(self, where: Expression | None = None, *, timeout: float | None = None) -> float:
        """The mean of all numbers in float64; NaN for an empty selection."""
        n, total = self._number("mean", MEAN, where, timeout)
        return total / n if n else math.nan

    def min(self, where: Expression | None = None, *, timeout: float | None = None) -> "float | int":
        """The smallest number; NaN if one of them is NaN. Raises for an empty selection."""
        return self._extreme("min", MIN, where, timeout)

    def max(self, where: Expression | None = None, *, timeout: float | None = None) -> "float | int":
        """The largest number; NaN if one of them is NaN. Raises for an empty selection."""
        return self._extreme("max", MAX, where, timeout)

    def norm(self, where: Expression | None = None, *, ord: float = 2, timeout: float | None = None) -> float:
        """The Euclidean norm of all numbers; with `ord` 1 or inf the sum or the maximum of their absolute values."""
        functions = {2: SQUARES, 1: ABSOLUTES, math.inf: ABSMAX}
        if isinstance(ord, bool) or not isinstance(ord, int | float) or ord not in functions:
            raise InvalidArgument(f"norm of {self._what}: ord must be 1, 2 or inf, not {ord!r}")
        value = float(self._number("norm", functions[ord], where, timeout)[1])
        return math.sqrt(value) if ord == 2 else value

    def nnz(self, where: Expression | None = None, *, timeout: float | None = None) -> int:
        """How many numbers are not zero."""
        return int(self._number("nnz", NONZERO, where, timeout)[1])

    def histogram(
        self,
        where: Expression | None = None,
        *,
        bins: Any = 10,
        range: tuple[float, float] | None = None,
        timeout: float | None = None,
    ) -> Histogram:
        """How many numbers lie in each bin, as ``numpy.histogram``: a number of bins, or the edges between them.

        Without `range` the bins reach from the smallest number to the largest, which takes two more queries. Numbers
        outside the bins and NaN are not counted.
        """
        what = f"histogram of {self._what}"
        if not expressions._is_integer(bins):
            edges = np.asarray(bins, np.float64)
            if edges.ndim != 1 or len(edges) < 2 or not np.isfinite(edges).all() or (np.diff(edges) < 0).any():
                raise InvalidArgument(f"{what}: edges are at least two finite numbers that ascend, not {bins!r}")
        else:
            if bins < 1:
                raise InvalidArgument(f"{what}: at least one bin, not {bins!r}")
            low, high = self._range(range, where, timeout, what)
            edges = np.linspace(low, high, int(bins) + 1)
        answer = self._query("histogram", HISTOGRAM, where, timeout, number=len(edges), rest=edges.tobytes())
        return Histogram(
            shown(self._cluster, np.frombuffer(answer, np.int64).copy()), shown(self._cluster, edges.copy())
        )

    def _range(
        self, given: tuple[float, float] | None, where: Expression | None, timeout: float | None, what: str
    ) -> tuple[float, float]:
        if given is None:
            n, low = self._number("histogram", MIN, where, timeout)
            high = self._number("histogram", MAX, where, timeout)[1]
            if not n:
                low, high = 0, 1
        else:
            low, high = given
        low, high = float(low), float(high)
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise InvalidArgument(f"{what}: expected a finite range that ascends, saw {low} to {high}")
        return (low - 0.5, high + 0.5) if low == high else (low, high)

    # -- the rest --------------------------------------------------------------------------------------------------

    def _extreme(self, verb: str, function: int, where: Expression | None, timeout: float | None) -> "float | int":
        n, value = self._number(verb, function, where, timeout)
        if not n:
            raise InvalidArgument(f"{verb} of {self._what}: there are no numbers")
        return value

    def _number(
        self, verb: str, function: int, where: Expression | None, timeout: float | None
    ) -> tuple[int, "float | int"]:
        """How many numbers were used, and the result."""
        whole = self._is_whole() and function in (SUM, MIN, MAX)
        n, value = struct.unpack("<Qq" if whole else "<Qd", self._query(verb, function, where, timeout))
        return n, value

    def _condition(self, verb: str, where: Expression | None) -> bytes:
        self._check_query(f"{verb} of {self._what}")
        if where is None:
            return b""
        return expressions.encode(where, "condition", self._row_numbers(), f"{verb} of {self._what}, where")

    def _query(
        self,
        verb: str,
        function: int,
        where: Expression | None,
        timeout: float | None,
        *,
        largest: bool = False,
        number: int = 0,
        score: bytes = b"",
        rest: bytes = b"",
    ) -> bytes:
        condition = self._condition(verb, where)
        head = HEAD.pack(function, bool(largest), len(condition), len(score), number)
        seconds = self._patience.pull if timeout is None else timeout
        return self._ask(head + condition + score + rest, seconds)

    def _check_chunk(self, verb: str, chunk_rows: int) -> None:
        if chunk_rows < 1:
            raise InvalidArgument(f"{verb} of {self._what}: chunk_rows must be at least 1, not {chunk_rows}")


__all__ = ["Expression", "Histogram", "Queries", "Row", "TopK"]
