"""Which checkpoint a scheduler begins with that was started again."""

import pathlib

import pytest
from made import make

import windlass as wl
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import opaque
from windlass.control.manifests import Checkpoints


def begins_with(where: pathlib.Path, resume: str | None, since: float | None) -> str | None:
    found = Checkpoints(str(where), 3, resume, "default", since).resume
    return None if found is None else found.id


def test_one_that_was_taken_since_goes_before_what_the_run_began_with(tmp_path: pathlib.Path):
    folder = Folder(str(tmp_path))
    assert begins_with(tmp_path, None, 1000.0) is None  # nothing there: the run begins
    old = make(folder, clock=5, created=900.0, tag="best", ledgers=opaque({}))
    assert begins_with(tmp_path, None, 1000.0) is None  # another run's
    assert begins_with(tmp_path, "newest", 1000.0) == old.place.id
    assert begins_with(tmp_path, "best", 1000.0) == old.place.id
    own = make(folder, clock=7, created=1001.0, ledgers=opaque({}))
    for resume in (None, "newest", "best"):
        assert begins_with(tmp_path, resume, 1000.0) == own.place.id
    assert begins_with(tmp_path, "best", None) == old.place.id
    assert begins_with(tmp_path, None, None) is None


def test_where_there_is_none_what_was_asked_for_is_missed_by_its_name(tmp_path: pathlib.Path):
    with pytest.raises(wl.NotFound, match="there is no checkpoint of app 'default' to resume from"):
        begins_with(tmp_path, "newest", 1000.0)
