"""Whoever writes a checkpoint may be interrupted at any moment: the one before stays good."""

import errno
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from made import Made, content, equal, facts, make, new_place

import windlass as wl
from windlass._checkpoint import local
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import Manifest, Object
from windlass._checkpoint.reader import Checkpoint, newest
from windlass._checkpoint.retention import prune
from windlass._checkpoint.writer import ServerFiles, write_manifest

CALLS = ("open", "writev", "fsync", "rename", "mkdir")  # what changes a folder; cleaning up may fail, too
CLEANING = ("unlink", "rmdir")


class System:
    """The operating system, which fails from its nth call on, or at that one alone. It notes who called what."""

    def __init__(self, fails_at: int, error: BaseException | None, *, for_good: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._fails_at = fails_at
        self._error = error
        self._for_good = for_good

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS + CLEANING:
            return real

        def called(*arguments: Any, **named: Any) -> Any:
            n = len(self.calls)
            self.calls.append((name, arguments))
            failing = n >= self._fails_at if self._for_good else n == self._fails_at and name in CALLS
            if failing and self._error is not None:
                raise self._error
            result = real(*arguments, **named)
            self.calls[n] = (name, (*arguments, result))
            return result

        return called


@pytest.fixture
def older(folder: Folder) -> Made:
    return make(folder, clock=5, created=1e9)


def save(folder: Folder) -> Made:
    """As a server does, which cleans up where it fails."""
    place = new_place()
    arrays = {"weights": np.arange(100, dtype=np.float32)}
    files = ServerFiles(folder, place, 0, block_bytes=256)
    try:
        files.add("default/w", 0, arrays)
        files.shard_done("default/w", 0, facts("default/w", 0, arrays))
        known = Object("default/w", "tensor", "F32", [100], 1, b"")
        manifest = Manifest(place.id, place.app, place.clock, 2e9, "0", [known], [files.finish()])
        write_manifest(folder, manifest)
    except BaseException:
        files.abort()
        raise
    return Made(folder, place, manifest, {("default/w", 0): arrays})


def steps(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many calls a save makes."""
    system = System(0, None)
    with monkeypatch.context() as patch:
        patch.setattr(local, "os", system)
        made = save(folder)
    folder.remove(made.place)
    return len(system.calls)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_step_leaves_the_one_before_and_nothing_else(
    folder: Folder, older: Made, monkeypatch: pytest.MonkeyPatch, code: int
):
    n = steps(folder, monkeypatch)
    assert n > 20
    failed = 0
    for at in range(n + 5):
        with monkeypatch.context() as patch:
            patch.setattr(local, "os", System(at, OSError(code, os.strerror(code))))
            try:
                made = save(folder)
            except wl.StorageFailed as error:
                failed += 1
                assert error.errno == code  # noqa: PT017
                assert os.strerror(code) in str(error)  # noqa: PT017
                assert str(folder.store.url) in str(error)  # noqa: PT017
                made = None
        if made is not None:
            folder.remove(made.place)
        found = newest(folder, "default")
        assert found.checkpoint is not None
        assert found.checkpoint.place == older.place
        assert [entry.place for entry in folder.entries("default")] == [older.place]
    print(f"{failed} of {n} calls failed")
    assert failed > n - 4
    assert equal(content(Checkpoint.open(folder, older.place)), older.shards)


class Killed(BaseException):
    """The process is gone: nothing after it happens."""


def test_a_death_at_any_step_leaves_the_one_before_and_what_is_pruned_later(
    folder: Folder, older: Made, monkeypatch: pytest.MonkeyPatch
):
    n = steps(folder, monkeypatch)
    for at in range(n + 1):
        with monkeypatch.context() as patch:
            patch.setattr(local, "os", System(at, Killed(), for_good=True))
            try:
                save(folder)
            except Killed:
                pass
            else:
                assert at >= n
        found = newest(folder, "default")
        assert found.checkpoint is not None
        found.checkpoint.verify()
        assert found.checkpoint.place == older.place or at >= n - 3
        for path in pathlib.Path(folder.store.url).rglob("*"):  # as if that was long ago
            if path.is_file() and path.name != "manifest.json":
                os.utime(path, (1, 1))
        after = save(folder)
        prune(folder, "default", keep=1)
        assert [entry.place for entry in folder.entries("default")] == [after.place]
        folder.remove(after.place)
        older = make(folder, clock=5, created=1e9)


def check_order(folder: Folder, system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls of a save: what must be on the disk before something else happens."""
    monkeypatch.setattr(local, "os", system)
    made = save(folder)
    fds: dict[int, str] = {}
    synced: dict[str, int] = {}
    named: dict[str, int] = {}
    for at, (name, arguments) in enumerate(system.calls):
        if name == "open":
            fds[arguments[-1]] = arguments[0]
        elif name == "fsync":
            synced[fds[arguments[0]]] = at
        elif name == "writev":
            synced.pop(fds[arguments[0]], None)
        elif name == "rename":
            assert arguments[0] in synced, f"{arguments[0]} got its name before its bytes were on the disk"
            named[pathlib.Path(arguments[1]).name] = at
    manifest = named.pop("manifest.json")
    folder_synced = [at for at, (name, of) in enumerate(system.calls) if name == "fsync" and at > max(named.values())]
    assert max(named.values()) < folder_synced[0] < manifest < synced[str(made.path)]


def test_names_are_given_to_synced_files_and_the_manifest_comes_after_synced_folders(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
):
    check_order(folder, System(0, None), monkeypatch)


def test_a_writer_that_syncs_nothing_turns_this_red(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    class Careless(System):
        def __getattr__(self, name: str) -> Any:
            return (lambda fd: None) if name == "fsync" else super().__getattr__(name)

    with pytest.raises(AssertionError, match="before its bytes were on the disk"):
        check_order(folder, Careless(0, None), monkeypatch)


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 8 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(where)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a file system of 8 MiB: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def write_numbers(folder: Folder, mebibytes: int) -> Made:
    place, arrays = new_place(), {"weights": np.random.default_rng(5).random(mebibytes << 17)}
    files = ServerFiles(folder, place, 0, block_bytes=1 << 20)
    try:
        files.add("default/w", 0, arrays)
        files.shard_done("default/w", 0, facts("default/w", 0, arrays))
        known = Object("default/w", "tensor", "F64", [len(arrays["weights"])], 1, b"")
        manifest = Manifest(place.id, place.app, place.clock, 2e9 + mebibytes, "0", [known], [files.finish()])
        write_manifest(folder, manifest)
    except wl.StorageFailed:
        files.abort()
        raise
    return Made(folder, place, manifest, {("default/w", 0): arrays})


def test_a_disk_that_fills_keeps_the_checkpoint_before_and_gets_its_room_back(small_disk: pathlib.Path):
    folder = Folder(small_disk / "checkpoints")
    good = write_numbers(folder, 4)
    free = os.statvfs(small_disk).f_bavail
    for _ in range(3):
        with pytest.raises(wl.StorageFailed, match=re.escape(os.strerror(errno.ENOSPC))) as caught:
            write_numbers(folder, 6)
        assert caught.value.errno == errno.ENOSPC
        assert [entry.place for entry in folder.entries("default")] == [good.place]
        assert os.statvfs(small_disk).f_bavail >= free - 1
    found = newest(folder, "default").checkpoint
    assert found is not None
    assert found.place == good.place
    assert equal(content(found), good.shards)
    after = write_numbers(folder, 3)
    assert equal(content(Checkpoint.open(folder, after.place)), after.shards)
