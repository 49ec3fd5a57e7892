"""The bench of checkpoints runs, and measures against what it says."""

import pathlib

import pytest
from rich.console import Console
from typer.testing import CliRunner

from windlass._cli import app
from windlass.bench import checkpoint as bench


def test_the_short_form_measures_saving_loading_training_and_a_restart(tmp_path: pathlib.Path):
    suite = bench.run(Console(quiet=True), 0, short=True, where=str(tmp_path))
    figures = {figure.name.partition(" 0.01 GB")[0]: figure for figure in suite.figures}
    for name, bar in (("save", ">= 0.8"), ("load", ">= 0.8"), ("restart from", "<= 5 s")):
        assert figures[name].bar == bar
        assert figures[name].value > 0
    assert {name for name, figure in figures.items() if figure.against == "write and fsync"} >= {"save"}
    (steps,) = (figure for figure in suite.figures if figure.unit == "steps/s")
    assert (steps.bar, steps.against) == (">= 0.9", "the same without")
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"


def test_a_plain_read_reads_every_byte(tmp_path: pathlib.Path):
    import numpy as np

    file = tmp_path / "x"
    file.write_bytes(bytes(10_000))
    buffer = np.ones(4096, np.uint8)
    bench.plain_read([file], buffer)
    assert not buffer[: 10_000 % 4096].any()


def test_a_folder_that_is_not_there_is_refused():
    done = CliRunner().invoke(app, ["bench", "checkpoint", "--dir", "/nowhere/at/all"])
    assert done.exit_code == 2
    assert "no such folder: /nowhere/at/all" in done.output


def test_a_plain_write_leaves_nothing(tmp_path: pathlib.Path):
    path = tmp_path / "plain"
    with bench.plain_write(path, 100_000) as write:
        assert all(seconds > 0 for seconds in write(2))
        assert path.stat().st_size == 100_000
    with pytest.raises(FileNotFoundError):
        path.stat()
