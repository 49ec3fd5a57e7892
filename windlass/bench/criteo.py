"""Clicks in the shape of Criteo's, drawn without end: 13 numbers, 26 ids and a label each.

::

    rank   0      1      2     3  ...        the feature's first value is the most frequent, by a power law
    id     5031   77     9120  418 ...       ids are scattered, so that frequent ones are not neighbours
    h(id)  (.3, -.8, ...)                    an id's hidden factors are a hash of it; labels follow from their products

Batch `number` depends on the seed and its number alone, and no two batches are alike: what is measured on them finds
frequent rows in a cache and rare ones not, as in training. Nothing is stored: not the ids, not the factors.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Distinct values of each of the 26 categorical columns of Criteo's display advertising challenge: 33.8 million.
CARDINALITIES = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992),
    *(5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
NUMBERS = 13
FEATURES = tuple(f"c{i}" for i in range(1, len(CARDINALITIES) + 1))
EXPONENT = 1.05
FACTORS = 4  # hidden ones of an id
SPREAD = 1.5  # of what the factors say, beside the numbers' 0.5
BIAS = -1.0  # about a quarter of the clicks are positive
_PRIME = 2_654_435_761  # larger than any cardinality, so multiplying by it is one to one


class Clicks(NamedTuple):
    """A batch: numbers are (size, 13) float32, ids (size, 26) int64, each below its feature's cardinality; labels are
    0 or 1, float32."""

    numbers: NDArray[np.float32]
    ids: NDArray[np.int64]
    labels: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Criteo:
    """The generator. rows: of all features together, each having its share (Criteo's own 33,762,577). exponent: of the
    power law of each feature; 0 is even."""

    rows: int = sum(CARDINALITIES)
    exponent: float = EXPONENT
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows < len(CARDINALITIES):
            raise ValueError(f"Criteo: rows must be at least {len(CARDINALITIES)}, one per feature, not {self.rows}")
        if not (self.exponent >= 0 and math.isfinite(self.exponent)):
            raise ValueError(f"Criteo: exponent must be a finite number of at least 0, not {self.exponent}")

    @property
    def cardinalities(self) -> list[int]:
        """Distinct ids of each feature."""
        if self.rows == sum(CARDINALITIES):
            return list(CARDINALITIES)
        return [max(1, count * self.rows // sum(CARDINALITIES)) for count in CARDINALITIES]

    def batch(self, number: int, size: int) -> Clicks:
        """Of so many clicks; the same for the same number and size."""
        rng = np.random.default_rng((self.seed, number))
        numbers = np.log1p(rng.exponential(2.0, (size, NUMBERS))).astype(np.float32)
        ids = np.empty((size, len(CARDINALITIES)), np.int64)
        for feature, count in enumerate(self.cardinalities):
            ids[:, feature] = zipf_ids(rng, count, size, self.exponent, salt=self.seed + feature)
        logit = BIAS + SPREAD * self._agreement(ids) + 0.5 * (numbers @ self._slopes())
        labels = rng.random(size) < 1 / (1 + np.exp(-logit))
        return Clicks(numbers, ids, labels.astype(np.float32))

    def batches(self, size: int, first: int = 0) -> Iterator[Clicks]:
        """Without end."""
        while True:
            yield self.batch(first, size)
            first += 1

    def _agreement(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """How well the hidden factors of a click's ids go together: the products of all pairs, of deviation 1."""
        hidden = _hash(ids + (np.arange(ids.shape[1], dtype=np.int64) << 56), self.seed)
        factors = hidden.view(np.int16).reshape(*ids.shape, FACTORS).astype(np.float32) / 2**15
        pairs = factors.sum(axis=1, dtype=np.float64) ** 2 - (factors**2).sum(axis=1, dtype=np.float64)
        deviation = math.sqrt(ids.shape[1] * (ids.shape[1] - 1) / 2 * FACTORS) / 3
        agreement: NDArray[np.float64] = pairs.sum(axis=1) / 2 / deviation
        return agreement

    def _slopes(self) -> NDArray[np.float32]:
        drawn = np.random.default_rng((self.seed, 0, 1)).standard_normal(NUMBERS)
        return np.asarray((drawn - drawn.mean()) / math.sqrt(NUMBERS), np.float32)


def zipf_ids(
    rng: np.random.Generator, count: int, size: int, exponent: float = EXPONENT, salt: int = 0
) -> NDArray[np.int64]:
    """Ids below `count`, the most frequent of which has rank 0 and so on; scattered.

    The law is the continuous one, rounded: x has density x^-exponent between 1/2 and count + 1/2. It needs no table of
    all ids, and its frequencies are Zipf's within a tenth for the first rank and a few per cent for the others.
    """
    low, high = 0.5, count + 0.5
    drawn = rng.random(size)
    if abs(exponent - 1) < 1e-9:
        x = low * (high / low) ** drawn
    else:
        power = 1 - exponent
        x = (low**power + drawn * (high**power - low**power)) ** (1 / power)
    ranks = np.minimum(np.rint(x).astype(np.int64), count) - 1
    return scattered(np.maximum(ranks, 0), count, salt)


def scattered(ranks: NDArray[np.int64], count: int, salt: int = 0) -> NDArray[np.int64]:
    """The id of each rank: one to one below `count`."""
    return (ranks * _PRIME + salt * 7919) % count


def _hash(keys: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """64 bits without a pattern for each."""
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(keys).view(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
