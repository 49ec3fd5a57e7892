"""What a machine gives a process: memory, files, huge pages, cores; from within whatever container it is in."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import platform
import resource
from collections.abc import Iterator

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_THP = pathlib.Path("/sys/kernel/mm/transparent_hugepage")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NO_LIMIT = 1 << 60  # how version 1 of cgroups says that there is none


@dataclasses.dataclass(frozen=True)
class Machine:
    """What was seen; nothing here is judged."""

    kernel: tuple[int, int]
    memory_bytes: int  #: what this process may ever have
    available_bytes: int
    contained: bool  #: whether that is the limit of a cgroup, not the machine's own
    overcommit: str  #: /proc/sys/vm/overcommit_memory
    files: tuple[int, int]  #: RLIMIT_NOFILE, soft and hard; -1: no limit
    locked_bytes: int  #: RLIMIT_MEMLOCK; -1: no limit
    memfd_trouble: str  #: why no sealed file in memory can be made, or nothing
    shm_free_bytes: int | None  #: in /dev/shm; None: there is none
    huge_pages: str  #: of anonymous memory, such as "madvise"; nothing where the kernel has none
    huge_pages_shared: str  #: of memfd, such as "advise"
    cores: int  #: this process may run on
    cores_there: int
    cores_quota: float | None  #: how many its cgroup lets it use at a time


def look() -> Machine:
    """At this one."""
    from windlass import _core

    memory = {line.split(":")[0]: line.split()[1] for line in _read(pathlib.Path("/proc/meminfo")).splitlines()}
    total, available = (int(memory.get(name, "0")) * 1024 for name in ("MemTotal", "MemAvailable"))
    groups = _read(pathlib.Path("/proc/self/cgroup"))
    limit, left = memory_of(_CGROUPS, groups)
    free = None
    with contextlib.suppress(OSError):
        space = os.statvfs("/dev/shm")
        free = space.f_bavail * space.f_frsize
    return Machine(
        kernel=kernel_version(platform.release()),
        memory_bytes=min(total, limit),
        available_bytes=min(available, left),
        contained=limit < total,
        overcommit=_read(pathlib.Path("/proc/sys/vm/overcommit_memory")).strip(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        memfd_trouble=_memfd_trouble(),
        shm_free_bytes=free,
        huge_pages=chosen(_read(_THP / "enabled")),
        huge_pages_shared=chosen(_read(_THP / "shmem_enabled")),
        cores=_core.cores(),
        cores_there=os.cpu_count() or 1,
        cores_quota=cores_of(_CGROUPS, groups),
    )


def kernel_version(release: str) -> tuple[int, int]:
    """Of "6.1.0-13-amd64" the first two numbers."""
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def chosen(text: str) -> str:
    """The word that is bracketed in "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]


def memory_of(root: pathlib.Path, groups: str) -> tuple[int, int]:
    """The least limit on memory of our cgroups, and the least that one of them has left; 2^60 where there is none.

    groups: /proc/self/cgroup. Version 2 of cgroups has the line "0::/path", version 1 "4:memory:/path".
    """
    limit = left = _NO_LIMIT
    for folder, unified in _folders(root, groups, "memory"):
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most, used = (_read(folder / name).strip() for name in names)
        if not (most.isdecimal() and used.isdecimal()) or int(most) >= _NO_LIMIT:
            continue
        key = "inactive_file " if unified else "total_inactive_file "
        lines = _read(folder / "memory.stat").splitlines()
        cache = sum(int(line.removeprefix(key)) for line in lines if line.startswith(key))  # given up when needed
        limit, left = min(limit, int(most)), min(left, max(0, int(most) - int(used) + cache))
    return limit, left


def cores_of(root: pathlib.Path, groups: str) -> float | None:
    """How many cores our cgroups let us use at a time; None: all."""
    quotas = []
    for folder, unified in _folders(root, groups, "cpu"):
        words = (
            _read(folder / "cpu.max").split()
            if unified
            else [_read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        )
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0:  # "max" and -1 are none
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _folders(root: pathlib.Path, groups: str, controller: str) -> Iterator[tuple[pathlib.Path, bool]]:
    """Our cgroup and those above it, and whether it is version 2. In a container only the root may be there."""
    for line in groups.splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        unified = number == "0" and not names
        if not unified and controller not in names.split(","):
            continue
        top = root if unified else root / controller
        folder = top / path.lstrip("/")
        while True:
            yield folder, unified
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _memfd_trouble() -> str:
    """Tries what an arena needs."""
    try:
        fd = os.memfd_create("windlass-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.posix_fallocate(fd, 0, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return ""
    except OSError as error:
        return f"allocating and sealing: {error.strerror}"
    finally:
        os.close(fd)


def _read(path: pathlib.Path) -> str:
    """Nothing where there is no such file, or it is not for us."""
    try:
        return path.read_text()
    except OSError:
        return ""
