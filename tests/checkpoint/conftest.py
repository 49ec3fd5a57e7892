"""Small checkpoints, and what is in them."""

import pathlib

import pytest
from made import Made, make

from windlass._checkpoint.folder import Folder


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    return Folder(tmp_path / "checkpoints")


@pytest.fixture
def made(folder: Folder) -> Made:
    """One small checkpoint of a tensor and a table by two servers."""
    return make(folder)


@pytest.fixture(params=["local", "memory"])
def any_folder(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Folder:
    """In a local directory, and at a URL."""
    return Folder(tmp_path / "checkpoints" if request.param == "local" else f"memory://{tmp_path.name}/checkpoints")
