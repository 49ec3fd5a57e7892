"""`windlass doctor`: whatever is wrong has a line that names it, and one that says what to do."""

import contextlib
import dataclasses
import http.server
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from helpers import PATIENCE_S

from windlass import _core
from windlass._cgroup import cores_of, memory_of, processes_of, usable_cores
from windlass._settings import load
from windlass.observe import doctor
from windlass.observe.doctor import Check, Verdict
from windlass.observe.machine import Machine, chosen, kernel_version, look
from windlass.testing import LocalCluster, Servers
from windlass.testing.cluster import until

GIB = 1 << 30
GOOD = Machine(
    kernel=(6, 8),
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    contained=False,
    overcommit="0",
    files=(4096, 1 << 20),
    processes=-1,
    address_bytes=-1,
    locked_bytes=8 << 20,
    memfd_trouble="",
    shm_free_bytes=32 * GIB,
    huge_pages="madvise",
    huge_pages_shared="never",
    cores=16,
    cores_there=16,
    cores_quota=None,
)


class Result:
    """What a run of the doctor printed."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        own = {n: v for n, v in os.environ.items() if not n.startswith("WINDLASS_") and n != "WORLD_SIZE"}
        command = [sys.executable, "-m", "windlass", "doctor", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env={**own, **environment})
        assert done.stderr == ""
        self.code, self.text = done.returncode, done.stdout

    def wrong(self) -> list[str]:
        """The lines that say so."""
        return [line for line in self.text.splitlines() if line.startswith("wrong ")]

    def advice(self, of: str) -> str:
        """What stands under a line."""
        lines = self.text.splitlines()
        at = next(i for i, line in enumerate(lines) if of in line)
        return lines[at + 1].partition("-> ")[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=2) as cluster:
        until(lambda: len(cluster.members("server")) == 2, "the servers are there", PATIENCE_S)
        yield cluster


@pytest.fixture
def token(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "token"
    path.write_text("a token of tests\n")
    path.chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """No `windlass run` of anybody else's is found."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


# -- clusters --------------------------------------------------------------------------------------------------------


def test_a_healthy_cluster_has_nothing_wrong(cluster: LocalCluster, token: pathlib.Path):
    with cluster.connect():
        result = Result("--address", cluster.address, "--token-file", str(token))
    assert (result.code, result.wrong()) == (0, []), result.text
    assert re.search(r"^ok +scheduler +\S+ can be reached, has our token and speaks our version", result.text, re.M)
    assert re.search(r"^ok +members +2 of 2 servers, 1 workers", result.text, re.M)
    for i in range(2):
        assert re.search(rf"^ok +server {i} +tcp://127.0.0.1:\d+ .* can be reached from here$", result.text, re.M)
    assert re.search(r"^0 wrong, \d+ warnings, \d+ ok$", result.text.splitlines()[-1])


def test_a_program_reads_the_same_as_json(cluster: LocalCluster):
    result = Result("--json", WINDLASS_ADDRESS=cluster.address, WINDLASS_TOKEN="another")
    found = json.loads(result.text)
    assert (result.code, found["wrong"]) == (1, 1)
    wrong = next(check for check in found["checks"] if check["verdict"] == "wrong")
    assert wrong["name"] == "token"
    assert set(wrong) == {"name", "verdict", "seen", "advice"}


@pytest.mark.parametrize("other", ["another", None])
def test_a_wrong_token_is_named_and_where_to_set_it(cluster: LocalCluster, other: str | None):
    result = Result("--address", cluster.address, **({} if other is None else {"WINDLASS_TOKEN": other}))
    assert result.code == 1
    (line,) = result.wrong()
    assert re.search(rf"token +status: the scheduler at {cluster.address} has another token", line)
    assert "--token-file" in result.advice("has another token")


