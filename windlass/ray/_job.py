"""What is to be run on Ray: the settings, and what each of its processes is to have."""

import dataclasses
import pathlib
from collections.abc import Callable

from windlass._settings import Settings
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
    say: Callable[[str], object]  #: what becomes of processes
    work: Work | None = None
    script: list[str] | None = None  #: and its arguments
    near: str | None = None  #: the folder of the script
    log_dir: pathlib.Path | None = None
    verbose: bool = False

    @property
    def workers(self) -> int:
        """How many it has."""
        return 0 if self.work is None and self.script is None else int(self.settings.workers)
