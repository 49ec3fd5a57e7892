"""`windlass run --progress`: a display that is there when asked for, and in nobody's way."""

import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import PATIENCE_S, unannounced

WINDLASS = [sys.executable, "-m", "windlass"]
STEPS = """
import numpy as np, os, time, windlass as wl
with wl.connect(timeout=300) as cluster:
    w = cluster.tensor("w", 10, rule=wl.Sum())
    for i in range(20):
        w.push_pull(np.ones(10, np.float32))
        cluster.tick()
        cluster.report(loss=1 / (i + 1), rank=cluster.rank)
        time.sleep(0.01)
    print("worker's own line", flush=True)
    AFTER
"""


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    return {**clean, **more}


def command(folder: pathlib.Path, *options: str, after: str = "pass") -> list[str]:
    script = folder / "train.py"
    script.write_text(STEPS.replace("AFTER", after))
    return [*WINDLASS, "run", "--workers=2", *options, str(script)]


def run(arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(**more))


def test_where_there_is_no_terminal_the_last_line_says_how_it_came_out(tmp_path: pathlib.Path):
    done = run(command(tmp_path, "--progress"))
    assert (done.returncode, unannounced(done.stderr)) == (0, "")
    assert done.stdout.count("] worker's own line\n") == 2
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\[progress\] \d+ s, .*loss 0\.05, rank 0\.5, .*clocks 20 20", last), done.stdout
    assert "\x1b" not in done.stdout


def test_it_is_off_unless_asked_for_and_the_flag_wins(tmp_path: pathlib.Path):
    assert "progress" not in run(command(tmp_path, "--no-progress"), WINDLASS_PROGRESS="on").stdout
    assert "progress" not in run(command(tmp_path), WINDLASS_PROGRESS="auto").stdout  # no terminal
    assert "[progress] " in run(command(tmp_path), WINDLASS_PROGRESS="on").stdout
    wrong = run(command(tmp_path), WINDLASS_PROGRESS="often")
    assert wrong.returncode == 2
    assert "expected one of auto, on, off, not 'often'" in re.sub(r"[\s│]+", " ", wrong.stderr)


def read_all(fd: int, seconds: float) -> bytes:
    """Until the other end of the terminal is closed."""
    content, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            content += (data := os.read(fd, 1 << 16))
        except OSError:
            return content
        if not data:
            return content
    raise AssertionError(f"still open after {seconds} s: {content!r}")


def test_on_a_terminal_it_is_below_what_workers_print(tmp_path: pathlib.Path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(tmp_path, "--progress"), stdout=theirs, stderr=theirs, env=environment(TERM="xterm", COLUMNS="100")
    )
    os.close(theirs)
    try:
        shown = read_all(ours, PATIENCE_S).decode()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert shown.count("worker's own line") == 2
    assert "steps/s" in shown
    end = shown[shown.rindex("worker's own line") :]
    assert "default" in end
    assert "done" in end
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def scheduler_of(pid: int) -> int:
    for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"scheduler" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError("there is no scheduler")


@pytest.mark.parametrize("gone", [False, True], ids=["", "scheduler gone"])
def test_ctrl_c_ends_it_at_once_also_when_the_scheduler_is_gone(tmp_path: pathlib.Path, gone: bool):
    process = subprocess.Popen(
        command(tmp_path, "--progress", after="print('asleep', flush=True); time.sleep(1000)"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        while "asleep" not in (line := process.stdout.readline()):
            assert line, "it ended too soon"
        if gone:
            os.kill(scheduler_of(process.pid), signal.SIGKILL)
            while "scheduler ended with signal SIGKILL" not in (line := process.stdout.readline()):
                assert line, "it ended too soon"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    ours = [line for line in rest.splitlines() if not line.startswith("[")]
    assert not any("Traceback" in line for line in ours), rest
    assert rest.rstrip().endswith("windlass run: ended by SIGINT")
