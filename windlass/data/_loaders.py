"""What is in the lines of files, as arrays."""

import collections
import dataclasses
import io
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass._errors import InvalidArgument
from windlass.data._files import Block, Files, Part, Path, checked_part

Where = Path | Sequence[Path] | Files
_KEY = re.compile(rb"[+-]?[0-9]+")
_PAIRS = 1 << 16  # of an iterator, at a time


def _files(where: Where) -> Files:
    return where if isinstance(where, Files) else Files(where)


def lines(where: Where, *, part: Part = (0, 1), encoding: str = "utf-8") -> Iterator[str]:
    """The lines of a text, without their ends."""
    for block in _files(where).blocks(part):
        for number, line in enumerate(block.data.removesuffix(b"\n").split(b"\n")):
            try:
                yield line.removesuffix(b"\r").decode(encoding)
            except UnicodeDecodeError as error:
                raise InvalidArgument(
                    f"{block.where(number)}: expected a line in {encoding}, but {error.reason}"
                ) from None


@dataclasses.dataclass(frozen=True)
class SparseRows:
    """Rows of a sparse matrix: row i has ``keys[starts[i]:starts[i + 1]]``, and `values` likewise."""

    labels: NDArray[np.float32]
    starts: NDArray[np.int64]  #: one more than rows
    keys: NDArray[np.int64]
    values: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: NDArray[np.integer[Any]] | slice) -> "SparseRows":
        """These rows, by their numbers or as a slice."""
        chosen = np.arange(len(self))[rows]
        counts = np.diff(self.starts)[chosen]
        starts = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(starts[-1]) + np.repeat(self.starts[chosen] - starts[:-1], counts)
        return SparseRows(self.labels[chosen], starts, self.keys[at], self.values[at])


def sparse(where: Where, *, part: Part = (0, 1)) -> SparseRows:
    """Rows of a sparse matrix, a line each: a label, then a key or KEY:VALUE for each number that is not zero.

    So libsvm writes them. A key is any whole number of 64 bits; without a value it has 1. What follows # is no part of
    a line, and empty lines are none.
    """
    found = [_sparse_block(block) for block in _files(where).blocks(part)]
    labels, counts, keys, values = (
        np.concatenate([np.zeros(0, dtype), *(one[i] for one in found)])
        for i, dtype in enumerate((np.float32, np.int64, np.int64, np.float32))
    )
    return SparseRows(labels, np.concatenate([[0], np.cumsum(counts)]), keys, values)


_Columns = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


def _sparse_block(block: Block) -> _Columns:
    """Labels, how many keys each row has, keys, values."""
    words = [line.partition(b"#")[0].split() for line in block.data.split(b"\n")]
    rows = [line for line in words if line]
    pairs = [pair.partition(b":") for line in rows for pair in line[1:]]
    try:
        if not all(key and (value or not colon) for key, colon, value in pairs):
            raise ValueError
        labels = np.array([float(line[0]) for line in rows], np.float32)
        keys = _keys([key for key, _, _ in pairs])
        values = np.array([float(value) if colon else 1.0 for _, colon, value in pairs], np.float32)
    except (ValueError, OverflowError):
        raise InvalidArgument(_first_wrong(block, words)) from None
    return labels, np.array([len(line) - 1 for line in rows], np.int64), keys, values


def _keys(texts: list[bytes]) -> NDArray[np.int64]:
    numbers = list(map(int, texts))
    try:
        return np.array(numbers, np.int64)
    except OverflowError:  # of 2^63 and more: the same 64 bits
        if min(numbers) < -(2**63) or max(numbers) >= 2**64:
            raise
        return np.array([number & (2**64 - 1) for number in numbers], np.uint64).view(np.int64)


