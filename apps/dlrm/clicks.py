"""What to train on: people of a census, ratings of films, or clicks that are drawn; as numbers, ids and bags of ids.

An id is any whole number below 2^56: nobody needs a vocabulary. Ids of words are hashes of them, and those of crossed
features hashes of the ids that are crossed.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.bench.criteo import FEATURES, Criteo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import scores as scores_
from arguments import positive, whole
from census import CROSSED, WORDS, Words, load_arrays
from data import FILMS, DataError
from packages import files

__all__ = ["CHOICES", "Batch", "DataError", "Samples", "auc", "load", "positive", "whole"]

TEST_SHARE = 0.2  # of the films' ratings: the latest
LIKED = 4  # stars


class Bags(NamedTuple):
    """Any number of ids for each sample: those of sample i are ids[starts[i] : starts[i + 1]]."""

    ids: Tensor
    starts: Tensor

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and offsets of these samples, as torch's EmbeddingBag takes them."""
        first, counts = self.starts[rows], self.starts[rows + 1] - self.starts[rows]
        ends = counts.cumsum(0)
        offsets = ends - counts
        return self.ids[torch.arange(int(ends[-1])) + (first - offsets).repeat_interleave(counts)], offsets


#: Ids of all features, (batch, features), or each feature's ids or bags of ids by its name.
Sparse: TypeAlias = Tensor | dict[str, Tensor | tuple[Tensor, Tensor]]


class Batch(NamedTuple):
    """numbers: (batch, n). sparse: as EmbeddingBags takes it. labels: 0 or 1."""

    numbers: Tensor
    sparse: Sparse
    labels: Tensor


@dataclasses.dataclass(frozen=True)
class Samples:
    """numbers: (samples, n) float32. ids: (samples, len(features)) int64. bags: by the names of further features."""

    numbers: Tensor
    ids: Tensor
    features: tuple[str, ...]
    labels: Tensor
    bags: dict[str, Bags] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all features."""
        return (*self.features, *self.bags)

    def at(self, rows: Tensor) -> Batch:
        """These samples."""
        ids = self.ids[rows]
        sparse: Sparse = ids
        if self.bags:
            sparse = dict(zip(self.features, ids.unbind(1), strict=True))
            sparse |= {name: bags.of(rows) for name, bags in self.bags.items()}
        return Batch(self.numbers[rows], sparse, self.labels[rows])

    def in_order(self, size: int) -> Iterator[Batch]:
        """All, for a test."""
        return map(self.at, torch.arange(len(self)).split(size))

    def shuffled(self, size: int, seed: int, rank: int = 0, workers: int = 1) -> Iterator[Batch]:
        """This worker's parts of an epoch's batches, which are of `size` samples with those of all workers together;
        the remainder of the epoch is left out."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        for joined in order[: self.batches(size) * size].split(size):
            yield self.at(joined.chunk(workers)[rank])

    def batches(self, size: int) -> int:
        """In an epoch."""
        return len(self) // size


class Data(NamedTuple):
    """What to train on, and what to test on. sizes: of features whose ids are 0, 1, ... up to one of these."""

    name: str
    train: Samples
    test: Samples
    sizes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        features = f"{self.train.numbers.shape[1]} numbers and {len(self.train.names)} features"
        return f"{self.name}: {len(self.train):,} to train on, {len(self.test):,} to test on; {features}"


# -- census ------------------------------------------------------------------------------------------------------------


def load_census() -> Data:
    """Who earns more than 50,000: 7 numbers, 33 columns of words, and 10 pairs of columns crossed."""
    kept = load_arrays()
    words = (f"column {i}" for i in WORDS)
    names = (*words, *(f"columns {a} x {b}" for a, b in CROSSED))
    of = {name: torch.from_numpy(array) for name, array in kept.items()}
    mean, deviation = of["train numbers"].mean(dim=0), of["train numbers"].std(dim=0)
    train, test = (
        Samples((of[f"{part} numbers"] - mean) / deviation, of[f"{part} ids"], names, of[f"{part} labels"])
        for part in ("train", "test")
    )
    return Data("census", train, test)


