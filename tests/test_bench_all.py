"""``windlass bench all``: a file per suite, and a suite that fails does not stop the others."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windlass._cli import app, bench
from windlass.bench import suites
from windlass.bench.compare import load

MEASURES = """
import pathlib, sys
from rich.console import Console
from windlass.bench import Suite
suite = Suite(sys.argv[1], Console(quiet=True), "", short=True)
suite.value("nothing", 1.0, "us")
suite.save(pathlib.Path(sys.argv[2]))
"""


def stand_in(suite: str, file: Path, rows: int, short: bool) -> list[str]:
    return [sys.executable, "-c", "raise SystemExit(3)" if suite == "bad" else MEASURES, suite, str(file)]


def test_a_suite_that_fails_is_named_leaves_no_file_and_does_not_stop_the_others(tmp_path: Path):
    folder, lines = tmp_path / "new" / "figures", []
    folder.mkdir(parents=True)
    (folder / "bad.json").write_text("of an earlier time")
    failed = suites.run_all(folder, 0, True, lines.append, ["first", "bad", "last"], stand_in)
    assert failed == ["bad"]
    assert lines == ["bad: failed with status 3"]
    assert sorted(file.name for file in folder.iterdir()) == ["first.json", "last.json"]
    assert [measured.suite for measured in load(folder)] == ["first", "last"]


def test_the_folder_is_made(tmp_path: Path):
    assert suites.run_all(tmp_path / "a" / "b", 0, True, print, ["only"], stand_in) == []
    assert json.loads((tmp_path / "a" / "b" / "only.json").read_text())["suite"] == "only"


@pytest.mark.parametrize(("failed", "code"), [([], 0), (["wire"], 1)])
def test_the_status_says_whether_a_suite_failed(monkeypatch, tmp_path: Path, failed: list[str], code: int):
    monkeypatch.setattr(suites, "run_all", lambda *_: failed)
    result = CliRunner().invoke(app, ["bench", "all", "--json", str(tmp_path)])
    assert result.exit_code == code
    assert ("failed: wire" in result.output) == bool(failed)


def test_every_suite_is_a_command_with_a_short_form():
    commands = {command.name or command.callback.__name__ for command in bench.registered_commands}
    assert commands == {*suites.SUITES, "all", "compare"}
    for suite in suites.SUITES:
        command = suites.command(suite, Path("x.json"), 300_000, True)
        assert command[command.index("bench") + 1] == suite
        assert "--short" in command
        result = CliRunner().invoke(app, [*command[command.index("bench") :], "--help"])
        assert result.exit_code == 0, result.output