def test_a_dead_server_is_named_with_why_it_is_lost():
    with LocalCluster(servers=2) as cluster, cluster.connect():
        cluster.servers[1].kill()
        until(lambda: cluster.status()["servers_lost"], "it is missed", PATIENCE_S)
        result = Result("--address", cluster.address, WINDLASS_TOKEN=cluster.token)
        assert result.code == 1
        (line,) = result.wrong()
        assert re.search(r"members +server 1 is lost: its process \d+ has ended", line)
        assert "restart the job" in result.advice("server 1 is lost")
        assert re.search(r"^ok +server 0 ", result.text, re.M)


def test_a_server_that_stands_still_is_named(cluster: LocalCluster):
    with LocalCluster(servers=2, failure_timeout=30) as cluster:
        until(lambda: len(cluster.members("server")) == 2, "the servers are there", PATIENCE_S)
        cluster.servers[0].stop()
        result = Result("--address", cluster.address, WINDLASS_TOKEN=cluster.token)
        cluster.servers[0].cont()
    assert result.code == 1
    (line,) = result.wrong()
    number = line.split()[2]
    assert re.search(rf"server {number} +tcp://127.0.0.1:\d+ \(process \d+ on .*no greeting within the time", line)
    assert "firewall" in result.advice(line)


def test_who_is_missing_is_a_warning():
    with LocalCluster(servers=2) as cluster:
        cluster.servers[1].kill()
        until(lambda: len(cluster.members("server")) == 1, "one has come", PATIENCE_S)
        result = Result("--address", cluster.address, WINDLASS_TOKEN=cluster.token)
    assert result.code == 0
    assert re.search(r"^warning +members +still missing: server \d", result.text, re.M)
    assert "start them" in result.advice("still missing")


def test_nobody_at_the_address():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        result = Result("--address", address)
    assert result.code == 1
    (line,) = result.wrong()
    assert f"connect to {address}: Connection refused" in line
    assert "nobody listens there" in result.advice("refused")


def test_a_host_of_a_name_that_nobody_knows():
    result = Result("--address", "tcp://nowhere.invalid:4000")
    assert result.code == 1
    assert "nowhere.invalid" in result.wrong()[0]
    assert "does not know the name" in result.advice("nowhere.invalid:4000: ")


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("nonsense", "address 'nonsense': expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0 is nobody's"),
        ("unix://@name", "unix://@name is nobody's"),
    ],
)
def test_an_address_that_can_never_be_right(address: str, complaint: str):
    result = Result("--address", address)
    assert result.code == 1
    assert complaint in result.wrong()[0]
    assert result.advice(complaint) == "expected tcp://HOST:PORT, as the scheduler printed it"


def test_a_web_server_at_the_address_is_no_scheduler():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.05,))
        thread.start()
        try:
            result = Result("--address", f"tcp://127.0.0.1:{web.server_port}")
        finally:
            web.shutdown()
            thread.join()
    assert result.code == 1
    assert "is no scheduler: it answered 501 to /healthz" in result.wrong()[0]
    assert "the line that the scheduler printed" in result.advice("is no scheduler")


def test_a_server_at_the_address_is_no_scheduler():
    with Servers(1) as servers:
        result = Result("--address", servers.addresses[0])
    assert result.code == 1
    assert f"{servers.addresses[0]} is a server of Windlass, not a scheduler" in result.wrong()[0]


