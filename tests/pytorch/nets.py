"""Small models and data for tests of the PyTorch side."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

STEPS = 12
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


_seeding = threading.Lock()  # torch has one generator, and workers are threads


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is made inside is the same every time."""
    with _seeding:
        torch.manual_seed(seed)
        yield


def mlp(seed: int = 1, width: int = 300) -> torch.nn.Sequential:
    """About 100,000 parameters: several shards."""
    with seeded(seed):
        return torch.nn.Sequential(
            torch.nn.Linear(20, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 10),
        )


def normed() -> torch.nn.Sequential:
    """With statistics."""
    with seeded(0):
        return torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10))


def batch(step: int, rank: int = 0, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the same step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 20, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def loss_of(model: Callable[[Any], Any], step: int, rank: int = 0) -> torch.Tensor:
    x, y = batch(step, rank)
    return F.cross_entropy(model(x), y)


def train(model: Any, opt: Any, steps: int = STEPS, rank: int = 0, *, first: int = 0) -> None:
    """Backward, step, zero_grad."""
    for step in range(first, first + steps):
        loss_of(model, step, rank).backward()
        opt.step()
        opt.zero_grad()


def train_joined(model: Any, opt: Any, world: int, steps: int = STEPS) -> None:
    """What workers under BSP do together, in one process: the mean of their gradients."""
    for step in range(steps):
        opt.zero_grad()
        for rank in range(world):
            (loss_of(model, step, rank) / world).backward()
        opt.step()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    """To the last bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_close(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor], **limits: float) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.float(), b.float(), **(limits or CLOSE))
