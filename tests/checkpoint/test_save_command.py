"""`windlass checkpoint save` and what follows it, as an operator types it beside a training."""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import PATIENCE_S
from typer.testing import CliRunner, Result

import windlass as wl
from windlass._cli import app
from windlass.launch import rundir
from windlass.testing import LocalCluster


def windlass(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200", **environment})


class Training:
    """One worker that trains until it is told to stop."""

    def __init__(self, folder: pathlib.Path | None, rows: int = 50, **settings: float) -> None:
        place = {} if folder is None else {"checkpoint_dir": folder}
        self.local = LocalCluster(servers=2, **place, **settings)
        self._rows = rows
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> "Training":
        self.local.__enter__()
        self.cluster = self.local.connect(timeout=PATIENCE_S)
        self.w = self.cluster.tensor("w", (self._rows, 4), rule=wl.Adam(lr=0.1), sync="bsp")
        self.t = self.cluster.table("t", 4, rule=wl.RowAdagrad(lr=0.1), sync="bsp")
        self._thread.start()
        return self

    def _train(self) -> None:
        while not self._stop.is_set():
            with self.cluster.step() as step:
                step.push_pull(self.w, np.ones((self._rows, 4), np.float32))
                step.push(self.t, np.arange(30, dtype=np.uint64), np.ones((30, 4), np.float32))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self.cluster.close()
        self.local.close()

    def save(self, *arguments: object, address: bool = True) -> Result:
        where = ["--address", self.local.address] if address else []
        return windlass("checkpoint", "save", *arguments, *where, WINDLASS_TOKEN=self.local.token)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def training(folder: pathlib.Path) -> Iterator[Training]:
    with Training(folder) as made:
        yield made


def test_an_operator_has_a_checkpoint_taken_and_finds_it_by_its_name(
    training: Training, folder: pathlib.Path, tmp_path: pathlib.Path
):
    done = training.save("best")
    assert done.exit_code == 0, done.output
    found = re.search(r"checkpoint ([0-9a-f]{16}) of app 'default' is complete", done.stdout)
    assert found is not None, done.stdout
    (row,) = [row for row in json.loads(windlass("checkpoint", "ls", folder, "--json").stdout) if row["tag"] == "best"]
    assert (row["id"], row["state"], row["objects"]) == (found[1], "complete", ["default/w", "default/t"])
    assert "good" in windlass("checkpoint", "verify", folder, "best").stdout
    file = tmp_path / "best.safetensors"
    assert windlass("checkpoint", "export", folder, "best", "--to", file, "--weights-only").exit_code == 0
    from safetensors.numpy import load_file

    arrays = load_file(file)
    assert arrays["w"].shape == (50, 4)
    assert sorted(arrays["t.keys"]) == list(range(30))
    assert arrays["t.weights"].shape == (30, 4)
    last = training.local.status()["checkpoints"]["last"]["default"]
    assert last["id"] == found[1]
    assert 0 <= last["age_seconds"] < PATIENCE_S
    shown = windlass("status", "--address", training.local.address, WINDLASS_TOKEN=training.local.token)
    assert re.search(rf"default +{found[1]} +\d+ +[\d.]+ (s|min)", shown.stdout), shown.stdout
    assert windlass("checkpoint", "rm", folder, "best").exit_code == 0
    assert "best" not in windlass("checkpoint", "ls", folder).stdout


def test_it_must_be_said_which_cluster_is_meant(training: Training):
    done = training.save("best", address=False)
    assert done.exit_code == 2
    assert "name it with --run NAME or --address" in " ".join(done.stderr.replace("│", " ").split())


def test_a_run_is_found_by_its_name(
    training: Training, folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run = rundir.make(training.local.address, training.local.token.encode(), name="mnist", script="train.py")
    try:
        done = windlass("checkpoint", "save", "named", "--run", "mnist")
        assert done.exit_code == 0, done.output
        rows = json.loads(windlass("checkpoint", "ls", folder, "--json").stdout)
        assert [row["state"] for row in rows if row["tag"] == "named"] == ["complete"]
        other = windlass("checkpoint", "save", "--run", "other")
        assert other.exit_code == 1
        assert "'other'" in other.stderr
        assert "'mnist'" in other.stderr
    finally:
        rundir.remove(run)


def on_terminal(*arguments: str, **environment: str) -> tuple[int, str]:
    """What a command draws on a terminal, and its exit code."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        command = [sys.executable, "-m", "windlass", *arguments]
        env = {**os.environ, "TERM": "xterm", **environment}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        drawn = bytearray()
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while some := os.read(ours, 4096):
                drawn += some
        return process.wait(PATIENCE_S), re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", drawn.decode())
    finally:
        os.close(ours)


def test_on_a_terminal_a_bar_shows_how_much_is_written(tmp_path: pathlib.Path):
    with Training(tmp_path, rows=250_000, checkpoint_rate=4e6) as training:  # 12 MB by two servers
        code, drawn = on_terminal(
            "checkpoint", "save", "--address", training.local.address, WINDLASS_TOKEN=training.local.token
        )
    assert code == 0, drawn
    assert re.search(r"clock \d+: [\d.]+ [kM]?B of about 12[.]?\d* MB", drawn), drawn
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in drawn
    assert "is complete" in drawn.splitlines()[-1]


@pytest.mark.parametrize("name", ["a/b", ".x", "", "x" * 129])
def test_a_name_that_is_none_is_refused(training: Training, name: str):
    done = training.save(name)
    assert done.exit_code == 2, done.output
    assert "letters, digits, '_', '.' and '-'" in " ".join(done.stderr.replace("│", " ").split())
    with pytest.raises(wl.InvalidArgument, match="letters, digits"):
        training.cluster.save(name)


def test_an_app_that_nobody_trains_is_refused_with_those_that_are(training: Training):
    done = training.save("--app", "other")
    assert done.exit_code == 1
    assert "no app 'other' is training; those that are: 'default'" in done.stderr


def test_a_cluster_that_does_not_answer_is_named(training: Training):
    done = windlass("checkpoint", "save", "--address", "tcp://127.0.0.1:1", WINDLASS_TOKEN="x")
    assert done.exit_code == 1
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.output


def test_without_a_place_for_it_the_option_is_named():
    with Training(None) as training:
        done = training.save()
        assert done.exit_code == 2, done.output
        assert "--checkpoint-dir" in " ".join(done.stderr.replace("│", " ").split())


def test_where_nobody_ends_an_iteration_it_is_said_after_the_timeout(tmp_path: pathlib.Path):
    with LocalCluster(servers=1, checkpoint_dir=tmp_path) as local, local.connect(timeout=PATIENCE_S) as cluster:
        cluster.tensor("w", (4,), rule=wl.Sum())
        command = ["checkpoint", "save", "--address", local.address, "--timeout", "0.5"]
        done = windlass(*command, WINDLASS_TOKEN=local.token)
        assert done.exit_code == 1
        assert "not complete within 0.5 s" in done.stderr
        assert "call tick() or step()" in done.stderr


def test_when_the_scheduler_is_gone_status_and_save_say_that_there_are_no_checkpoints(tmp_path: pathlib.Path):
    with Training(tmp_path) as training:
        training.local.scheduler.kill()
        where = ["--address", training.local.address]
        shown = windlass("status", *where, WINDLASS_TOKEN=training.local.token)
        assert shown.exit_code == 1
        assert "while it is away no checkpoints are taken" in shown.stderr
        done = training.save("--timeout", 1)
        assert done.exit_code == 1
        with pytest.raises(wl.WindlassError, match="scheduler"):
            training.cluster.save(timeout=1.0)


def test_an_optimizer_s_parameters_are_exported_under_the_module_s_names(tmp_path: pathlib.Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    def network() -> "torch.nn.Module":
        torch.manual_seed(1)
        conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return torch.nn.Sequential(conv, torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(36, 5))

    model = network()
    with LocalCluster(servers=2, checkpoint_dir=tmp_path) as local, local.connect(timeout=PATIENCE_S) as cluster:
        opt = wl.torch.ServerOptimizer(model, wl.Adam(lr=0.1), cluster=cluster)
        for _ in range(3):
            model(torch.randn(2, 3, 5, 5)).sum().backward()
            opt.step()
            opt.zero_grad()
        cluster.save("trained").wait(PATIENCE_S)
        wanted = {name: value.detach().clone() for name, value in model.state_dict().items()}
    file = tmp_path / "model.safetensors"
    done = windlass("checkpoint", "export", tmp_path, "trained", "--to", file, "--weights-only")
    assert done.exit_code == 0, done.output
    other = network()
    other.load_state_dict(load_file(file))
    for name, value in other.state_dict().items():
        if name != "1.num_batches_tracked":  # each worker counts its own
            assert torch.equal(value, wanted[name]), name
    everything = tmp_path / "all.safetensors"
    assert windlass("checkpoint", "export", tmp_path, "trained", "--to", everything).exit_code == 0
    assert load_file(everything)["3.weight.exp_avg"].shape == (5, 36)
    assert os.path.getsize(everything) > os.path.getsize(file)
