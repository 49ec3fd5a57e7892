"""The folders of runs: none is lost to a run beside it, none is seen half made, and what the dead leave is removed."""

import os
import pathlib
import re
import signal
import stat
import subprocess
import sys

import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._net.token import own_token, own_token_file, user_folder
from windlass.launch import rundir

PROCESSES, SECONDS = 6, 2.0

#: Makes and removes folders, and looks at what others have made; says what went wrong.
BUSY = """
import os, sys, time
from windlass.launch import rundir

seconds, made, seen = float(sys.argv[1]), 0, 0
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + seconds
while time.monotonic() < end:
    address = f"tcp://127.0.0.1:{made + 1}"
    folder = rundir.make(address)
    made += 1
    others = rundir.alive()
    assert folder in others, f"{folder} is not among those that are alive: {others}"
    for other in others:
        for name in ("token", "address"):
            try:
                assert (other / name).read_text().endswith("\\n"), f"{other / name} is half written"
                seen += 1
            except FileNotFoundError:  # it has been removed since, all of it
                assert not other.exists(), f"{other} has no {name}"
    rundir.sweep()
    assert (folder / "address").read_text() == address + "\\n"
    assert len((folder / "token").read_text()) == 65
    rundir.remove(folder)
print(made, seen)
"""
HOLDS = "from windlass.launch import rundir\nprint(rundir.make('tcp://127.0.0.1:1'), flush=True)\ninput()\n"


@pytest.fixture(autouse=True)
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The base folder, of this test alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return user_folder()


