"""``windlass bench compare OLD NEW``: what moved between two measurements by more than the noise they saw."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from windlass._errors import InvalidArgument
from windlass.bench._figures import UNITS, Figure

ONCE_NOISE = 0.1  # taken for a figure that was seen once, whose noise nobody knows
RULE = (
    "moved: the change of the ratio to the limit, or of the value where there is no limit. Shown where it is larger "
    f"than the noise of old and new together (a figure that was seen once counts as {ONCE_NOISE:.0%} noise)."
)
Key = tuple[str, str, str]  # suite, name, against


@dataclasses.dataclass(frozen=True)
class Measured:
    """A file of one suite."""

    suite: str
    short: bool
    machine: dict[str, Any]
    figures: list[Figure]


@dataclasses.dataclass(frozen=True)
class Change:
    """A figure that is in both."""

    key: Key
    old: Figure
    new: Figure

    @property
    def by_ratio(self) -> bool:
        """Whether both have a limit."""
        return self.old.ratio is not None and self.new.ratio is not None

    @property
    def before_after(self) -> tuple[float, float]:
        """What is compared."""
        if self.old.ratio is not None and self.new.ratio is not None:
            return self.old.ratio, self.new.ratio
        return self.old.value, self.new.value

    @property
    def moved(self) -> float:
        """Relative to old."""
        before, after = self.before_after
        if before == after:
            return 0.0
        return after / before - 1 if before else float("inf")

    @property
    def noise(self) -> float:
        """Of both."""
        return sum(ONCE_NOISE if f.noise is None else f.noise for f in (self.old, self.new))

    @property
    def better(self) -> bool:
        """By its unit."""
        return (self.moved > 0) == self.new.more_is_better


def compare(old: pathlib.Path, new: pathlib.Path, say: Callable[[str], object]) -> None:
    """Says what moved, what came and what went. Both are files, or folders with a file per suite."""
    before, after = load(old), load(new)
    _say_what_differs(before, after, say)
    found, gone, come = _matched(before, after)
    moved = [change for change in found if abs(change.moved) > change.noise]
    say(RULE)
    for change in sorted(moved, key=lambda c: (c.better, -abs(c.moved))):
        suite, name, against = change.key
        was, now = change.before_after
        unit = "of the limit" if change.by_ratio else change.new.unit
        how = "better" if change.better else "worse"
        beside = f" ({against})" if against else ""
        say(
            f"{how}: {suite}: {name}{beside}: {was:.3g} -> {now:.3g} {unit}, "
            f"moved {change.moved:+.1%} / noise {change.noise:.1%}"
        )
    for what, keys in (("went", gone), ("came", come)):
        for suite, name, against in keys:
            say(f"{what}: {suite}: {name}{f' ({against})' if against else ''}")
    if not moved:
        say(f"Nothing moved: {len(found)} figures are within their noise.")
    else:
        say(f"{len(moved)} of {len(found)} figures moved, {sum(c.better for c in moved)} of them for the better.")


def _matched(before: list[Measured], after: list[Measured]) -> tuple[list[Change], list[Key], list[Key]]:
    was, now = _by_key(before), _by_key(after)
    changes = [Change(key, was[key], now[key]) for key in was if key in now]
    return changes, [key for key in was if key not in now], [key for key in now if key not in was]


def _by_key(measured: list[Measured]) -> dict[Key, Figure]:
    return {(m.suite, f.name, f.against): f for m in measured for f in m.figures}


def _say_what_differs(before: list[Measured], after: list[Measured], say: Callable[[str], object]) -> None:
    for what, measured in (("old", before), ("new", after)):
        if short := [m.suite for m in measured if m.short]:
            say(f"{what}: {', '.join(short)} measured with --short, which shows that it works and not how fast")
    machines = [{json.dumps(m.machine, sort_keys=True) for m in measured} for measured in (before, after)]
    if machines[0] != machines[1]:
        old, new = before[0].machine, after[0].machine
        facts = [f"{k}: {old.get(k)} -> {new.get(k)}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
        say(f"The machines differ ({', '.join(facts) or 'from suite to suite'}); values hardly compare, ratios do.")


def load(path: pathlib.Path) -> list[Measured]:
    """A file, or all files of a folder."""
    if not path.is_dir():
        return [_load_file(path)]
    files = sorted(path.glob("*.json"))
    found = [_load_file(file) for file in files if _is_ours(file)]
    if not found:
        raise InvalidArgument(f"{path}: expected files of `windlass bench all --json {path}`, found none")
    return found


def _is_ours(file: pathlib.Path) -> bool:
    """A folder may have other files, too; one that says it is a suite's is held to it."""
    try:
        seen = json.loads(file.read_text())
    except ValueError:
        return True  # is refused with the reason
    return isinstance(seen, dict) and "suite" in seen


def _load_file(path: pathlib.Path) -> Measured:
    expected = f"{path}: expected a file that `windlass bench SUITE --json {path.name}` wrote"
    try:
        seen = json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgument(f"{expected}, but it cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidArgument(f"{expected}, but it is not JSON: {error}") from error
    if not isinstance(seen, dict):
        raise InvalidArgument(f"{expected}, an object with figures; it is a {_kind(seen)}")
    try:
        figures = [Figure(**figure) for figure in seen["figures"]]
        measured = Measured(str(seen["suite"]), bool(seen["short"]), dict(seen["machine"]), figures)
    except KeyError as error:
        raise InvalidArgument(f"{expected}; it has no {error}, only {', '.join(seen) or 'nothing'}") from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{expected}; its fields are others: {error}") from error
    for figure in figures:
        numbers = (figure.value, *(x for x in (figure.ratio, figure.noise) if x is not None))
        if figure.unit not in UNITS or not all(isinstance(x, int | float) for x in numbers):
            raise InvalidArgument(f"{expected}; its figure {figure.name!r} has {numbers} {figure.unit!r}")
    return measured


def _kind(value: object) -> str:
    return {list: "list", str: "text", bool: "truth value", type(None): "null"}.get(type(value), "number")
