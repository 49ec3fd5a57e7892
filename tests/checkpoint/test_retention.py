"""Which checkpoints stay."""

import os
import pathlib

import pytest
from made import Made, make

import windlass as wl
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.names import MANIFEST
from windlass._checkpoint.reader import find, newest
from windlass._checkpoint.retention import prune


def clocks(folder: Folder) -> list[int]:
    return [place.clock for place in folder.places("default")]


def age(made: Made, seconds: float) -> None:
    """Makes its files so old."""
    for path in pathlib.Path(made.folder.where(made.place)).iterdir():
        at = path.stat().st_mtime - seconds
        os.utime(path, (at, at))


def test_the_newest_complete_ones_stay(any_folder: Folder):
    for clock in range(1, 6):
        make(any_folder, clock=clock, created=1e9 + clock)
    pruned = prune(any_folder, "default", keep=2)
    assert clocks(any_folder) == [4, 5]
    assert [place.clock for place in pruned.removed] == [3, 2, 1]
    assert prune(any_folder, "default", keep=2).removed == []


def test_newest_means_made_last_whatever_the_clock(folder: Folder):
    make(folder, clock=100, created=1e9)
    make(folder, clock=7, created=1e9 + 1)
    found = newest(folder, "default").checkpoint
    assert found is not None
    assert found.place.clock == 7
    prune(folder, "default", keep=1)
    assert clocks(folder) == [7]


def test_those_with_a_tag_and_those_of_chosen_objects_stay_and_do_not_count(folder: Folder):
    make(folder, clock=1, created=1e9 + 1, tag="best")
    make(folder, clock=2, created=1e9 + 2, partial=True)
    make(folder, clock=3, created=1e9 + 3)
    make(folder, clock=4, created=1e9 + 4)
    make(folder, clock=5, created=1e9 + 5, tag="last")
    prune(folder, "default", keep=1)
    assert clocks(folder) == [1, 2, 4, 5]


def test_resume_passes_over_those_of_chosen_objects(folder: Folder):
    whole = make(folder, clock=1, created=1e9)
    chosen = make(folder, clock=2, created=1e9 + 1, partial=True)
    found = newest(folder, "default")
    assert found.checkpoint is not None
    assert found.checkpoint.place == whole.place
    assert [(one.place, one.why) for one in found.passed] == [(chosen.place, "it holds only some objects")]


def test_half_written_ones_go_once_a_newer_one_is_complete(folder: Folder):
    old, writing = (make(folder, clock=clock, finish=False) for clock in (1, 2))
    age(old, 100)
    age(writing, 100)
    prune(folder, "default", keep=1)
    assert clocks(folder) == [1, 2], "nothing is complete yet"
    make(folder, clock=3, created=1e9)
    young = make(folder, clock=4, finish=False)
    os.utime(young.path / "server-0.index.json", (4e9, 4e9))
    pruned = prune(folder, "default", keep=1, writing=[writing.place.id])
    assert pruned.removed == [old.place]
    assert clocks(folder) == [2, 3, 4]


def test_damaged_ones_stay_and_count_for_nothing(folder: Folder):
    good = make(folder, clock=1, created=1e9)
    bad, later = make(folder, clock=2, created=1e9 + 1), make(folder, clock=3, created=1e9 + 2)
    (bad.path / "server-0-0000.safetensors").unlink()
    (later.path / MANIFEST).write_bytes(b'{"format_version":2}')
    pruned = prune(folder, "default", keep=1)
    assert clocks(folder) == [1, 2, 3]
    assert {one.place for one in pruned.passed} == {bad.place, later.place}
    assert newest(folder, "default").checkpoint is not None
    assert good.path.is_dir()


def test_removing_leaves_what_is_not_ours(folder: Folder):
    made = make(folder)
    (made.path / "notes.txt").write_text("mine")
    folder.remove(made.place)
    assert [path.name for path in made.path.iterdir()] == ["notes.txt"]


def test_apps_do_not_see_one_another(any_folder: Folder):
    for app in ("default", "My App", "v1.2"):
        make(any_folder, app=app, clock=3)
        make(any_folder, app=app, clock=4, created=2e9)
    assert any_folder.apps() == ["My App", "default", "v1.2"]
    prune(any_folder, "My App", keep=1)
    assert [place.clock for place in any_folder.places("My App")] == [4]
    assert [place.clock for place in any_folder.places("v1.2")] == [3, 4]


def test_one_is_found_by_id_tag_or_folder(any_folder: Folder):
    made = make(any_folder, tag="best")
    for which in (made.place.id, made.place.name, "best"):
        assert find(any_folder, "default", which) == made.place
    with pytest.raises(wl.NotFound, match=f"no checkpoint 'worst'; the last are: {made.place.name}"):
        find(any_folder, "default", "worst")


def test_an_app_without_checkpoints_has_none(any_folder: Folder):
    assert newest(any_folder, "default") == (None, [])
    assert any_folder.apps() == []
    with pytest.raises(wl.InvalidArgument, match="at least 1"):
        prune(any_folder, "default", keep=0)


@pytest.mark.parametrize(
    ("app", "name"),
    [("default", "default"), ("v1.2", "v1.2e2"), ("..", ".2e.2e"), ("A b", ".41.20b"), ("ä", ".c3.a4"), ("a-b", "a-b")],
)
def test_an_app_has_one_folder_and_it_is_below_the_root(folder: Folder, app: str, name: str):
    made = make(folder, app=app)
    assert made.place.path.split("/")[0] == name
    assert made.path.parent == pathlib.Path(folder.store.url) / name
    assert folder.apps() == [app]


def test_a_folder_of_others_is_no_app(any_folder: Folder):
    made = make(any_folder)
    any_folder.store.write("exports", "model.safetensors", [b"x"])
    assert any_folder.apps() == [made.place.app]
