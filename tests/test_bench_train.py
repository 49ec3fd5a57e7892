"""The training benchmark runs, and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S

pytest.importorskip("torch", reason="the benchmark trains with torch")


def test_the_short_form_has_every_figure(tmp_path: Path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "windlass", "bench", "train", "--short", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert [f["name"] for f in figures] == [
        "MNIST CNN, 2 workers, BSP",
        "MNIST CNN, 2 workers, BSP, overlap",
        "MNIST CNN, 2 workers, SSP(3)",
        "MNIST CNN, 2 workers, ASP",
        "MNIST CNN, 1 worker and 1 server",
        "uneven workers, SSP(4)",
    ]
    assert all(f["value"] > 0 and f["limit"] > 0 and f["unit"] == "samples/s" for f in figures)
