"""What a machine gives a process: memory, files, huge pages, cores; from within whatever container it is in."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import platform
import resource

from windlass._cgroup import CGROUPS, cores_of, meminfo, memory_of, processes_of, read

_THP = pathlib.Path("/sys/kernel/mm/transparent_hugepage")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclasses.dataclass(frozen=True)
class Machine:
    """What was seen; nothing here is judged."""

    kernel: tuple[int, int]
    memory_bytes: int  #: what this process may ever have
    available_bytes: int
    contained: bool  #: whether that is the limit of a cgroup, not the machine's own
    overcommit: str  #: /proc/sys/vm/overcommit_memory
    files: tuple[int, int]  #: RLIMIT_NOFILE, soft and hard; -1: no limit
    processes: int  #: and threads that there may be: RLIMIT_NPROC, or what its cgroup allows; -1: no limit
    address_bytes: int  #: RLIMIT_AS; -1: no limit
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

    total, available = meminfo("MemTotal"), meminfo("MemAvailable")
    groups = read(pathlib.Path("/proc/self/cgroup"))
    limit, left = memory_of(CGROUPS, groups)
    free = None
    with contextlib.suppress(OSError):
        space = os.statvfs("/dev/shm")
        free = space.f_bavail * space.f_frsize
    return Machine(
        kernel=kernel_version(platform.release()),
        memory_bytes=min(total, limit),
        available_bytes=min(available, left),
        contained=limit < total,
        overcommit=read(pathlib.Path("/proc/sys/vm/overcommit_memory")).strip(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        processes=least(resource.getrlimit(resource.RLIMIT_NPROC)[0], processes_of(CGROUPS, groups)),
        address_bytes=resource.getrlimit(resource.RLIMIT_AS)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        memfd_trouble=_memfd_trouble(),
        shm_free_bytes=free,
        huge_pages=chosen(read(_THP / "enabled")),
        huge_pages_shared=chosen(read(_THP / "shmem_enabled")),
        cores=_core.cores(),
        cores_there=os.cpu_count() or 1,
        cores_quota=cores_of(CGROUPS, groups),
    )


def kernel_version(release: str) -> tuple[int, int]:
    """Of "6.1.0-13-amd64" the first two numbers."""
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def least(*limits: int) -> int:
    """Of limits, where -1 is none."""
    return min((limit for limit in limits if limit >= 0), default=-1)


def chosen(text: str) -> str:
    """The word that is bracketed in "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]


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
