"""The examples of the guides run as they stand, and their links lead somewhere."""

import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from helpers import PATIENCE_S

from windlass._client import open_clusters

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ROOT / "docs" / "guide"


def examples(guide: Path) -> list[tuple[int, str]]:
    """The Python blocks of a guide, each with the number of the line before it."""
    text = guide.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in found]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("start.md", 4),
        ("tensors-and-tables.md", 12),
        ("consistency.md", 10),
        ("data.md", 5),
        ("embeddings.md", 5),
        ("functions.md", 5),
        ("pytorch.md", 10),
        ("rules.md", 6),
        ("vectors.md", 5),
        ("your-code.md", 5),
        ("coming-from/ddp.md", 1),
        ("coming-from/torch-rpc.md", 2),
        ("coming-from/ps-lite.md", 3),
        ("coming-from/mindspore.md", 1),
        ("coming-from/torchrec.md", 1),
    ],
)
def test_every_example_runs_after_those_before_it(name: str, least: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(open_clusters, "_open", weakref.WeakSet())  # a script of its own has no other clusters
    blocks = examples(GUIDES / name)
    assert len(blocks) >= least
    space: dict[str, object] = {}
    for line, block in blocks:
        exec(compile("\n" * line + block, str(GUIDES / name), "exec"), space)


def test_the_program_of_the_start_page_runs_on_a_cluster(tmp_path: Path):
    (program,) = [block for _, block in examples(GUIDES / "start.md") if block.startswith("# train.py\n")]
    script = tmp_path / "train.py"
    script.write_text(program)
    command = [sys.executable, "-m", "windlass", "run", "--servers=2", "--workers=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(": ")[0] for line in done.stdout.splitlines()) == [
        "[worker 0] worker 0 of 2",
        "[worker 1] worker 1 of 2",
    ]


def test_the_program_of_the_checkpoint_page_goes_on_where_it_was(tmp_path: Path):
    (program,) = [block for _, block in examples(GUIDES / "checkpoints.md") if block.startswith("# train.py\n")]
    script = tmp_path / "train.py"
    script.write_text(program)
    command = [
        sys.executable,
        "-m",
        "windlass",
        "run",
        "--servers=2",
        "--workers=2",
        f"--checkpoint-dir={tmp_path}/saved",
    ]
    for resume, said in (([], []), (["--resume-from=ten"], ["resumes at clock 11"])):
        done = subprocess.run([*command, *resume, str(script)], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
        assert lines == ["done at clock 20", "done at clock 20", *said, *said]


def test_the_examples_of_the_checkpoint_page_run_without_a_cluster(tmp_path: Path):
    _, *others = [block for _, block in examples(GUIDES / "checkpoints.md")]
    code = "\n".join(["import numpy as np", "import windlass as wl", *others])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")


def anchors(page: Path) -> set[str]:
    """What a link can point to in a page: its headings, as they are on GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("apps/**/*.md")]),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_link_leads_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_an_example_that_is_wrong_fails_at_its_line(tmp_path: Path):
    guide = tmp_path / "guide.md"
    guide.write_text("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")
    assert examples(guide) == [(3, "x = 1\n"), (9, "assert x == 2\n")]
