"""What workers on one engine inside the process share: barriers, ledgers, the user's functions, checkpoints."""

import dataclasses
import threading
import time
import weakref
from typing import TYPE_CHECKING

from windlass import _core
from windlass._client.barrier import Barriers
from windlass._settings import load as load_settings

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster
    from windlass._client.near_saves import NearSaves
    from windlass._data.lease_source import Ledgers
    from windlass._rules.user_code import Calls
    from windlass.control.leases import Saved as SavedLedger


@dataclasses.dataclass
class SaveTerms:
    """Where checkpoints are kept, and when they are taken."""

    where: str | None = None
    app: str = "default"
    keep: int = 3
    bytes_per_second: float | None = None
    seconds: float | None = None  #: between two of them; neither: only when somebody asks
    iterations: int | None = None  #: likewise

    def __post_init__(self) -> None:
        #: whether they are taken unasked
        self.automatic = self.where is not None and (self.seconds is not None or self.iterations is not None)
        self.at_clock = self.iterations or 0
        self._at = time.monotonic() + (self.seconds or 0.0)

    def is_due(self, cluster: "Cluster") -> bool:
        """Whether one is, at this worker's clock; once."""
        if self.iterations is not None:
            clock = cluster._session.iteration
            if clock < self.at_clock:
                return False
            self.at_clock = clock // self.iterations * self.iterations + self.iterations
            return True
        now = time.monotonic()
        if self.seconds is None or now < self._at:
            return False
        self._at = now + self.seconds
        return True


class Near:
    """Made with its engine, so that threads that become workers at the same time share all of it.

    Few programs need ledgers, functions or checkpoints, so each is made when the first asks, under a lock.
    """

    def __init__(self, terms: SaveTerms | None = None) -> None:
        self.barriers = Barriers()
        self.terms = SaveTerms() if terms is None else terms
        self.workers: weakref.WeakSet[Cluster] = weakref.WeakSet()
        self.made_saves: NearSaves | None = None  #: once somebody has saved or loaded
        self._lock = threading.Lock()  # of what follows, and of making saves
        self._ledgers: Ledgers | None = None
        self._calls: Calls | None = None

    @property
    def ledgers(self) -> "Ledgers":
        """Who has leased what."""
        with self._lock:
            if self._ledgers is None:
                from windlass._data.lease_source import Ledgers

                self._ledgers = Ledgers()
            return self._ledgers

    @property
    def has_ledgers(self) -> bool:
        """Whether anybody has leased anything."""
        return self._ledgers is not None

    def saved_ledgers(self) -> "dict[str, SavedLedger]":
        """For a checkpoint."""
        return self.ledgers.saved() if self.has_ledgers else {}

    def restore_ledgers(self, saved: "dict[str, SavedLedger]") -> None:
        """From a checkpoint."""
        if saved:
            self.ledgers.restore(saved)

    def saves(self, engine: _core.Engine) -> "NearSaves":
        """The checkpoints of this engine."""
        with self._lock:
            if self.made_saves is None:
                from windlass._client.near_saves import NearSaves

                self.made_saves = NearSaves(engine, self, self.terms)
            return self.made_saves

    def calls(self, engine: _core.Engine) -> "Calls":
        """The user's functions that this engine runs."""
        with self._lock:
            if self._calls is None:
                from windlass._rules.user_code import Calls, Own

                self._calls = Calls(Own(), load_settings().function_seconds)
                engine.set_user_code(self._calls.core)
            return self._calls

    def close(self) -> None:
        """After the engine's end."""
        with self._lock:
            calls = self._calls
        if calls is not None:
            calls.close()
