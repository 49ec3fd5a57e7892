"""What a run says when processes end badly: what happened first comes first, and a traceback comes once."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from helpers import PATIENCE_S, unannounced

CONNECTED = """
import os, signal, sys, time
import numpy as np
import windlass as wl
cluster = wl.connect(timeout=300)
w = cluster.tensor("w", 40_000, rule=wl.Sum())
cluster.barrier()
print("connected", cluster.rank, flush=True)
"""
KILLS_A_SERVER = (
    CONNECTED
    + """
if cluster.rank == 0:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split("\\0")
            number = "WINDLASS_NUMBER=1" in open(f"/proc/{pid}/environ").read().split("\\0")
            mine = os.environ["WINDLASS_CLUSTER"] in open(f"/proc/{pid}/environ").read()
        except OSError:
            continue
        if "server" in words and number and mine:
            os.kill(int(pid), signal.SIGKILL)
while True:
    w.push_pull(np.ones(40_000, np.float32))
"""
)


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder is this test's alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))


def run(folder: pathlib.Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(code)
    own = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    command = [sys.executable, "-m", "windlass", "run", *options, str(folder / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=own)
    done.stderr = unannounced(done.stderr)
    return done


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The launcher's own lines."""
    return [line for line in done.stderr.splitlines() if not line.startswith("  ")]


def test_a_killed_server_is_the_cause_and_one_worker_shows_how_it_noticed(tmp_path: pathlib.Path):
    logs = tmp_path / "logs"
    done = run(tmp_path, KILLS_A_SERVER, "--servers", "2", "--workers", "3", "--log-dir", str(logs))
    assert done.returncode == 1
    lines = said(done)
    killed = "signal SIGKILL (not sent by this run: out of memory?)"
    assert lines[0] == f"windlass run: server 1 ended with {killed}"
    workers = [line for line in lines if re.match(r"windlass run: worker \d ended with exit code 1:", line)]
    assert len(workers) == 3, done.stderr
    assert sum(line.endswith(": ServerLost") for line in workers) == 2
    assert re.fullmatch(
        r"windlass run: exit code 1, that of worker \d; the first to end was server 1, with signal SIGKILL",
        lines[-1],
    )
    assert (done.stdout + done.stderr).count("Traceback (most recent call last)") == 1
    assert "Traceback" in done.stderr
    for rank in range(3):  # nothing is lost
        assert "ServerLost" in (logs / f"worker-{rank}.log").read_text()


def test_workers_that_fail_alike_show_one_traceback(tmp_path: pathlib.Path):
    code = CONNECTED + "time.sleep(0.1 * cluster.rank)\nraise KeyError('that one')"
    done = run(tmp_path, code, "--workers", "3")
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("KeyError: 'that one'") == 1
    assert (done.stdout + done.stderr).count("Traceback (most recent call last)") == 1
    assert said(done)[0].startswith("windlass run: worker ")
    alike = [line for line in said(done) if re.search(r"exit code 1(; the others go on)?: KeyError$", line)]
    assert len(alike) == 2


def test_a_traceback_is_shown_when_its_worker_fails_and_the_end_says_whose_exit_code_it_is(tmp_path: pathlib.Path):
    code = (
        "import os, sys, time\n"
        + CONNECTED
        + "mark = os.path.join(os.path.dirname(__file__), 'pid')\n"
        + "if cluster.rank == 1:\n"
        + "    open(mark, 'w').write(str(os.getpid()))\n"
        + "    raise KeyError('that one')\n"
        + "while not os.path.exists(mark) or os.path.exists('/proc/' + open(mark).read()): time.sleep(0.01)\n"
        + "time.sleep(1)\n"
    )
    done = run(tmp_path, code, "--workers", "2")
    assert done.returncode == 1
    assert said(done) == [
        "windlass run: worker 1 ended with exit code 1; the others go on:",
        "windlass run: exit code 1, that of worker 1",
    ]
    assert done.stderr.count("KeyError: 'that one'") == 1
    assert "KeyError" not in done.stdout


def test_a_worker_that_logs_an_exception_and_ends_well_is_heard(tmp_path: pathlib.Path):
    code = CONNECTED + "import logging\ntry: 1 / 0\nexcept ZeroDivisionError: logging.exception('it went wrong')"
    done = run(tmp_path, code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[worker 0] ZeroDivisionError: division by zero" in done.stdout.splitlines()


def test_ctrl_c_shows_no_traceback(tmp_path: pathlib.Path):
    (tmp_path / "train.py").write_text(CONNECTED + "while True: time.sleep(0.01)")
    own = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    command = [sys.executable, "-m", "windlass", "run", "--workers", "2", str(tmp_path / "train.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own)
    with process:
        assert process.stdout is not None
        text = ""
        while text.count("connected") < 2:
            line = process.stdout.readline()
            assert line, text
            text += line
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert rest == "windlass run: ended by SIGINT\n"
