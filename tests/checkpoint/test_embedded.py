"""Checkpoints of the engine inside the process: saved and gone on from with the same calls and files as a cluster's."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import own_rules
import pytest
from helpers import PATIENCE_S, check_python

import windlass as wl
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.reader import newest
from windlass.testing.cluster import LocalCluster

WIDTH, ROWS, DIM = 3_000, 500, 4


def numbers(clock: int, *shape: int) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(clock).normal(size=shape).astype(np.float32)


class Trainer:
    """What it does at a clock depends on the clock alone."""

    def __init__(self, cluster: wl.Cluster, sync: str = "bsp", rule: wl.Rule | None = None) -> None:
        adam = wl.Adam(lr=0.1, schedule=wl.Schedule(warmup=3, decay="cosine", updates=20, end=0.1))
        self.cluster = cluster
        self.w = cluster.tensor("w", (WIDTH, 10), rule=rule or adam, init=wl.Normal(std=1.0), sync=sync)
        self.d = cluster.tensor("d", like=self.w, sync=sync)
        self.own = cluster.tensor("own", (50, 4), rule=own_rules.adam(lr=0.1), sync=sync)
        self.whole = cluster.tensor("whole", (50, 400), rule=own_rules.by_norm(), init=wl.Normal(), sync=sync)
        self.n = cluster.tensor("n", (3,), rule=wl.Sum(), dtype="int64", sync=sync)
        self.x = cluster.tensor("x", (3,), rule=wl.Sum(), dtype="float64", sync=sync)
        self.t = cluster.table("t", DIM, rule=wl.RowAdagrad(lr=0.1), init=wl.Normal(std=1.0), sync=sync)
        self.m = cluster.table("m", DIM, rule=own_rules.heavy_ball(lr=0.1), sync=sync)

    def train(self, until_clock: int) -> None:
        while (clock := self.cluster.clock) < until_clock:
            keys = np.random.default_rng(clock).integers(0, ROWS, 300)
            with self.cluster.step() as step:
                step.push_pull(self.w, numbers(clock, WIDTH, 10))
                step.push(self.d, numbers(clock, WIDTH, 10))
                step.push(self.own, numbers(clock, 50, 4))
                step.push(self.whole, numbers(clock, 50, 400))
                step.push(self.n, np.full(3, clock, np.int64))
                step.push(self.x, np.full(3, 0.1 * clock))
                step.push(self.t, keys, numbers(clock, 300, DIM))
                step.push(self.m, keys, numbers(clock, 300, DIM))


@pytest.fixture(scope="module")
def undisturbed() -> tuple[str, str]:
    """Fingerprints at clock 5 and 9."""
    with wl.connect() as cluster:
        trainer = Trainer(cluster)
        trainer.train(5)
        five = cluster.fingerprint()
        trainer.train(9)
        return five, cluster.fingerprint()


def save_at_five(folder: pathlib.Path) -> None:
    with wl.connect(checkpoint_dir=folder) as cluster:
        trainer = Trainer(cluster)
        trainer.train(5)
        saved = cluster.save("five", extra={"epoch": 2})
        trainer.train(7)  # while it is being written
        assert saved.wait(PATIENCE_S).clock == 5


def test_a_process_goes_on_from_what_another_saved_bit_for_bit(
    undisturbed: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    save_at_five(tmp_path)
    five, nine = undisturbed
    for resume in ("newest", "five", str(tmp_path)):
        given = {} if resume == str(tmp_path) else {"checkpoint_dir": tmp_path}
        with wl.connect(**given) as cluster:
            assert "w" in cluster.load(resume)
            assert (cluster.clock, cluster.fingerprint()) == (5, five)
            assert cluster.resumed is not None
            assert cluster.resumed[1:] == (5, {"epoch": 2})
            assert cluster.tensor("w").shape == (WIDTH, 10)  # by its name alone
            Trainer(cluster).train(9)
            assert cluster.fingerprint() == nine


def test_connect_and_the_environment_say_that_a_process_goes_on(
    undisturbed: tuple[str, str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(wl.NotFound, match="there is no checkpoint of app 'default' to resume from"):
        wl.connect(checkpoint_dir=tmp_path, resume=True)
    with pytest.raises(wl.InvalidArgument, match="no place to look for checkpoints"):
        wl.connect(resume=True)
    save_at_five(tmp_path)
    with wl.connect(checkpoint_dir=tmp_path, resume=True) as cluster:
        assert (cluster.clock, cluster.fingerprint()) == (5, undisturbed[0])
    monkeypatch.setenv("WINDLASS_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("WINDLASS_RESUME", "five")
    with wl.connect() as cluster:
        Trainer(cluster).train(9)
        assert cluster.fingerprint() == undisturbed[1]
        cluster.save().wait(PATIENCE_S)
    found = newest(Folder(tmp_path), "default").checkpoint
    assert found is not None
    assert found.manifest.clock == 9


def test_a_cluster_goes_on_from_a_process_and_a_process_from_a_cluster(
    undisturbed: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    save_at_five(tmp_path)
    here = str(pathlib.Path(own_rules.__file__).parent)
    settings = {"checkpoint_dir": tmp_path, "allow": "own_rules"}
    cluster = LocalCluster(servers=2, **settings, resume="five")
    before = cluster.environment
    cluster.environment = lambda **more: before(PYTHONPATH=here, **more)  # type: ignore[method-assign]
    with cluster, cluster.connect() as one:
        assert one.fingerprint() == undisturbed[0]
        trainer = Trainer(one)
        trainer.train(7)
        one.save("seven", extra=[7]).wait(PATIENCE_S)
    with wl.connect(checkpoint_dir=tmp_path) as one:
        one.load("seven")
        assert one.resumed is not None
        assert (one.clock, one.resumed.extra) == (7, [7])
        Trainer(one).train(9)
        assert one.fingerprint() == undisturbed[1]


def test_threads_that_are_workers_go_on_at_the_cut(tmp_path: pathlib.Path) -> None:
    def train(worker: wl.Cluster, until_clock: int, save: bool = False) -> None:
        w = worker.tensor("w", (400,), rule=wl.Adam(lr=0.1), sync="bsp")
        while worker.clock < until_clock:
            w.push(numbers(10 * worker.clock + worker.rank, 400))
            worker.tick()
            w.pull()
            if save and worker.clock == 4:
                worker.save(extra="zero").wait(PATIENCE_S)

    def both(cluster: wl.Cluster, until_clock: int, save: bool = False) -> str:
        workers = [cluster.worker(rank, 2) for rank in (0, 1)]
        threads = [
            threading.Thread(target=train, args=(worker, until_clock, save and worker.rank == 0)) for worker in workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        found = cluster.fingerprint()
        for worker in workers:
            worker.close()
        return found

    with wl.connect(checkpoint_dir=tmp_path) as cluster:
        final = both(cluster, 8, save=True)
    with wl.connect(checkpoint_dir=tmp_path, resume=True) as cluster:
        zero, one = cluster.worker(0, 2), cluster.worker(1, 2)
        assert [worker.clock for worker in (zero, one)] == [4, 4]
        assert [worker.resumed and worker.resumed.extra for worker in (zero, one)] == ["zero", None]
        zero.close(), one.close()
        assert both(cluster, 8) == final


@pytest.mark.parametrize("split", ["leased", "static"])
def test_data_goes_on_where_it_was(split: Any, tmp_path: pathlib.Path) -> None:
    def seen(cluster: wl.Cluster, batches: int) -> list[list[int]]:
        w = cluster.tensor("w", (4,), rule=wl.Sum(), sync="bsp")
        found = []
        lease = cluster.lease(200, 10, epochs=3, split=split)
        for _ in range(3):
            for batch in lease:
                if len(found) == batches:
                    return found
                w.push_pull(np.ones(4, np.float32))
                found.append(batch.tolist())
                if len(found) == 27 and batches == 27:
                    cluster.save(to=tmp_path).wait(PATIENCE_S)
                    return found
        return found

    with wl.connect() as cluster:
        whole = seen(cluster, 60)
    assert len(whole) == 60
    with wl.connect() as cluster:
        first = seen(cluster, 27)
    with wl.connect() as cluster:
        cluster.load(tmp_path)
        rest = seen(cluster, 60)
    if split == "static":
        assert first + rest == whole
    else:
        counted = np.bincount(np.concatenate([*first, *rest]), minlength=200)
        assert (counted >= 3).all()
        assert len(first) + len(rest) < 60 + 10  # a lease that was not done is begun again


def test_checkpoints_are_taken_by_clock_and_kept_with_what_a_script_keeps(tmp_path: pathlib.Path) -> None:
    code = """
