"""Fills the tables of the guide and the README that come from ``windlass bench sync``.

    windlass bench sync --json benchmarks/sync.json && python benchmarks/tables.py

A table lies between ``<!-- bench sync: NAME -->`` and ``<!-- end -->``; what is there is replaced.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/guide/consistency.md", "README.md")
Figures = dict[str, dict[str, Any]]


def rows(head: list[str], body: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def by(pattern: str, figures: Figures) -> list[str]:
    """The first group of every name that matches, in their order."""
    return list(dict.fromkeys(found[1] for name in figures if (found := re.fullmatch(pattern, name))))


def policies(figures: Figures) -> str:
    """A line per policy."""
    body = []
    for policy in by(r"(.*), \d+ uneven workers", figures):
        steps = next(
            f for name, f in figures.items() if re.fullmatch(re.escape(policy) + r", \d+ uneven workers", name)
        )
        to_bsp = figures.get(f"{policy} to BSP")
        body.append(
            [
                f"`{policy}`",
                f"{steps['value']:.1f}",
                "1" if to_bsp is None else f"{to_bsp['value']:.2f}",
                "1" if to_bsp is None else f"{to_bsp['limit']:.2f}",
                f"{figures[f'{policy}, idle']['value']:.1f} %",
                f"{figures[f'{policy}, staleness, mean']['value']:.2f}",
                f"{figures[f'{policy}, staleness, p99']['value']:.0f}",
            ]
        )
    return rows(["policy", "steps/s", "to BSP", "in theory", "idle", "staleness, mean", "p99"], body)


def gates(figures: Figures) -> str:
    """A line per policy, a column per number of workers."""
    counts = by(r"gate, .*, (\d+) workers", figures)
    body = []
    for policy in by(r"gate, (.*), \d+ workers", figures):
        for more, title in (("", f"`{policy}`"), (", asked again", f"`{policy}`, asked again")):
            values = (figures[f"gate, {policy}, {count} workers{more}"]["value"] for count in counts)
            body.append([title, *(f"{value:,.0f}" for value in values)])
    return rows(["policy", *(f"{count} workers" for count in counts)], body)


def plain(pattern: str) -> Callable[[Figures], str]:
    """Figures beside their limits, as the README shows them."""

    def table(figures: Figures) -> str:
        body = [
            [name, f"{f['value']:.3g} {f['unit']}", f"{f['limit']:.3g}", f"{f['ratio']:.2f}", f["against"]]
            for name, f in figures.items()
            if re.fullmatch(pattern, name)
        ]
        return rows(["what", "ours", "limit", "ratio", "against"], body)

    return table


TABLES = {
    "policies": policies,
    "gates": gates,
    "update": plain("push_pull .*"),
    "ratios": plain(r".* to BSP|push_pull .*"),
}


def fill(text: str, figures: Figures) -> str:
    """The page with its tables."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]](figures)}\n{found[3]}"

    return re.sub(r"(<!-- bench sync: (\w+) -->)\n.*?\n(<!-- end -->)", table, text, flags=re.DOTALL)


def main() -> None:
    figures = {figure["name"]: figure for figure in json.loads((ROOT / "benchmarks" / "sync.json").read_text())}
    for page in PAGES:
        path = ROOT / page
        path.write_text(fill(path.read_text(), figures))
        print(f"filled: {page}")


if __name__ == "__main__":
    main()
