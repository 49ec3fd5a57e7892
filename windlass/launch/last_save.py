"""Whether the last checkpoint of a run is complete, by what its scheduler says."""

from typing import Any


def newest_in(status: dict[str, Any] | None) -> dict[str, str] | None:
    """The ids of the newest checkpoints by app, in what the scheduler says; None: it says nothing."""
    saves = {} if status is None else status.get("checkpoints") or {}
    return None if status is None else {app: one["id"] for app, one in (saves.get("last") or {}).items()}


class LastSave:
    """Of one run that ends. asked: whether one more was asked for; before: the newest ones until then."""

    def __init__(self, asked: bool, before: dict[str, str] | None) -> None:
        self._asked = asked
        self._before = before

    def is_over(self, status: dict[str, Any] | None) -> bool:
        """Whether there is nothing to wait for; the scheduler may be too busy to say."""
        if status is None:
            return False
        saves, newest = status.get("checkpoints") or {}, newest_in(status)
        self._before = newest if self._before is None else self._before
        return not saves.get("going") and (not self._asked or newest != self._before or bool(saves.get("failed")))
