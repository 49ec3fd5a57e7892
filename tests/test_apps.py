"""The apps beside their references, on small data; each also as a user starts it."""

import json
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl

APPS = Path(__file__).resolve().parents[1] / "apps"
sys.path.insert(0, str(APPS))
try:
    from table import SHORT, row, run_app
finally:
    sys.path.remove(str(APPS))
ON_A_CLUSTER = ("mf", "pagerank", "gbdt")  # in the short form
OURS = {path.stem for path in APPS.glob("*.py")}


@pytest.fixture
def train(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The train.py of the app that the test names."""
    monkeypatch.setattr(sys, "path", [str(APPS / request.param), str(APPS), *sys.path])
    import importlib

    for name in (*OURS, "train"):
        sys.modules.pop(name, None)
    yield importlib.import_module("train")
    for name in (*OURS, "train"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("app", SHORT)
def test_an_app_does_as_well_as_its_reference(app: str):
    outcome = run_app(app, *SHORT[app], timeout=PATIENCE_S)
    assert outcome.reference is not None
    assert outcome.reached, row(outcome)
    assert outcome.app == app


@pytest.mark.parametrize(
    "app", [app if app in ON_A_CLUSTER else pytest.param(app, marks=pytest.mark.long) for app in SHORT]
)
def test_an_app_runs_on_a_cluster_and_says_how_well_it_did(app: str, tmp_path: Path):
    file = tmp_path / "outcome"
    command = [sys.executable, "-m", "windlass", "run", "--workers=2", str(APPS / app / "train.py"), *SHORT[app]]
    exact = ["--reference"] if app in ("pagerank", "gbdt") else []  # others do as well alone, and are as good together
    done = subprocess.run([*command, *exact, f"--outcome={file}"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(file.read_text())
    assert 0 < outcome["ours"] < 1e6
    assert ("as good as it should be" in done.stdout) == bool(exact)
    assert "NOT" not in done.stdout


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


@pytest.mark.parametrize("train", ["mf"], indirect=True)
def test_factors_predict_what_was_held_out_better_than_biases(train: ModuleType):
    data = train.load_ratings(fallback=True)
    args = Namespace(epochs=3, batch=1000, factors=16, lr=0.1, decay=0.1, seed=0)
    with wl.connect() as cluster:
        assert train.train(cluster, data, args, lambda epoch, loss: None) < 0.85 * biases_alone(data)


@pytest.mark.parametrize("train", ["kmeans"], indirect=True)
def test_three_workers_find_the_centres_that_scikit_learn_finds(train: ModuleType):
    from sklearn.cluster import KMeans

    x = train.load_digits(fallback=True).x_train
    first = x[:10]

    def work(rank: int) -> tuple[np.ndarray, float]:
        with cluster.worker(rank, 3) as worker:
            return train.cluster_samples(worker, x[rank::3], first, 100, lambda iteration, inertia: None)

    with wl.connect() as cluster, ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3)))
    reference = KMeans(10, init=first, n_init=1, max_iter=100, tol=0).fit(x)
    for centres, inertia in results:
        np.testing.assert_array_equal(centres, results[0][0])
        assert inertia == pytest.approx(reference.inertia_, rel=1e-5)
        np.testing.assert_allclose(centres, reference.cluster_centers_, atol=0.01)


def test_ranks_of_a_graph_in_files_are_those_of_its_edges(tmp_path: Path):
    """A star: every walk is at its middle half of the time, but for the jumps."""
    for part in range(3):
        edges = [f"0 {leaf}\n{leaf} 0\n" for leaf in range(1 + part, 31, 3)]
        (tmp_path / f"edges-{part}.txt").write_text("".join(edges))
    command = [sys.executable, str(APPS / "pagerank" / "train.py"), "--edges", f"{tmp_path}/edges-*.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = re.search(r"highest ranks: node 0 (\S+),", done.stdout)
    assert found is not None
    middle = (0.15 / 31 + 0.85) / 1.85  # r = 0.15 / n + 0.85 (1 - r)
    assert float(found[1]) == pytest.approx(middle, rel=1e-2)
    assert "31 nodes, 60 edges" in done.stdout


@pytest.mark.parametrize(
    ("app", "arguments", "complaint"),
    [
        ("pagerank", ["--damping=1"], "--damping: expected less than 1"),
        ("pagerank", ["--edges", "/no/such/file"], "there is no file /no/such/file"),
        ("kmeans", ["--fallback", "--clusters=100000"], "100000 centres of"),
        ("mf", ["--lr=0"], "argument --lr: expected a finite number above 0"),
    ],
)
def test_what_an_app_cannot_do_is_said_in_a_line(app: str, arguments: list[str], complaint: str):
    command = [sys.executable, str(APPS / app / "train.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
