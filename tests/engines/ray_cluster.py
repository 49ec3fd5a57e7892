"""What the tests of Ray have: a cluster of two nodes on this machine, and what is seen of it from outside."""

import dataclasses
import os
import pathlib
import time

from windlass.testing import ray_nodes

HERE = pathlib.Path(__file__).parent
GONE_S = 60.0  # for processes to be gone


class Nodes(ray_nodes.Nodes):
    """What the tests see of them."""

    def ours(self) -> "list[Seen]":
        """The processes of Windlass on the nodes: servers, schedulers and scripts, but no actors."""
        return [seen for pid in self.pids if (seen := Seen.of(pid)) is not None and seen.is_ours]

    def command_lines(self) -> str:
        """Of all processes on this machine."""
        found = []
        for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found.append(file.read_bytes().decode(errors="replace").replace("\0", " "))
            except OSError:
                continue
        return "\n".join(found)

    def until_nothing_is_left(self, seconds: float = GONE_S) -> None:
        """Waits until no process of ours runs on the nodes."""
        deadline = time.monotonic() + seconds
        while left := self.ours():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A process on the nodes."""

    pid: int
    command: list[str]
    environment: dict[str, str] = dataclasses.field(repr=False)
    listens: list[str]  #: hexadecimal addresses and ports, as the kernel lists them

    @classmethod
    def of(cls, pid: int) -> "Seen | None":
        """None: it has ended."""
        folder = pathlib.Path(f"/proc/{pid}")
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            environment = dict(
                line.partition("=")[::2] for line in (folder / "environ").read_bytes().decode().split("\0") if line
            )
            sockets = {os.readlink(fd) for fd in (folder / "fd").iterdir()}
            listens = []
            for table in ("tcp", "tcp6"):
                for line in (folder / "net" / table).read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                        listens.append(words[1])
        except OSError:
            return None
        return cls(pid, command, environment, listens)

    @property
    def role(self) -> str:
        """Of a server or the scheduler."""
        return self.command[3] if self.command[1:3] == ["-m", "windlass.launch.roles"] else ""

    @property
    def is_ours(self) -> bool:
        """Whether it is no part of Ray."""
        return bool(self.role) or "train.py" in " ".join(self.command)


def as_listed(ip: str) -> str:
    """An address as the kernel lists it."""
    return "".join(f"{int(part):02X}" for part in reversed(ip.split(".")))
