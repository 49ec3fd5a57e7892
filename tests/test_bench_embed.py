"""The benchmark of embeddings runs, and says what it measured and what it could not."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S
from rich.console import Console

torch = pytest.importorskip("torch", reason="the benchmark trains with torch")


def test_the_short_form_has_every_figure(tmp_path: Path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "windlass", "bench", "embed", "--short", "--rows=200000", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {f["name"]: f for f in json.loads(file.read_text())["figures"]}
    beside_torch = {
        "Embedding Adagrad, dim 64, 1 thread": ">= 3",
        "Embedding SparseAdam, dim 64, 1 thread": ">= 5",
        "26 features, one EmbeddingBags, Adagrad, dim 64, 1 thread": ">= 2",
        "26 features, 26 EmbeddingBag, Adagrad, dim 64, 1 thread": ">= 1",
        "DLRM, Adagrad, dim 16, batch 256": ">= 1",
    }
    beside_fbgemm = [f"EmbeddingBag RowAdagrad, bags of {bag}, dim 64, 1 thread" for bag in (1, 10)]
    beside_torchrec = ["26 features, one EmbeddingBags, RowAdagrad, dim 64, 1 thread"]
    there = [importlib.util.find_spec(peer) is not None for peer in ("fbgemm_gpu", "torchrec")]
    assert set(figures) == {*beside_torch, *beside_fbgemm, *(beside_torchrec if all(there) else [])}
    assert all(f["value"] > 0 for f in figures.values())
    assert {name: figures[name]["bar"] for name in beside_torch} == beside_torch
    if not there[0]:
        assert "fbgemm's TBE: not measured, it is not installed" in done.stdout
    if not all(there):
        assert "TorchRec: not measured, it is not installed" in done.stdout


def test_what_is_measured_on_a_gpu_runs_on_any_device(monkeypatch: pytest.MonkeyPatch):
    from windlass.bench import embed
    from windlass.bench._figures import Suite

    monkeypatch.setattr(embed, "GPU_BATCHES", ((32, 2),))
    monkeypatch.setattr(embed, "GPU_MLP", {"bottom": (16,), "top": (16,)})
    monkeypatch.setattr(embed, "GPU_STEPS", 2)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    suite = Suite("embed", Console(quiet=True), "", short=True)
    precision = torch.get_float32_matmul_precision()
    try:
        embed.on_a_gpu(suite, 2000, device="cpu")
    finally:
        torch.set_float32_matmul_precision(precision)
        for name in set(sys.modules) - before:  # the app's, whose names others have, too
            if name in ("arguments", "data", "packages", "clicks", "model"):
                del sys.modules[name]
    assert [f.name.rpartition(", dim")[0] for f in suite.figures] == [
        "DLRM, SGD",
        "tables alone, SGD",
        "DLRM, Adagrad",
        "tables alone, Adagrad",
    ]
    assert all(f.value > 0 and f.unit == "ms" and f.limit is not None for f in suite.figures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_form_says_so():
    from windlass import InvalidArgument
    from windlass.bench import embed

    with pytest.raises(InvalidArgument, match="--device cuda: torch finds no CUDA device here"):
        embed.run(Console(quiet=True), 200_000, short=True, device="cuda")
