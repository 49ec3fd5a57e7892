"""Logs: no source fills them, and one that cannot be written ends nothing."""

import logging
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest
from helpers import PATIENCE_S

from windlass.launch import log
from windlass.launch.output import LogFile
from windlass.testing.cluster import until

SCRIPT = """
import windlass as wl
with wl.connect(timeout=300) as cluster:
    for i in range(300):
        print("step", i, "of a loop with much to say", flush=True)
"""


def logger_with(tell: list[str]) -> logging.Logger:
    """One whose lines, limited, are put into the list."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell.append(record.getMessage())

    handler, made = Handler(), logging.Logger("limited")
    handler.addFilter(log.RateLimit(handler.emit))
    made.addHandler(handler)
    return made


def test_a_source_writes_few_lines_and_is_told_how_many_were_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "WINDOW_SECONDS", 0.5)
    lines: list[str] = []
    logger = logger_with(lines)
    for i in range(5000):
        logger.info("refused %s: reason %d", "10.0.0.1", i, extra={"source": "10.0.0.1"})
    logger.info("refused %s", "10.0.0.2", extra={"source": "10.0.0.2"})
    logger.error("something else")

    def left_out() -> list[int]:
        counts = (re.fullmatch(r"(\d+) more lines from 10.0.0.1 were left out within 0.5 s", line) for line in lines)
        return [int(count[1]) for count in counts if count]

    def shown() -> int:
        return sum(line.startswith("refused 10.0.0.1: ") for line in lines)

    until(lambda: shown() + sum(left_out()) == 5000, "every line is shown or counted", PATIENCE_S)
    assert log.LINES_MAX <= shown() <= log.LINES_MAX * len(left_out())  # one window, or more where it took long
    assert {"refused 10.0.0.2", "something else"} <= set(lines)
    logger.info("refused %s again", "10.0.0.1", extra={"source": "10.0.0.1"})
    assert lines[-1] == "refused 10.0.0.1 again"


def test_many_sources_count_as_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "KEYS_MAX", 10)
    monkeypatch.setattr(log, "WINDOW_SECONDS", 0.5)
    lines: list[str] = []
    logger = logger_with(lines)
    for i in range(1000):
        logger.info("refused %d", i, extra={"source": str(i)})
    assert len(lines) == 10 + log.LINES_MAX
    until(lambda: "970 more lines from others were left out within 0.5 s" in lines, "the count", PATIENCE_S)


def test_one_thread_ends_all_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "WINDOW_SECONDS", 0.5)
    lines: list[str] = []
    logger, before = logger_with(lines), set(threading.enumerate())

    def ours() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before]

    for i in range(50 * (log.LINES_MAX + 1)):
        logger.info("refused %d", i, extra={"source": str(i % 50)})
    assert len(ours()) == 1
    until(lambda: sum("1 more lines from" in line for line in lines) == 50, "every window is ended", PATIENCE_S)
    until(lambda: not ours(), "the thread ends with the last window", PATIENCE_S)
    logger.info("refused %d", 1, extra={"source": "1"})
    assert len(ours()) == 1


def test_without_a_thread_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    lines: list[str] = []
    logger = logger_with(lines)
    for i in range(100):
        logger.info("refused %d", i, extra={"source": "10.0.0.1"})
    assert len(lines) == 100


def test_lines_that_name_no_source_are_limited_by_what_they_say(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "WINDOW_SECONDS", 0.5)
    lines: list[str] = []
    logger = logger_with(lines)
    for i in range(3000):
        logger.warning("round %d", i)
        if i % 100 == 0:
            logger.error("round %d", i)
    assert sum(line.startswith("round") for line in lines) == log.LINES_ALIKE_MAX + 30
    until(lambda: "2000 more lines like 'round %d' were left out within 0.5 s" in lines, "the count", PATIENCE_S)


def test_a_log_file_says_how_much_of_it_is_missing(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / "server-0.log"
    file = LogFile(path, append=False)
    file.write(b"before\n")
    good = file._file
    with open("/dev/full", "wb", buffering=0) as full:
        file._file = full  # type: ignore[assignment]
        file.write(b"lost\n" * 10)
        file.write(b"lost\n" * 10)
    file._file = good
    file.write(b"after\n")
    file.close()
    assert path.read_text() == "before\n\n--- 100 bytes could not be written here ---\nafter\n"
    said = capfd.readouterr().err
    assert said == f"windlass run: log file {path} cannot be written: No space left on device; the run continues\n"


def run(folder: pathlib.Path, **files: int) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "windlass", "run", "--verbose", "--log-dir", str(folder / "logs"), "train.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    return subprocess.run(command, cwd=folder, text=True, timeout=PATIENCE_S, env=environment, **files)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("which", ["scheduler", "server-0", "worker-0", "nowhere"])
def test_a_full_log_disk_ends_no_run(tmp_path: pathlib.Path, which: str):
    (tmp_path / "logs").mkdir()
    target = "/nowhere/at/all" if which == "nowhere" else "/dev/full"
    (tmp_path / "logs" / f"{'worker-0' if which == 'nowhere' else which}.log").symlink_to(target)
    done = run(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"cannot be written: .*; the run continues", done.stderr)) == 1
    assert "step 299" in done.stdout


def test_a_full_disk_under_its_own_output_ends_no_run(tmp_path: pathlib.Path):
    (tmp_path / "logs").mkdir()
    with open("/dev/full", "wb") as full:
        assert run(tmp_path, stdout=full.fileno(), stderr=full.fileno()).returncode == 0
    assert "step 299" in (tmp_path / "logs" / "worker-0.log").read_text()
