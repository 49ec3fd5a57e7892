"""The examples of the guides run as they stand."""

import re
import weakref
from pathlib import Path

import pytest

from windlass import _cluster

GUIDES = Path(__file__).resolve().parents[1] / "docs" / "guide"


def examples(guide: Path) -> list[tuple[int, str]]:
    """The Python blocks of a guide, each with the number of the line before it."""
    text = guide.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in found]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("consistency.md", 10),
        ("data.md", 5),
        ("functions.md", 5),
        ("pytorch.md", 9),
        ("rules.md", 5),
        ("vectors.md", 5),
        ("your-code.md", 5),
        ("coming-from/ddp.md", 1),
        ("coming-from/torch-rpc.md", 2),
        ("coming-from/ps-lite.md", 2),
        ("coming-from/mindspore.md", 1),
    ],
)
def test_every_example_runs_after_those_before_it(name: str, least: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_cluster, "_open", weakref.WeakSet())  # a script of its own has no other clusters
    blocks = examples(GUIDES / name)
    assert len(blocks) >= least
    space: dict[str, object] = {}
    for line, block in blocks:
        exec(compile("\n" * line + block, str(GUIDES / name), "exec"), space)


def test_an_example_that_is_wrong_fails_at_its_line(tmp_path: Path):
    guide = tmp_path / "guide.md"
    guide.write_text("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")
    assert examples(guide) == [(3, "x = 1\n"), (9, "assert x == 2\n")]