import time
import numpy as np, windlass as wl
cluster = wl.connect()
w = cluster.tensor("w", (100,), rule=wl.Sum(), sync="bsp")
cluster.keep(lambda: {"at": cluster.clock})
print("begins", cluster.clock, cluster.resumed and cluster.resumed.extra)
for _ in range(12):
    w.push_pull(np.ones(100, np.float32))  # needs no tick()
    time.sleep(0.02)
"""
    given = {
        "WINDLASS_CHECKPOINT_DIR": str(tmp_path),
        "WINDLASS_CHECKPOINT_EVERY": "5",
        "WINDLASS_CHECKPOINT_KEEP": "1",
    }
    assert check_python(code, **given).split() == ["begins", "0", "None"]
    (place,) = Folder(tmp_path).places("default")
    assert place.clock >= 5
    again = check_python(code, **given, WINDLASS_RESUME="newest")
    assert f"begins {place.clock} {{'at': {place.clock}}}\n" == again


def test_another_rule_takes_weights_only_and_says_so_and_another_policy_is_taken(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_at_five(tmp_path)
    with wl.connect(checkpoint_dir=tmp_path) as cluster:
        cluster.load("five")
        w = cluster.tensor("w", (WIDTH, 10), rule=wl.SGD(lr=0.5), init=wl.Normal(std=1.0), sync="asp")
        assert "'default/w' has another rule than in the checkpoint: only its weights are taken" in caplog.text
        assert "'w' has the policy ASP(), and had BSP() in the checkpoint" in caplog.text
        with wl.connect(checkpoint_dir=tmp_path) as same:
            same.load("five")
            was = same.tensor("w").pull()
        np.testing.assert_array_equal(w.pull(), was)
        w.push(np.ones((WIDTH, 10), np.float32)).wait()
        np.testing.assert_allclose(w.pull(), was - 0.5, atol=1e-6)
        d = cluster.tensor("d", like=w, sync="bsp")
        assert d.pull().any()
        t = cluster.table("t", DIM, rule=wl.FTRL(lr=0.1), init=wl.Normal(std=1.0), sync="bsp")
        assert len(t) > 100
        # a rule that wants the whole tensor cuts it otherwise
        n = cluster.tensor("whole", (50, 400), rule=wl.Adam(lr=0.1), init=wl.Normal(), sync="bsp")
        assert n.shards > 1
        own = cluster.tensor("own", (50, 4), rule=own_rules.by_norm(), sync="bsp")
        assert own.pull().any()
        with pytest.raises(wl.SpecMismatch, match="another spec"):  # it is in use now
            cluster.tensor("own", (50, 4), rule=wl.Sum(), sync="bsp")
        with pytest.raises(wl.SpecMismatch, match="another spec"):  # its shape is no matter of a rule
            cluster.tensor("n", (4,), rule=wl.Sum(), dtype="int64", sync="bsp")
        np.testing.assert_array_equal(cluster.tensor("n").pull(), [10, 10, 10])  # it is there all the same


def test_a_damaged_checkpoint_leaves_nothing_and_the_next_older_one_is_taken(tmp_path: pathlib.Path) -> None:
    save_at_five(tmp_path)
    with wl.connect(checkpoint_dir=tmp_path, resume=True) as cluster:
        Trainer(cluster).train(6)
        cluster.save("six").wait(PATIENCE_S)
    (six,) = (place for place in Folder(tmp_path).places("default") if place.clock == 6)
    block = sorted((tmp_path / six.path).glob("*.safetensors"))[0]
    data = bytearray(block.read_bytes())
    data[-5] ^= 1
    block.write_bytes(data)
    with wl.connect(checkpoint_dir=tmp_path) as cluster:
        with pytest.raises(wl.CorruptCheckpoint, match=block.name):
            cluster.load("six")
        assert cluster.objects() == []
        assert (cluster.clock, cluster.resumed) == (0, None)
    with wl.connect(checkpoint_dir=tmp_path, resume=True) as cluster:
        assert cluster.clock == 5


def test_saving_inside_the_process_says_what_is_wrong(tmp_path: pathlib.Path) -> None:
    with wl.connect() as cluster:
        w = cluster.tensor("w", (4,), rule=wl.Sum(), sync="bsp")
        v = cluster.tensor("v", (4,), rule=wl.Sum(), sync="bsp")
        with pytest.raises(wl.InvalidArgument, match="there is no place for it; give to="):
            cluster.save()
        with pytest.raises(wl.InvalidArgument, match="expected a name of at most 128 letters"):
            cluster.save("a/b", to=tmp_path)
        with pytest.raises(wl.NotFound, match="there is no object 'x'"):
            cluster.save(only=["x"], to=tmp_path)
        w.push(np.ones(4, np.float32))
        with pytest.raises(wl.InvalidArgument, match=r"within iteration 0.*call tick\(\) first"):
            cluster.save(to=tmp_path)
        cluster.tick()
        (tmp_path / "default").write_text("where a folder should be")
        with pytest.raises(wl.CheckpointFailed, match="default"):
            cluster.save(to=tmp_path).wait(PATIENCE_S)
        (tmp_path / "default").unlink()
        assert cluster.save(only=[v], to=f"memory://{tmp_path.name}").wait(PATIENCE_S).clock == 1
    with wl.connect() as cluster, pytest.raises(wl.NotFound, match="no checkpoint of app 'default'"):
        cluster.load(f"memory://{tmp_path.name}/")  # it has only some objects: nobody goes on from it unasked


def test_the_end_of_a_process_waits_for_what_is_being_written(tmp_path: pathlib.Path) -> None:
    code = f"""