def _first_wrong(block: Block, words: list[list[bytes]]) -> str:
    """What is wrong with the first line that is."""
    for number, line in enumerate(words):
        for place, word in enumerate(line):
            key, colon, value = word.partition(b":") if place else (b"0", b":", word)
            whole = _KEY.fullmatch(key) and -(2**63) <= int(key) < 2**64
            if not whole or (colon and not _is_number(value)):
                expected = "a key of 64 bits, or KEY:VALUE" if place else "a label, a number"
                return f"{block.where(number)}: expected {expected}, not {word.decode(errors='replace')!r}"
    return f"{block.name}: expected rows of a sparse matrix"


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def dense(
    where: Where, *, part: Part = (0, 1), delimiter: str | None = ",", header: bool = False, dtype: Any = np.float32
) -> NDArray[Any]:
    """A matrix, a row per line, its numbers with `delimiter` between them; None: white space.

    header: the first line of each file names columns and is left out.
    """
    wide: int | None = None
    found: list[NDArray[Any]] = []
    for block in _files(where).blocks(part):
        data = block.data
        if header and block.begin == 0:
            data = data.partition(b"\n")[2]
        table = _table(block, data, delimiter, dtype)
        if table.size == 0:
            continue
        if wide not in (None, table.shape[1]):
            raise InvalidArgument(f"{block.name}: expected rows of {wide} numbers, not of {table.shape[1]}")
        wide = table.shape[1]
        found.append(table)
    return np.concatenate(found) if found else np.zeros((0, wide or 0), dtype)


def _table(block: Block, data: bytes, delimiter: str | None, dtype: Any) -> NDArray[Any]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt: input contained no data")
            return np.loadtxt(io.BytesIO(data), dtype, delimiter=delimiter, ndmin=2, encoding="utf-8")
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"{block.name}, from byte {block.begin} on: {error}") from None


@dataclasses.dataclass(frozen=True)
class Edges:
    """Edges of a graph: from ``source[i]`` to ``target[i]``."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    weight: NDArray[np.float32] | None  #: where the file has a third column

    def __len__(self) -> int:
        return len(self.source)


def edges(where: "Where | Iterable[tuple[int, int]]", *, part: Part = (0, 1), delimiter: str | None = None) -> Edges:
    """Edges of a graph, one per line: two numbers of nodes, and a weight if there is a third number.

    Or out of an iterator of pairs, of which the part (i, n) has every n-th.
    """
    if not isinstance(where, (str, Files)) and not hasattr(where, "__fspath__"):
        first, given = _peeked(iter(where))
        if not isinstance(first, str) and not hasattr(first, "__fspath__"):
            return _edges_of(given, checked_part(part))
        where = list(given)
    found = dense(where, part=part, delimiter=delimiter, dtype=np.float64)  # type: ignore[arg-type]
    if found.size and found.shape[1] not in (2, 3):
        name = _files(where).names[0]  # type: ignore[arg-type]
        raise InvalidArgument(
            f"{name}: expected edges of 2 nodes, or 2 and a weight, not {found.shape[1]} numbers a line"
        )
    nodes = found[:, :2] if found.size else np.zeros((0, 2))
    if not ((nodes == np.floor(nodes)) & (np.abs(nodes) <= 2**53)).all():
        wrong = nodes[~((nodes == np.floor(nodes)) & (np.abs(nodes) <= 2**53)).all(axis=1)][0]
        raise InvalidArgument(f"edges: expected whole numbers of nodes up to 2^53, not {wrong.tolist()}")
    whole = nodes.astype(np.int64)
    weight = found[:, 2].astype(np.float32) if found.ndim == 2 and found.shape[1] == 3 else None
    return Edges(whole[:, 0], whole[:, 1], weight)


def _peeked(given: Iterator[Any]) -> tuple[Any, Iterator[Any]]:
    for first in given:
        return first, itertools.chain([first], given)
    return None, iter(())


def _edges_of(pairs: Iterator[tuple[int, int]], part: Part) -> Edges:
    mine = itertools.islice(pairs, part[0], None, part[1])
    found: collections.deque[NDArray[np.int64]] = collections.deque([np.zeros((0, 2), np.int64)])
    while some := list(itertools.islice(mine, _PAIRS)):
        try:
            found.append(np.array(some, np.int64).reshape(-1, 2))
        except (ValueError, TypeError, OverflowError):
            raise InvalidArgument(
                f"edges: expected pairs of whole numbers, such as {some[0]!r}, in an iterator"
            ) from None
    whole = np.concatenate(found)
    return Edges(whole[:, 0], whole[:, 1], None)
