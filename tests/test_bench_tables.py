"""The tables of figures in the README and the guides are what tables.py makes of the kept results."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


tables = module()


def figure(name: str, **more: Any) -> dict[str, Any]:
    plain = {"value": 1234.5, "unit": "us", "p99": None, "limit": None, "ratio": None, "bar": "", "met": None}
    return {"name": name, "against": "", "calls": 1, "noise": None, **plain, **more}


def result(*figures: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "A CPU", "isa": "avx2", "cores": 2, "python": "3.11", "numpy": "2.0", "torch": None}
    return {"suite": "wire", "measured": "Medians.", "short": False, "machine": machine, "figures": list(figures)}


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_kept_pages_are_made_from_the_kept_results(page: str):
    text = (ROOT / page).read_text()
    assert tables.BLOCK.search(text), "it has tables"
    assert tables.fill(text, tables.load(ROOT / "benchmarks")) == text, "run `python benchmarks/tables.py`"


def test_no_page_of_the_guide_has_a_table_that_nobody_fills():
    for page in (ROOT / "docs").rglob("*.md"):
        if "<!-- bench" in page.read_text():
            assert str(page.relative_to(ROOT)) in tables.PAGES
    text = (ROOT / "README.md").read_text()
    assert "| ratio |" not in tables.BLOCK.sub("", text)


def test_what_lies_between_the_marks_is_replaced_and_nothing_else():
    met = figure("push", unit="GB/s", value=5.0, limit=10.0, ratio=0.5, bar=">= 0.4", met=True, against="loop")
    missed = figure("pull", p99=2000.0, limit=1000.0, ratio=1.2345, bar="<= 1.1", met=False)
    filled = tables.fill("a\n<!-- bench wire -->\nold\n<!-- end -->\nb\n", {"wire": result(met, missed)})
    assert filled.splitlines() == [
        "a",
        "<!-- bench wire -->",
        "Medians. A CPU, 2 cores, avx2; python 3.11, numpy 2.0.",
        "",
        "| what | ours | p99 | limit | ratio | bar | against |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| push | 5 GB/s |  | 10 | 0.50 | ≥ 0.4, met | loop |",
        "| pull | 1,234 us | 2,000 | 1,000 | 1.23 | ≤ 1.1, **missed** |  |",
        "<!-- end -->",
        "b",
    ]
    assert tables.fill(filled, {"wire": result(met, missed)}) == filled


def test_short_results_are_not_passed_off_as_figures():
    filled = tables.fill("<!-- bench wire -->\n<!-- end -->", {"wire": result(figure("a")) | {"short": True}})
    assert "these are not figures" in filled


def test_rules_are_summed_up_from_the_least_to_the_most():
    def push(name: str, value: float, unit: str, met: bool = True) -> dict[str, Any]:
        return figure(
            name, value=value, limit=10.0, ratio=value / 10, unit=unit, bar=">= 0.5", met=met, against="bare kernel"
        )

    kept = result(
        push("push SGD 64 MB, 2 threads", 8.0, "GB/s"),
        push("push SGD, momentum 64 MB, 2 threads", 9.0, "GB/s"),
        push("push SGD 100,000 x 64, 1 thread", 4.0, "M rows/s", met=False),
        push("push SGD, momentum 100,000 x 64, 1 thread", 6.0, "M rows/s"),
        figure("top 100 of 10 rows"),
    )
    filled = tables.fill("<!-- bench rules -->\n<!-- end -->", {"rules": kept})
    assert (
        "| push to a tensor, 2 rules | 8 to 9 GB/s |  | 10 to 10 | 0.8 to 0.9 | ≥ 0.5, met by all | bare kernel |"
        in filled
    )
    assert "| push of rows, 1 rules without state | 4 to 4 M rows/s |" in filled
    assert "**missed** by SGD" in filled
    assert "top 100 of 10 rows" in filled


def test_a_telling_figure_that_is_missing_is_an_error_that_names_it():
    results = {suite: result() for suite in ("local", "core", "wire", "train", "sync")}
    with pytest.raises(LookupError, match=re.escape("benchmarks/local.json: expected a figure 'push_pull SGD of 4")):
        tables.fill("<!-- bench telling -->\n<!-- end -->", results)
    with pytest.raises(LookupError, match="a table 'nothing': expected one of telling, core"):
        tables.fill("<!-- bench nothing -->\n<!-- end -->", results)
