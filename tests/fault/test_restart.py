"""Checkpoints of a cluster: what is in them, and what a cluster that begins from one goes on with."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.reader import Checkpoint, find, newest
from windlass._settings import SAVE_SECONDS
from windlass.testing.cluster import LocalCluster, until

WINDLASS = [sys.executable, "-m", "windlass"]
ROWS, DIM, WIDTH = 2_000, 4, 3_000
APP = "default"


def numbers(rank: int, clock: int, *shape: int) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(1000 * clock + rank).normal(size=shape).astype(np.float32)


class Trainer:
    """One worker; what it does at a clock depends on its rank and the clock alone."""

    def __init__(self, cluster: wl.Cluster, sync: str) -> None:
        self.cluster = cluster
        self.w = cluster.tensor("w", (WIDTH, 10), rule=wl.Adam(lr=0.1), init=wl.Normal(std=1.0), sync=sync)
        self.t = cluster.table("t", DIM, rule=wl.RowAdagrad(lr=0.1), init=wl.Normal(std=1.0), sync=sync)
        self.n = cluster.tensor("n", (3,), rule=wl.Sum(), dtype="int64", sync=sync)
        self.d = cluster.tensor("d", like=self.w, sync=sync)

    def train(self, until_clock: int) -> None:
        while (clock := self.cluster.clock) < until_clock:
            rank = self.cluster.rank
            keys = np.random.default_rng(clock + 7 * rank).integers(0, ROWS, 300).astype(np.uint64)
            with self.cluster.step() as step:
                step.push_pull(self.w, numbers(rank, clock, WIDTH, 10))
                step.push(self.t, keys, numbers(rank, clock, 300, DIM))
                step.push(self.n, np.full(3, clock, np.int64))


def together(*jobs: Any) -> None:
    """Runs them in threads; raises what any of them raises."""
    errors: list[BaseException] = []

    def run(job: Any) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]


def pair(cluster: LocalCluster) -> list[wl.Cluster]:
    """Two workers."""
    made: dict[int, wl.Cluster] = {}
    jobs = [lambda rank=rank: made.update({rank: cluster.connect(rank=rank, world_size=2)}) for rank in (0, 1)]
    together(*jobs)
    return [made[0], made[1]]


def trained(until_clock: int) -> str:
    """The fingerprint of an undisturbed run."""
    with LocalCluster(servers=1) as cluster:
        workers = pair(cluster)
        together(*[lambda one=one: Trainer(one, "bsp").train(until_clock) for one in workers])
        found = workers[0].fingerprint()
        together(*[one.close for one in workers])
        return found


def test_under_bsp_a_checkpoint_has_the_updates_before_its_clock_and_training_goes_on_from_it_bit_for_bit(
    tmp_path: pathlib.Path,
) -> None:
    saved: list[wl.types.SavedCheckpoint] = []

    def first(one: wl.Cluster) -> None:
        trainer = Trainer(one, "bsp")
        trainer.train(5)
        if one.rank == 0:
            saved.append(one.save("five", extra={"epoch": 2}))
        trainer.train(9)  # while it is being written

    with LocalCluster(servers=2, checkpoint_dir=tmp_path) as cluster:
        workers = pair(cluster)
        together(*[lambda one=one: first(one) for one in workers])
        assert saved[0].wait(PATIENCE_S).clock == 5
        final = workers[0].fingerprint()
        together(*[one.close for one in workers])
    assert final == trained(9)

    checkpoint = Checkpoint.open(Folder(tmp_path), find(Folder(tmp_path), APP, "five"))
    checkpoint.verify()
    assert {one.name for one in checkpoint.manifest.objects} == {"default/w", "default/t", "default/n", "default/d"}
    for servers in (1, 3):
        with LocalCluster(servers=servers, checkpoint_dir=tmp_path, resume="five") as cluster:
            workers = pair(cluster)
            for one in workers:
                assert (one.clock, one.resumed and one.resumed.clock) == (5, 5)
            assert [one.resumed and one.resumed.extra for one in workers] == [{"epoch": 2}, None]
            assert workers[0].fingerprint() == trained(5)
            assert workers[0].tensor("w").shape == (WIDTH, 10)  # by its name alone
            together(*[lambda one=one: Trainer(one, "bsp").train(9) for one in workers])
            assert workers[0].fingerprint() == final
            together(*[one.close for one in workers])


@pytest.mark.parametrize("sync", ["asp", "ssp:2"])
def test_elsewhere_each_shard_has_the_pushes_that_its_watermarks_name(sync: str, tmp_path: pathlib.Path) -> None:
    """The witness: ones that are pushed to sums, so that each shard counts its pushes."""
    stop = threading.Event()

    def push(one: wl.Cluster) -> None:
        n = one.tensor("n", (200_000,), rule=wl.Sum(), dtype="int64", sync=sync)
        while not stop.is_set():
            n.push(np.ones(200_000, np.int64))
            one.tick()

    with LocalCluster(servers=2, checkpoint_dir=tmp_path) as cluster:
        workers = pair(cluster)

        def save() -> None:
            try:
                n = workers[0].tensor("n", (200_000,), rule=wl.Sum(), dtype="int64", sync=sync)
                for _ in range(3):
                    for _ in range(5):
                        n.push(np.ones(200_000, np.int64))
                        workers[0].tick()
                    workers[0].save().wait(PATIENCE_S)
            finally:
                stop.set()

        together(lambda: push(workers[1]), save)
        together(*[one.close for one in workers])
    folder = Folder(tmp_path)
    assert len(folder.places(APP)) == 3
    for place in folder.places(APP):
        checkpoint = Checkpoint.open(folder, place)
        values = {read.shard: read.arrays["weights"] for read in checkpoint.read()}
        for shard in checkpoint.shards("default/n"):
            pushed = sum(record.sequence for record in shard.facts.records)
            assert (values[shard.shard] == pushed).all()
            own = next(record for record in shard.facts.records if record.rank == 0)
            assert own.sequence >= place.clock  # all that was closed before the cut


def test_what_is_leased_goes_on_where_it_was_and_every_sample_is_seen(tmp_path: pathlib.Path) -> None:
    seen: set[int] = set()
    with LocalCluster(servers=1, checkpoint_dir=tmp_path) as cluster, cluster.connect() as one:
        w = one.tensor("w", (4,), rule=wl.Sum(), sync="bsp")
        for at, samples in enumerate(one.lease(400, 10)):
            seen.update(samples.tolist())
            pushed = w.push(np.ones(4, np.float32))
            one.tick()
            pushed.wait()  # what has no answer is not done
            if at == 24:
                until(lambda: cluster.status()["leases"][0]["samples_done"] > 0, "some of it is reported", PATIENCE_S)
                one.save().wait(PATIENCE_S)
                break
    before = set(seen)
    with LocalCluster(servers=2, checkpoint_dir=tmp_path, resume="newest") as cluster, cluster.connect() as one:
        again = 0
        for samples in one.lease(400, 10):
            again += len(before & set(samples.tolist()))
            seen.update(samples.tolist())
            one.tick()
    assert seen == set(range(400))
    assert again < 250  # what was done is not done again, but for what was under way


def test_a_checkpoint_within_an_iteration_is_refused_and_names_tick(tmp_path: pathlib.Path) -> None:
    with LocalCluster(servers=1, checkpoint_dir=tmp_path) as cluster, cluster.connect() as one:
        w = one.tensor("w", (4,), rule=wl.Sum(), sync="bsp")
        v = one.tensor("v", (4,), rule=wl.Sum(), sync="bsp")
        w.push(np.ones(4, np.float32))
        with pytest.raises(wl.InvalidArgument, match=r"within iteration 0.*call tick\(\) first"):
            one.save()
        one.tick()
        w.push_pull(np.ones(4, np.float32))
        v.push_pull(np.ones(4, np.float32))
        assert one.save().wait(PATIENCE_S).clock == 2  # all of the iteration was closed, so that it ended
        with pytest.raises(wl.NotFound, match="there is no object 'nothing'"):
            one.save(only=["nothing"])
        with pytest.raises(wl.InvalidArgument, match="extra: expected what JSON can say"):
            one.save(extra=object())


def test_without_a_place_for_checkpoints_there_is_an_error_that_names_the_option() -> None:
    with (
        LocalCluster(servers=1) as cluster,
        cluster.connect() as one,
        pytest.raises(wl.InvalidArgument, match="--checkpoint-dir"),
    ):
        one.save()


def test_a_disk_that_refuses_ends_the_checkpoint_and_not_the_training(tmp_path: pathlib.Path) -> None:
    (tmp_path / "default").write_text("where a folder should be")
    with LocalCluster(servers=2, checkpoint_dir=tmp_path) as cluster, cluster.connect() as one:
        trainer = Trainer(one, "bsp")
        trainer.train(2)
        with pytest.raises(wl.CheckpointFailed, match="default"):
            one.save().wait(PATIENCE_S)
        trainer.train(4)
        (tmp_path / "default").unlink()
        one.save().wait(PATIENCE_S)
        assert newest(Folder(tmp_path), APP).checkpoint is not None


def test_a_server_that_dies_ends_the_checkpoint_and_the_one_before_stays(tmp_path: pathlib.Path) -> None:
    with LocalCluster(servers=2, checkpoint_dir=tmp_path, checkpoint_rate=200_000) as cluster:
        one = cluster.connect()
        Trainer(one, "asp").train(2)
        saved = one.save()
        cluster.servers[1].kill()
        with pytest.raises(wl.CheckpointFailed, match="server 1 is gone"):
            saved.wait(PATIENCE_S)
        with pytest.raises(wl.ServerLost, match="server 1"):
            one.save()
    found = newest(Folder(tmp_path), APP)
    assert found.checkpoint is None
    with LocalCluster(servers=2, checkpoint_dir=tmp_path, resume="newest") as cluster:
        assert cluster.scheduler.wait(PATIENCE_S) != 0
        assert "no checkpoint of app 'default' to resume from" in cluster.scheduler.output()


SCRIPT = """
import sys, time
import numpy as np
import windlass as wl
cluster = wl.connect(timeout=300)
w = cluster.tensor("w", (400, 50), rule=wl.Adam(lr=0.1), init=wl.Normal(std=1.0), sync="bsp")
t = cluster.table("t", 4, rule=wl.Adagrad(lr=0.1), sync="bsp")
print("begins at", cluster.clock, flush=True)
while cluster.clock < int(sys.argv[1]):
    r = np.random.default_rng(100 * cluster.clock + cluster.rank)
    keys = r.integers(0, 3000, 200).astype(np.uint64)
    with cluster.step() as step:
        step.push_pull(w, r.normal(size=(400, 50)).astype(np.float32))
        step.push(t, keys, r.normal(size=(200, 4)).astype(np.float32))
    time.sleep(float(sys.argv[2]))
