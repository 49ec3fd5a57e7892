"""``windlass checkpoint``, as a user types it."""

import json
import pathlib
import time

import pytest
import safetensors.numpy
from made import Made, make
from typer.testing import CliRunner, Result

from windlass._checkpoint.folder import Folder
from windlass._cli import app


def windlass(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], env={"COLUMNS": "200"})


def where(made: Made) -> str:
    return made.folder.store.url


def test_ls_shows_each_with_its_age_clock_size_and_state(folder: Folder):
    now = time.time()
    good = make(folder, clock=1, created=now - 300, tag="best")
    make(folder, clock=2, created=now, partial=True)
    bad = make(folder, clock=3, created=now)
    (bad.path / "server-1.index.json").unlink()
    half = make(folder, clock=4, finish=False)
    shown = windlass("ls", where(good))
    assert shown.exit_code == 0
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[0] == ["app", "id", "clock", "age", "bytes", "objects", "state", "tag"]
    assert lines[1][:5] == ["default", good.place.id, "1", "5", "min"]
    assert lines[1][-3:] == ["2", "complete", "best"]
    assert lines[2][-3:] == ["2", "some", "objects"]
    assert lines[3][-1] == "damaged"
    assert lines[4][-1] == "half-written"
    assert f"{bad.path}/server-1.index.json: expected" in shown.stdout
    found = json.loads(windlass("ls", where(good), "--json").stdout)
    assert [row["state"] for row in found] == ["complete", "some objects", "damaged", "half-written"]
    assert found[0]["objects"] == ["default/w", "default/user"]
    assert found[3] == {**found[3], "id": half.place.id, "created": None, "objects": None}
    assert found[0]["bytes"] == sum(path.stat().st_size for path in good.path.iterdir())


def test_ls_of_nothing_says_so(tmp_path: pathlib.Path):
    assert windlass("ls", tmp_path / "none").stdout == f"{tmp_path}/none: no checkpoints\n"


def test_verify_reads_every_byte_and_fails_with_the_file(folder: Folder):
    first, second = make(folder, clock=1), make(folder, clock=2)
    make(folder, clock=3, finish=False)
    shown = windlass("verify", where(first))
    assert shown.exit_code == 0
    assert [line.rpartition(": ")[2].split(",")[0] for line in shown.stdout.splitlines()] == [
        *("good", "good", "half-written"),
    ]
    block = second.path / "server-0-0000.safetensors"
    block.write_bytes(block.read_bytes()[:-1] + b"?")
    assert windlass("ls", where(first)).stdout.count("complete") == 2, "ls reads no numbers"
    shown = windlass("verify", where(first), second.place.id)
    assert shown.exit_code == 1
    assert f"damaged: {block}: expected checksum" in shown.stderr
    assert windlass("verify", where(first)).exit_code == 1
    assert windlass("verify", where(first), first.place.name).exit_code == 0


def test_export_writes_the_newest_or_the_one_that_is_named(folder: Folder, tmp_path: pathlib.Path):
    made = make(folder, clock=1, created=1.0, tag="best")
    later = make(folder, clock=2, created=2.0)
    to = tmp_path / "out.safetensors"
    assert later.place.path in windlass("export", where(made), "--to", to).stdout
    shown = windlass("export", where(made), "best", "--to", to, "--weights-only", "--name", "w")
    assert (shown.exit_code, shown.stdout) == (0, f"{made.place.path}: {to}\n")
    assert set(safetensors.numpy.load_file(to)) == {"w"}
    (later.path / "server-0.index.json").unlink()
    shown = windlass("export", where(made), "--to", to)
    assert f"passed over {later.place.path}" in shown.stderr
    assert made.place.path in shown.stdout
    assert "needs --to" in windlass("export", where(made)).stderr


def test_rm_removes_one_and_unknown_ones_are_named(folder: Folder):
    made, other = make(folder, clock=1), make(folder, clock=2)
    assert windlass("rm", where(made), made.place.id).stdout == f"{made.place.path}: removed\n"
    assert [place.clock for place in folder.places("default")] == [2]
    shown = windlass("rm", where(made), made.place.id)
    assert shown.exit_code == 1
    assert f"no checkpoint '{made.place.id}'; the last are: {other.place.name}" in shown.stderr


def test_of_several_apps_one_is_to_be_named(folder: Folder):
    made = make(folder, clock=1)
    make(folder, clock=1, app="other")
    shown = windlass("rm", where(made), "x")
    assert shown.exit_code != 0
    assert "default, other" in " ".join(shown.stderr.split())
    assert windlass("ls", where(made)).stdout.count("complete") == 2
    assert windlass("ls", where(made), "--app", "other").stdout.count("complete") == 1


@pytest.mark.parametrize("url", ["nosuch://x/y", "", "s4://bucket"])
def test_a_place_that_nobody_knows_is_refused_in_a_sentence(url: str):
    shown = windlass("ls", url)
    assert shown.exit_code != 0
    assert "checkpoint:" in shown.stderr
    assert "Traceback" not in shown.output
