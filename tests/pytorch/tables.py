"""Modules over tables beside torch's own, with the same rows."""

from typing import Any

import torch

import windlass as wl
from windlass.torch import Embedding, EmbeddingBag

ROWS, DIM = 50, 8


def rows(n: int = ROWS, dim: int = DIM, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, n: int = ROWS, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, n, shape, generator=torch.Generator().manual_seed(seed))


def pair(
    cluster: wl.Cluster, kind: type[Embedding] | type[EmbeddingBag] = Embedding, rule: Any = None, **options: Any
) -> tuple[Any, Any]:
    """A module of torch's, and ours with its rows."""
    theirs_too = {key: value for key, value in options.items() if key not in ("sync", "dtype", "init")}
    theirs = getattr(torch.nn, kind.__name__)(ROWS, DIM, **theirs_too)
    with torch.no_grad():
        theirs.weight.copy_(rows())
        if options.get("padding_idx") is not None:
            theirs.weight[options["padding_idx"]] = 0
    ours = kind("rows", DIM, rule=rule or wl.SGD(lr=1.0), cluster=cluster, **options)
    ours.from_torch(theirs)
    return theirs, ours


def gradient_of(ours: Any) -> torch.Tensor:
    """What waits for the step, as the gradient of all rows."""
    found = torch.zeros(ROWS, DIM)
    for piece in ours._open()._pending:
        found.index_add_(0, torch.from_numpy(piece.keys), piece.grad)
    return found


def all_rows(ours: Any, n: int = ROWS) -> torch.Tensor:
    return torch.from_numpy(ours.table.pull(torch.arange(n).numpy(), create=False).copy())
