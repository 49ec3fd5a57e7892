"""Figures: what a suite measures, shows and saves.

A figure is the median of sustained calls, beside a limit (a plain loop of csrc/bench/, or a peer) that did the same
work in turns with ours (_turns.py). Its ratio is ours to the limit's, and its bar is what that should be.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from windlass import _core
from windlass.bench._turns import FULL, RUNS, SHORT, SHORT_RUNS, Length, Times, scatter

MEASURED = "Medians of sustained calls, each of them timed; ours and the limit take turns in the same run."
#: Every unit, and whether more of it is better.
UNITS = {
    "GB/s": True,
    "M rows/s": True,
    "M keys/s": True,
    "steps/s": True,
    "samples/s": True,
    "x": True,
    "% right": True,
    "ns": False,
    "us": False,
    "ms": False,
    "s": False,
    "% idle": False,
    "% of a core": False,
    "iterations": False,
    "MiB": False,
    "bytes/row": False,
    "of the final size": False,
}
SHORT_BYTES_MAX = 16_000_000  # of an array, in the short form
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of a suite.

    value: the median, or what was seen where it was seen once. p99, limit_p99: of latencies. noise: how far single
    rounds were from that, relative; of the ratio where there is one; None where it was seen once. bar: what the ratio
    should be, or with a unit what the value should be; met: whether it is. calls: how many of ours were timed.
    """

    name: str
    value: float
    unit: str
    p99: float | None = None
    noise: float | None = None
    limit: float | None = None
    limit_p99: float | None = None
    ratio: float | None = None
    bar: str = ""
    met: bool | None = None
    against: str = ""
    calls: int = 1

    @property
    def more_is_better(self) -> bool:
        """By its unit."""
        return UNITS[self.unit]


class Suite:
    """Collects figures; prints each as it comes. `measured` is one sentence about what the suite's figures are."""

    def __init__(self, name: str, console: Console, measured: str, *, short: bool = False, detail: str = "") -> None:
        self.name, self.short = name, short
        self.figures: list[Figure] = []
        self.title = f"windlass bench {name} ({_core.isa()}, {_core.cores()} cores{detail and ', '}{detail})"
        self.length: Length = SHORT if short else FULL
        self.runs: Length = SHORT_RUNS if short else RUNS
        self._measured = measured
        self._console = console

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """Those to measure, in bytes: in the short form the large ones are left out."""
        return [size for size in sizes if not self.short or size <= SHORT_BYTES_MAX]

    def rate(
        self,
        name: str,
        amount: float,
        unit: str,
        ours: Times,
        limit: Times | None = None,
        *,
        bar: float | None = None,
        value_bar: float | None = None,
        against: str = "",
    ) -> None:
        """A figure where more is better: each call does `amount`, of the unit without "/s"."""
        self.value(
            name,
            amount / ours.median,
            unit,
            limit=None if limit is None else amount / limit.median,
            noise=_noise(ours, limit),
            bar=bar,
            value_bar=value_bar,
            against=against,
            calls=ours.calls,
        )

    def latency(
        self,
        name: str,
        unit: str,
        ours: Times,
        limit: Times | None = None,
        *,
        bar: float | None = None,
        value_bar: float | None = None,
        against: str = "",
    ) -> None:
        """A figure where less is better: the time of a call, p50 and p99."""
        each = _SECONDS[unit]
        self.value(
            name,
            ours.median / each,
            unit,
            p99=ours.p99 / each,
            limit=None if limit is None else limit.median / each,
            limit_p99=None if limit is None else limit.p99 / each,
            noise=_noise(ours, limit),
            bar=bar,
            value_bar=value_bar,
            against=against,
            calls=ours.calls,
        )

    def value(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        limit: float | None = None,
        bar: float | None = None,
        value_bar: float | None = None,
        **more: Any,
    ) -> None:
        """Any figure. `bar` is for the ratio, `value_bar` for the value; `more` are fields of Figure."""
        if unit not in UNITS:
            raise ValueError(f"figure {name!r}: unit must be one of {', '.join(UNITS)}, not {unit!r}")
        ratio = value / limit if limit else None
        sign, met = (">=" if UNITS[unit] else "<="), None
        text = ""
        for wanted, seen, of in ((bar, ratio, ""), (value_bar, value, f" {unit}")):
            if wanted is not None and seen is not None:
                text = f"{sign} {wanted:g}{of}"
                met = seen >= wanted if UNITS[unit] else seen <= wanted
        self.add(Figure(name, value, unit, limit=limit, ratio=ratio, bar=text, met=met, **more))

    def add(self, figure: Figure) -> None:
        """One that is complete."""
        self.figures.append(figure)
        p99 = "" if figure.p99 is None else f" (p99 {_number(figure.p99)})"
        limit = "" if figure.ratio is None else f"  limit {_number(figure.limit)}  ratio {figure.ratio:.2f}"
        self.note(f"{figure.name}: {_number(figure.value)} {figure.unit}{p99}{limit}")

    def note(self, text: str) -> None:
        """Something to say between figures."""
        self._console.print(f"[dim]{text}[/dim]", highlight=False)

    def show(self) -> None:
        """The table of all figures."""
        table = Table(title=self.title, title_justify="left", caption=self._measured, caption_justify="left")
        for column in ("what", "ours", "p99", "limit", "unit", "ratio", "bar", "", "against"):
            table.add_column(column, justify="right" if column in ("ours", "p99", "limit", "ratio") else "left")
        for f in self.figures:
            numbers = map(_number, (f.value, f.p99, f.limit))
            ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
            table.add_row(f.name, *numbers, f.unit, ratio, f.bar, _SHOWN[f.met], f.against)
        self._console.print(table)

    def save(self, path: pathlib.Path) -> None:
        """All there is to know, as JSON."""
        found = {
            "suite": self.name,
            "title": self.title,
            "measured": self._measured,
            "short": self.short,
            "machine": machine(),
            "figures": [dataclasses.asdict(f) for f in self.figures],
        }
        path.write_text(json.dumps(found, indent=1) + "\n")


_SHOWN = {None: "", True: "met", False: "[bold red]missed[/bold red]"}


def _number(x: float | None) -> str:
    """Three digits, all before the point."""
    return "" if x is None else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def _noise(ours: Times, limit: Times | None) -> float:
    """Of what two runs are compared by: the ratio, which hardly moves with the machine's speed, or else the value."""
    if limit is None:
        return scatter(ours.medians)
    return scatter([mine / best for mine, best in zip(ours.medians, limit.medians, strict=True)])


def machine() -> dict[str, Any]:
    """What figures depend on."""
    facts: dict[str, Any] = {
        "cpu": _cpu(),
        "isa": _core.isa(),
        "cores": _core.cores(),
        "system": f"{platform.system()} {os.uname().release}",
        "python": platform.python_version(),
    }
    for package in ("numpy", "torch"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def _cpu() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
