"""What is to be run on Ray: the settings, and what each of its processes is to have."""

import dataclasses
import pathlib
from collections.abc import Callable

from windlass._errors import InvalidArgument
from windlass._settings import Settings
from windlass.launch import STRATEGIES
from windlass.ray._actors import Work


@dataclasses.dataclass(frozen=True)
class Job:
    """One run. Its workers call a function or run a script, or there are none."""

    who: str  #: for messages: who was called
    settings: Settings
    token: bytes = dataclasses.field(repr=False)
    of_server: dict[str, float]  #: resources
    of_worker: dict[str, float]
    strategy: str
    name: str  #: what `windlass status` calls it
    resume: str | None  #: the checkpoint that it goes on from
    say: Callable[[str], object]  #: what becomes of processes
    restarts: int = 0  #: how often it starts again from the last checkpoint when a server is lost
    work: Work | None = None
    script: list[str] | None = None  #: and its arguments
    near: str | None = None  #: the folder of the script
    log_dir: pathlib.Path | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        who, strategies = self.who, ", ".join(STRATEGIES)
        if self.strategy not in STRATEGIES:
            raise InvalidArgument(f"{who}: strategy: expected one of {strategies}, not {self.strategy!r}")
        if self.resume is not None and self.settings.checkpoint_dir is None:
            raise InvalidArgument(f"{who}: resume: there is no place to look for checkpoints; give checkpoint_dir")
        if not isinstance(self.restarts, int) or self.restarts < 0:
            raise InvalidArgument(f"{who}: restarts: expected a whole number from 0 on, not {self.restarts!r}")

    @property
    def workers(self) -> int:
        """How many it has."""
        return 0 if self.work is None and self.script is None else int(self.settings.workers)
