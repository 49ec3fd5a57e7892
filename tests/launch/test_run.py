"""`windlass run`: what a user sees, and that nothing is left behind."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from helpers import PATIENCE_S, unannounced

from windlass._cgroup import default_memory_bytes_max
from windlass._net.token import user_folder
from windlass.testing.cluster import until

WINDLASS = [sys.executable, "-m", "windlass"]
CONNECTED = """
import os, sys, time
import windlass as wl
cluster = wl.connect(timeout=300)
print("connected", cluster.rank, "of", cluster.world_size, flush=True)
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder is this test's alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}


def script(folder: pathlib.Path, code: str) -> str:
    path = folder / "train.py"
    path.write_text(code)
    return str(path)


def windlass(*arguments: str, timeout: float = PATIENCE_S, **more: str) -> subprocess.CompletedProcess[str]:
    env = environment() | more
    done = subprocess.run([*WINDLASS, *arguments], capture_output=True, text=True, timeout=timeout, env=env)
    done.stderr = unannounced(done.stderr)
    return done


def family(pid: int) -> set[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = {pid}, [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def alive(pids: set[int]) -> set[int]:
    def lives(pid: int) -> bool:
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return {pid for pid in pids if lives(pid)}


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


class Running:
    """A `windlass run` under way; its output is in a file."""

    def __init__(self, folder: pathlib.Path, code: str, *options: str) -> None:
        self._file = (folder / "output").open("w+b")
        self.before = shared_memory()
        command = [*WINDLASS, "run", *options, script(folder, code)]
        self.process = subprocess.Popen(
            command, stdout=self._file, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        self.pids: set[int] = set()

    def output(self) -> str:
        return os.pread(self._file.fileno(), 1 << 20, 0).decode()

    def wait_for(self, text: str, times: int = 1) -> None:
        until(lambda: self.output().count(text) >= times or self.process.poll() is not None, text, PATIENCE_S)
        assert self.output().count(text) >= times, self.output()
        self.pids = family(self.process.pid)

    def pid_of(self, role: str) -> int:
        """Of one of the children."""
        for pid in sorted(self.pids):
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if role.encode() in words or (role == "worker" and any(w.endswith(b"train.py") for w in words[1:2])):
                return pid
        raise AssertionError(f"no {role} among {self.pids}")

    def check_nothing_is_left(self, seconds: float = PATIENCE_S) -> None:
        until(lambda: not alive(self.pids), f"all processes have ended; left: {alive(self.pids)}", seconds)
        until(lambda: not user_folder().exists() or not list(user_folder().iterdir()), "no file is left", seconds)
        assert shared_memory() <= self.before

    def close(self) -> None:
        for pid in alive(self.pids | family(self.process.pid)):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._file.close()


@pytest.fixture
def running(tmp_path: pathlib.Path) -> Iterator[object]:
    started: list[Running] = []

    def start(code: str, *options: str) -> Running:
        started.append(Running(tmp_path, code, *options))
        return started[-1]

    yield start
    for one in started:
        one.close()


# -- what a user sees ------------------------------------------------------------------------------------------------


def test_a_script_runs_on_a_local_cluster_and_its_arguments_are_its_own(tmp_path: pathlib.Path):
    code = (
        CONNECTED
        + """
w = cluster.tensor("w", 1000, rule=wl.Sum(), dtype="int64")
import numpy as np
w.push(np.full(1000, cluster.rank + 1)).wait()
print("arguments", sys.argv[1:], flush=True)
while w.pull()[0] != 3: time.sleep(0.01)
"""
    )
    arguments = ["--epochs", "3", "--servers", "x"]
    result = windlass("run", "--servers", "2", "--workers", "2", script(tmp_path, code), *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert sorted(lines) == sorted(
        f"[worker {rank}] {text}" for rank in range(2) for text in (f"connected {rank} of 2", f"arguments {arguments}")
    )
    assert result.stderr == ""
    assert not user_folder().exists()


def test_workers_get_the_variables_that_torch_reads(tmp_path: pathlib.Path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WINDLASS_ADDRESS"]
    code = f"import os; print({{n: os.environ[n] for n in {names}}})"
    result = windlass("run", "--workers", "2", script(tmp_path, code))
    assert result.returncode == 0
    for rank in range(2):
        line = next(line for line in result.stdout.splitlines() if line.startswith(f"[worker {rank}]"))
        values = eval(line.partition("] ")[2])
        assert (values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert values["MASTER_ADDR"] == "127.0.0.1"
        assert values["MASTER_PORT"].isdecimal()
        assert values["WINDLASS_ADDRESS"].startswith("tcp://127.0.0.1:")


def test_workers_are_told_a_policy_where_one_was_given(tmp_path: pathlib.Path):
    path = script(tmp_path, "import os; print(os.environ.get('WINDLASS_SYNC'))")
    assert windlass("run", path).stdout == "[worker 0] None\n"
    assert windlass("run", "--sync", "ssp:2", path).stdout == "[worker 0] ssp:2\n"


def test_the_token_is_in_a_file_that_only_the_owner_can_read(tmp_path: pathlib.Path):
    code = """
import os, stat
path = os.environ["WINDLASS_TOKEN_FILE"]
print(oct(os.stat(path).st_mode & 0o777), oct(os.stat(os.path.dirname(path)).st_mode & 0o777))
token = open(path).read().strip()
def command_line(pid):
    try:
        return open(f"/proc/{pid}/cmdline").read()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended meanwhile
print(len(token), any(token in command_line(p) for p in os.listdir("/proc") if p.isdecimal()))
"""
    result = windlass("run", script(tmp_path, code))
    assert result.stdout.splitlines() == ["[worker 0] 0o600 0o700", "[worker 0] 64 False"]


def test_every_process_has_a_log_file(tmp_path: pathlib.Path):
    logs = tmp_path / "deep" / "logs"
    result = windlass("run", "--servers", "2", "--workers", "2", "--log-dir", str(logs), script(tmp_path, CONNECTED))
    assert result.returncode == 0
    assert sorted(path.name for path in logs.iterdir()) == [
        "scheduler.log",
        "server-0.log",
        "server-1.log",
        "worker-0.log",
        "worker-1.log",
    ]
    assert (logs / "worker-1.log").read_text() == "connected 1 of 2\n"
    assert "app 'default' starts: 2 worker(s) on 2 server(s)" in (logs / "scheduler.log").read_text()
    assert "listening on tcp://127.0.0.1:" in (logs / "server-0.log").read_text()


def test_the_dry_run_shows_who_would_be_started_and_starts_nobody(tmp_path: pathlib.Path):
    result = windlass("run", "--dry-run", "--servers", "2", "--workers", "3", script(tmp_path, "1/0"), "--x")
    assert result.returncode == 0
    roles = re.findall(r"^(scheduler|server|worker) +(\d)", result.stdout, re.MULTILINE)
    assert roles == [("scheduler", "0"), ("server", "0"), ("server", "1"), *(("worker", str(i)) for i in range(3))]
    assert "train.py --x" in result.stdout
    assert "RANK=2" in result.stdout
    each = default_memory_bytes_max(2)
    assert 0 < each < default_memory_bytes_max(1) < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert result.stdout.count(f"WINDLASS_MEMORY_BYTES_MAX={each}") == 3  # the scheduler is told, too


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("import sys; print('about to fail'); sys.exit(7)", 7, "worker 0 ended with exit code 7"),
        ("raise KeyError('that one')", 1, "KeyError: 'that one'"),
        ("import os; os.kill(os.getpid(), 9)", 137, "worker 0 ended with signal SIGKILL (not sent by this run: out of"),
    ],
)
def test_a_worker_that_fails_is_what_the_user_sees(tmp_path: pathlib.Path, code: str, expected: int, said: str):
    code = f"import os, time\nif os.environ['RANK'] == '1': time.sleep(1000)\n{code}"
    result = windlass("run", "--workers", "2", script(tmp_path, code))  # which does not wait for the other worker
    assert result.returncode == expected
    assert said in result.stderr
    assert result.stderr.startswith("windlass run: worker 0 ended with")
    assert not user_folder().exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run"], "Missing argument"),
        (["run", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["run", "--servers", "0", "SCRIPT"], "--servers: expected at least 1, not '0'"),
        (["run", "--workers", "many", "SCRIPT"], "--workers: expected a whole number, not 'many'"),
        (["run", "--transport", "pigeon", "SCRIPT"], "expected one of auto, arena, socket, not 'pigeon'"),
        (["run", "--log-dir", "/proc/nowhere", "SCRIPT"], "--log-dir /proc/nowhere"),
        (["run", "--wrong", "SCRIPT"], "--wrong"),
        (["run", "--sync", "ssp", "SCRIPT"], "--sync: expected ssp:STALENESS with a whole number"),
        (["run", "--on-worker-loss", "panic", "SCRIPT"], "expected one of continue, wait, not 'panic'"),
        (["worker", "--sync", "none", "--", "true"], "--sync: expected one of bsp, bsp:1, ssp:3, asp or"),
        (["worker", "--", "true"], "windlass worker needs --address"),
        (["status"], "no `windlass run` is on this machine"),
        (["status", "--address", "tcp://127.0.0.1:1"], "cannot be reached: Connection refused"),
        (["scheduler", "--listen", "tcp://0.0.0.0:0", "--no-token"], "beyond loopback a token is required"),
        (["server", "--listen", "tcp://0.0.0.0:0", "--token-file", "TOKEN"], "say with --advertise"),
        (["server", "--memory-bytes-max", "lots"], "expected a number of bytes, such as 1000000, 8G or 8Gi"),
        (["scheduler", "--config", "nowhere.toml"], "settings file nowhere.toml: No such file"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_in_a_line(tmp_path: pathlib.Path, arguments: list[str], complaint: str):
    (tmp_path / "token").write_text("secret")
    paths = {"SCRIPT": script(tmp_path, "print('ran')"), "TOKEN": str(tmp_path / "token")}
    result = windlass(*[paths.get(a, a) for a in arguments])
    assert result.returncode != 0
    text = re.sub(r"[│╭╮╰╯─\s]+", " ", result.stderr)
    assert re.sub(r"\s+", " ", complaint) in text
    assert "Traceback" not in result.stderr
    assert "ran" not in result.stdout


def test_status_finds_the_run_on_this_machine_and_says_where_its_settings_came_from(running, tmp_path: pathlib.Path):
    config = tmp_path / "windlass.toml"
    config.write_text("failure_timeout = 7\n[apps.default]\nmemory_bytes_max = '1M'\n")
    code = CONNECTED + "cluster.tensor('w', 50_000, rule=wl.Adam())\nprint('made', flush=True)\ntime.sleep(1000)"
    run = running(code, "--config", str(config), "--start-timeout", "50")
    run.wait_for("made")
    result = windlass("status")
    assert result.returncode == 0, result.stderr
    for word in ("default/w", "servers", "heartbeat", "failure_timeout"):
        assert word in result.stdout
    status = json.loads(windlass("status", "--json").stdout)
    while not next(one for one in status["members"] if one["role"] == "server")["memory_bytes_max"]:  # not reported yet
        status = json.loads(windlass("status", "--json").stdout)
    assert status["settings"]["failure_timeout"] == {"value": 7.0, "from": f"file, {config}"}
    assert status["settings"]["start_timeout"] == {"value": 50.0, "from": "flag"}
    assert status["timeouts"]["heartbeat"] == 0.7
    [server] = [one for one in status["members"] if one["role"] == "server"]
    assert server["memory_bytes_max"] == status["settings"]["memory_bytes_max"]["value"] == default_memory_bytes_max(1)
    assert status["apps"][0]["quota_bytes"] == 1_000_000


# -- ending ----------------------------------------------------------------------------------------------------------

SLEEPS = CONNECTED + "time.sleep(1000)"
STUBBORN = "import signal; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n" + SLEEPS
FORKS = CONNECTED + "\nif os.fork() == 0: time.sleep(1000)\nprint('forked', flush=True); time.sleep(1000)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("code", [SLEEPS, STUBBORN, FORKS], ids=["sleeps", "stubborn", "forks"])
def test_ctrl_c_ends_everything_within_five_seconds(running, code: str, number: signal.Signals):
    run = running(code, "--servers", "2", "--workers", "2")
    run.wait_for("connected", 2)
    time.sleep(0.2)
    run.pids = family(run.process.pid)
    run.process.send_signal(number)
    begun = time.monotonic()
    assert run.process.wait(PATIENCE_S) == 128 + number
    assert time.monotonic() - begun < 5
    assert f"ended by {number.name}" in run.output()
    run.check_nothing_is_left(5.0)


def test_ctrl_c_before_anybody_has_come_ends_everything_too(running):
    run = running("import time; print('started', flush=True); time.sleep(1000)", "--servers", "2", "--workers", "2")
    until(lambda: len(family(run.process.pid)) >= 3, "children", PATIENCE_S)
    run.pids = family(run.process.pid)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(PATIENCE_S) == 130
    run.check_nothing_is_left(5.0)


@pytest.mark.parametrize("who", ["windlass", "scheduler", "server", "worker"])
def test_whoever_is_killed_nothing_is_left(running, who: str):
    run = running(SLEEPS, "--servers", "2", "--workers", "2", "--failure-timeout", "2")
    run.wait_for("connected", 2)
    victim = run.process.pid if who == "windlass" else run.pid_of(who)
    os.kill(victim, signal.SIGKILL)
    if who != "windlass":  # training may go on; the user is told
        until(lambda: "ended with signal SIGKILL" in run.output(), "it is said", PATIENCE_S)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
    run.check_nothing_is_left()


def test_a_run_that_is_over_before_its_servers_have_begun_ends_in_silence(tmp_path: pathlib.Path):
    (tmp_path / "sitecustomize.py").write_text("import sys, time\ntime.sleep(1.5 * (sys.orig_argv[-1] == 'server'))\n")
    done = subprocess.run(
        [*WINDLASS, "run", "--servers", "2", script(tmp_path, "")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**environment(), "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, unannounced(done.stderr)) == (0, "", "")
    assert not user_folder().exists()


def test_what_a_killed_worker_forked_is_ended_with_it(running):
    run = running("import signal; signal.signal(15, signal.SIG_IGN)\n" + FORKS, "--workers", "2")
    run.wait_for("forked", 2)
    victim = run.pid_of("worker")
    until(lambda: len(family(victim)) == 2, "it has a child", PATIENCE_S)
    theirs = family(victim)
    os.kill(victim, signal.SIGKILL)
    until(lambda: not alive(theirs), "what it forked has ended", PATIENCE_S)
    assert run.process.poll() is None  # the other goes on
    run.process.send_signal(signal.SIGINT)
    run.check_nothing_is_left()


# -- losing workers --------------------------------------------------------------------------------------------------

COUNTS = (
    CONNECTED
    + """
import numpy as np
w = cluster.tensor("w", 8, rule=wl.Sum(), dtype="int64")
def until(n):
    while w.pull()[0] < n: time.sleep(0.01)
"""
)


@pytest.mark.parametrize("dies", ["sys.exit(7)", "raise KeyError('that one')", "os.kill(os.getpid(), 9)"])
def test_when_a_worker_fails_the_others_go_on_and_the_run_says_so_at_its_end(tmp_path: pathlib.Path, dies: str):
    code = (
        COUNTS
        + f"""
mark = os.path.join(os.path.dirname(__file__), "pid")
if cluster.rank == 1:
    with open(mark, "w") as file: file.write(str(os.getpid()))
    print("about to fail", flush=True)
    {dies}
here = cluster._attendance
while len(here.view.workers) > 2: time.sleep(0.01)
while os.path.exists("/proc/" + open(mark).read()): time.sleep(0.01)  # until the launcher knows
w.push(np.ones(8, np.int64)).wait()
until(2)
print("done", cluster.rank, here.view.waited, flush=True)
"""
    )
    result = windlass("run", "--workers", "3", script(tmp_path, code))
    killed = "signal SIGKILL (not sent by this run: out of memory?)"
    expected, how = {"s": (7, "exit code 7"), "r": (1, "exit code 1"), "o": (0, killed)}[dies[0]]
    assert result.returncode == expected, result.stdout + result.stderr
    assert {f"[worker {rank}] done {rank} []" for rank in (0, 2)} <= set(result.stdout.splitlines())
    said = result.stderr.splitlines()
    traceback = dies[0] == "r"
    assert said[0] == f"windlass run: worker 1 ended with {how}; the others go on{':' * traceback}"
    assert ("  KeyError: 'that one'" in said) == traceback
    done = "done by the others; worker 1 was lost, by signal SIGKILL"
    assert said[-1] == f"windlass run: {done if expected == 0 else f'exit code {expected}, that of worker 1'}"
    assert not user_folder().exists()


def test_a_worker_that_is_lost_when_nobody_is_left_to_go_on_fails_the_run(tmp_path: pathlib.Path):
    code = (
        CONNECTED
        + f"""
pid = {str(tmp_path / "pid")!r}
if cluster.rank == 0:
    open(pid, "w").write(str(os.getpid()))
    sys.exit(0)
cluster.barrier(timeout=300)  # until worker 0 has left
while os.path.exists("/proc/" + open(pid).read()):
    time.sleep(0.01)  # and the launcher knows that it has ended
os.kill(os.getpid(), 9)
"""
    )
    result = windlass("run", "--workers", "2", script(tmp_path, code))
    assert result.returncode == 137
    assert "worker 1 ended with signal SIGKILL" in result.stderr


@pytest.mark.parametrize("policy", ["continue", "wait"])
def test_a_worker_that_fails_before_all_have_come_leaves_nobody_waiting(tmp_path: pathlib.Path, policy: str):
    code = "import os, sys\nif os.environ['RANK'] == '1': sys.exit(5)\n" + CONNECTED.replace("300", "1000")
    options = ["--workers", "2", "--on-worker-loss", policy, "--start-timeout", "1000"]  # beyond our patience
    result = windlass("run", *options, script(tmp_path, code))
    assert result.returncode == 5
    assert "connected" not in result.stdout
    assert result.stderr.count("starts") == (3 if policy == "wait" else 0)


@pytest.mark.parametrize("given", ["WINDLASS_TOKEN", "WINDLASS_TOKEN_FILE", "WINDLASS_NO_TOKEN"])
def test_whatever_the_environment_says_of_tokens_a_run_has_one_and_sees_a_worker_fail(
    tmp_path: pathlib.Path, given: str
):
    (tmp_path / "token").write_text("the user's token\n")
    value = {"WINDLASS_TOKEN": "the user's token", "WINDLASS_NO_TOKEN": "1"}.get(given, str(tmp_path / "token"))
    code = CONNECTED + (
        "token = open(os.environ['WINDLASS_TOKEN_FILE']).read().strip()\n"
        "print(token == \"the user's token\", len(token), 'WINDLASS_TOKEN' in os.environ, flush=True)\n"
        "if cluster.rank == 1: sys.exit(5)\n"
    )
    result = windlass("run", "--workers", "2", script(tmp_path, code), **{given: value})
    assert result.returncode == 5
    seen = "False 64 False" if given == "WINDLASS_NO_TOKEN" else "True 16 False"
    assert {f"[worker {rank}] {seen}" for rank in (0, 1)} <= set(result.stdout.splitlines())
    early = "import os, sys\nif os.environ['RANK'] == '1': sys.exit(5)\n" + CONNECTED.replace("300", "1000")
    options = ["--workers", "2", "--start-timeout", "1000"]  # beyond our patience
    assert windlass("run", *options, script(tmp_path, early), timeout=100, **{given: value}).returncode == 5


@pytest.mark.parametrize("dies", ["raise KeyError('that one')", "os.kill(os.getpid(), 9)"])
def test_a_worker_that_is_waited_for_is_started_again_with_its_rank(tmp_path: pathlib.Path, dies: str):
    code = (
        COUNTS
        + f"""
marks = os.path.join(os.path.dirname(__file__), "marks")
here = cluster._attendance
if cluster.rank == 1 and not os.path.exists(marks):
    open(marks, "w").close()
    print("about to fail", flush=True)
    {dies}
if cluster.rank == 0:
    while not here.view.waited: time.sleep(0.001)
    print("waiting for", here.view.waited, flush=True)
    while here.view.waited: time.sleep(0.001)
    peer = here.view.workers[1]
    print("came", peer.index, peer.since, here.view.number, here.view.started, flush=True)
w.push(np.ones(8, np.int64)).wait()
until(2)
print("done", cluster.rank, flush=True)
"""
    )
    logs = tmp_path / "logs"
    options = ["--workers", "2", "--on-worker-loss", "wait", "--log-dir", str(logs)]
    result = windlass("run", *options, script(tmp_path, code))
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert {"[worker 0] waiting for [1]", "[worker 0] came 1 3 3 1"} <= set(lines)
    assert {"[worker 0] done 0", "[worker 1] done 1"} <= set(lines)
    how = "exit code 1" if "raise" in dies else "signal SIGKILL (not sent by this run: out of memory?)"
    first = result.stderr.splitlines()[0]
    assert first.removesuffix(":") == f"windlass run: worker 1 ended with {how}; replacement 1 of 3 starts"
    assert result.stderr.count("windlass run") == 1
    log = (logs / "worker-1.log").read_text()
    assert log.startswith("connected 1 of 2\nabout to fail\n")  # the replacement writes on
    assert log.endswith("connected 1 of 2\ndone 1\n")
    scheduler = (logs / "scheduler.log").read_text()
    assert "WARNING app 'default' waits for a replacement of worker 1\n" in scheduler
    assert re.search(r"worker 1 of app 'default' .* has come, in place of the one that was lost: 2 of 2", scheduler)


def test_a_worker_that_fails_again_and_again_ends_the_run(tmp_path: pathlib.Path):
    code = CONNECTED + "if cluster.rank == 0: time.sleep(1000)\nos.kill(os.getpid(), 9)"
    result = windlass("run", "--workers", "2", "--on-worker-loss", "wait", script(tmp_path, code))
    killed = "signal SIGKILL (not sent by this run: out of memory?)"
    assert result.returncode == 137
    assert result.stdout.count("[worker 1] connected 1 of 2") == 4
    assert [line for line in result.stderr.splitlines() if line.startswith("windlass")] == [
        *(f"windlass run: worker 1 ended with {killed}; replacement {i} of 3 starts" for i in (1, 2, 3)),
        f"windlass run: worker 1 ended with {killed}",
        "windlass run: exit code 137, that of worker 1",
    ]
    assert not user_folder().exists()


def test_policies_reach_the_workers(tmp_path: pathlib.Path):
    code = CONNECTED + "print(cluster.sync, cluster._attendance.at.on_worker_loss, flush=True)"
    result = windlass("run", "--sync", "SSP:3", "--on-worker-loss", "wait", script(tmp_path, code))
    assert result.stdout.splitlines()[1:] == ["[worker 0] ssp:3 wait"]
