"""The small apps: each does as well as a reference."""

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing.cluster import until

SMALL = Path(__file__).resolve().parents[1] / "apps" / "small"
MODULES = ("arguments", "data", "packages", "sparse_logistic", "half_precision")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A function that imports one of them."""

    def forget() -> None:
        for name in MODULES:
            sys.modules.pop(name, None)

    forget()
    monkeypatch.setattr(sys, "path", [str(SMALL), str(SMALL.parent), *sys.path])
    yield importlib.import_module
    forget()


def test_sparse_logistic_regression_ranks_as_well_as_scikit_learn_with_fewer_weights(app):
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import OneHotEncoder

    logistic: ModuleType = app("sparse_logistic")
    data = logistic.load_digits(fallback=True)
    with wl.connect() as cluster:
        table = logistic.train(cluster, data, epochs=5)
        rows = len(table)
        found = logistic.predict(table, data.x_test)
        assert len(table) == rows  # the prediction made none
        assert table.nnz() < rows

    columns = OneHotEncoder(handle_unknown="ignore").fit(logistic.features(data.x_train))
    known = LogisticRegression(C=0.1).fit(columns.transform(logistic.features(data.x_train)), data.y_train % 2)
    theirs = known.predict_proba(columns.transform(logistic.features(data.x_test)))[:, 1]
    odd = data.y_test % 2
    assert roc_auc_score(odd, found) > roc_auc_score(odd, theirs) - 0.01


def test_a_model_in_bfloat16_learns_as_well_as_plain_torch_in_float32(app, one_thread):
    import torch

    half: ModuleType = app("half_precision")
    data = half.load_digits(fallback=True)
    with wl.connect() as cluster:
        found = half.accuracy(half.train(cluster, data, epochs=5), data)

    model = half.make_model(data.x_train.shape[1])
    opt = torch.optim.Adam(model.parameters(), lr=0.002)
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))
    for _ in range(5):
        for x, y in torch.utils.data.DataLoader(dataset, batch_size=half.BATCH, shuffle=True):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    assert found > half.accuracy(model.bfloat16(), data) - 0.03


def test_a_reader_finds_a_run_by_its_name_and_evaluates_what_its_workers_train(tmp_path: Path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS")}
    environment |= {"XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def start(*command: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True)

    train, evaluate = (str(SMALL / name) for name in ("sparse_logistic.py", "evaluate.py"))
    with start("-m", "windlass", "run", "--workers=2", train, "--epochs=1000000") as run:
        try:
            until(lambda: any(tmp_path.glob("windlass/run-*")), "the run has a folder", PATIENCE_S)
            with start(evaluate, "--times=1000000", "--every=0.05") as reader:
                try:
                    assert reader.stdout is not None
                    shown = iter(reader.stdout)  # it ends where the reader does
                    assert any(float(re.match(r"(\d+\.\d)% right", line)[1]) > 85 for line in shown)
                    assert run.poll() is None
                finally:
                    reader.kill()
        finally:
            run.send_signal(signal.SIGINT)