# -- films -------------------------------------------------------------------------------------------------------------


def load_films() -> Data:
    """Who likes which film: user, film, age, sex, occupation, zip code; the film's genres as a bag, its year as a
    number. The latest ratings are the test."""
    content = files(FILMS)
    rated, films, users = (_lines(content[f"ml-100k.{name}"]) for name in ("inter", "item", "user"))
    rated.sort(key=lambda line: (int(line[3]), int(line[0]), int(line[1])))
    of_film, of_user = ({line[0]: line for line in lines} for lines in (films, users))
    years = {film: (int(line[2]) - 1990) / 10 if line[2].isdigit() else 0.0 for film, line in of_film.items()}
    genre, about = Words("genre"), [Words(name) for name in ("age", "sex", "job", "zip")]
    genres = {film: genre.ids(line[3].split()) for film, line in of_film.items()}
    split = len(rated) - int(len(rated) * TEST_SHARE)
    parts = []
    for some in (rated[:split], rated[split:]):
        people = [of_user[line[0]] for line in some]
        ids = [np.array([int(line[i]) for line in some], np.int64) for i in (0, 1)]
        ids += [of.ids([person[i] for person in people]) for i, of in enumerate(about, 1)]
        parts.append(
            Samples(
                numbers=torch.tensor([[years[line[1]]] for line in some]),
                ids=torch.from_numpy(np.stack(ids, axis=1)),
                features=("user", "film", "age", "sex", "job", "zip"),
                labels=torch.tensor([float(float(line[2]) >= LIKED) for line in some]),
                bags={"genres": bags_of([genres[line[1]] for line in some])},
            )
        )
    return Data("MovieLens-100K", parts[0], parts[1])


def _lines(content: bytes) -> list[list[str]]:
    return [line.split("\t") for line in content.decode().splitlines()[1:]]


def bags_of(lists: Sequence[NDArray[np.int64]]) -> Bags:
    """Of the ids of each sample."""
    starts = np.cumsum([0, *map(len, lists)])
    return Bags(torch.from_numpy(np.concatenate(lists)), torch.from_numpy(starts))


# -- clicks that are drawn ---------------------------------------------------------------------------------------------

DRAWN = 8192  # at a time
DRAWN_TEST = 8  # times


def load_zipf(samples: int, rows: int | None = None) -> Data:
    """Clicks in the shape of Criteo's; `rows` of all features together."""
    criteo = Criteo() if rows is None else Criteo(rows)
    size = min(DRAWN, samples)
    drawn = -(-samples // size)
    parts = []
    for numbers in (range(drawn), range(drawn, drawn + DRAWN_TEST)):
        batches = [criteo.batch(number, size) for number in numbers]
        numbers_, ids, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*batches, strict=True))
        parts.append(Samples(numbers_, ids, FEATURES, labels))
    sizes = tuple(criteo.cardinalities)
    return Data(f"clicks on {sum(sizes):,} rows", parts[0], parts[1], sizes)


#: What there is; the loader is given what the arguments say.
CHOICES = {
    "census": "299,285 people of a census, with crossed features",
    "movielens": "100,000 ratings of films, with genres as bags",
    "zipf": "drawn, in the shape of Criteo's clicks; no download",
}
SAMPLES = 819_200  # of drawn clicks


def load(which: str, samples: int | None = None, rows: int | None = None) -> Data:
    """which: one of CHOICES. samples: so many to train on. rows: of all features of drawn clicks."""
    if which == "zipf":
        return load_zipf(samples or SAMPLES, rows)
    loaders: dict[str, Callable[[], Data]] = {"census": load_census, "movielens": load_films}
    data = loaders[which]()
    return data if samples is None else data._replace(train=first(data.train, samples))


def first(samples: Samples, count: int) -> Samples:
    """The first ones; bags are by sample and stay as they are."""
    of = dataclasses.replace
    return of(samples, numbers=samples.numbers[:count], ids=samples.ids[:count], labels=samples.labels[:count])


def auc(labels: Tensor, scores: Tensor) -> float:
    """Of tensors."""
    return scores_.auc(labels.numpy(), scores.numpy())