cluster.barrier(timeout=300)
if cluster.rank == 0:
    print("fingerprint", cluster.fingerprint(), flush=True)
cluster.barrier(timeout=300)
"""


def run(
    tmp_path: pathlib.Path, *options: str, steps: int = 30, pause: float = 0.05, script: str = SCRIPT
) -> "subprocess.Popen[str]":
    path = tmp_path / "train.py"
    path.write_text(script)
    command = [*WINDLASS, "run", "--workers", "2", "--checkpoint-dir", str(tmp_path / "saved"), *options]
    return subprocess.Popen(
        [*command, str(path), str(steps), str(pause)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def fingerprint_in(output: str) -> str:
    return output.rpartition("fingerprint ")[2].split()[0]


def complete(tmp_path: pathlib.Path) -> int:
    """How many checkpoints there are."""
    folder = Folder(tmp_path / "saved")
    return sum(folder.entry(place).complete for place in folder.places(APP))


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    with run(tmp_path_factory.mktemp("undisturbed"), pause=0.0) as process:
        return fingerprint_in(process.communicate(timeout=PATIENCE_S)[0])


def test_when_a_server_is_lost_the_run_starts_again_from_the_last_checkpoint(
    undisturbed: str, tmp_path: pathlib.Path
) -> None:
    with run(tmp_path, "--servers", "2", "--checkpoint-every", "3") as process:
        until(lambda: complete(tmp_path) > 0 or process.poll() is not None, "a first checkpoint", PATIENCE_S)
        server = next(pid for pid, line in children(process.pid) if "roles server" in line)
        os.kill(server, signal.SIGKILL)
        output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, output
    assert "restart 1 of 3, from the last checkpoint" in output
    assert fingerprint_in(output) == undisturbed


def test_sigterm_takes_a_checkpoint_before_the_run_ends(undisturbed: str, tmp_path: pathlib.Path) -> None:
    with run(tmp_path, "--servers", "2") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "begins at 0" in line:
                break
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "worker: SIGTERM" not in output  # it is ended by the launcher, for whom there is a checkpoint
    assert len(Folder(tmp_path / "saved").places(APP)) == complete(tmp_path) == 1
    with run(tmp_path, "--servers", "1", "--resume", pause=0.0) as process:
        assert fingerprint_in(process.communicate(timeout=PATIENCE_S)[0]) == undisturbed


def test_resuming_needs_a_place_and_one_choice(tmp_path: pathlib.Path) -> None:
    for options, said in (
        (["--resume"], "name it with --checkpoint-dir DIR"),
        (["--resume", "--resume-from", "x", "--checkpoint-dir", "d"], "give one"),
        (["--checkpoint-every", "often"], "expected seconds, such as 600s, or iterations"),
    ):
        path = tmp_path / "train.py"
        path.write_text("")
        command = [*WINDLASS, "run", *options, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode != 0
        assert said in " ".join(done.stderr.replace("│", " ").split())


def children(pid: int) -> list[tuple[int, str]]:
    """Processes that it has started, with their command lines."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append((int(entry.name), line))
    return found


