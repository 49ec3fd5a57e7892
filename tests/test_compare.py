"""The same training under each policy of consistency, with workers that are uneven on purpose."""

import importlib.util
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S

SOFTMAX = Path(__file__).resolve().parents[1] / "apps" / "softmax"
WITHOUT_PLOT = importlib.util.find_spec("matplotlib") is None


def python(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracies(output: str) -> dict[str, float]:
    found = re.findall(r"^(\S+) +accuracy (\d\.\d{4})  loss \d+\.\d{4} +\d+\.\d\d s$", output, re.MULTILINE)
    return {policy: float(accuracy) for policy, accuracy in found}


def test_uneven_workers_come_to_the_same_accuracy_under_every_policy_and_the_plot_is_a_png(tmp_path: Path):
    png = tmp_path / "losses.png"
    plot = [] if WITHOUT_PLOT else ["--plot", str(png)]
    compare = [str(SOFTMAX / "compare.py"), "--data=classification", "--epochs=6", "--workers=2", "--uneven=0.001"]
    seen = accuracies(python(*compare, "--policies", "bsp", "ssp:4", "asp", *plot))
    assert list(seen) == ["bsp", "ssp:4", "asp"]
    assert max(seen.values()) - min(seen.values()) <= 0.01, seen
    assert min(seen.values()) > 0.9, seen
    if WITHOUT_PLOT:
        pytest.skip("the PNG needs matplotlib, which is not installed; accuracies were compared")
    content = png.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (960, 600)


def test_the_policy_of_the_app_is_its_flag_or_else_the_environment_s(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(SOFTMAX)!r})\nimport train\n"
        "inner = train.train\n"
        "def show(cluster, *rest):\n    print('policy', cluster.sync, flush=True)\n    return inner(cluster, *rest)\n"
        "train.train = show\ntrain.main()\n"
    )
    arguments = [str(script), "--data", "digits", "--epochs", "1"]
    assert "policy asp\n" in python(*arguments)
    assert "policy ssp:2\n" in python(*arguments, WINDLASS_SYNC="ssp:2")
    assert "policy bsp\n" in python(*arguments, "--sync", "bsp", WINDLASS_SYNC="ssp:2")


def test_a_policy_that_does_not_exist_is_refused_with_a_suggestion():
    command = [sys.executable, str(SOFTMAX / "train.py"), "--data", "digits", "--sync", "spp:3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert done.stderr.startswith("train.py: connect: sync: expected one of bsp")
    assert "did you mean" in done.stderr
