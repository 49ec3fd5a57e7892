"""docs/design/promises.md names tests that are there, and each promise once."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "design" / "promises.md").read_text()


def test_every_promise_has_one_row():
    ids = re.findall(r"^\| ([RSV]\d+) \|", TEXT, re.MULTILINE)
    counts = {kind: sum(one.startswith(kind) for one in ids) for kind in "RSV"}
    assert ids == [f"{kind}{i + 1}" for kind, count in counts.items() for i in range(count)]
    assert len(ids) > 30


def test_the_tests_that_are_named_are_there():
    names = re.findall(r"`([\w/]+\.(?:py|cc))`", TEXT)
    assert len(names) > 30
    beside = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert [name for name in names if not (ROOT / name).is_file() and name not in beside] == []


def test_what_is_said_to_break_a_mechanism_is_a_switch():
    known = re.findall(r'"(\w+)"', (ROOT / "csrc" / "base" / "breaks.h").read_text())
    journal = (ROOT / "windlass" / "control" / "journal.py").read_text()
    known += re.findall(r'"(\w+)" in os.environ.get\("WINDLASS_BREAK"', journal)  # what the core has nothing of
    named = {word for group in re.findall(r"`WINDLASS_BREAK=([^|]*)", TEXT) for word in re.findall(r"(\w+)`", group)}
    assert named - {"short"} <= set(known)