def test_a_changed_rule_takes_weights_only_and_says_so_and_a_changed_policy_is_taken(tmp_path: pathlib.Path) -> None:
    with LocalCluster(servers=2, checkpoint_dir=tmp_path) as cluster, cluster.connect() as one:
        trainer = Trainer(one, "asp")
        trainer.train(4)
        weights, keys, ds = trainer.w.pull(), np.arange(ROWS), trainer.d.pull()
        rows = trainer.t.pull(keys, create=False)
        one.save().wait(PATIENCE_S)
    with LocalCluster(servers=3, checkpoint_dir=tmp_path, resume="newest") as cluster:
        workers = pair(cluster)

        def open_all(one: wl.Cluster) -> tuple[wl.Tensor, wl.Table]:
            w = one.tensor("w", (WIDTH, 10), rule=wl.SGD(lr=1.0), init=wl.Normal(std=1.0), sync="bsp")
            t = one.table("t", DIM, rule=wl.Adam(lr=0.1), init=wl.Normal(std=1.0), sync="bsp")
            return w, t

        opened: dict[int, tuple[wl.Tensor, wl.Table]] = {}
        together(*[lambda one=one: opened.update({one.rank: open_all(one)}) for one in workers])
        w, t = opened[0]
        np.testing.assert_array_equal(w.pull(), weights)
        np.testing.assert_array_equal(t.pull(keys, create=False), rows)
        (first, *_) = t.export(state=True)
        assert not first.state["exp_avg"].any()
        said = cluster.status()["checkpoints"]["resumed"]["said"]
        assert "'default/w' has another rule than in the checkpoint: only its weights are taken" in said
        assert "'default/w' has the policy BSP(), and had ASP() in the checkpoint" in said
        assert "only its weights are taken" in cluster.scheduler.output()

        def train(one: wl.Cluster) -> None:
            mine, _ = opened[one.rank]
            assert one.clock == 4
            for _ in range(3):
                mine.push_pull(np.ones((WIDTH, 10), np.float32))
                one.tick()

        together(*[lambda one=one: train(one) for one in workers])
        np.testing.assert_allclose(w.pull(), weights - 3, atol=1e-5)
        d = workers[0].tensor("d", like=w, sync="asp")
        np.testing.assert_array_equal(d.pull(), ds)
        assert isinstance(w.dot(d), float)  # they lie alike still
        with pytest.raises(wl.SpecMismatch, match="another spec"):  # it is in use
            workers[1].tensor("w", (WIDTH, 10), rule=wl.Sum(), sync="bsp")
        with pytest.raises(wl.SpecMismatch, match="another spec"):  # a shape is no matter of a rule
            workers[1].tensor("n", (4,), rule=wl.Sum(), dtype="int64", sync="asp")
        together(*[one.close for one in workers])


