"""What the machine and its cgroups let this process have, and what servers take of it unless they are told."""

import math
import pathlib
from collections.abc import Iterator

from windlass import _core

CGROUPS = pathlib.Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # how version 1 of cgroups says that there is none
SHARE = 0.8  # of the memory; the rest is for workers, requests under way and everything else


def default_memory_bytes_max(servers: int = 1) -> int:
    """memory_bytes_max of each of so many servers on this host, where it is not set."""
    limit, _ = memory_of(CGROUPS, read(pathlib.Path("/proc/self/cgroup")))
    return int(min(meminfo("MemTotal") or limit, limit) * SHARE) // servers


def meminfo(name: str) -> int:
    """A number of bytes in /proc/meminfo; 0 where it is not there."""
    lines = read(pathlib.Path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def memory_of(root: pathlib.Path, groups: str) -> tuple[int, int]:
    """The least limit on memory of our cgroups, and the least that one of them has left; 2^60 where there is none.

    groups: /proc/self/cgroup. Version 2 of cgroups has the line "0::/path", version 1 "4:memory:/path".
    """
    limit = left = _NO_LIMIT
    for folder, unified in _folders(root, groups, "memory"):
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most, used = (read(folder / name).strip() for name in names)
        if not (most.isdecimal() and used.isdecimal()) or int(most) >= _NO_LIMIT:
            continue
        key = "inactive_file " if unified else "total_inactive_file "
        lines = read(folder / "memory.stat").splitlines()
        cache = sum(int(line.removeprefix(key)) for line in lines if line.startswith(key))  # given up when needed
        limit, left = min(limit, int(most)), min(left, max(0, int(most) - int(used) + cache))
    return limit, left


def cores_of(root: pathlib.Path, groups: str) -> float | None:
    """How many cores our cgroups let us use at a time; None: all."""
    quotas = []
    for folder, unified in _folders(root, groups, "cpu"):
        words = (
            read(folder / "cpu.max").split()
            if unified
            else [read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        )
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0:  # "max" and -1 are none
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def usable_cores(root: pathlib.Path = CGROUPS, groups: str | None = None) -> int:
    """How many threads are worth starting: the cores that we may run on, or fewer where a quota gives less time."""
    quota = cores_of(root, read(pathlib.Path("/proc/self/cgroup")) if groups is None else groups)
    return _core.cores() if quota is None else max(1, min(_core.cores(), math.ceil(quota)))


def processes_of(root: pathlib.Path, groups: str) -> int:
    """How many processes and threads our cgroups allow; -1: no limit."""
    limits = [read(folder / "pids.max").strip() for folder, _ in _folders(root, groups, "pids")]
    return min((int(limit) for limit in limits if limit.isdecimal()), default=-1)


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


def read(path: pathlib.Path) -> str:
    """Nothing where there is no such file, or it is not for us."""
    try:
        return path.read_text()
    except OSError:
        return ""
