"""Figures: what a suite measures, shows and saves.

A figure is held against a limit: a plain loop (csrc/bench/) or a peer doing the same work, measured in the same run
and interleaved with ours, since the machine's mood changes by the second. Both sides show their best of several.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of a suite. `ratio` is ours to the limit; `bar` is what it should be, or what the value should be."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    bar: str = ""
    against: str = ""


class Suite:
    """Collects figures; prints each as it comes."""

    def __init__(self, title: str, console: Console) -> None:
        self.figures: list[Figure] = []
        self._title = title
        self._console = console

    def rate(self, name: str, ours: float, limit: float, unit: str, *, bar: float, against: str) -> None:
        """A figure where more is better, such as GB/s."""
        self._add(Figure(name, ours, unit, limit, ours / limit, f">= {bar:g}", against))

    def latency(self, name: str, ours: float, limit: float, unit: str, *, bar: float, against: str) -> None:
        """A figure where less is better, such as microseconds."""
        self._add(Figure(name, ours, unit, limit, ours / limit, f"<= {bar:g}", against))

    def absolute(
        self, name: str, value: float, unit: str, *, bar: str, limit: float | None = None, against: str = ""
    ) -> None:
        """A figure with a bar of its own, or none; a limit is for information."""
        ratio = None if limit is None else value / limit
        self._add(Figure(name, value, unit, limit, ratio, bar, against))

    def _add(self, figure: Figure) -> None:
        self.figures.append(figure)
        limit = "" if figure.limit is None else f"  limit {figure.limit:.3g}  ratio {figure.ratio:.2f}"
        self._console.print(f"[dim]{figure.name}: {figure.value:.3g} {figure.unit}{limit}[/dim]", highlight=False)

    def show(self) -> None:
        """The table of all figures."""
        table = Table(title=self._title, title_justify="left")
        for column in ("what", "ours", "limit", "unit", "ratio", "bar", "against"):
            table.add_column(column, justify="right" if column in ("ours", "limit", "ratio") else "left")
        for f in self.figures:
            limit = "" if f.limit is None else f"{f.limit:.3g}"
            ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
            table.add_row(f.name, f"{f.value:.3g}", limit, f.unit, ratio, f.bar, f.against)
        self._console.print(table)

    def save(self, path: pathlib.Path) -> None:
        """The figures as JSON."""
        path.write_text(json.dumps([dataclasses.asdict(f) for f in self.figures], indent=1) + "\n")


def seconds_of(run: Callable[[], object], repeats: int = 1) -> float:
    """The best of `repeats` runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def interleave(ours: Callable[[], float], limit: Callable[[], float], rounds: int) -> tuple[float, float]:
    """The best seconds of both, measured in turns."""
    best_ours, best_limit = (min(seconds) for seconds in in_turns(ours, limit, rounds))
    return best_ours, best_limit


def in_turns(ours: Callable[[], float], limit: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """The seconds of both, measured in turns."""
    pairs = [(limit(), ours()) for _ in range(rounds)]
    return [mine for _, mine in pairs], [best for best, _ in pairs]
