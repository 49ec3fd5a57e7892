"""R4 for a PyTorch training: one worker is killed in the middle of an epoch, another comes, and all end alike."""

import random
import re

import pytest
from helpers import PATIENCE_S

from windlass.testing import LocalCluster
from windlass.testing.cluster import Process, until

pytest.importorskip("torch", reason="about training with torch")

FAILURE_S, LATE_S = 1.0, 1.0
SAMPLES, EPOCHS = 2000, 4

WORKER = """
import hashlib, time, torch, windlass as wl
torch.set_num_threads(1)
cluster = wl.connect()
torch.manual_seed(cluster.rank)
model = torch.nn.Sequential(torch.nn.Linear(10, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 3))
opt = wl.torch.ServerOptimizer(model, wl.SGD(lr=0.05, momentum=0.9), sync="{sync}", overlap={overlap})
data = torch.utils.data.TensorDataset(torch.randn(2000, 10), torch.randint(0, 3, (2000,)))
loader = wl.torch.leased(data, batch_size=10, epochs={epochs})
stall, count, last = 0.0, 0, time.monotonic()
for epoch in range({epochs}):
    for x, y in loader:
        all_there = len(cluster._attendance.view.workers) == cluster.world_size
        time.sleep(0.005 if all_there else 0.025)  # so that a replacement comes in time
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        count, now = count + 1, time.monotonic()
        stall, last = max(stall, now - last), now
        print("batch", count, "stall", round(stall, 3), flush=True)
opt.finish()
assert all(torch.isfinite(p).all() for p in model.parameters())
print("end", loader.lease.samples_done, flush=True)
"""


def last(worker: Process, what: str) -> float:
    found = re.findall(rf"\b{what} ([0-9.]+)", worker.output())
    return float(found[-1]) if found else 0.0


@pytest.mark.parametrize(
    ("sync", "overlap"), [pytest.param("bsp", False, marks=pytest.mark.long), ("bsp", True), ("ssp:3", False)]
)
def test_the_others_go_on_and_a_new_one_takes_its_share(sync: str, overlap: bool):
    seed = random.randrange(2**32)
    at = random.Random(seed).randint(1, 60)
    print(f"seed {seed}: kill at batch {at}")
    script = WORKER.format(sync=sync, overlap=overlap, epochs=EPOCHS)
    with LocalCluster(servers=1, failure_timeout=FAILURE_S) as cluster:
        stays, victim = (cluster.worker(script, rank, 2) for rank in range(2))
        until(
            lambda: last(victim, "batch") >= at or victim.process.poll() is not None, "the victim is there", PATIENCE_S
        )
        victim.kill()
        until(lambda: len(cluster.members("worker")) == 1, "its death is known", FAILURE_S + LATE_S)
        done = last(stays, "batch")
        until(lambda: last(stays, "batch") > done + 1, "the other goes on", PATIENCE_S)
        stall = last(stays, "stall")  # later the newcomer's first batch is waited for, however long it takes to begin
        fresh = cluster.worker(script, 1, 2)
        for worker in (stays, fresh):
            assert worker.wait(PATIENCE_S) == 0, worker.output()
        ledger = cluster.status()["leases"][0]
        print(f"killed at {last(victim, 'batch')}; stall {stall}; the new one did {last(fresh, 'end')}")
        assert ledger["epoch"] == EPOCHS
        assert ledger["samples_done"] == SAMPLES * EPOCHS
        assert last(fresh, "end") > 0, "the new worker got nothing"
        assert stall <= FAILURE_S + LATE_S
