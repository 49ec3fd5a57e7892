"""Runs have names: commands and readers find them by these, and no command changes a run that was not named."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.launch import rundir

WINDLASS = [sys.executable, "-m", "windlass"]
TRAINS = """
import sys
import numpy as np
import windlass as wl
cluster = wl.connect(timeout=300)
w = cluster.tensor("w", (4, 2), rule=wl.Sum())
w.push(np.full((4, 2), float(sys.argv[1]), np.float32)).wait()
print("trained", flush=True)
while w.pull()[0, 0] < 1000:
    pass
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder is this test's alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    for name in [name for name in os.environ if name.startswith("WINDLASS_")]:
        monkeypatch.delenv(name)


def windlass(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*WINDLASS, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)


def words(text: str) -> str:
    """Without the frame that errors and help have."""
    return " ".join(text.replace("│", " ").split())


@contextlib.contextmanager
def training(script: pathlib.Path, number: float, *options: str) -> Iterator[None]:
    """A run that has pushed this number, and goes on."""
    command = [*WINDLASS, "run", "--servers", "2", *options, str(script), str(number)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert re.fullmatch(r"windlass run: '[\w-]+' at tcp://127\.0\.0\.1:\d+\n", process.stderr.readline())
        assert process.stdout.readline() == "[worker 0] trained\n"
        yield
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_runs_are_found_by_their_names_and_changed_by_them_alone(tmp_path: pathlib.Path):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    with training(script, 1):
        refused = windlass("move", "w", "0", "1")
        assert refused.returncode == 2
        assert "these run on this machine: 'train'; name it with --run NAME" in words(refused.stderr)
        with training(script, 2), training(script, 3, "--name", "other"):
            runs = {run.name: run for run in rundir.runs()}
            assert list(runs) == ["train", "train-2", "other"]
            listed = windlass("status").stdout
            for name, run in runs.items():
                assert re.search(rf"^{name} ", listed, re.MULTILINE)
                assert run.address in listed
            shown = windlass("status", "--run", "train-2").stdout
            assert f"scheduler at {runs['train-2'].address}\n" in shown
            for name, number in (("train", 1), ("train-2", 2), ("other", 3)):
                with wl.connect(run=name, reader=True, timeout=PATIENCE_S) as reader:
                    np.testing.assert_array_equal(reader.tensor("w", (4, 2), rule=wl.Sum()).pull(), number)
            with pytest.raises(wl.NotFound, match=r"run 'trian': .*; did you mean 'train'\?"):
                wl.connect(run="trian", reader=True)
            taken = windlass("run", "--name", "other", str(script), "4")
            assert taken.returncode == 2
            assert "other-2 is free" in words(taken.stderr)
            server = "1" if "server 0" in windlass("move", "w", "0", "0", "--run", "other").stdout else "0"
            moved = windlass("move", "w", "0", server, "--run", "other")
            assert moved.stdout == f"cluster at {runs['other'].address}: shard 0 of w is on server {server}\n"
        assert [run.name for run in rundir.runs()] == ["train"]
    with pytest.raises(wl.NotFound, match="you have none"):
        wl.connect(run="train", reader=True)
    with pytest.raises(wl.InvalidArgument, match="either run='train', or an address"):
        wl.connect("tcp://127.0.0.1:1", run="train")


def test_an_option_that_is_none_is_answered_with_the_one_that_was_meant(tmp_path: pathlib.Path):
    refused = windlass("run", "--server", "2", str(tmp_path / "train.py"))
    assert refused.returncode == 2
    assert "there is no option --server; did you mean --servers?" in words(refused.stderr)


def test_help_shows_types_and_defaults():
    text = words(windlass("run", "--help").stdout)
    for shown in ("--servers count", "expected. Default: 1.", "auto|arena|socket", "dead. Default: 10.0."):
        assert shown in text
