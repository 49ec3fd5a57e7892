"""The folder of one `windlass run`: its token, which only the owner can read, where its scheduler is, and its name.
What is derived from the token for readers of `/metrics` lies beside it, as a value and as a header.

It is there while the run is, so that `windlass status` and ``wl.connect(run=NAME)`` find it. The launcher removes it;
if that was killed, the scheduler does; if everything was, the next run does.

Runs begin and end beside each other in one base folder, without a common lock:

    base/part-4711-9f2c41d7   half made or half removed; no reader looks at it
    base/run-4711-9f2c41d7    complete: `token`, `bearer`, `header`, `address` and `about` are in it

The process that makes a folder locks it (flock) and keeps the lock for life; the kernel releases it when the process
ends, however that happens. So the folder itself tells whether its run goes on. A process number does not: it may belong
to another process by now, and means nothing in another container. A `run-` folder is locked before it has that name, so
one without a lock is dead. A `part-` folder without a lock may be a moment old: sweep() locks it before it removes it,
and make() starts over if it lost that race. Names are random, so none is used twice.
"""

import contextlib
import dataclasses
import difflib
import fcntl
import json
import os
import pathlib
import secrets
import shutil
import time
from collections.abc import Iterator

from windlass._errors import InvalidArgument, NotFound
from windlass._net.token import check_own, make_user_folder, read_token, user_folder, write_private
from windlass.control.auth import bearer

BEARER, HEADER = "bearer", "header"  # the Bearer value for Prometheus, and all of its header for curl
_COMPLETE, _PARTIAL = "run-", "part-"
_ATTEMPTS = 100  # one fails only if another run removes something at that very moment

_locks: dict[pathlib.Path, int] = {}  # of the folders that this process has made


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of this user on this machine that goes on."""

    name: str
    script: str
    since: float  #: when it began, as time.time()
    address: str
    folder: pathlib.Path

    def token(self) -> bytes:
        """What lets one in."""
        return read_token(self.folder / "token")


def make(address: str, token: bytes | None = None, *, name: str = "run", script: str = "") -> pathlib.Path:
    """A new one for this process, with this token or a new one."""
    token = secrets.token_hex(32).encode() if token is None else token
    about = json.dumps({"name": name, "script": script, "since": time.time()})
    sweep()
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError, FileExistsError, BlockingIOError):
            return _make(address, token, about)
    return _make(address, token, about)


def _make(address: str, token: bytes, about: str) -> pathlib.Path:
    root, name = make_user_folder(), f"{os.getpid()}-{secrets.token_hex(4)}"
    partial, complete = root / f"{_PARTIAL}{name}", root / f"{_COMPLETE}{name}"
    partial.mkdir(mode=0o700)
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _hold(lock)
        write_private(partial / "token", token)
        for file, line in bearer_files(token).items():
            write_private(partial / file, line)
        write_private(partial / "address", address.encode())
        write_private(partial / "about", about.encode())
        partial.rename(complete)
    except BaseException:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _locks[complete] = lock
    return complete


def bearer_files(token: bytes) -> dict[str, bytes]:
    """What lets one read the status, by the name of the file."""
    value = bearer(token)
    return {BEARER: value.encode(), HEADER: f"Authorization: Bearer {value}".encode()}


def _hold(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise  # somebody removes it
    except OSError:
        pass  # a file system without locks: every folder counts as alive, and a killed run's stays


def remove(folder: pathlib.Path) -> None:
    """And what is above it, once that is empty. Readers see all of the folder or nothing."""
    partial = folder.with_name(f"{_PARTIAL}{folder.name.removeprefix(_COMPLETE)}")
    with contextlib.suppress(OSError):
        folder.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def alive() -> list[pathlib.Path]:
    """The folders of this user's runs that go on. Raises InvalidArgument if one, or all, could be somebody else's."""
    found = [folder for folder in _folders(_COMPLETE) if _held(folder)]
    for folder in found:
        with contextlib.suppress(FileNotFoundError):  # it has ended since
            check_own(folder)
    return found


def runs() -> list[Run]:
    """This user's runs that go on, the oldest first."""
    found = []
    for folder in alive():
        with contextlib.suppress(FileNotFoundError):  # it has ended since
            about = json.loads((folder / "about").read_text())
            found.append(Run(**about, address=(folder / "address").read_text().strip(), folder=folder))
    return sorted(found, key=lambda run: run.since)


def named(name: str) -> Run:
    """The run of this name. Raises NotFound, with the names there are."""
    there = runs()
    found = [run for run in there if run.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        addresses = ", ".join(run.address for run in found)
        raise InvalidArgument(
            f"run {name!r}: {len(found)} runs have this name; use one of their addresses: {addresses}"
        )
    names = [run.name for run in there]
    close = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"you have {', '.join(map(repr, names)) or 'none'}"
    raise NotFound(f"run {name!r}: you have no run of this name on this machine; {hint}")


def free_name(wanted: str) -> str:
    """This name, with a number behind it if a run that goes on has it."""
    taken = {run.name for run in runs()}
    candidates = (wanted if i == 1 else f"{wanted}-{i}" for i in range(1, len(taken) + 2))
    return next(name for name in candidates if name not in taken)


def of(pid: int) -> pathlib.Path:
    """The folder of the run whose launcher this process is."""
    for folder in _folders(f"{_COMPLETE}{pid}-"):
        if _held(folder):
            return folder
    raise FileNotFoundError(f"process {pid} has no folder of a run in {user_folder()}")


def sweep() -> None:
    """Removes what runs that were killed have left."""
    for folder in _folders(_COMPLETE):
        if not _held(folder):
            remove(folder)
    for folder in _folders(_PARTIAL):
        with contextlib.suppress(OSError), _locked(folder, fcntl.LOCK_EX):
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.rmdir()


def _folders(prefix: str) -> list[pathlib.Path]:
    root = user_folder()
    try:
        check_own(root)
        return sorted(folder for folder in root.iterdir() if folder.name.startswith(prefix))
    except OSError:
        return []


def _held(folder: pathlib.Path) -> bool:
    """Whether the process that made it lives. In doubt it does: a folder in use must stay."""
    try:
        with _locked(folder, fcntl.LOCK_SH):  # shared: readers do not take each other for the owner
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def _locked(folder: pathlib.Path, how: int) -> Iterator[None]:
    """Raises BlockingIOError if somebody else has the lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