import numpy as np, windlass as wl
cluster = wl.connect(checkpoint_dir={str(tmp_path)!r})
w = cluster.tensor("w", (3_000_000,), rule=wl.Adam(lr=0.1))
w.push(np.ones(3_000_000, np.float32)).wait()
cluster.save()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
    assert newest(Folder(tmp_path), "default").checkpoint is not None


@pytest.mark.parametrize("loop", ["w.push_pull(g)", "w.push(g); cluster.tick()"])
def test_sigterm_takes_a_checkpoint_before_a_process_ends(loop: str, tmp_path: pathlib.Path) -> None:
    code = f"""
import time, numpy as np, windlass as wl
cluster = wl.connect(checkpoint_dir={str(tmp_path)!r})
w = cluster.tensor("w", (100,), rule=wl.Sum(), sync="bsp")
g = np.ones(100, np.float32)
cluster.keep(lambda: {{"at": cluster.clock}})
print("begins", flush=True)
while True:
    {loop}
    time.sleep(0.01)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(0.2)
        process.terminate()
        assert process.wait(PATIENCE_S) == -signal.SIGTERM
    with wl.connect(checkpoint_dir=tmp_path, resume=True) as cluster:
        assert cluster.resumed is not None
        assert cluster.resumed.extra == {"at": cluster.clock}
        assert (cluster.tensor("w").pull() == cluster.clock).all()
        assert cluster.clock > 0


def test_threads_with_a_static_split_go_on_at_their_own_batches(tmp_path: pathlib.Path) -> None:
    def run(cluster: wl.Cluster, save: bool) -> dict[int, list[list[int]]]:
        seen: dict[int, list[list[int]]] = {0: [], 1: []}

        def work(worker: wl.Cluster) -> None:
            w = worker.tensor("w", (40,), rule=wl.Sum(), sync="bsp")
            for batch in worker.lease(200, 5, split="static"):
                w.push_pull(np.ones(40, np.float32))
                seen[worker.rank].append(batch.tolist())
                if worker.rank == 1:
                    time.sleep(0.01)
                if save and worker.rank == 0 and len(seen[0]) == 9:
                    worker.save().wait(PATIENCE_S)

        workers = [cluster.worker(rank, 2) for rank in (0, 1)]
        threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        for worker in workers:
            worker.close()
        return seen

    with wl.connect(checkpoint_dir=tmp_path) as cluster:
        whole = run(cluster, save=True)
    with wl.connect(checkpoint_dir=tmp_path, resume=True) as cluster:
        rest = run(cluster, save=False)
    assert {rank: len(batches) for rank, batches in whole.items()} == {0: 20, 1: 20}
    for rank in (0, 1):
        assert rest[rank] == whole[rank][9:]


def test_a_rule_that_is_not_imported_is_named(tmp_path: pathlib.Path) -> None:
    save_at_five(tmp_path)
    code = f"""
import windlass as wl
cluster = wl.connect()
try:
    cluster.load({str(tmp_path)!r})
except wl.InvalidArgument as error:
    print(error)
print(len(cluster.objects()))
"""
    assert check_python(code).splitlines() == ["'default/own': import its rule 'own_rules:adam' first", "0"]


def test_process_1_of_a_container_saves_at_sigterm_and_ends(tmp_path: pathlib.Path) -> None:
    """The kernel spares it signals that it does not handle."""
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a namespace of processes")
    code = """
import os, time
import numpy as np, windlass as wl
assert os.getpid() == 1
cluster = wl.connect()
w = cluster.tensor("w", (100,), rule=wl.Sum(), sync="bsp")
while True:
    w.push_pull(np.ones(100, np.float32))
    print(cluster.clock, flush=True)
    time.sleep(0.01)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    environment |= {"WINDLASS_CHECKPOINT_DIR": str(tmp_path)}
    with subprocess.Popen([*alone, sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            while process.stdout.readline() != b"5\n":
                assert process.poll() is None
            (inner,) = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(inner), signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
    (place,) = Folder(tmp_path).places("default")
    assert place.clock >= 5
