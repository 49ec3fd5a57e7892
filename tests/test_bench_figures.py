"""Figures: what is made of times, and what is kept."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from windlass import _core
from windlass.bench import Suite
from windlass.bench._turns import Times

OURS, LIMIT = Times(((2.0, 2.0, 4.0), (2.0, 2.0, 6.0))), Times(((1.0, 1.0, 1.0), (1.0, 1.0, 3.0)))


def suite(**more: bool) -> Suite:
    return Suite("core", Console(quiet=True), "What is measured.", **more)


def test_a_rate_is_by_medians_and_has_no_p99():
    s = suite()
    s.rate("push", 10, "GB/s", OURS, LIMIT, bar=0.4, against="loop")
    (f,) = s.figures
    assert (f.value, f.limit, f.ratio, f.calls) == (5.0, 10.0, 0.5, 6)
    assert (f.p99, f.limit_p99) == (None, None)
    assert (f.bar, f.met, f.against, f.noise) == (">= 0.4", True, "loop", 0)


def test_a_latency_has_the_p99_of_both_sides_and_less_is_better():
    s = suite()
    s.latency("pull", "ms", OURS, LIMIT, bar=1.3)
    (f,) = s.figures
    assert (f.value, f.p99, f.limit, f.limit_p99, f.ratio) == (2000.0, 6000.0, 1000.0, 3000.0, 2.0)
    assert (f.bar, f.met) == ("<= 1.3", False)


def test_noise_is_that_of_the_ratio_where_there_is_a_limit():
    slower_together = Times(((1.0,), (2.0,), (4.0,))), Times(((2.0,), (4.0,), (8.0,)))
    s = suite()
    s.rate("a", 1, "GB/s", *slower_together)
    s.rate("b", 1, "GB/s", slower_together[0])
    assert s.figures[0].noise == 0
    assert s.figures[1].noise > 0.3


def test_a_bar_for_the_value_carries_the_unit():
    s = suite()
    s.rate("rows", 10, "M rows/s", OURS, LIMIT, value_bar=6)
    s.value("growth", 3.0, "MiB", value_bar=4)
    s.value("staleness", 3.0, "iterations")
    assert [(f.bar, f.met) for f in s.figures] == [(">= 6 M rows/s", False), ("<= 4 MiB", True), ("", None)]
    assert s.figures[1].noise is None


def test_a_unit_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"'push': unit must be one of GB/s, .*not 'furlongs'"):
        suite().value("push", 1.0, "furlongs")


def test_the_file_says_what_was_measured_and_on_what(tmp_path: Path):
    s = suite(short=True)
    s.latency("pull", "us", OURS)
    s.save(tmp_path / "core.json")
    kept = json.loads((tmp_path / "core.json").read_text())
    assert (kept["suite"], kept["measured"], kept["short"]) == ("core", "What is measured.", True)
    assert kept["title"].startswith("windlass bench core (")
    assert kept["machine"]["isa"] == _core.isa()
    assert {"cpu", "cores", "python", "numpy", "torch"} <= kept["machine"].keys()
    fields = ["name", "value", "unit", "p99", "noise", "limit", "limit_p99", "ratio", "bar", "met", "against", "calls"]
    assert [list(figure) for figure in kept["figures"]] == [fields]


def test_the_table_marks_bars_that_are_missed_and_met():
    console = Console(width=200, file=io.StringIO())
    s = Suite("core", console, "What is measured.")
    s.rate("fast", 10, "GB/s", OURS, LIMIT, bar=0.4)
    s.latency("slow", "ms", OURS, LIMIT, bar=1.3)
    s.show()
    shown = console.file.getvalue()
    assert " met " in next(line for line in shown.splitlines() if "│ fast" in line)
    assert all(word in next(line for line in shown.splitlines() if "│ slow" in line) for word in ("missed", "6,000"))
    assert "What is measured." in shown
