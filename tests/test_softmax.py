"""Softmax regression: what the smallest app prints, refuses and survives."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S

APPS = Path(__file__).resolve().parents[1] / "apps"
TRAIN = [sys.executable, str(APPS / "softmax" / "train.py")]


def run_app(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRAIN, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)


def test_it_learns_the_digits_and_says_how_well() -> None:
    done = run_app("--fallback", "--epochs", "20")
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


def test_it_is_repeatable_and_the_seed_matters() -> None:
    def lines_of_loss(seed: str) -> list[str]:
        done = run_app("--fallback", "--epochs", "3", "--seed", seed)
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
def test_it_refuses_wrong_arguments(arguments: list[str], complaint: str) -> None:
    done = run_app("--fallback", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stdout == ""


def test_it_says_when_the_training_diverges() -> None:
    done = run_app("--fallback", "--lr", "1e38")
    assert done.returncode == 1
    assert done.stderr == "train.py: the loss of epoch 1 is not a number any more; try a smaller --lr than 1e+38\n"


def test_it_stops_at_an_interrupt_without_a_traceback() -> None:
    arguments = [*TRAIN, "--fallback", "--epochs", "10000000"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        while "epoch 1/" not in app.stdout.readline():
            assert app.poll() is None
        app.send_signal(signal.SIGINT)
        _, complaint = app.communicate(timeout=PATIENCE_S)
    assert app.returncode == 130
    assert complaint == "\nstopped\n"


def test_it_ends_quietly_when_its_reader_leaves() -> None:
    arguments = [*TRAIN, "--fallback", "--epochs", "1000"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        assert app.stderr is not None
        app.stdout.readline()
        app.stdout.close()
        complaint = app.stderr.read()
        app.wait(timeout=PATIENCE_S)
    assert complaint == ""
