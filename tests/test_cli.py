"""The command ``windlass``, as a user runs it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

import windlass as wl
from windlass.bench import local, wire


def windlass(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from windlass._cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_version_names_the_version_and_the_instruction_set():
    result = windlass("version")
    assert result.returncode == 0
    assert re.fullmatch(rf"windlass {re.escape(wl.__version__)} \((baseline|avx2|avx512), \d+ cores\)\n", result.stdout)


def test_without_arguments_it_shows_what_there_is():
    assert "bench" in windlass().stdout


@pytest.mark.parametrize("arguments", [["nothing"], ["bench", "nothing"], ["bench", "core", "--rows", "3"], ["--x"]])
def test_wrong_arguments_are_refused_with_status_2(arguments: list[str]):
    result = windlass(*arguments)
    assert result.returncode == 2
    assert "Usage" in result.stderr


def test_bench_refuses_a_file_it_cannot_write_before_it_measures(tmp_path: Path):
    result = windlass("bench", "core", "--json", str(tmp_path / "no" / "figures.json"), timeout=20)
    assert result.returncode == 2
    assert "no such folder" in result.stderr


def test_bench_core_shows_a_table_and_saves_every_figure(tmp_path: Path):
    path = tmp_path / "figures.json"
    result = windlass("bench", "core", "--short", "--rows", "200000", "--json", str(path))
    assert result.returncode == 0, result.stderr
    figures = json.loads(path.read_text())["figures"]
    assert len({f["name"] for f in figures}) == len(figures) >= 20
    for figure in figures:
        assert {"name", "value", "unit", "limit", "ratio"} <= figure.keys()
        assert figure["value"] > 0
        if figure["limit"] is not None:
            assert figure["ratio"] == pytest.approx(figure["value"] / figure["limit"])
        assert figure["name"][:20] in result.stdout


@pytest.mark.parametrize("suite", [wire, local], ids=["wire", "local"])
def test_the_other_benches_run_and_compare_with_limits(suite: ModuleType):
    figures = suite.run(Console(quiet=True), 200_000, short=True).figures
    assert len({figure.name for figure in figures}) >= 9
    assert all(figure.value >= 0 for figure in figures)
    assert sum(figure.ratio is not None for figure in figures) >= 8
