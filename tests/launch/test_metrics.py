"""`windlass metrics`: lines for curl and a configuration for Prometheus that work as they are, and have no secret."""

import json
import os
import pathlib
import shlex
import shutil
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from helpers import PATIENCE_S

from windlass._net.token import user_folder
from windlass.control.auth import bearer
from windlass.launch import rundir
from windlass.testing import LocalCluster

WINDLASS = [sys.executable, "-m", "windlass"]


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder is this test's alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))


def windlass(*arguments: str, **more: str) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    done = subprocess.run([*WINDLASS, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, env=own | more)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def train(tmp_path: pathlib.Path) -> Iterator[rundir.Run]:
    """A run that goes on."""
    (tmp_path / "train.py").write_text(
        "import sys, windlass as wl\nwith wl.connect(timeout=300):\n    print('up', flush=True); sys.stdin = None\n"
        "    import time; time.sleep(1000)\n"
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    process = subprocess.Popen(
        [*WINDLASS, "run", str(tmp_path / "train.py")], stdout=subprocess.PIPE, text=True, env=own
    )
    assert process.stdout is not None
    try:
        assert "up" in process.stdout.readline()
        yield rundir.named("train")
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def get(line: str) -> str:
    """What the line for curl fetches."""
    words = shlex.split(line)
    assert words[:3] == ["curl", "-sS", "-H"]
    assert words[3].startswith("@/")
    if shutil.which("curl") is not None:
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return done.stdout
    name, _, value = pathlib.Path(words[3][1:]).read_text().strip().partition(": ")
    request = urllib.request.Request(words[-1], headers={name: value})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_the_lines_for_curl_work_as_they_are(train: rundir.Run):
    metrics, status = windlass("metrics").splitlines()
    assert 'windlass_members{role="server"} 1.0' in get(metrics)
    assert json.loads(get(status))["members"]
    assert windlass("metrics", "--run", "train").splitlines() == [metrics, status]


def test_only_the_owner_can_read_the_files_and_no_secret_is_in_an_argument(train: rundir.Run):
    value = bearer(train.token())
    for name, text in ((rundir.BEARER, value), (rundir.HEADER, f"Authorization: Bearer {value}")):
        file = train.folder / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.read_text() == f"{text}\n"
    shown = windlass("metrics") + windlass("metrics", "--prometheus")
    assert value not in shown
    assert train.token().decode() not in shown


def test_the_configuration_for_prometheus_names_the_target_and_the_file_of_the_value(train: rundir.Run):
    text = windlass("metrics", "--prometheus")
    host = train.address.removeprefix("tcp://")
    assert text == (
        "scrape_configs:\n"
        "  - job_name: windlass\n"
        "    scheme: http\n"
        "    authorization:\n"
        "      type: Bearer\n"
        f'      credentials_file: "{train.folder / "bearer"}"\n'
        "    static_configs:\n"
        f'      - targets: ["{host}"]\n'
        '        labels: {run: "train"}\n'
    )
    value = (train.folder / "bearer").read_text().strip()  # as Prometheus reads it
    request = urllib.request.Request(f"http://{host}/metrics", headers={"Authorization": f"Bearer {value}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert b"windlass_members" in answer.read()


def test_of_a_scheduler_that_is_no_run_the_files_are_in_the_users_folder():
    with LocalCluster(servers=1) as cluster:
        lines = windlass("metrics", "--address", cluster.address, WINDLASS_TOKEN=cluster.token).splitlines()
        again = windlass("metrics", "--address", cluster.address, WINDLASS_TOKEN=cluster.token).splitlines()
        assert lines == again
        assert "windlass_members" in get(lines[0])
    (folder,) = user_folder().iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(file.name for file in folder.iterdir()) == ["bearer", "header"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_with_tls_and_without_a_token_the_lines_say_so(tmp_path: pathlib.Path):
    address, ca = "tcp://10.0.0.1:7164", tmp_path / "ca.pem"
    ca.touch()
    plain = windlass("metrics", "--address", address, "--no-token").splitlines()
    assert plain[0] == "curl -sS http://10.0.0.1:7164/metrics"
    secure = windlass("metrics", "--address", address, "--tls-ca", str(ca), WINDLASS_TOKEN="secret")
    assert f"--cacert {ca} https://10.0.0.1:7164/metrics" in secure
    text = windlass("metrics", "--address", address, "--tls-ca", str(ca), "--prometheus", WINDLASS_TOKEN="secret")
    assert "    scheme: https\n" in text
    assert f'    tls_config:\n      ca_file: "{ca}"\n' in text
    assert "labels" not in text
