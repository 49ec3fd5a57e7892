"""Fills every table of figures in the README and the guides from the kept results.

    windlass bench all --json benchmarks && python benchmarks/tables.py

A table lies between ``<!-- bench NAME -->`` and ``<!-- end -->``, NAME being one of TABLES; what is there is replaced.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/guide/figures.md", "docs/guide/consistency.md", "docs/guide/pytorch.md")
BLOCK = re.compile(r"(<!-- bench ([\w ]+) -->)\n.*?(<!-- end -->)", re.DOTALL)
#: What the README shows: the suite and the name of a figure, and against what where there are several.
TELLING = (
    ("local", "push_pull SGD of 4 floats, in a run", ""),
    ("local", "push_pull SGD 64 KB, in a run", ""),
    ("local", "push_pull SGD 1 MB, in a run", ""),
    ("local", "push_pull SGD 16 MB, in a run", ""),
    ("local", "push_pull SGD 64 MB, in a run", ""),
    ("local", "push_pull SGD 16 MB, in a run, ordinary arrays", ""),
    ("local", "push_pull SGD 16 MB, ASP, 2 workers in a run, together", ""),
    ("local", "push_pull SGD 16 MB, BSP, 2 workers in a run, together", ""),
    ("local", "push_pull SGD 16 MB, bare server", "torch RPC, huge pages"),
    ("local", "table pull, dim 64, in a run", ""),
    ("local", "table push RowAdagrad, dim 64, in a run", ""),
    ("local", "table pull, dim 64, in a run, ordinary arrays", ""),
    ("local", "pull of 256 keys, in a run", ""),
    ("local", "pull + push + tick of 256 keys, ASP, 2 workers in a run", ""),
    ("local", "pull + push + tick of 256 keys, SSP(2), 2 workers in a run", ""),
    ("local", "pull + push + tick of 256 keys, BSP, 2 workers in a run", ""),
    ("core", "push_pull SGD 16 MB, 1 thread", ""),
    ("core", "pull + push Adam, dim 64, 1 thread", ""),
    ("wire", "push_pull 16 MB, tcp", ""),
    ("train", "MNIST CNN, 2 workers, BSP", ""),
    ("sync", "SSP(4) to BSP", ""),
)
STATELESS = {"SGD", "Sum", "Assign", "Max", "Min", "Average"}  # rules whose rows are weights alone
WAYS = {
    "bsp": "`BSP()`",
    "ssp:3": "`SSP(3)`",
    "asp": "`ASP()`",
    "plain": "plain torch, batch 256, one process of two threads",
    "ddp": "DistributedDataParallel, gloo",
}
DLRM_WAYS = {
    "plain": "plain torch, `nn.EmbeddingBag(sparse=True)`",
    "servers": "tables and network on servers",
    "hybrid": "tables on servers, network in DistributedDataParallel, 2 workers",
}
Result = dict[str, Any]  # a file of benchmarks/
Figure = dict[str, Any]


def rows(head: list[str], body: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def number(x: float | None) -> str:
    """Three digits, all before the point."""
    return "" if x is None else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def bar(figure: Figure) -> str:
    """What it should be, and whether it is."""
    if not figure["bar"]:
        return ""
    return f"{figure['bar'].replace('>=', '≥').replace('<=', '≤')}, {'met' if figure['met'] else '**missed**'}"


def line(figure: Figure) -> list[str]:
    """A figure beside its limit."""
    return [
        figure["name"],
        f"{number(figure['value'])} {figure['unit']}",
        number(figure["p99"]),
        number(figure["limit"]),
        "" if figure["ratio"] is None else f"{figure['ratio']:.2f}",
        bar(figure),
        figure["against"],
    ]


HEAD = ["what", "ours", "p99", "limit", "ratio", "bar", "against"]


def said(result: Result) -> str:
    """What was measured, and on what."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "numpy", "torch") if machine[name])
    short = " **Measured with --short: these are not figures.**" if result["short"] else ""
    return f"{result['measured']} {machine['cpu']}, {machine['cores']} cores, {machine['isa']}; {versions}.{short}"


def plain(suite: str, pattern: str = ".*", *, but: str = "(?!)") -> Callable[[dict[str, Result]], str]:
    """The figures of a suite whose names match, after a sentence of what was measured."""

    def table(results: dict[str, Result]) -> str:
        chosen = [
            f for f in results[suite]["figures"] if re.fullmatch(pattern, f["name"]) and not re.search(but, f["name"])
        ]
        return f"{said(results[suite])}\n\n{rows(HEAD, map(line, chosen))}"

    return table


def telling(results: dict[str, Result]) -> str:
    """The figures of TELLING, of all suites."""
    found = []
    for suite, name, against in TELLING:
        matching = [f for f in results[suite]["figures"] if f["name"] == name and against in f["against"]]
        if not matching:
            beside = f" against {against!r}" if against else ""
            raise LookupError(f"benchmarks/{suite}.json: expected a figure {name!r}{beside} for the README")
        found.append([suite, *line(matching[0])])
    return f"{said(results['local'])}\n\n{rows(['suite', *HEAD], found)}"


# -- rules -------------------------------------------------------------------------------------------------------------