def split_work(one: wl.Cluster, sync: str, stop: int, seen: dict[int, list[tuple[int, list[int]]]]) -> None:
    """Epochs of a static split; what was handed out, with its epoch, by rank."""
    w = one.tensor("w", (200,), rule=wl.Adam(lr=0.1), sync=sync)
    lease = one.lease(120, 5, epochs=3, split="static")
    for epoch in range(3):
        for batch in lease:
            seen.setdefault(one.rank, []).append((epoch, batch.tolist()))
            w.push_pull(np.full(200, batch.sum(), np.float32))
            if sync != "bsp":
                one.tick()
            if one.clock >= stop:
                return


def test_a_static_split_goes_on_at_each_ranks_own_batch(tmp_path: pathlib.Path) -> None:
    def run(resume: str | None, stop: int, save: bool) -> tuple[dict[int, list[tuple[int, list[int]]]], str]:
        seen: dict[int, list[tuple[int, list[int]]]] = {}
        with LocalCluster(servers=2, checkpoint_dir=tmp_path, **({"resume": resume} if resume else {})) as cluster:
            workers = pair(cluster)

            def work(one: wl.Cluster) -> None:
                if save:
                    split_work(one, "bsp", 17, seen)
                    if one.rank == 0:
                        one.save("cut")
                    return
                split_work(one, "bsp", stop, seen)

            together(*[lambda one=one: work(one) for one in workers])
            found = workers[0].fingerprint()
            if save:
                for one in workers[1:]:
                    one.tick()
                until(lambda: cluster.status()["checkpoints"]["last"], "it is complete", PATIENCE_S)
            together(*[one.close for one in workers])
        return seen, found

    whole, final = run(None, 1000, save=False)
    first, _ = run(None, 17, save=True)
    rest, found = run("cut", 1000, save=False)
    assert {rank: len(batches) for rank, batches in whole.items()} == {0: 36, 1: 36}
    for rank in (0, 1):
        done = [batch for batch in whole[rank] if batch not in rest[rank]]
        assert whole[rank][len(done) :] == rest[rank]
        assert first[rank][: len(done)] == done
    assert found == final  # bit for bit


