"""The folder of one `windlass run`: its token, which only the owner can read, and where its scheduler is.

It is there while the run is, so that `windlass status` finds it. The launcher removes it; if that was killed, the
scheduler does; if everything was, the next run does.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import tempfile

_PREFIX = "run-"


def base() -> pathlib.Path:
    """Where the folders of this user's runs are."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return pathlib.Path(runtime) / "windlass"
    return pathlib.Path(tempfile.gettempdir()) / f"windlass-{os.getuid()}"


def make(address: str) -> pathlib.Path:
    """A new one for this process."""
    sweep()
    root = base()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.getuid() or root.stat().st_mode & 0o077:
        raise PermissionError(f"{root} must belong to you and be closed to others")
    folder = root / f"{_PREFIX}{os.getpid()}"
    folder.mkdir(mode=0o700)
    write(folder / "token", secrets.token_hex(32))
    write(folder / "address", address)
    return folder


def write(path: pathlib.Path, text: str) -> None:
    """A file that only the owner can read."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text + "\n")


def remove(folder: pathlib.Path) -> None:
    """And what is above it, once that is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def alive() -> list[pathlib.Path]:
    """The folders of runs that go on."""
    folders = []
    with contextlib.suppress(OSError):
        for folder in sorted(base().iterdir()):
            number = folder.name.removeprefix(_PREFIX)
            if folder.name.startswith(_PREFIX) and number.isdecimal() and pathlib.Path(f"/proc/{number}").exists():
                folders.append(folder)
    return folders


def sweep() -> None:
    """Removes what runs that were killed have left."""
    keep = set(alive())
    with contextlib.suppress(OSError):
        for folder in list(base().iterdir()):
            if folder.name.startswith(_PREFIX) and folder not in keep:
                remove(folder)