def rules(results: dict[str, Result]) -> str:
    """A line for each kind of push of the rules of ours, from the least to the most; then the others."""
    figures = results["rules"]["figures"]
    pushes = [f for f in figures if f["against"] == "bare kernel"]
    dense = [f for f in pushes if f["unit"] == "GB/s"]
    per_row = [f for f in pushes if f["unit"] == "M rows/s"]
    without = [f for f in per_row if rule_of(f) in STATELESS]
    groups = [
        (f"push to a tensor, {len(dense)} rules", dense),
        (f"push of rows, {len(without)} rules without state", without),
        (f"push of rows, {len(per_row) - len(without)} rules with state", [f for f in per_row if f not in without]),
    ]
    body = [span(name, group) for name, group in groups] + [line(f) for f in figures if f not in pushes]
    return f"{said(results['rules'])}\n\n{rows(HEAD, body)}"


def rule_of(figure: Figure) -> str:
    """The rule in a name such as "push SGD, momentum 100,000 x 64, 1 thread"."""
    return re.sub(r"^push | [\d,]+ (x \d+|MB), \d+ threads?$", "", figure["name"])


def span(name: str, figures: list[Figure]) -> list[str]:
    """Many figures in a line."""

    def of(key: str) -> str:
        values = sorted(f[key] for f in figures)
        return f"{values[0]:.3g} to {values[-1]:.3g}"

    missed = [rule_of(f) for f in figures if not f["met"]]
    bars = figures[0]["bar"].replace(">=", "≥")
    verdict = f"{bars}, **missed** by {', '.join(missed)}" if missed else f"{bars}, met by all"
    return [name, f"{of('value')} {figures[0]['unit']}", "", of("limit"), of("ratio"), verdict, figures[0]["against"]]


# -- policies ----------------------------------------------------------------------------------------------------------


def by(pattern: str, figures: dict[str, Figure]) -> list[str]:
    """The first group of every name that matches, in their order."""
    return list(dict.fromkeys(found[1] for name in figures if (found := re.fullmatch(pattern, name))))


def policies(results: dict[str, Result]) -> str:
    """A line per policy."""
    figures = {f["name"]: f for f in results["sync"]["figures"]}
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
    head = ["policy", "steps/s", "to BSP", "in theory", "idle", "staleness, mean", "p99"]
    return f"{said(results['sync'])}\n\n{rows(head, body)}"


def gates(results: dict[str, Result]) -> str:
    """A line per policy, a column per number of workers."""
    figures = {f["name"]: f for f in results["sync"]["figures"]}
    counts = by(r"gate, .*, (\d+) workers", figures)
    body = []
    for policy in by(r"gate, (.*), \d+ workers", figures):
        for more, title in (("", f"`{policy}`"), (", asked again", f"`{policy}`, asked again")):
            values = (figures[f"gate, {policy}, {count} workers{more}"]["value"] for count in counts)
            body.append([title, *(f"{value:,.0f}" for value in values)])
    return rows(["policy", *(f"{count} workers" for count in counts)], body)


def mnist(results: dict[str, Result]) -> str:
    """What `apps/mnist/compare.py` found."""
    body = []
    for way in results["mnist"]["ways"]:
        idle, stale = way["idle"], way["staleness"]
        body.append(
            [
                WAYS[way["way"]],
                f"{way['accuracy']:.2%}".replace("%", " %"),
                f"{way['samples_per_second']:,.0f}",
                "" if idle is None else f"{idle:.1%}".replace("%", " %"),
                "" if stale is None else f"{stale:.2f}",
            ]
        )
    return rows(["way", "accuracy", "samples/s", "idle", "mean staleness"], body)


def dlrm(results: dict[str, Result]) -> str:
    """What `apps/dlrm/compare.py` found: means over the seeds, and how far each seed is from plain torch."""
    body = []
    for data in ("census", "movielens"):
        ways = results[f"dlrm-{data}"]["ways"]
        plain = [run["auc"] for run in ways["plain"]]
        for way, runs in ways.items():
            aucs = [run["auc"] for run in runs]
            apart = [one - other for one, other in zip(aucs, plain, strict=True)]
            shown = ["", ""] if way == "plain" else [f"{sum(apart) / len(apart):+.5f}", f"{max(apart, key=abs):+.5f}"]
            body.append([data, DLRM_WAYS[way], f"{sum(aucs) / len(aucs):.4f}", *shown])
    return rows(["data", "way", "AUC", "to plain, mean", "to plain, most"], body)


TABLES: dict[str, Callable[[dict[str, Result]], str]] = {
    "telling": telling,
    "core": plain("core"),
    "wire": plain("wire"),
    "local in a run": plain("local", ".* in a run.*"),
    "local bare": plain("local", ".*bare server.*"),
    "control": plain("control"),
    "sync": plain("sync", r".* to BSP|push_pull .*"),
    "train": plain("train"),
    "embed": plain("embed"),
    "embed cuda": plain("embed-cuda"),
    "rules": rules,
    "checkpoint": plain("checkpoint"),
    "ray": plain("ray"),
    "rules all": plain("rules", "push .*"),
    "policies": policies,
    "gates": gates,
    "update": plain("sync", "push_pull .*"),
    "mnist": mnist,
    "dlrm": dlrm,
}


def fill(text: str, results: dict[str, Result]) -> str:
    """The page with its tables."""

    def table(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise LookupError(f"a table {found[2]!r}: expected one of {', '.join(TABLES)}")
        return f"{found[1]}\n{TABLES[found[2]](results)}\n{found[3]}"

    return BLOCK.sub(table, text)


def load(folder: Path) -> dict[str, Result]:
    """The kept results, by the names of their files."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def main() -> None:
    results = load(ROOT / "benchmarks")
    for page in PAGES:
        path = ROOT / page
        path.write_text(fill(path.read_text(), results))
        print(f"filled: {page}")


if __name__ == "__main__":
    main()