def test_something_that_speaks_another_language_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(3):
                with listener.accept()[0] as sock, contextlib.suppress(OSError):  # it looks in several times
                    sock.sendall(b"220 mail.example.com ESMTP\r\n")
                    sock.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        result = Result("--address", f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(10)
    assert result.code == 1
    assert "it speaks no HTTP ('220 mail.example.com ESMTP" in result.wrong()[0]
    assert "the line that the scheduler printed" in result.advice("speaks no HTTP")


def test_a_scheduler_that_stands_still_is_said_not_to_answer():
    with LocalCluster(servers=1) as cluster:
        until(lambda: "listening" in cluster.scheduler.output(), "it listens", PATIENCE_S)
        cluster.scheduler.stop()
        result = Result("--address", cluster.address, WINDLASS_TOKEN=cluster.token)
        cluster.scheduler.cont()
    assert result.code == 1
    assert f"{cluster.address} lets us connect, but does not answer" in result.wrong()[0]
    assert "stands still" in result.advice("does not answer")


def test_without_an_address_the_machine_alone_is_looked_at():
    result = Result()
    assert result.code == 0, result.text
    assert re.search(r"^ok +scheduler +no address is set, and there is no `windlass run`", result.text, re.M)


def test_several_workers_without_an_address_are_told_of_windlass_run():
    result = Result(WORLD_SIZE="4")
    assert result.code == 1
    assert "WORLD_SIZE=4 without a cluster's address" in result.wrong()[0]
    assert "`windlass run`" in result.advice("WORLD_SIZE=4")


def test_several_workers_of_another_launcher_are_told_too():
    assert "OMPI_COMM_WORLD_SIZE=3 without a cluster's address" in Result(OMPI_COMM_WORLD_SIZE="3").wrong()[0]


def test_the_run_on_this_machine_is_found(tmp_path: pathlib.Path):
    (tmp_path / "train.py").write_text(
        "import subprocess, sys, windlass as wl\n"
        "cluster = wl.connect(timeout=300)\n"
        "import os; own = {n: v for n, v in os.environ.items() if not n.startswith(('WINDLASS', 'WORLD_SIZE'))}\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'windlass', 'doctor'], env=own).returncode)\n"
    )
    command = [sys.executable, "-m", "windlass", "run", str(tmp_path / "train.py")]
    own = {n: v for n, v in os.environ.items() if not n.startswith("WINDLASS_") and n != "WORLD_SIZE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"ok +members +1 of 1 servers, 1 workers", done.stdout)


def test_a_server_that_tells_others_of_its_own_loopback_is_wrong_from_elsewhere(cluster: LocalCluster):
    checks = doctor.examine_servers(cluster.status(), cluster.token.encode(), scheduler_is_here=False)
    assert [check.verdict for check in checks] == [Verdict.WRONG] * 2
    assert "--advertise" in checks[0].advice


# -- settings and token ----------------------------------------------------------------------------------------------


def test_a_mistyped_variable_is_named_with_the_right_one():
    result = Result(WINDLASS_ADRESS="tcp://127.0.0.1:1", WINDLASS_THREADS="many", WINDLASS_SERVERS="3")
    assert result.code == 1
    lines = result.wrong()
    assert len(lines) == 2  # every one, not only the first
    assert "WINDLASS_ADRESS: there is no such setting; did you mean WINDLASS_ADDRESS?" in lines[0]
    assert result.advice("WINDLASS_ADRESS:") == "rename or unset WINDLASS_ADRESS"
    assert "WINDLASS_THREADS: expected a whole number, not 'many'" in lines[1]
    assert result.advice("WINDLASS_THREADS:") == "correct WINDLASS_THREADS"


def test_a_settings_file_that_is_wrong_is_named(tmp_path: pathlib.Path):
    file = tmp_path / "windlass.toml"
    file.write_text("server = 3\n")
    by_flag, by_variable = Result("--config", str(file)), Result(WINDLASS_CONFIG=str(file))
    for result in (by_flag, by_variable):
        assert result.code == 1
        assert f"{file}: server: there is no such setting; did you mean servers?" in result.wrong()[0]


def test_where_settings_came_from_is_said(tmp_path: pathlib.Path):
    file = tmp_path / "windlass.toml"
    file.write_text("servers = 3\n")
    result = Result("--config", str(file), WINDLASS_APP="mine")
    assert result.code == 0
    assert re.search(rf"settings +app=mine \(environment, WINDLASS_APP\), servers=3 \(file, {file}\)", result.text)


def test_the_users_own_token_is_looked_at_and_not_made(tmp_path: pathlib.Path):
    runtime, file = {"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path / "windlass" / "token"
    assert re.search(rf"^ok +token +none yet: .* makes {file}$", Result(**runtime).text, re.M)
    assert list(tmp_path.iterdir()) == []
    file.parent.mkdir(mode=0o700)
    file.write_text("mine\n")
    file.chmod(0o644)
    result = Result(**runtime)
    assert result.code == 1
    assert f"{file} is not trusted" in result.wrong()[0]
    file.chmod(0o600)
    assert re.search(rf"^ok +token +{file}, your own on this host$", Result(**runtime).text, re.M)


def test_a_token_file_that_others_can_read_is_a_warning(token: pathlib.Path):
    token.chmod(0o644)
    result = Result("--token-file", str(token))
    assert result.code == 0
    assert re.search(rf"^warning +token +{token} \(flag\) has mode 644: other users can read it$", result.text, re.M)
    assert result.advice("mode 644") == f"chmod 600 {token}"


def test_a_token_file_that_is_not_there_or_empty_is_wrong(tmp_path: pathlib.Path, cluster: LocalCluster):
    (tmp_path / "empty").touch()
    for name, said in (("nowhere", "No such file"), ("empty", "it is empty")):
        result = Result("--token-file", str(tmp_path / name), "--address", cluster.address)
        assert result.code == 1
        (line,) = result.wrong()
        assert f"{tmp_path / name}: " in line
        assert said in line
        assert result.advice(said) == "give every process the token that the scheduler has"


def test_an_instruction_set_that_is_not_here_is_wrong():
    result = Result(WINDLASS_ISA="vax")
    assert result.code == 1
    assert "WINDLASS_ISA=vax: this machine has" in result.wrong()[0]
    assert "unset WINDLASS_ISA" in result.advice("WINDLASS_ISA=vax")


# -- the machine -----------------------------------------------------------------------------------------------------


def check(name: str, **odd: object) -> Check:
    """The check of that name on a machine that is good but for this."""
    settings = load(odd.pop("settings", {}), None, {})  # type: ignore[arg-type]
    return next(c for c in doctor.check_machine(dataclasses.replace(GOOD, **odd), settings) if c.name == name)


def test_a_good_machine_has_no_complaint():
    assert {c.verdict for c in doctor.check_machine(GOOD, load(None, None, {}))} == {Verdict.OK}


def test_looking_at_this_machine_finds_what_is_there():
    seen = look()
    assert 0 < seen.available_bytes <= seen.memory_bytes
    assert seen.kernel >= (3, 0)
    assert seen.memfd_trouble == ""
    assert 1 <= seen.cores <= seen.cores_there


@pytest.mark.parametrize(
    ("name", "odd", "seen", "advice"),
    [
        ("memory", {"available_bytes": 1 << 29}, "512 MiB of 64.0 GiB", "--memory-bytes-max"),
        (
            "memory_bytes_max",
            {"memory_bytes": GIB, "contained": True, "settings": {"memory_bytes_max": "2Gi"}},
            "2.0 GiB (flag), but there are 1.0 GiB",
            "at most 1073741824",
        ),
        ("overcommit", {"overcommit": "2"}, "vm.overcommit_memory=2", "sysctl vm.overcommit_memory=0"),
        ("open files", {"files": (256, 4096)}, "256 at once", "ulimit -n 1024"),
        ("open files", {"files": (256, 512)}, "256 at once", "LimitNOFILE="),
        ("processes", {"processes": 100}, "at most 100", "--pids-limit"),
        ("address space", {"address_bytes": 4 * GIB}, "4.0 GiB", "ulimit -v unlimited"),
        ("/dev/shm", {"shm_free_bytes": 64 << 20}, "64 MiB free", "--shm-size"),
        ("/dev/shm", {"shm_free_bytes": None}, "not there", "--shm-size"),
        ("huge pages", {"huge_pages": "never"}, "never: tables and tensors have pages of 4 KiB", "echo madvise > /sys"),
        ("huge pages", {"huge_pages": ""}, "the kernel has none", "echo madvise"),
        ("huge pages, shared", {"kernel": (5, 15)}, "never: shared memory has pages of 4 KiB", "echo advise > /sys"),
        ("huge pages, shared", {"huge_pages_shared": "deny"}, "deny: ", "echo advise"),
        ("cores", {"cores_quota": 2.5}, "16, but the cgroup lets us use 2.5 at a time", "--threads 2 "),
        ("cores", {"settings": {"threads": 99}}, "16, but threads=99", "--threads 16"),
    ],
)
def test_what_makes_a_machine_slow_or_unsafe_is_a_warning(name: str, odd: dict[str, object], seen: str, advice: str):
    found = check(name, **odd)
    assert found.verdict == Verdict.WARNING
    assert seen in found.seen
    assert advice in found.advice


def test_servers_that_may_together_take_more_than_there_is_are_a_warning():
    def members(*caps: int) -> dict[str, object]:
        here = [{"role": "server", "host": "node7", "memory_bytes_max": cap * GIB} for cap in caps]
        return {"members": [*here, {"role": "server", "host": "node8", "memory_bytes_max": 2**64 - 1}]}

    assert doctor.check_caps(members(32, 32), GOOD, "node7") == []
    [found] = doctor.check_caps(members(51, 51), GOOD, "node7")
    assert (found.name, found.verdict) == ("memory_bytes_max", Verdict.WARNING)
    assert found.seen == "2 servers here may take 102.0 GiB together, of 64.0 GiB"
    assert f"--memory-bytes-max {int(64 * GIB * 0.8) // 2}" in found.advice


def test_without_memfd_nothing_can_be_shared():
    found = check("shared memory", memfd_trouble="memfd_create: Operation not permitted")
    assert found.verdict == Verdict.WRONG
    assert "Operation not permitted" in found.seen
    assert "--transport socket" in found.advice


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("open files", {"files": (-1, -1)}),
        ("processes", {"processes": 30_000}),
        ("memory_bytes_max", {"settings": {"memory_bytes_max": "2Gi"}}),
        ("locked memory", {"locked_bytes": -1}),
        ("huge pages", {"huge_pages": "always"}),
        ("huge pages, shared", {"kernel": (5, 15), "huge_pages_shared": "advise"}),
        ("cores", {"cores_quota": 16.0}),
        ("cores", {"cores_quota": 4.0, "settings": {"threads": 4}}),
    ],
)
def test_what_is_good_enough_is_no_complaint(name: str, odd: dict[str, object]):
    assert check(name, **odd).verdict == Verdict.OK


def test_words_of_the_kernel_are_read():
    assert chosen("always [madvise] never\n") == "madvise"
    assert chosen("") == ""
    assert kernel_version("6.1.0-13-amd64") == (6, 1)
    assert kernel_version("6.18-rc1") == (6, 18)
    assert kernel_version("odd") == (0, 0)


def test_the_least_limit_of_nested_cgroups_counts(tmp_path: pathlib.Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text("1000000\n")
    (tmp_path / "a" / "memory.current").write_text("900000\n")
    (tmp_path / "a" / "memory.stat").write_text("anon 1\ninactive_file 400000\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    (tmp_path / "a" / "b" / "memory.current").write_text("5\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "cpu.max").write_text("max 100000\n")
    assert memory_of(tmp_path, "0::/a/b\n") == (1000000, 500000)
    assert cores_of(tmp_path, "0::/a/b\n") == 1.5
    assert usable_cores(tmp_path, "0::/a/b\n") == min(2, _core.cores())
    (tmp_path / "a" / "pids.max").write_text("700\n")
    (tmp_path / "a" / "b" / "pids.max").write_text("max\n")
    assert processes_of(tmp_path, "0::/a/b\n") == 700
    assert processes_of(tmp_path, "0::/\n") == -1
    assert memory_of(tmp_path, "0::/elsewhere\n") == (1 << 60, 1 << 60)
    assert cores_of(tmp_path, "0::/\n") is None
    assert usable_cores(tmp_path, "0::/\n") == _core.cores()


def test_the_first_version_of_cgroups_is_read_too(tmp_path: pathlib.Path):
    (tmp_path / "memory" / "x").mkdir(parents=True)
    (tmp_path / "memory" / "x" / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory" / "x" / "memory.usage_in_bytes").write_text("1\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    groups = "4:memory:/x\n1:cpu,cpuacct:/\n0::/\n"
    assert memory_of(tmp_path, groups) == (1000, 999)
    assert cores_of(tmp_path, groups) is None
