"""Roles: one script in every role, addresses that are told to others, and TLS on the control port."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from helpers import PATIENCE_S, check_python

import windlass as wl
from windlass.testing import LocalCluster
from windlass.testing.cluster import Process, until

WINDLASS = [sys.executable, "-m", "windlass"]
TOKEN = "a token of roles"
SCRIPT = """
import os, windlass as wl
print("before", os.environ.get("WINDLASS_ROLE"), flush=True)
cluster = wl.connect(timeout=300)
import numpy as np
w = cluster.tensor("w", 1000, rule=wl.Sum(), dtype="int64")
w.push(np.full(1000, 7)).wait()
print("trained", cluster.rank, int(w.pull().sum()), flush=True)
cluster.close()
"""
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts a process with variables; all are ended."""
    started: list[Process] = []

    def start(*command: str, **environment: str) -> Process:
        started.append(Process(list(command), {"WINDLASS_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1", **environment}))
        return started[-1]

    yield start
    for process in started:
        print(f"--- {' '.join(process.process.args[1:])}", process.output(), sep="\n")
        process.close()


def address_in(file: pathlib.Path) -> str:
    until(file.exists, f"{file.name} is there", PATIENCE_S)
    return file.read_text().strip()


def windlass(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    return subprocess.run(
        [*WINDLASS, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**own, "COLUMNS": "300", "WINDLASS_TOKEN": TOKEN, **environment},
    )


# -- one script ------------------------------------------------------------------------------------------------------


def test_one_script_is_every_role_and_exits_with_it(tmp_path: pathlib.Path, start: Start):
    (tmp_path / "train.py").write_text(SCRIPT)
    script, where = [sys.executable, str(tmp_path / "train.py")], tmp_path / "address"
    scheduler = start(*script, WINDLASS_ROLE="scheduler", WINDLASS_SERVERS="2", WINDLASS_ADDRESS_FILE=str(where))
    address = address_in(where)
    servers = [start(*script, WINDLASS_ROLE="server", WINDLASS_ADDRESS=address) for _ in range(2)]
    worker = start(*script, WINDLASS_ROLE="worker", WINDLASS_ADDRESS=address)
    assert [process.wait(PATIENCE_S) for process in (worker, scheduler, *servers)] == [0] * 4
    assert worker.output() == "before worker\ntrained 0 7000\n"
    assert f"windlass scheduler listening on {address}\n" in scheduler.output()
    assert "the cluster ends: all workers have left" in scheduler.output()
    for server in servers:
        assert "windlass server listening on tcp://127.0.0.1:" in server.output()
    for process in (scheduler, *servers):
        assert process.output().startswith("before ")
        assert "trained" not in process.output()  # connect() did not return


def test_a_role_that_fails_is_an_exit_code_and_a_line(tmp_path: pathlib.Path, start: Start):
    (tmp_path / "train.py").write_text(SCRIPT)
    script = [sys.executable, str(tmp_path / "train.py")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        scheduler = start(*script, WINDLASS_ROLE="scheduler", WINDLASS_LISTEN=listen)
        assert scheduler.wait(PATIENCE_S) == 1
    assert f"windlass scheduler: listen on {listen}: Address already in use" in scheduler.output()
    assert "Traceback" not in scheduler.output()
    nobody = start(*script, WINDLASS_ROLE="server", WINDLASS_ADDRESS="tcp://127.0.0.1:1", WINDLASS_START_TIMEOUT="0.5")
    assert nobody.wait(PATIENCE_S) == 1
    assert "connect to tcp://127.0.0.1:1: Connection refused" in nobody.output()


def test_a_server_and_the_scheduler_begin_without_what_workers_alone_need():
    """It takes half of the time until they listen, in each process of a run."""
    code = """
import sys
import windlass.control.model, windlass.control.scheduler, windlass.control.server, windlass.launch.roles
import windlass._cli
host = windlass._core.Host(1, 1 << 30, 1 << 30, 1 << 30)
print({"numpy", "torch", "windlass._public", "windlass._client.cluster"} & set(sys.modules))
import windlass as wl, numpy as np
with wl.connect(threads=1) as cluster:
    print(cluster.tensor("w", 2, rule=wl.Sum()).push_pull(np.ones(2, np.float32)))
"""
    assert check_python(code) == "set()\n[1. 1.]\n"


def test_a_role_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, start: Start):
    process = start(sys.executable, "-c", "import windlass as wl; wl.connect()", WINDLASS_ROLE="king")
    assert process.wait(PATIENCE_S) == 1
    assert "WINDLASS_ROLE: expected one of worker, server, scheduler, not 'king'" in process.output()


def test_connect_with_a_list_of_servers_has_no_role(start: Start):
    code = "import windlass as wl; wl.connect(servers=['tcp://127.0.0.1:1'], timeout=5, failure_timeout=0.2)"
    process = start(sys.executable, "-c", code, WINDLASS_ROLE="server")
    assert process.wait(PATIENCE_S) == 1
    assert "ServerLost" in process.output()


def test_a_world_of_several_without_an_address_names_windlass_run(start: Start):
    process = start(sys.executable, "-c", "import windlass as wl; wl.connect()", WORLD_SIZE="2", RANK="0")
    assert process.wait(PATIENCE_S) == 1
    assert "start the script with `windlass run`" in process.output()


# -- addresses -------------------------------------------------------------------------------------------------------


def test_the_real_address_is_on_a_line_and_in_a_file(tmp_path: pathlib.Path, start: Start):
    files = tmp_path / "scheduler", tmp_path / "server"
    scheduler = start(*WINDLASS, "scheduler", "--address-file", str(files[0]))
    address = address_in(files[0])
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", address)
    server = start(*WINDLASS, "server", "--address", address, "--address-file", str(files[1]))
    own = address_in(files[1])
    assert f"windlass scheduler listening on {address}\n" in scheduler.output()
    assert f"windlass server listening on {own}\n" in server.output()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scheduler", "server"]  # nothing beside them


def test_an_address_file_that_cannot_be_written_is_an_error_and_nobody_listens(tmp_path: pathlib.Path):
    for role in ("scheduler", "server"):
        result = windlass(role, "--address-file", str(tmp_path / "no" / "file"))
        assert result.returncode != 0
        assert f"address file {tmp_path / 'no' / 'file'}: No such file or directory" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("advertise", ["localhost", "tcp://localhost", "localhost:PORT", "tcp://localhost:PORT"])
def test_what_is_told_to_others_need_not_be_what_is_bound(tmp_path: pathlib.Path, start: Start, advertise: str):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = f"tcp://127.0.0.1:{port if 'PORT' in advertise else 0}"
    files = tmp_path / "scheduler", tmp_path / "server"
    start(*WINDLASS, "scheduler", "--address-file", str(files[0]))
    address = address_in(files[0])
    told = advertise.replace("PORT", str(port))
    start(
        *(*WINDLASS, "server", "--listen", listen, "--advertise", told, "--address", address),
        *("--address-file", str(files[1])),
    )
    own = address_in(files[1])
    assert re.fullmatch(r"tcp://localhost:[1-9]\d*", own)
    with wl.connect(address, token=TOKEN, timeout=PATIENCE_S) as cluster:
        assert cluster.tensor("w", 3, rule=wl.Sum()).pull().shape == (3,)
        status = json.loads(windlass("status", "--json", "--address", address).stdout)
    assert [one["address"] for one in status["members"] if one["role"] == "server"] == [own]


def test_a_worker_of_the_command_has_rank_and_address(tmp_path: pathlib.Path):
    code = "import os; print(*(os.environ.get(n) for n in ('WINDLASS_ADDRESS', 'RANK', 'WORLD_SIZE', 'WINDLASS_APP')))"
    flags = ["--address", "tcp://10.0.0.1:4000", "--rank", "3", "--world-size", "5", "--app", "mine"]
    result = windlass("worker", *flags, "--", sys.executable, "-c", code, "--rank", "7")
    assert result.stdout == "tcp://10.0.0.1:4000 3 5 mine\n"
    code = "import os; print(os.environ.get('WINDLASS_SYNC'), os.environ.get('WINDLASS_ON_WORKER_LOSS'))"
    flags = ["--address", "tcp://10.0.0.1:4000", "--sync", "SSP:2", "--on-worker-loss", "wait"]
    assert windlass("worker", *flags, "--", sys.executable, "-c", code).stdout == "ssp:2 wait\n"
    result = windlass("worker", "--address", "tcp://10.0.0.1:4000", "--", "no-such-program")
    assert result.returncode == 2
    assert "no-such-program: No such file" in result.stderr


def test_everybody_takes_the_same_of_two_tokens(tmp_path: pathlib.Path, start: Start):
    (tmp_path / "token").write_text("another")
    both = {"WINDLASS_TOKEN_FILE": str(tmp_path / "token"), "WINDLASS_SERVERS": "1"}
    start(*WINDLASS, "scheduler", "--address-file", str(tmp_path / "address"), **both)
    address = address_in(tmp_path / "address")
    start(*WINDLASS, "server", "--address", address, **both)
    worker = start(
        sys.executable, "-c", "import windlass as wl; wl.connect(timeout=300)", WINDLASS_ADDRESS=address, **both
    )
    assert worker.wait(PATIENCE_S) == 0


def test_workers_that_end_without_closing_end_well(start: Start):
    with LocalCluster(servers=1) as cluster:
        code = "import windlass as wl; wl.connect(timeout=300)"
        at = {"WINDLASS_ADDRESS": cluster.address, "WINDLASS_TOKEN": cluster.token, "WORLD_SIZE": "1", "RANK": "0"}
        workers = [start(sys.executable, "-c", code, WINDLASS_APP=f"app{i}", **at) for i in range(6)]
        assert [worker.wait(PATIENCE_S) for worker in workers] == [0] * len(workers)


def test_the_settings_file_also_says_where_the_cluster_is(tmp_path: pathlib.Path, start: Start):
    with LocalCluster(servers=1) as cluster:
        (tmp_path / "token").write_text(cluster.token)
        (tmp_path / "windlass.toml").write_text(
            f'address = "{cluster.address}"\ntoken_file = "{tmp_path / "token"}"\napp = "filed"\n'
        )
        code = "import os, windlass as wl; del os.environ['WINDLASS_TOKEN']; print(wl.connect(timeout=300))"
        worker = start(sys.executable, "-c", code, WINDLASS_CONFIG=str(tmp_path / "windlass.toml"))
        assert worker.wait(PATIENCE_S) == 0
        assert "app 'filed'" in worker.output()


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def encrypted(tmp_path: pathlib.Path, start: Start, certificate: pathlib.Path) -> str:
    """The address of a scheduler that speaks TLS and lingers."""
    tls = ["--tls-cert", str(certificate / "cert.pem"), "--tls-key", str(certificate / "key.pem")]
    start(*WINDLASS, "scheduler", "--linger", "--address-file", str(tmp_path / "address"), *tls)
    return address_in(tmp_path / "address")


def test_a_cluster_whose_control_port_speaks_tls_works(
    encrypted: str, certificate: pathlib.Path, start: Start, tmp_path: pathlib.Path
):
    trust = {"WINDLASS_TLS_CA": str(certificate / "cert.pem")}
    server = start(*WINDLASS, "server", "--address", encrypted, **trust)
    (tmp_path / "train.py").write_text(SCRIPT)
    worker = start(sys.executable, str(tmp_path / "train.py"), WINDLASS_ADDRESS=encrypted, **trust)
    assert worker.wait(PATIENCE_S) == 0
    assert "trained 0 7000" in worker.output()
    assert server.process.poll() is None
    status = windlass("status", "--address", encrypted, "--tls-ca", str(certificate / "cert.pem"), "--json")
    assert status.returncode == 0, status.stderr
    assert [one["role"] for one in json.loads(status.stdout)["members"]] == ["server"]
    assert json.loads(status.stdout)["settings"]["tls_cert"]["from"] == "flag"
    doctor = windlass("doctor", "--address", encrypted, "--tls-ca", str(certificate / "cert.pem"))
    assert doctor.returncode == 0, doctor.stdout
    assert "can be reached, has our token and speaks our version" in doctor.stdout


def test_who_does_not_expect_tls_gets_an_error_in_time_and_the_doctor_knows_why(encrypted: str, start: Start):
    server = start(*WINDLASS, "server", "--address", encrypted, "--start-timeout", "3")
    with pytest.raises(wl.WindlassError, match=re.escape(encrypted)) as caught:
        wl.connect(encrypted, token=TOKEN, timeout=3)
    assert isinstance(caught.value, wl.ServerLost | wl.ProtocolError)
    assert server.wait(PATIENCE_S) == 1
    assert encrypted in server.output()
    status = windlass("status", "--address", encrypted)
    assert status.returncode == 1
    assert f"the scheduler at {encrypted} cannot be reached" in status.stderr
    doctor = windlass("doctor", "--address", encrypted)
    assert doctor.returncode == 1
    assert f"{encrypted} speaks TLS, which is not expected here" in doctor.stdout
    assert "set --tls-ca" in doctor.stdout


def test_who_does_not_expect_tls_is_told_of_the_setting(encrypted: str):
    with pytest.raises(wl.WindlassError, match=r"(?i)tls"):
        wl.connect(encrypted, token=TOKEN, timeout=1)


def test_a_certificate_that_is_not_trusted_is_refused(
    encrypted: str, certificate: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WINDLASS_TLS_CA", str(certificate / "other.pem"))
    with pytest.raises(wl.WindlassError, match="is not trusted") as caught:
        wl.connect(encrypted, token=TOKEN, timeout=3)
    assert encrypted in str(caught.value)
    doctor = windlass("doctor", "--address", encrypted, "--tls-ca", str(certificate / "other.pem"))
    assert doctor.returncode == 1
    assert f"{encrypted} has another certificate: self-signed certificate" in doctor.stdout
    assert "must have signed the scheduler's certificate" in doctor.stdout


def test_tls_where_there_is_none_is_refused(tmp_path: pathlib.Path, start: Start, certificate: pathlib.Path):
    start(*WINDLASS, "scheduler", "--linger", "--address-file", str(tmp_path / "address"))
    address = address_in(tmp_path / "address")
    status = windlass("status", "--address", address, "--tls-ca", str(certificate / "cert.pem"))
    assert status.returncode == 1
    assert address in status.stderr
    doctor = windlass("doctor", "--address", address, "--tls-ca", str(certificate / "cert.pem"))
    assert doctor.returncode == 1
    assert "it speaks no TLS" in doctor.stdout
    assert "start the scheduler with --tls-cert, or unset tls_ca" in doctor.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["scheduler", "--tls-cert", "nowhere.pem"], "tls_cert nowhere.pem: "),
        (["scheduler", "--tls-cert", "CERT", "--tls-key", "OTHER"], "tls_cert "),
        (["status", "--address", "tcp://127.0.0.1:1", "--tls-ca", "nowhere.pem"], "tls_ca nowhere.pem: "),
        (["server", "--address", "tcp://127.0.0.1:1", "--tls-ca", "nowhere.pem"], "tls_ca nowhere.pem: "),
    ],
)
def test_a_certificate_that_cannot_be_used_is_named(certificate: pathlib.Path, arguments: list[str], complaint: str):
    paths = {"CERT": str(certificate / "cert.pem"), "OTHER": str(certificate / "other-key.pem")}
    result = windlass(*[paths.get(a, a) for a in arguments])
    assert result.returncode != 0
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
