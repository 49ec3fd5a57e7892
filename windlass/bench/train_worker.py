"""A worker of ``windlass bench train``: trains as each line of its standard input says, and answers with a line.

    {"way": "bsp", "batch": 128, "steps": 20, "run": 3, "world": 2, "servers": [...], "overlap": true}
        ->   {"seconds": 3.1}

The ways are "plain" (torch.optim in this process), "ddp" (gloo) and the policies of consistency.
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import windlass as wl

WARM_UP = 3
SLOW_SHARE, SLOWER = 0.25, 4  # so many steps take so many times as long
EPOCHS, KEEP_EVERY, TEST_SAMPLES = 1.5, 10, 2000  # until an accuracy is reached: at most two
LEARNING_RATE = 0.25  # of one worker's gradients; a mean of two gets twice that


class CNN(nn.Module):  # type: ignore[misc]
    """Two convolutions and three linear layers: 1,201,382 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(9216, 128), nn.Linear(128, 20), nn.Linear(20, 10)

    def forward(self, x: Any) -> Any:
        """Log-probabilities of ten classes."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.dropout2d(F.max_pool2d(x, 2), 0.5, self.training)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = F.dropout2d(x[:, :, None, None], 0.75, self.training)[:, :, 0, 0]  # 128 channels of one pixel
        return F.log_softmax(self.fc3(F.relu(self.fc2(x))), dim=1)


class Job:
    """One line's worth of training."""

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        self.rank, self.servers = rank, job["servers"]
        self.way, self.world, self.run = job["way"], job["world"], job["run"]
        self.batch, self.steps, self.overlap = job["batch"], job["steps"], job.get("overlap", False)
        self.slow_s, self.until = job.get("slow_s", 0.0), job.get("until")
        torch.manual_seed(1000 * self.run + rank)
        self.x, self.y = torch.randn(self.batch * 4, 1, 28, 28), torch.randint(0, 10, (self.batch * 4,))

    def work(self) -> dict[str, Any]:
        """Trains; the seconds of the steps behind the first few."""
        model = CNN()
        with contextlib.ExitStack() as stack:
            trained, opt = self._optimizer(model, stack)
            if self.until is not None:
                return self._until(model, trained, opt)
            slow = np.random.default_rng((self.run, self.rank)).random(self.steps) < SLOW_SHARE
            for step in range(WARM_UP):
                self._step(trained, opt, step)
            if self.world > 1:
                dist.barrier()
            begun = time.perf_counter()
            for step in range(self.steps):
                self._step(trained, opt, step)
                if self.slow_s and slow[step]:
                    time.sleep((SLOWER - 1) * self.slow_s)
            return {"seconds": time.perf_counter() - begun}

    def _optimizer(self, model: CNN, stack: contextlib.ExitStack) -> Any:
        """The module to call, and its optimizer."""
        if self.way == "plain":
            return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        if self.way == "ddp":
            ddp = DistributedDataParallel(model)
            return ddp, torch.optim.SGD(model.parameters(), lr=self.world * LEARNING_RATE)
        app = f"{self.way} {self.overlap} {self.world} {self.run} {self.steps} {self.slow_s}".replace(":", "-")
        cluster = wl.connect(servers=self.servers, app=app, rank=self.rank, world_size=self.world)
        stack.enter_context(cluster)
        joined = self.world if self.way == "bsp" else 1
        opt = wl.torch.ServerOptimizer(
            model.parameters(),
            wl.SGD(lr=joined * LEARNING_RATE),
            sync=self.way,
            overlap=self.overlap,
            cluster=cluster,
        )
        return model, opt

    def _step(self, model: Any, opt: Any, step: int) -> None:
        some = slice(step % 4 * self.batch, (step % 4 + 1) * self.batch)
        F.nll_loss(model(self.x[some]), self.y[some]).backward()
        opt.step()
        opt.zero_grad()

    # -- time to an accuracy -----------------------------------------------------------------------------------------

    def _until(self, model: CNN, trained: Any, opt: Any) -> dict[str, Any]:
        """Seconds until the model is right so often; it is kept now and then, and tested afterwards."""
        x, y, x_test, y_test = mnist()
        kept: list[tuple[float, dict[str, Any]]] = []
        generator = torch.Generator().manual_seed(self.run)
        order = torch.cat([torch.randperm(len(x), generator=generator) for _ in range(2)])
        batches = order[: int(EPOCHS * len(x))].split(self.batch)
        mine = batches[self.rank :: self.world][: len(batches) // self.world]
        slow = np.random.default_rng((self.run, self.rank)).random(len(mine)) < SLOW_SHARE
        dist.barrier()
        begun = time.perf_counter()
        for step, batch in enumerate(mine):
            F.nll_loss(trained(x[batch]), y[batch]).backward()
            opt.step()
            opt.zero_grad()
            if self.slow_s and slow[step]:
                time.sleep((SLOWER - 1) * self.slow_s)
            if self.rank == 0 and (step % KEEP_EVERY == 0 or step == len(mine) - 1):
                state = {name: value.clone() for name, value in model.state_dict().items()}
                kept.append((time.perf_counter() - begun, state))
        dist.barrier()
        return {"seconds": time.perf_counter() - begun, **self._first(model, kept, x_test, y_test)}

    def _first(self, model: CNN, kept: list[tuple[float, dict[str, Any]]], x: Any, y: Any) -> dict[str, Any]:
        """The first that was right so often, and how often the last one is. Only the lowest rank keeps any."""
        if not kept:
            return {}
        model = CNN().eval()
        found: dict[str, Any] = {"reached_s": None}
        with torch.no_grad():
            for seconds, state in kept:
                model.load_state_dict(state)
                right = (model(x).argmax(1) == y).float().mean().item()
                if right >= self.until and found["reached_s"] is None:
                    found["reached_s"] = seconds
        return found | {"accuracy": right}


def mnist() -> tuple[Any, Any, Any, Any]:
    """The complete digits, by the loader of the apps of this source tree; the first of the test set."""
    sys.path.insert(0, str(Path(wl.__file__).parents[1] / "apps"))
    from data import load_mnist  # type: ignore[import-not-found]

    data = load_mnist()

    def pictures(x: Any) -> Any:
        return (torch.from_numpy(x).view(-1, 1, 28, 28) - 0.1307) / 0.3081

    y, y_test = torch.from_numpy(data.y_train), torch.from_numpy(data.y_test[:TEST_SAMPLES])
    return pictures(data.x_train), y, pictures(data.x_test[:TEST_SAMPLES]), y_test


def main() -> None:
    """Rank, world, and a file for torch's rendezvous."""
    rank, world, store = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=int(rank), world_size=int(world))
    for line in sys.stdin:
        print(json.dumps(Job(int(rank), json.loads(line)).work()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
