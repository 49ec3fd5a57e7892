"""cluster.load() as a warm start: from a checkpoint, a file of safetensors, what torch saved, or arrays."""

import logging
import pathlib
from typing import Any

import numpy as np
import own_rules  # noqa: F401 (rules of the checkpoints here)
import pytest
import safetensors.numpy
from helpers import PATIENCE_S, numbers

import windlass as wl
from windlass._checkpoint.export import export
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.reader import Checkpoint, find

KEYS = np.array([3, -1, 7, 2**40])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, Any]]:
    """A folder with a checkpoint of two tensors and a table, and what is in them."""
    folder = tmp_path_factory.mktemp("saved")
    with wl.connect(checkpoint_dir=folder) as cluster:
        w = cluster.tensor("w", (300, 100), rule=wl.Adam(lr=0.1), init=wl.Normal())
        d = cluster.tensor("d", like=w)
        n = cluster.tensor("n", (3,), rule=wl.Sum(), dtype="int64")
        t = cluster.table("t", 4, rule=wl.RowAdagrad(lr=0.1), init=wl.Normal())
        for i in range(3):
            w.push(numbers(300, 100, seed=i)).wait()
            t.push(KEYS, numbers(4, 4, seed=i)).wait()
            n.push(np.full(3, 2**60)).wait()
            cluster.tick()
        d.push(numbers(300, 100)).wait()
        cluster.save("best").wait(PATIENCE_S)
        snapshot, chunks = w.snapshot(), list(t.export(state=True))
        return folder, {"w": snapshot, "d": d.pull(), "n": n.pull(), "t": chunks, "all": cluster.fingerprint()}


def rows_of(table: wl.Table) -> list[Any]:
    return [
        array.tolist() for chunk in table.export(state=True) for array in (chunk.keys, chunk.weights, chunk.updates)
    ]


def test_objects_of_a_checkpoint_are_made_with_weights_state_and_counts(
    cluster: wl.Cluster, saved: tuple[pathlib.Path, dict[str, Any]]
) -> None:
    folder, was = saved
    cluster.tick()  # it has begun: this is no place to go on from
    assert cluster.load(folder, rename={}) == ["w", "d", "n", "t"]
    assert cluster.clock == 1
    w = cluster.tensor("w")
    taken = w.snapshot()
    np.testing.assert_array_equal(taken.weights, was["w"].weights)
    np.testing.assert_array_equal(taken.updates, was["w"].updates)
    for name, array in was["w"].state.items():
        np.testing.assert_array_equal(taken.state[name], array)
    np.testing.assert_array_equal(cluster.tensor("d").pull(), was["d"])
    np.testing.assert_array_equal(cluster.tensor("n").pull(), was["n"])
    keys = np.concatenate([chunk.keys for chunk in was["t"]])
    (chunk,) = cluster.table("t").export(state=True)
    order, there = np.argsort(chunk.keys), np.argsort(keys)
    np.testing.assert_array_equal(chunk.keys[order], keys[there])
    for mine, theirs in ((chunk.weights, was["t"][0].weights), (chunk.updates, was["t"][0].updates)):
        np.testing.assert_array_equal(mine[order], theirs[there])
    np.testing.assert_array_equal(chunk.state["sum"][order], was["t"][0].state["sum"][there])


def test_some_objects_are_loaded_under_other_names(
    cluster: wl.Cluster, saved: tuple[pathlib.Path, dict[str, Any]]
) -> None:
    folder, was = saved
    path = folder / find(Folder(folder), "default", "best").path  # the checkpoint's own folder
    assert cluster.load(path, names=["w", "t"], rename={"w": "backbone"}) == ["backbone", "t"]
    assert [one.name for one in cluster.objects() if "/" not in one.name] == ["backbone", "t"]
    np.testing.assert_array_equal(cluster.tensor("backbone").pull(), was["w"].weights)


