"""ServerOptimizer beside torch.compile, DistributedDataParallel and windlass run."""

import copy
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PATIENCE_S, check_python
from nets import assert_close, loss_of, mlp, same, train, weights

import windlass as wl
from windlass.torch import ServerOptimizer, leave_to_servers

embedded = pytest.mark.embedded("about the optimizer, whatever its servers are")


@embedded
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, where a graph breaks at a hook
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["module", "parameters"])
def test_a_compiled_module_trains_alike(cluster: wl.Cluster, options: dict[str, Any], whole: bool) -> None:
    torch._dynamo.reset()
    theirs, ours = mlp(width=30), mlp(width=30)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 6)
    opt = ServerOptimizer(ours if whole else ours.parameters(), wl.SGD(lr=0.1), cluster=cluster, **options)
    train(torch.compile(ours, backend="aot_eager"), opt, 6)
    opt.finish()
    assert_close(weights(ours), weights(theirs))
    torch._dynamo.reset()


def test_a_training_begins_without_the_compiler_of_torch() -> None:
    """Importing it takes a second of a processor, and torch does so for every optimizer of its own."""
    code = """
import sys, torch, windlass as wl
model = torch.nn.Linear(3, 2)
with wl.connect(threads=1) as cluster:
    opt = wl.torch.ServerOptimizer(model, wl.SGD(lr=0.1), cluster=cluster)
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        opt.step()
        opt.zero_grad()
print("torch._dynamo" in sys.modules)
"""
    assert check_python(code) == "False\n"


@embedded
def test_a_scaler_of_gradients_works_and_skips_a_step(cluster: wl.Cluster) -> None:
    """It divides gradients in place, and leaves a step out when one is not finite."""
    theirs, ours = mlp(), mlp()
    opts: list[Any] = [torch.optim.SGD(theirs.parameters(), lr=0.1)]
    opts.append(ServerOptimizer(ours.parameters(), wl.SGD(lr=0.1), cluster=cluster))
    for model, opt in zip((theirs, ours), opts, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(6):
            loss = loss_of(model, step) * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert_close(weights(ours), weights(theirs))


@embedded
def test_a_model_can_be_copied_and_saved_as_any_other(cluster: wl.Cluster) -> None:
    model = mlp()
    plain, ours = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), plain)
    opt = ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), cluster=cluster)
    torch.save(model.state_dict(), ours)
    assert len(ours.getvalue()) < 1.05 * len(plain.getvalue())
    copied = copy.deepcopy(model)
    before = weights(copied)
    train(model, opt, 2)
    assert same(weights(copied), before)
    assert not same(weights(model), before)


BESIDE_DDP = """
import torch, torch.distributed as dist, windlass as wl
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 10))
wl.torch.leave_to_servers(model, model[0].parameters())
ddp = DistributedDataParallel(model)
servers = wl.torch.ServerOptimizer(model[0].parameters(), wl.SGD(lr=0.1))
rest = torch.optim.SGD(model[2].parameters(), lr=0.1)
for step in range(8):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(16, 20, generator=generator), torch.randint(0, 10, (16,), generator=generator)
    torch.nn.functional.cross_entropy(ddp(x), y).backward()
    servers.step()
    rest.step()
    model.zero_grad()
if rank == 0:
    torch.save(model.state_dict(), "OUT")
dist.destroy_process_group()
"""


def test_both_kinds_of_parameters_in_one_module_with_gloo(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    out = tmp_path / "model.pt"
    script.write_text(textwrap.dedent(BESIDE_DDP).replace("OUT", str(out)))
    command = [sys.executable, "-m", "windlass", "run", "--servers", "1", "--workers", "2", str(script)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        sgd.step()
        sgd.zero_grad()
    assert_close(torch.load(out, weights_only=True).values(), weights(model))


def test_leaving_parameters_to_servers_checks_what_it_is_given() -> None:
    model = mlp()
    with pytest.raises(wl.InvalidArgument, match="is not in the module"):
        leave_to_servers(model, [torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(wl.InvalidArgument, match="expected a module"):
        leave_to_servers(3, [])
