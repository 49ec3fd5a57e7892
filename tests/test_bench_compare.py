"""``windlass bench compare``: it says what moved by more than the noise, and refuses what it cannot read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from windlass._cli import app
from windlass._errors import InvalidArgument
from windlass.bench._figures import Figure
from windlass.bench.compare import compare, load


def write(path: Path, *figures: Figure, suite: str = "core", **more: Any) -> Path:
    kept = {"suite": suite, "title": "", "measured": "", "short": False, "machine": {"cpu": "x"}} | more
    path.write_text(json.dumps(kept | {"figures": [dataclasses.asdict(f) for f in figures]}))
    return path


def rate(ratio: float, noise: float | None = 0.02, name: str = "push", against: str = "loop") -> Figure:
    return Figure(name, 10 * ratio, "GB/s", limit=10, ratio=ratio, noise=noise, against=against)


def said(tmp_path: Path, old: Figure, new: Figure) -> str:
    lines: list[str] = []
    compare(write(tmp_path / "old.json", old), write(tmp_path / "new.json", new), lines.append)
    return "\n".join(lines)


def test_a_figure_that_moved_by_more_than_the_noise_of_both_is_shown_with_both(tmp_path: Path):
    assert "worse: core: push (loop): 0.8 -> 0.72 of the limit, moved -10.0% / noise 4.0%" in said(
        tmp_path, rate(0.8), rate(0.72)
    )
    assert "1 of 1 figures moved, 0 of them for the better." in said(tmp_path, rate(0.8), rate(0.72))


def test_within_the_noise_nothing_moved(tmp_path: Path):
    text = said(tmp_path, rate(0.8, noise=0.05), rate(0.73, noise=0.05))
    assert "Nothing moved: 1 figures are within their noise." in text
    assert "worse" not in text


def test_the_ratio_counts_and_not_the_machines_speed(tmp_path: Path):
    slower = dataclasses.replace(rate(0.8), value=4.0, limit=5.0)
    assert "Nothing moved" in said(tmp_path, rate(0.8), slower)


@pytest.mark.parametrize(
    ("unit", "old", "new", "how"),
    [("us", 10.0, 5.0, "better"), ("us", 5.0, 10.0, "worse"), ("GB/s", 10.0, 5.0, "worse"), ("x", 1.0, 1.5, "better")],
)
def test_the_direction_is_by_the_unit(tmp_path: Path, unit: str, old: float, new: float, how: str):
    figures = [Figure("it", value, unit, noise=0.01) for value in (old, new)]
    assert f"{how}: core: it: {old:.3g} -> {new:.3g} {unit}" in said(tmp_path, *figures)


def test_a_figure_seen_once_must_move_by_a_fifth(tmp_path: Path):
    once = [Figure("growth", value, "MiB") for value in (1.0, 1.15, 1.25, 0.0)]
    assert "Nothing moved" in said(tmp_path, once[0], once[1])
    assert "worse: core: growth: 1 -> 1.25 MiB, moved +25.0% / noise 20.0%" in said(tmp_path, once[0], once[2])
    assert "worse: core: growth: 0 -> 1 MiB" in said(tmp_path, once[3], once[0])
    assert "Nothing moved" in said(tmp_path, once[3], once[3])


def test_figures_that_came_and_went_are_named_by_what_they_are_held_against(tmp_path: Path):
    text = said(tmp_path, rate(0.8, against="torch RPC"), rate(0.8, against="Ray"))
    assert "went: core: push (torch RPC)" in text
    assert "came: core: push (Ray)" in text


def test_folders_are_compared_suite_by_suite_and_other_files_in_them_are_left_alone(tmp_path: Path):
    for name, ratio in (("old", 0.8), ("new", 0.4)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "core.json", rate(0.8))
        write(tmp_path / name / "wire.json", rate(ratio), suite="wire")
        (tmp_path / name / "mnist.json").write_text('{"data": "MNIST"}')
    lines: list[str] = []
    compare(tmp_path / "old", tmp_path / "new", lines.append)
    assert [line.split(" (")[0] for line in lines if line.startswith("worse")] == ["worse: wire: push"]


def test_it_says_when_machines_differ_and_when_a_run_was_short(tmp_path: Path):
    old = write(tmp_path / "old.json", rate(0.8))
    new = write(tmp_path / "new.json", rate(0.8), machine={"cpu": "y"}, short=True)
    lines: list[str] = []
    compare(old, new, lines.append)
    assert lines[0].startswith("new: core measured with --short")
    assert lines[1].startswith("The machines differ (cpu: x -> y)")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[]", "an object with figures; it is a list"),
        ("{}", "it has no 'figures', only nothing"),
        ('{"suite": "core", "figures": [], "short": false}', "it has no 'machine', only suite, figures, short"),
        ('{"suite": "core", "short": false, "machine": {}, "figures": [{"speed": 3}]}', "its fields are others"),
        (
            '{"suite": "core", "short": false, "machine": {}, "figures": [{"name": "a", "value": "x", "unit": "us"}]}',
            "its figure 'a' has",
        ),
    ],
)
def test_what_is_not_such_a_file_is_refused_by_name(tmp_path: Path, text: str | None, complaint: str):
    file = tmp_path / "some.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidArgument, match=r"some\.json: expected a file that `windlass bench") as error:
        load(file)
    assert complaint in str(error.value)


def test_an_empty_folder_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument, match=r"expected files of `windlass bench all --json .*found none"):
        load(tmp_path)


def test_the_command_has_status_0_when_figures_moved_and_2_without_a_traceback_for_a_bad_file(tmp_path: Path):
    from typer.testing import CliRunner

    old, new = write(tmp_path / "old.json", rate(0.8)), write(tmp_path / "new.json", rate(0.4))
    result = CliRunner().invoke(app, ["bench", "compare", str(old), str(new)])
    assert result.exit_code == 0
    assert "worse: core: push" in result.stdout
    result = CliRunner().invoke(app, ["bench", "compare", str(old), str(tmp_path / "none.json")])
    assert result.exit_code == 2
    assert "none.json" in result.output
    assert "Traceback" not in result.output
