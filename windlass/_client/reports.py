"""Numbers that a worker reports: the newest under each name."""

import math
from collections.abc import Mapping
from typing import Any

from windlass._errors import InvalidArgument

VALUES_MAX = 32  # names
VALUE_NAME_CHARS_MAX = 64


class Reports:
    """What ``cluster.report()`` was given. Another thread may read it at the same time."""

    def __init__(self) -> None:
        self._newest: dict[str, float | None] = {}

    def put(self, values: Mapping[str, Any]) -> None:
        """Takes all of them, or none and raises InvalidArgument. A number that is not finite becomes None, for JSON."""
        checked = {_name(name): _number(name, value) for name, value in values.items()}
        if len(self._newest.keys() | checked.keys()) > VALUES_MAX:
            more = ", ".join(sorted(checked.keys() - self._newest.keys()))
            raise InvalidArgument(f"report: at most {VALUES_MAX} names are kept, and {more} would be more")
        self._newest.update(checked)

    def newest(self) -> dict[str, float | None]:
        """A copy, by name."""
        return dict(self._newest)


def _name(name: str) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= VALUE_NAME_CHARS_MAX:
        raise InvalidArgument(
            f"report: a name is 1 to {VALUE_NAME_CHARS_MAX} printable characters, not {str(name)[:80]!r}"
        )
    return name


def _number(name: str, value: Any) -> float | None:
    """A number of Python, or an array or tensor without dimensions."""
    number = math.nan
    try:
        wrong = isinstance(value, (str, bytes, bool)) or getattr(value, "ndim", 0) != 0
        number = number if wrong else float(value)
    except (TypeError, ValueError, OverflowError):
        wrong = True
    if wrong:
        raise InvalidArgument(f"report: {name} must be a number, not {str(value)[:80]!r} ({type(value).__name__})")
    return number if math.isfinite(number) else None
