"""The scheduler's journal: one process at a time has it, generations go up, and what is damaged is refused by name."""

import pathlib
import sqlite3
import subprocess
import sys

import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.control.journal import Journal

MEMBER = ("members", "17")


def kept(path: pathlib.Path, **rows: bytes) -> dict[tuple[str, str], bytes]:
    """Writes rows of members, and closes it; what the next one finds."""
    journal = Journal(path)
    journal.commit({("members", key): value for key, value in rows.items()})
    journal.close()
    journal = Journal(path)
    journal.close()
    return journal.rows


def test_what_was_committed_is_there_for_the_next_generation(tmp_path: pathlib.Path):
    path = tmp_path / "state"
    first = Journal(path)
    assert (first.generation, first.rows) == (1, {})
    first.commit({MEMBER: b"{}", ("apps", "a"): b"1", ("apps", "b"): b"2"})
    first.commit({("apps", "a"): b"3", ("apps", "b"): None})
    first.close()
    second = Journal(path)
    assert (second.generation, second.rows) == (2, {MEMBER: b"{}", ("apps", "a"): b"3"})
    second.clear()
    second.close()
    third = Journal(path)
    assert (third.generation, third.rows) == (3, {})
    third.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_second_scheduler_is_refused_and_the_kernel_lets_go_when_the_first_is_killed(tmp_path: pathlib.Path):
    path = tmp_path / "state"
    code = f"""
import time
from windlass.control.journal import Journal
journal = Journal({str(path)!r})
journal.commit({{("members", "17"): b"here"}})
print("open", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(wl.InvalidArgument, match="another scheduler has it") as refused:
            Journal(path)
        assert str(path) in str(refused.value)
        other.kill()
        other.wait(PATIENCE_S)
    journal = Journal(path)
    assert (journal.generation, journal.rows) == (2, {MEMBER: b"here"})
    journal.close()


def test_every_byte_of_a_row_counts(tmp_path: pathlib.Path):
    path = tmp_path / "state"
    value = b"what was told, " * 40
    assert kept(path, a=value) == {("members", "a"): value}
    whole = path.read_bytes()
    at = whole.index(value)
    for i in range(at - 2, at + len(value), 7):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :])
        with pytest.raises(wl.InvalidArgument, match="damaged") as refused:
            Journal(path)
        assert str(path) in str(refused.value)
    path.write_bytes(whole)
    assert kept(path) == {("members", "a"): value}


def test_a_file_that_is_cut_off_is_refused(tmp_path: pathlib.Path):
    path = tmp_path / "state"
    kept(path, **{f"m{i}": bytes([i]) * 500 for i in range(100)})
    whole = path.read_bytes()
    for length in range(1, len(whole), len(whole) // 23):
        path.write_bytes(whole[:length])
        with pytest.raises(wl.InvalidArgument, match=str(path)):
            Journal(path)


@pytest.mark.parametrize("text", ["not a database, " * 100, "SQLite format 3\0" + "x" * 5000])
def test_what_is_no_journal_is_refused(tmp_path: pathlib.Path, text: str):
    path = tmp_path / "state"
    path.write_text(text)
    with pytest.raises(wl.InvalidArgument, match=str(path)):
        Journal(path)
    assert path.read_text() == text


def test_another_programs_database_is_refused_and_left_alone(tmp_path: pathlib.Path):
    path = tmp_path / "theirs"
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE cluster (key TEXT)")
    theirs.close()
    before = path.read_bytes()
    with pytest.raises(wl.InvalidArgument, match="another SQLite file"):
        Journal(path)
    assert path.read_bytes() == before


def test_a_folder_that_is_not_there_is_refused(tmp_path: pathlib.Path):
    with pytest.raises(wl.InvalidArgument, match="there is no folder"):
        Journal(tmp_path / "none" / "state")
