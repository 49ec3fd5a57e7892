"""What workers on one engine inside the process share: barriers, ledgers of leases, and the user's functions."""

import threading
from typing import TYPE_CHECKING

from windlass import _core
from windlass._client.barrier import Barriers
from windlass._settings import load as load_settings

if TYPE_CHECKING:
    from windlass._data.lease_source import Ledgers
    from windlass._rules.user_code import Calls


class Near:
    """Made with its engine, so that threads that become workers at the same time share all of it.

    Few programs need ledgers or functions, so each is made when the first asks, under a lock.
    """

    def __init__(self) -> None:
        self.barriers = Barriers()
        self._lock = threading.Lock()  # of what follows
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
