"""The tables that `benchmarks/tables.py` fills in are those of the bench."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from windlass.bench import sync as bench
from windlass.bench._figures import Suite

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Figures by the names that the bench gives them, with numbers that can be told apart, by way of the file."""
    suite = Suite("sync", Console(quiet=True))
    for i, (policy, bar) in enumerate(bench.POLICIES):
        name = bench.name(policy)
        suite.absolute(f"{name}, 4 uneven workers", 30 + i, "steps/s", bar="", limit=40.0, against="theory")
        if i:
            suite.absolute(f"{name} to BSP", 1 + i / 10, "x", bar=f">= {bar}", limit=1.5 + i / 10, against="theory")
        suite.absolute(f"{name}, idle", 10.0 * i, "%", bar="")
        suite.absolute(f"{name}, staleness, mean", i / 2, "iterations", bar="")
        suite.absolute(f"{name}, staleness, p99", i, "iterations", bar="")
        for workers in bench.GATES:
            suite.absolute(f"gate, {name}, {workers} workers", workers + i, "ns per pull", bar="")
            suite.absolute(f"gate, {name}, {workers} workers, asked again", 2 * workers + i, "ns per pull", bar="")
    suite.rate("push_pull SGD 16 MB under BSP, 2 workers", 8.0, 10.0, "GB/s", bar=0.7, against="fused loop")
    path = tmp_path_factory.mktemp("figures") / "sync.json"
    suite.save(path)
    return {figure["name"]: figure for figure in json.loads(path.read_text())}


def test_every_place_of_the_pages_is_filled_and_nothing_else_changes(tables: ModuleType, figures: dict):
    names = set()
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        filled = tables.fill(text, figures)
        places = re.findall(r"<!-- bench sync: (\w+) -->\n\| .*?\|\n<!-- end -->", filled, re.DOTALL)
        assert len(places) == text.count("<!-- bench sync: ") > 0, page
        names.update(places)
        outside = r"(<!-- bench sync: \w+ -->\n).*?(<!-- end -->)"
        assert re.sub(outside, r"\1\2", filled, flags=re.DOTALL) == re.sub(outside, r"\1\2", text, flags=re.DOTALL)
        assert tables.fill(filled, figures) == filled
    assert names == set(tables.TABLES)


def test_a_line_has_the_figures_of_its_policy(tables: ModuleType, figures: dict):
    assert "| `SSP(4)` | 31.0 | 1.10 | 1.60 | 10.0 % | 0.50 | 1 |" in tables.policies(figures).splitlines()
    assert "| `BSP` | 30.0 | 1 | 1 | 0.0 % | 0.00 | 0 |" in tables.policies(figures).splitlines()
    assert "| `ASP`, asked again | 10 | 130 | 2,002 |" in tables.gates(figures).splitlines()
    ratios = tables.TABLES["ratios"](figures)
    assert "| ASP to BSP | 1.2 x | 1.7 | 0.71 | theory |" in ratios.splitlines()
    assert "| push_pull SGD 16 MB under BSP, 2 workers | 8 GB/s | 10 | 0.80 | fused loop |" in ratios.splitlines()


def test_kept_figures_are_those_of_the_pages(tables: ModuleType):
    kept = ROOT / "benchmarks" / "sync.json"
    if not kept.is_file():
        for page in tables.PAGES:
            assert "Not measured yet" in (ROOT / page).read_text(), "figures that nobody keeps"
        return
    figures = {figure["name"]: figure for figure in json.loads(kept.read_text())}
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert tables.fill(text, figures) == text, f"{page}: run benchmarks/tables.py"
