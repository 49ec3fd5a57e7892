"""R6: everything is killed at once, at random moments, and starts again from the last checkpoint, on other servers.

Every life of the run is checked: what it begins with is what the manifest says; the witness, ones that are pushed to a
sum under ASP, is in each shard of every checkpoint as often as its watermarks say; at the end the BSP objects have the
bits of a run that nobody disturbed, and every sample was seen.
"""

import pathlib
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import PATIENCE_S

from windlass import _core
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.reader import Checkpoint
from windlass.testing.cluster import until
from windlass.testing.processes import kill_session

APP, BATCH = "default", 4
SCRIPT = """
import os, sys, time
import numpy as np
import windlass as wl
steps, pause, batch, seen = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
cluster = wl.connect(timeout=300)
w = cluster.tensor("w", (400, 50), rule=wl.Adam(lr=0.1), init=wl.Normal(std=1.0), sync="bsp")
t = cluster.table("t", 4, rule=wl.Adagrad(lr=0.1), sync="bsp")
n = cluster.tensor("n", (40_000,), rule=wl.Sum(), dtype="int64", sync="asp")
cluster.barrier(timeout=300)
if cluster.rank == 0:
    resumed = cluster.resumed.id if cluster.resumed else "nothing"
    print("begins at", cluster.clock, "from", resumed, "with", cluster.fingerprint(), flush=True)
cluster.barrier(timeout=300)

def train():
    r = np.random.default_rng(100 * cluster.clock + cluster.rank)
    keys = r.integers(0, 3000, 200).astype(np.uint64)
    n.push(np.ones(40_000, np.int64))
    with cluster.step() as step:
        step.push_pull(w, r.normal(size=(400, 50)).astype(np.float32))
        step.push(t, keys, r.normal(size=(200, 4)).astype(np.float32))
    time.sleep(pause)

file = os.open(f"{seen}-{cluster.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for samples in cluster.lease(steps * batch, batch):  # as many batches as there are iterations
    os.write(file, samples.tobytes())
    train()
    if cluster.clock >= steps:
        break
while cluster.clock < steps:
    train()
cluster.barrier(timeout=300)
if cluster.rank == 0:
    print("ends with", w.fingerprint(), t.fingerprint(), flush=True)
cluster.barrier(timeout=300)
"""


class Life:
    """A run from its start to its end, or until it is killed with all that it has started."""

    def __init__(self, folder: pathlib.Path, *options: str, steps: int, pause: float = 0.0) -> None:
        script = folder / "train.py"
        script.write_text(SCRIPT)
        self._output = folder / "output"
        command = [sys.executable, "-m", "windlass", "run", "--workers", "2"]
        arguments = [str(script), str(steps), str(pause), str(BATCH), str(folder / "seen")]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *options, *arguments], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def output(self) -> str:
        return self._output.read_text()

    def kill(self) -> bool:
        """Every process of its session; whether it was still going on."""
        going = self.process.poll() is None
        kill_session(self.process.pid)
        self.process.wait()
        return going

    def wait(self) -> str:
        """Until it ends well; what it said."""
        try:
            assert self.process.wait(PATIENCE_S) == 0, self.output()
        finally:
            self.kill()
        return self.output()


def ends_with(output: str) -> str:
    found = re.search(r"ends with (\w+ \w+)", output)
    assert found is not None, output
    return found[1]


class Witness:
    """What each shard of the witness has in every checkpoint that was seen, and whether that is right."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._values: dict[str, dict[int, int]] = {}  # by checkpoint and shard
        self.checked = 0

    def check(self, resumed: str) -> None:
        """The checkpoints that a life left which began with this one."""
        before = self._values.get(resumed, {})
        assert resumed == "nothing" or before, f"{resumed} was never seen"
        for place in self._folder.places(APP):
            if place.id in self._values or not self._folder.entry(place).complete:
                continue
            checkpoint = Checkpoint.open(self._folder, place)
            weights = {read.shard: read.arrays["weights"] for read in checkpoint.read() if read.object == "default/n"}
            values = self._values[place.id] = {}
            for shard in checkpoint.shards("default/n"):
                pushed = sum(record.sequence for record in shard.facts.records)
                values[shard.shard] = before.get(shard.shard, 0) + pushed
                assert (weights[shard.shard] == values[shard.shard]).all(), (place, shard)
                self.checked += 1


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """What a cluster has that holds exactly this."""
    names = [one.name for one in checkpoint.manifest.objects]
    parts = [_core.fingerprint_of_name(name.partition("/")[2]) + checkpoint.fingerprint(name) for name in names]
    return f"{sum(parts) % 2**64:016x}"


def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_not(
    tmp_path: pathlib.Path, accurate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = 50 if accurate else 5
    steps = 8 * kills + 20
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "killed"
    for path in (undisturbed, folder):
        path.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    saved = Folder(folder / "saved")
    witness = Witness(saved)
    save = ["--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "3", "--checkpoint-keep", "3"]
    bit = resumes = 0

    def complete() -> list[Checkpoint]:
        return [Checkpoint.open(saved, place) for place in saved.places(APP) if saved.entry(place).complete]

    def check(output: str, known: dict[str, str]) -> int:
        """What a life began with, if it came so far."""
        began = re.search(r"begins at (\d+) from (\w+) with (\w+)", output)
        if began is None:
            return 0
        witness.check(began[2])
        if not known:
            assert began[2] == "nothing"
            return 0
        assert known[began[2]] == began[3], "the bits are those of the manifest"
        return 1

    for _ in range(kills):
        known = {one.manifest.id: fingerprint_of(one) for one in complete()}
        resume = ["--resume"] if known else []
        life = Life(folder, "--servers", chance.choice("123"), *save, *resume, steps=steps, pause=0.1)
        if not known:
            until(lambda: complete() or life.process.poll() is not None, "a first checkpoint", PATIENCE_S)  # noqa: B023
        elif chance.random() < 0.8:  # else it may die before it begins
            until(
                lambda: "begins at" in life.output() or life.process.poll() is not None,  # noqa: B023
                "it begins",
                PATIENCE_S,
            )
        time.sleep(chance.uniform(0.0, 1.5))
        bit += life.kill()
        resumes += check(life.output(), known)
    assert bit > 0
    known = {one.manifest.id: fingerprint_of(one) for one in complete()}
    last = Life(folder, "--servers", "2", *save, "--resume", steps=steps)
    expected = Life(undisturbed, "--servers", "1", steps=steps)
    output = last.wait()
    resumes += check(output, known)
    assert ends_with(output) == ends_with(expected.wait())
    seen = np.concatenate([np.fromfile(path, np.int64) for path in folder.glob("seen-*")])
    assert set(seen.tolist()) == set(range(steps * BATCH))
    print(
        f"{bit} of {kills} kills bit, {resumes} resumes had the manifest's bits, {witness.checked} shards their pushes"
    )
    assert resumes > 0
    assert witness.checked > 0
