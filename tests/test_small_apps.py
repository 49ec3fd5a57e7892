"""The small apps: each does as well as a reference."""

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing.cluster import until

SMALL = Path(__file__).resolve().parents[1] / "apps" / "small"
MODULES = ("arguments", "data", "packages", "sparse_logistic", "factorise", "kmeans", "half_precision")


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


def biases_alone(data) -> float:
    """The error of the best prediction from one number per user and one per item."""
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import Ridge

    users, items = (1 + int(max(data.train[i].max(), data.test[i].max())) for i in (0, 1))

    def columns(part) -> csr_matrix:
        n = len(part[2])
        both = np.concatenate([part[0], users + part[1]])
        return csr_matrix((np.ones(2 * n), (np.tile(np.arange(n), 2), both)), shape=(n, users + items))

    ridge = Ridge(alpha=3.0).fit(columns(data.train), data.train[2])
    return float(np.sqrt(np.mean((ridge.predict(columns(data.test)) - data.test[2]) ** 2)))


def test_factors_predict_what_was_held_out_better_than_biases(app):
    factorise: ModuleType = app("factorise")
    data = factorise.load_ratings(fallback=True)
    with wl.connect() as cluster:
        assert factorise.train(cluster, data, epochs=3) < 0.85 * biases_alone(data)


@pytest.mark.long
def test_factors_predict_movielens_better_than_biases(app):
    factorise: ModuleType = app("factorise")
    data = factorise.load_ratings()
    if data.name != "MovieLens-100K":
        pytest.skip("MovieLens-100K cannot be downloaded here")
    with wl.connect() as cluster:
        assert factorise.train(cluster, data, epochs=20) < biases_alone(data) - 0.01


def test_three_workers_find_the_centres_that_scikit_learn_finds(app):
    from sklearn.cluster import KMeans

    kmeans: ModuleType = app("kmeans")
    x = kmeans.load_digits(fallback=True).x_train
    first = x[:10]

    def work(rank: int) -> tuple[np.ndarray, float]:
        with cluster.worker(rank, 3) as worker:
            return kmeans.cluster_samples(worker, x, first, iterations=100)

    with wl.connect() as cluster, ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3)))
    reference = KMeans(10, init=first, n_init=1, max_iter=100, tol=0).fit(x)
    for centres, inertia in results:
        np.testing.assert_array_equal(centres, results[0][0])
        assert inertia == pytest.approx(reference.inertia_, rel=1e-3)
        np.testing.assert_allclose(centres, reference.cluster_centers_, atol=0.01)


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
