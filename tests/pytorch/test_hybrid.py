"""Dense parameters in DistributedDataParallel, tables on servers: under `windlass run`, with gloo."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest
import torch
from helpers import PATIENCE_S
from nets import assert_close

import windlass as wl
from windlass.torch import ServerOptimizer

MODEL = """
import os, sys, time, torch, torch.distributed as dist, windlass as wl
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

class Net(torch.nn.Module):
    def __init__(self, cluster, table):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = wl.torch.EmbeddingBags(
            ["user", "item"], 8, table=table, rule=wl.Adagrad(lr=0.1), init=wl.Normal(std=1.0), cluster=cluster)
        self.head = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    def forward(self, ids):
        return self.head(self.embeddings(ids).flatten(1))

def batch(step, rank, n=16):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 40, (n, 2), generator=generator), torch.randn(n, 1, generator=generator)
"""
BEGUN = """
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

def begin(table):
    model = Net(None, table)
    ddp = DistributedDataParallel(model)
    return model, ddp, torch.optim.Adam(ddp.parameters(), lr=0.01)
"""


def run(tmp_path: pathlib.Path, script: str, *options: str, workers: int = 2) -> subprocess.Popen[str]:
    """`windlass run` of a script, which finds `OUT`, a folder."""
    path = tmp_path / "train.py"
    whole = MODEL + BEGUN + textwrap.dedent(script)
    path.write_text(whole.replace("OUT", repr(str(tmp_path))))
    command = [
        sys.executable,
        "-m",
        "windlass",
        "run",
        "--servers",
        "2",
        "--workers",
        str(workers),
        *options,
        str(path),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS_")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out
    return out


def joined(table: str, steps: list[list[int]], divisor: int, clip: float | None = None) -> tuple[Any, Any]:
    """The same in one process: of each step the workers that have a batch. Dense weights, and all rows."""
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    with wl.connect(threads=1) as cluster:
        model = scope["Net"](cluster, table)
        rest = torch.optim.Adam(model.parameters(), lr=0.01)
        tables = ServerOptimizer(model.embeddings, clip_norm=clip, cluster=cluster)
        for step, ranks in enumerate(steps):
            for rank in ranks:
                x, y = scope["batch"](step, rank)
                ((model(x) - y).square().mean() / divisor).backward()
            rest.step()
            tables.step()
            rest.zero_grad()
            tables.zero_grad()
        rows = model.embeddings(torch.arange(40)[:, None].expand(40, 2)).detach()
        return [p.detach().clone() for p in model.head.parameters()], rows


TRAIN = """
model, ddp, rest = begin("train")
tables = wl.torch.ServerOptimizer(model.embeddings)
for step in range(12):
    x, y = batch(step, rank)
    (ddp(x) - y).square().mean().backward()
    rest.step()
    tables.step()
    rest.zero_grad()
    tables.zero_grad()
rows = model.embeddings(torch.arange(40)[:, None].expand(40, 2)).detach()
if rank == 0:
    torch.save([[p.detach() for p in model.head.parameters()], rows], OUT + "/train.pt")
"""

JOIN = """
model, ddp, rest = begin("join")
tables = wl.torch.ServerOptimizer(model.embeddings)
with Join([ddp, tables]):
    for step in range(6 + 5 * rank):
        x, y = batch(step, rank)
        (ddp(x) - y).square().mean().backward()
        rest.step()
        tables.step()
        rest.zero_grad()
        tables.zero_grad()
rows = model.embeddings(torch.arange(40)[:, None].expand(40, 2)).detach()
if rank == 1:
    torch.save([[p.detach() for p in model.head.parameters()], rows], OUT + "/join.pt")
dist.barrier()
"""
CLIP = """
model, ddp, rest = begin("clip")
tables = wl.torch.ServerOptimizer(model.embeddings, clip_norm=0.05)
for step in range(6):
    x, y = batch(step, rank)
    (ddp(x) - y).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
    rest.step()
    tables.step()
    rest.zero_grad()
    tables.zero_grad()
ours = torch.cat([p.detach().flatten() for p in model.head.parameters()])
theirs = [torch.empty_like(ours) for _ in range(2)]
dist.all_gather(theirs, ours)
assert torch.equal(*theirs), "replicas differ"
print("replicas are equal")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """Three trainings one after the other in one run, since its start takes longer than they do: a folder with what
    they saved, and what was printed."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, finished(run(folder, TRAIN + CLIP + JOIN + "dist.destroy_process_group()\n"))


def test_two_workers_are_one_with_the_joined_batch(trained: tuple[pathlib.Path, str]) -> None:
    dense, rows = torch.load(trained[0] / "train.pt", weights_only=True)
    expected, expected_rows = joined("train", [[0, 1]] * 12, 2)
    assert_close(dense, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rows, expected_rows, rtol=1e-4, atol=1e-6)


def test_workers_with_uneven_inputs_end_and_count_in_the_mean(trained: tuple[pathlib.Path, str]) -> None:
    dense, rows = torch.load(trained[0] / "join.pt", weights_only=True)
    expected, expected_rows = joined("join", [[0, 1]] * 6 + [[1]] * 5, 2)
    assert_close(dense, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rows, expected_rows, rtol=1e-4, atol=1e-6)


def test_clipping_leaves_the_replicas_of_dense_parameters_equal(trained: tuple[pathlib.Path, str]) -> None:
    assert trained[1].count("replicas are equal") == 2


LOSS = """
model, ddp, rest = begin("loss")
tables = wl.torch.ServerOptimizer(model.embeddings)
for step in range(100000):
    x, y = batch(step, rank)
    (ddp(x) - y).square().mean().backward()
    rest.step()
    tables.step()
    rest.zero_grad()
    tables.zero_grad()
    if step == 5:
        print(f"pid {rank} {os.getpid()}", flush=True)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_worker_that_is_lost_ends_the_run_soon(tmp_path: pathlib.Path, sent: signal.Signals) -> None:
    """Without it, the others would wait in their AllReduce for half an hour."""
    process = run(tmp_path, LOSS, "--failure-timeout", "3")
    assert process.stdout is not None
    pid = 0
    for line in process.stdout:
        if "pid 1 " in line:
            pid = int(line.split()[-1])
            break
    os.kill(pid, sent)
    began = time.monotonic()
    try:
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode != 0
    assert time.monotonic() - began < 100, out
