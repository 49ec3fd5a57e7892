"""The command ``windlass``, as a user runs it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import PATIENCE_S
from rich.console import Console

import windlass as wl
from windlass.bench import Suite, in_run, local, wire


def windlass(*arguments: str, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
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
    result = windlass("bench", "core", "--json", str(tmp_path / "no" / "figures.json"))
    assert (result.returncode, result.stdout) == (2, "")
    assert "no such folder" in result.stderr


def test_bench_core_shows_a_table_and_saves_every_figure(tmp_path: Path):
    path = tmp_path / "figures.json"
    result = windlass("bench", "core", "--short", "--rows", "200000", "--json", str(path))
    assert result.returncode == 0, result.stderr
    figures = json.loads(path.read_text())["figures"]
    assert len({f["name"] for f in figures}) == len(figures) >= 18
    for figure in figures:
        assert {"name", "value", "unit", "limit", "ratio"} <= figure.keys()
        assert figure["value"] > 0
        if figure["limit"] is not None:
            assert figure["ratio"] == pytest.approx(figure["value"] / figure["limit"])
        assert figure["name"][:20] in result.stdout


@pytest.mark.parametrize("suite", [wire, local], ids=["wire", "local"])
def test_the_other_benches_run_and_compare_with_limits(suite: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(in_run, "together", one_cluster)
    figures = suite.run(Console(quiet=True), 200_000, short=True).figures
    assert len({figure.name for figure in figures}) >= 9
    assert all(figure.value >= 0 for figure in figures)
    assert sum(figure.ratio is not None for figure in figures) >= 8
    if suite is local:
        names = {figure.name for figure in figures}
        assert {
            "push_pull SGD 64 KB, bare server",
            "push_pull SGD of 4 floats, in a run",
            "pull of 256 keys, in a run, CPU time of both sides",
            "push_pull SGD 4 MB, in a run, ordinary arrays",
            "table pull, dim 64, in a run, ordinary arrays",
            "pull + push + tick of 256 keys, BSP, 2 workers in a run, the tick",
            "push_pull SGD 16 MB, BSP, 2 workers in a run, together",
        } <= names


def one_cluster(suite: Suite) -> None:
    """One policy is enough to see that it works."""
    in_run.measure(suite, 2, 2, "bsp", "iterations", "push_pulls")


def test_a_run_of_the_bench_that_fails_is_an_error_with_its_last_words(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"ended with status 3; it said:\nthe reason"):
        in_run.run_until_it_ends([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], str(tmp_path))
