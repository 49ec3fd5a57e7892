"""The token that lets a process in, and the user's own, which processes on one host find by themselves.

    XDG_RUNTIME_DIR/windlass   the user's folder, closed to others. Without that variable it is in /run/user/UID, and if
                               there is no such folder, /tmp/windlass-UID
        token                  the user's token on this host
        run-...                windlass/launch/rundir.py

Whoever needs the user's token first makes it. It stays until the folder goes, so that schedulers, servers and workers
can come in any order. What is in the folder is trusted, so the folder must be the user's own and closed to others.
"""

import contextlib
import hashlib
import os
import pathlib
import secrets
import stat
import tempfile

from windlass._errors import InvalidArgument
from windlass._net.address import why

TOKEN_BYTES_MAX = 4096
_ATTEMPTS = 100  # one fails only if the last run of the user removes the empty folder at that very moment


def key_of(token: bytes) -> bytes:
    """What proofs are made with.

    HMAC fills short keys up with NULs and hashes long ones: without this, different tokens could be the same key.
    """
    return hashlib.sha256(token).digest()


def read_token(file: pathlib.Path) -> bytes:
    """The token in a file. White space around it does not count."""
    where = f"token file {file}"
    try:
        with file.open("rb") as opened:
            text = opened.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidArgument(f"{where}: {why(error)}") from error
    return check_token(text, where)


def check_token(text: bytes, where: str) -> bytes:
    """The token without white space around it. Raises if it is not one, and says where it came from."""
    token = text.strip()
    if not token:
        raise InvalidArgument(f"{where}: a token was expected, but it is empty")
    if len(text) > TOKEN_BYTES_MAX:
        raise InvalidArgument(f"{where}: a token has at most {TOKEN_BYTES_MAX} bytes")
    if b"\0" in token:
        raise InvalidArgument(f"{where}: a token has no NUL bytes")
    return token


# -- the user's own --------------------------------------------------------------------------------------------------


def user_folder() -> pathlib.Path:
    """Where this user's runs and token are; it may not be there yet."""
    runtime = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    if "XDG_RUNTIME_DIR" in os.environ or os.access(runtime, os.W_OK):  # a session has it set, a cron job has not
        return runtime / "windlass"
    return pathlib.Path(tempfile.gettempdir()) / f"windlass-{os.getuid()}"


def check_own(path: pathlib.Path) -> None:
    """Raises InvalidArgument unless it is this user's and closed to others, FileNotFoundError if it is not there."""
    seen = path.lstat()
    if stat.S_ISLNK(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        what = "a link" if stat.S_ISLNK(seen.st_mode) else f"uid {seen.st_uid}, mode {stat.S_IMODE(seen.st_mode):o}"
        raise InvalidArgument(
            f"{path} is not trusted: expected it to belong to you (uid {os.getuid()}) and to be closed to others "
            f"(mode 700), saw {what}; remove it, or set XDG_RUNTIME_DIR to a folder of your own"
        )


def make_user_folder() -> pathlib.Path:
    """The user's folder, made if need be, and checked."""
    folder = user_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError):
        raise  # it vanished at that moment
    except OSError as error:
        raise InvalidArgument(
            f"{folder}: {why(error)}; set XDG_RUNTIME_DIR to a folder of your own, or give a token with --token-file"
        ) from error
    check_own(folder)
    return folder


def own_token_file() -> pathlib.Path:
    """Where the user's token on this host is, once a process has needed it."""
    return user_folder() / "token"


def own_token() -> bytes:
    """The user's token on this host, made now if there is none."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            return _own_token()
    try:
        return _own_token()
    except OSError as error:
        raise InvalidArgument(f"{own_token_file()}: {why(error)}; give a token with --token-file instead") from error


def _own_token() -> bytes:
    folder, file = make_user_folder(), own_token_file()
    try:
        check_own(file)
    except FileNotFoundError:
        whole = folder / f"token-{secrets.token_hex(4)}"
        write_private(whole, secrets.token_hex(32).encode())
        try:
            os.link(whole, file)  # whoever comes first makes it, and nobody reads half of it
        except FileExistsError:
            pass
        finally:
            whole.unlink()
    return read_token(file)


def write_private(path: pathlib.Path, line: bytes) -> None:
    """A new file that only its owner can read."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(line + b"\n")