def test_with_another_number_of_workers_a_static_split_begins_its_epoch_again_and_says_so(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[int, list[tuple[int, list[int]]]] = {}
    with LocalCluster(servers=1, checkpoint_dir=tmp_path) as cluster:
        workers = pair(cluster)
        together(*[lambda one=one: split_work(one, "asp", 15, seen) for one in workers])
        workers[0].save().wait(PATIENCE_S)
        together(*[one.close for one in workers])
    assert {batches[-1][0] for batches in seen.values()} == {1}
    seen.clear()
    with LocalCluster(servers=1, checkpoint_dir=tmp_path, resume="newest") as cluster, cluster.connect() as one:
        split_work(one, "asp", 1000, seen)
        said = cluster.status()["checkpoints"]["resumed"]["said"]
    assert "begins epoch 1 again" in caplog.text
    assert "is of 2 workers, and now there are 1" in caplog.text
    assert [line for line in said if "static splits begin their epochs again" in line]
    assert [epoch for epoch, _ in seen[0]] == [1] * 24 + [2] * 24
    for epoch in (1, 2):
        assert sorted(sample for at, batch in seen[0] if at == epoch for sample in batch) == list(range(120))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_sigterm_to_all_processes_at_once_takes_a_checkpoint_and_then_they_end(
    sync: str, tmp_path: pathlib.Path
) -> None:
    """As Slurm, Kubernetes and spot machines do."""
    keeps = 'cluster.keep(lambda: {"at": cluster.clock})\nprint(cluster.resumed)\nwhile cluster.clock'
    script = SCRIPT.replace('sync="bsp"', f'sync="{sync}"').replace("while cluster.clock", keeps)
    with run(tmp_path, "--servers", "2", script=script) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "begins at 0" in line:
                break
        time.sleep(0.5)
        everyone = [process.pid, *(pid for pid, _ in children(process.pid))]
        assert len(everyone) == 6
        for pid in random.sample(everyone, 6):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "Traceback" not in output
    assert complete(tmp_path) == 1, output
    (place,) = Folder(tmp_path / "saved").places(APP)
    with run(tmp_path, "--servers", "1", "--resume", pause=0.0, script=script) as process:
        output = process.communicate(timeout=PATIENCE_S)[0]
    assert f"clock={place.clock}, extra={{'at': {place.clock}}}" in output, output
    if sync == "bsp":
        with run(tmp_path, pause=0.0, script=script) as process:
            assert fingerprint_in(output) == fingerprint_in(process.communicate(timeout=PATIENCE_S)[0])


def test_sigterm_to_processes_that_nobody_launched_takes_a_checkpoint_too(tmp_path: pathlib.Path) -> None:
    code = """
import time, numpy as np, windlass as wl
with wl.connect() as cluster:
    w = cluster.tensor("w", (1000,), rule=wl.Adam(lr=0.1), sync="bsp")
    print("begins", flush=True)
    while True:
        w.push_pull(np.ones(1000, np.float32))
        time.sleep(0.02)
"""
    with LocalCluster(servers=2, checkpoint_dir=tmp_path, linger=False) as cluster:
        workers = [cluster.worker(code, rank, 2) for rank in (0, 1)]
        until(lambda: all("begins" in one.output() for one in workers), "workers train", PATIENCE_S)
        time.sleep(0.3)
        for one in (*cluster.servers, cluster.scheduler, *workers):
            os.kill(one.pid, signal.SIGTERM)
        assert [one.wait(PATIENCE_S) for one in workers] == [-signal.SIGTERM] * 2
        assert [one.wait(PATIENCE_S) for one in (cluster.scheduler, *cluster.servers)] == [0, 0, 0]
    found = newest(Folder(tmp_path), APP).checkpoint
    assert found is not None
    found.verify()
    assert found.manifest.clock > 0


def test_a_second_sigterm_ends_a_worker_at_once(tmp_path: pathlib.Path) -> None:
    code = """
import time, numpy as np, windlass as wl
with wl.connect() as cluster:
    w = cluster.tensor("w", (1000,), rule=wl.Sum(), sync="bsp")
    v = cluster.tensor("v", (1000,), rule=wl.Sum(), sync="bsp")
    w.push(np.ones(1000, np.float32))  # within an iteration, for ever
    print("begins", flush=True)
    time.sleep(1000)
"""
    with LocalCluster(servers=1, checkpoint_dir=tmp_path) as cluster:
        worker = cluster.worker(code)
        until(lambda: "begins" in worker.output(), "the worker trains", PATIENCE_S)
        os.kill(worker.pid, signal.SIGTERM)
        until(lambda: "SIGTERM; ends when a checkpoint is taken" in worker.output(), "it has heard", PATIENCE_S)
        assert worker.process.poll() is None
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(PATIENCE_S) == -signal.SIGTERM
    assert newest(Folder(tmp_path), APP).checkpoint is None


def test_a_worker_that_waits_for_a_last_checkpoint_ends_with_its_cluster(tmp_path: pathlib.Path) -> None:
    code = """
import time, numpy as np, windlass as wl
with wl.connect() as cluster:
    w = cluster.tensor("w", (1000,), rule=wl.Sum(), sync="bsp")
    while True:
        print("begins", flush=True)
        w.push_pull(np.ones(1000, np.float32))
        time.sleep(1000 if cluster.rank else 0.01)  # the other is within an iteration, for ever
"""
    with LocalCluster(servers=1, checkpoint_dir=tmp_path, linger=False) as cluster:
        workers = [cluster.worker(code, rank, 2) for rank in (0, 1)]
        until(lambda: all("begins" in one.output() for one in workers), "workers train", PATIENCE_S)
        os.kill(workers[0].pid, signal.SIGTERM)
        told = time.monotonic()
        until(lambda: "SIGTERM; ends when a checkpoint is taken" in workers[0].output(), "it has heard", PATIENCE_S)
        for _ in range(2):  # it would take a checkpoint, too
            os.kill(cluster.scheduler.pid, signal.SIGTERM)
            time.sleep(0.3)
        assert workers[0].wait(PATIENCE_S) == -signal.SIGTERM
        assert time.monotonic() - told < SAVE_SECONDS


def test_apps_side_by_side_are_saved_and_gone_on_from_each_by_itself(tmp_path: pathlib.Path) -> None:
    with LocalCluster(servers=2, checkpoint_dir=tmp_path) as cluster:
        for app, value in (("a", 1.0), ("b", 2.0)):
            with cluster.connect(app=app) as one:
                w = one.tensor("w", (1000,), rule=wl.Sum(), sync="bsp")
                for _ in range(3):
                    w.push_pull(np.full(1000, value, np.float32))
                one.save(extra=app).wait(PATIENCE_S)
    assert Folder(tmp_path).apps() == ["a", "b"]
    for app, other, value in (("a", "b", 3.0), ("b", "a", 6.0)):
        with LocalCluster(servers=1, checkpoint_dir=tmp_path, resume="newest", app=app) as cluster:
            with cluster.connect(app=app, checkpoint_dir=tmp_path) as one:
                assert one.resumed is not None
                assert (one.clock, one.resumed.extra) == (3, app)
                assert (one.tensor("w").pull() == value).all()
                assert [found.name for found in one.objects()] == ["w"]
            with cluster.connect(app=other, checkpoint_dir=tmp_path) as one:
                assert (one.clock, one.resumed) == (0, None)
                assert one.load("newest") == ["w"]  # a warm start, beside the one that goes on
                assert (one.tensor("w").pull() == 9.0 - value).all()
                assert one.clock == 0


def test_a_checkpoint_with_a_damaged_block_is_passed_over_for_the_next_older_one(tmp_path: pathlib.Path) -> None:
    with LocalCluster(servers=2, checkpoint_dir=tmp_path) as cluster, cluster.connect() as one:
        trainer = Trainer(one, "bsp")
        for clock in (2, 5):
            trainer.train(clock)
            one.save(extra=clock).wait(PATIENCE_S)
    newer = Folder(tmp_path).places(APP)[-1]
    block = sorted((tmp_path / newer.path).glob("server-1-*.safetensors"))[0]
    data = bytearray(block.read_bytes())
    data[-3] ^= 1
    block.write_bytes(data)
    with LocalCluster(servers=2, checkpoint_dir=tmp_path, resume="newest") as cluster, cluster.connect() as one:
        assert one.resumed is not None
        assert (one.clock, one.resumed.extra) == (2, 2)
        assert f"checkpoint {newer.id} is passed over" in cluster.scheduler.output()
        assert block.name in cluster.scheduler.output()
        Trainer(one, "bsp").train(3)
    with LocalCluster(servers=2, checkpoint_dir=tmp_path, resume=newer.id) as cluster:
        assert cluster.scheduler.wait(PATIENCE_S) != 0
        assert f"cannot resume: {tmp_path}" in cluster.scheduler.output()