def test_with_another_rule_weights_alone_are_taken_and_the_log_says_so(
    cluster: wl.Cluster, saved: tuple[pathlib.Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, was = saved
    w = cluster.tensor("w", (300, 100), rule=wl.SGD(lr=1.0))
    t = cluster.table("t", 4, rule=wl.Adam(lr=0.1))
    with caplog.at_level(logging.WARNING):
        cluster.load(folder, names=["w", "t"])
    assert "'w' has another rule than in" in caplog.text
    np.testing.assert_array_equal(w.pull(), was["w"].weights)
    (chunk,) = t.export(state=True)
    assert chunk.updates.tolist() == [0] * 4
    assert not chunk.state["exp_avg"].any()


@pytest.mark.parametrize(
    ("names", "rename", "what"),
    [
        (["wx"], None, r"has no 'wx'; did you mean 'w'"),
        (None, {"q": "w"}, r"has no 'q'; there are 'd', 'n', 't', 'w'"),
        ("w", None, "names must be a list"),
    ],
)
def test_names_that_are_not_there_are_answered_with_the_nearest(
    cluster: wl.Cluster, saved: tuple[pathlib.Path, dict[str, Any]], names: Any, rename: Any, what: str
) -> None:
    with pytest.raises(wl.WindlassError, match=what):
        cluster.load(saved[0], names=names, rename=rename)


def test_what_does_not_fit_is_refused_before_anything_is_put(
    cluster: wl.Cluster, saved: tuple[pathlib.Path, dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    cluster.tensor("w", (300, 101), rule=wl.Adam(lr=0.1))
    with pytest.raises(
        wl.SpecMismatch, match=r"'w': .* has a tensor float32 \(300, 100\), and here is a tensor float32"
    ):
        cluster.load(saved[0], names=["w"])
    v = cluster.tensor("v", (3,), rule=wl.Sum(), dtype="int64")
    u = cluster.tensor("u", (3,), rule=wl.Sum())
    for given, what in (
        ({"v": np.zeros(3, np.float32), "u": np.ones(3)}, r"'v' of the arrays given: .*int64"),
        ({"v": np.zeros(4, np.int64), "u": np.ones(3)}, r"'v' of the arrays given: expected shape \(3,\), saw \(4,\)"),
        ({"u": np.ones(3), "uu": np.ones(3)}, r"has 'uu', and there is no tensor or table 'uu' here; did you mean 'u'"),
        ({"u": np.ones(3), "u.exp": np.ones(3)}, r"has 'u.exp', and .* has no state 'exp'"),
        ({"u": {"a": 1}}, "expected arrays by name, saw 'u' of dict"),
    ):
        with pytest.raises(wl.WindlassError, match=what):
            cluster.load(given)
    assert not u.pull().any()
    assert not v.pull().any()
    for path, what in (
        (tmp_path / "no.safetensors", "there is no such file"),
        (tmp_path / "no", "there is no checkpoint, and no file that ends in"),
    ):
        with pytest.raises(wl.NotFound, match=what):
            cluster.load(path)
    with pytest.raises(wl.InvalidArgument, match="'best' is no path, and there is no folder to look for it in"):
        cluster.load("best")
    with pytest.raises(wl.InvalidArgument, match="expected a checkpoint's tag, id or path"):
        cluster.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("file_bytes_max", [1 << 30, 200_000])
def test_what_was_exported_is_loaded_again_with_its_state(
    cluster: wl.Cluster,
    saved: tuple[pathlib.Path, dict[str, Any]],
    tmp_path: pathlib.Path,
    file_bytes_max: int,
) -> None:
    folder, was = saved
    checkpoint = Checkpoint.open(Folder(folder), find(Folder(folder), "default", "best"))
    files = export(checkpoint, tmp_path / "model.safetensors", file_bytes_max=file_bytes_max)
    w = cluster.tensor("w", (300, 100), rule=wl.Adam(lr=0.1))
    cluster.tensor("d", (300, 100), rule=wl.Assign())
    cluster.tensor("n", (3,), rule=wl.Sum(), dtype="int64")
    t = cluster.table("user", 4, rule=wl.RowAdagrad(lr=0.1))
    assert sorted(cluster.load(files[-1], rename={"t": "user"})) == ["d", "n", "user", "w"]
    np.testing.assert_array_equal(w.snapshot().state["exp_avg_sq"], was["w"].state["exp_avg_sq"])
    np.testing.assert_array_equal(w.pull(), was["w"].weights)
    assert sorted(map(int, next(iter(t.export())).keys)) == sorted(np.uint64(key) for key in KEYS.astype(np.uint64))
    (chunk,) = t.export(state=True)
    assert sorted(chunk.state["sum"].tolist()) == sorted(was["t"][0].state["sum"].tolist())
    assert set(chunk.updates.tolist()) == {3}


def test_a_matrix_of_a_file_becomes_the_rows_of_a_table(cluster: wl.Cluster, tmp_path: pathlib.Path) -> None:
    weights = numbers(70_000, 3)
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"emb.weight": weights, "rest": np.ones(2, np.float32)}, path, {"format": "pt"})
    table = cluster.table("user", 3, rule=wl.Adagrad(lr=0.1))
    assert cluster.load(path, names=["emb.weight"], rename={"emb.weight": "user"}) == ["user"]
    assert len(table) == 70_000
    np.testing.assert_array_equal(table.pull(np.arange(70_000)), weights)


def test_files_of_torch_are_read_as_numbers_alone(cluster: wl.Cluster, tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 3).to(torch.bfloat16)
    w = cluster.tensor("weight", (3, 4), rule=wl.SGD(lr=0.1))
    b = cluster.tensor("bias", (3,), rule=wl.SGD(lr=0.1))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for source in (tmp_path / "model.pt", model.state_dict()):
        w.put(np.zeros((3, 4)))
        assert cluster.load(source) == ["weight", "bias"]
        np.testing.assert_array_equal(w.pull(), model.weight.detach().float().numpy())
        np.testing.assert_array_equal(b.pull(), model.bias.detach().float().numpy())
    import safetensors.torch

    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    w.put(np.zeros((3, 4)))
    cluster.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(w.pull(), model.weight.detach().float().numpy())
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "nested.pt")
    with pytest.raises(wl.InvalidArgument, match=r"saw 'model' of OrderedDict; load it with torch\.load"):
        cluster.load(tmp_path / "nested.pt")


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.path,)


def test_nothing_in_a_file_is_executed(cluster: wl.Cluster, tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": Hostile(tmp_path / "touched")}, tmp_path / "bad.pt")
    with pytest.raises(wl.CorruptCheckpoint, match="torch cannot read it as weights alone"):
        cluster.load(tmp_path / "bad.pt")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("cut", [0, 5, 8, 40, -1])
def test_a_file_that_was_cut_off_is_refused_by_name(cluster: wl.Cluster, tmp_path: pathlib.Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.ones(100, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    cluster.tensor("w", (100,), rule=wl.Sum())
    with pytest.raises(wl.CorruptCheckpoint, match=r"model\.safetensors"):
        cluster.load(path)