def python(code: str, *arguments: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def holder() -> "tuple[subprocess.Popen[str], pathlib.Path]":
    """A process that has made a folder and lives, and that folder."""
    process = python(HOLDS)
    assert process.stdout is not None
    return process, pathlib.Path(process.stdout.readline().strip())


def ended(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_runs_that_begin_and_end_beside_each_other_lose_nothing(root: pathlib.Path):
    processes = [python(BUSY, str(SECONDS)) for _ in range(PROCESSES)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:  # all are up: they begin at once
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        done = [process.communicate(timeout=PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            ended(process)
    assert [error for _, error in done] == [""] * PROCESSES
    made, seen = (sum(column) for column in zip(*(map(int, out.split()) for out, _ in done), strict=True))
    print(f"{made} folders made, {seen} files of others and of one's own read")
    assert seen > 2 * made > 2 * PROCESSES
    assert not root.exists()


def test_a_folder_is_alive_until_its_run_removes_it(root: pathlib.Path):
    folder = rundir.make("tcp://127.0.0.1:1")
    other, theirs = holder()
    try:
        assert rundir.alive() == sorted([folder, theirs])
        assert rundir.of(other.pid) == theirs
        rundir.remove(folder)
        rundir.remove(folder)
        assert rundir.alive() == [theirs]
        with pytest.raises(FileNotFoundError, match=f"process {os.getpid()} has no folder"):
            rundir.of(os.getpid())
    finally:
        ended(other)
    rundir.sweep()
    assert not root.exists()


def test_the_folder_of_a_run_that_was_killed_is_swept_and_a_stopped_ones_stays(root: pathlib.Path):
    stopped, kept = holder()
    killed, left = holder()
    try:
        stopped.send_signal(signal.SIGSTOP)
        ended(killed)
        assert left.exists()
        assert rundir.alive() == [kept]
        mine = rundir.make("tcp://127.0.0.1:1")
        assert sorted(root.iterdir()) == sorted([mine, kept])
        rundir.remove(mine)
    finally:
        ended(stopped)
    rundir.sweep()
    assert not root.exists()


def test_a_recycled_process_number_keeps_no_folder(root: pathlib.Path):
    first = rundir.make("tcp://127.0.0.1:1")
    rundir.remove(first)
    root.mkdir(mode=0o700)
    for pid in (1, os.getpid()):  # of another user, or our own: both live, and neither has made it
        folder = root / f"run-{pid}-0"
        folder.mkdir()
        (folder / "token").touch()
    assert rundir.alive() == []
    mine = rundir.make("tcp://127.0.0.1:2")
    assert list(root.iterdir()) == rundir.alive() == [mine] == [rundir.of(os.getpid())]
    rundir.remove(mine)
    assert not root.exists()


@pytest.mark.parametrize("files", [[], ["token"], ["token", "bearer", "header", "address"]])
def test_no_reader_sees_a_half_made_folder_and_the_next_run_removes_it(root: pathlib.Path, files: list[str]):
    begins = f"""
import os, signal
from windlass.launch import rundir
real, written = rundir.write_private, 0
def write(*arguments):
    if written == {len(files)}:
        os.kill(os.getpid(), signal.SIGKILL)
    globals()["written"] += 1
    real(*arguments)
rundir.write_private = write
os.rename = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
rundir.make("tcp://127.0.0.1:1")
"""
    process = python(begins)
    assert process.communicate(timeout=PATIENCE_S) == ("", "")
    assert process.returncode == -signal.SIGKILL
    (half,) = root.iterdir()
    assert sorted(path.name for path in half.iterdir()) == sorted(files)
    assert rundir.alive() == []
    rundir.sweep()
    assert not root.exists()


def test_a_folder_that_is_being_made_is_not_swept(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    real = rundir.write_private

    def write(path: pathlib.Path, line: bytes) -> None:
        assert rundir.alive() == []
        subprocess.run([sys.executable, "-c", "from windlass.launch import rundir; rundir.sweep()"], check=True)
        real(path, line)

    monkeypatch.setattr(rundir, "write_private", write)
    rundir.remove(rundir.make("tcp://127.0.0.1:1"))
    assert not root.exists()


@pytest.mark.parametrize("times", [1, 20])
def test_a_base_folder_that_vanishes_is_made_again(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, times: int):
    real, left = pathlib.Path.mkdir, [times]

    def mkdir(path: pathlib.Path, *arguments: int, **options: int) -> None:
        if path.name.startswith("part-") and left[0] > 0:
            left[0] -= 1
            path.parent.rmdir()
        real(path, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
    folder = rundir.make("tcp://127.0.0.1:1")
    assert left == [0]
    assert rundir.alive() == [folder]
    rundir.remove(folder)


def test_a_base_folder_that_vanishes_every_time_is_an_error(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    real = pathlib.Path.mkdir

    def mkdir(path: pathlib.Path, *arguments: int, **options: int) -> None:
        if path.name.startswith("part-"):
            path.parent.rmdir()
        real(path, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
    with pytest.raises(FileNotFoundError, match="part-"):
        rundir.make("tcp://127.0.0.1:1")


def test_a_base_folder_that_others_can_enter_is_refused(root: pathlib.Path):
    root.mkdir(mode=0o755)
    expected = re.escape(f"{root} is not trusted: expected it to belong to you (uid {os.getuid()})")
    for use in (lambda: rundir.make("tcp://127.0.0.1:1"), rundir.alive, rundir.sweep, own_token):
        with pytest.raises(wl.InvalidArgument, match=f"{expected}.* mode 755"):
            use()
    assert list(root.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_base_folder_of_another_user_is_refused(root: pathlib.Path):
    folder = rundir.make("tcp://127.0.0.1:1")
    os.chown(root, 65534, 65534)
    try:
        for use in (lambda: rundir.make("tcp://127.0.0.1:1"), rundir.alive, own_token):
            with pytest.raises(wl.InvalidArgument, match=r"is not trusted.* saw uid 65534, mode 700"):
                use()
    finally:
        os.chown(root, 0, 0)
    rundir.remove(folder)


def test_a_base_folder_that_is_a_link_is_refused(root: pathlib.Path, tmp_path: pathlib.Path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    for use in (lambda: rundir.make("tcp://127.0.0.1:1"), rundir.alive, own_token):
        with pytest.raises(wl.InvalidArgument, match=r"is not trusted.* saw a link"):
            use()


def test_status_trusts_no_run_that_others_can_enter(root: pathlib.Path):
    folder = rundir.make("tcp://127.0.0.1:1")
    folder.chmod(0o755)
    for command in ("status", "doctor"):
        result = subprocess.run([sys.executable, "-m", "windlass", command], capture_output=True, text=True)
        assert result.returncode != 0
        said = " ".join((result.stdout + result.stderr).replace("│", " ").split())
        assert "is not trusted" in said
        assert "mode 755" in said
    rundir.remove(folder)


# -- the user's own token --------------------------------------------------------------------------------------------


def test_processes_that_need_the_users_token_at_once_find_the_same_one(root: pathlib.Path):
    code = "import sys\nfrom windlass._net.token import own_token\nsys.stdin.readline()\nprint(own_token().decode())"
    processes = [python(code) for _ in range(PROCESSES)]
    said = {process.communicate("go\n", PATIENCE_S) for process in processes}
    assert said == {(f"{own_token().decode()}\n", "")}
    assert [path.name for path in root.iterdir()] == ["token"]
    assert stat.S_IMODE((root / "token").stat().st_mode) == 0o600
    assert len(own_token()) == 64
    run = rundir.make("tcp://127.0.0.1:1")  # whose end leaves the token
    rundir.remove(run)
    assert own_token_file().read_text().strip() == own_token().decode()


def test_a_users_token_that_others_can_read_is_refused(root: pathlib.Path):
    own_token()
    own_token_file().chmod(0o644)
    with pytest.raises(wl.InvalidArgument, match=r"token is not trusted.* mode 644"):
        own_token()


def test_only_the_owner_can_read_the_token(root: pathlib.Path):
    folder = rundir.make("tcp://127.0.0.1:1")
    for path, mode in ((root, 0o700), (folder, 0o700), (folder / "token", 0o600), (folder / "address", 0o600)):
        assert path.stat().st_mode & 0o777 == mode, path
    rundir.remove(folder)
