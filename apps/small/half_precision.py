"""A torch model in bfloat16 with gradient accumulation.

    python apps/small/half_precision.py
    windlass run --servers 2 --workers 2 apps/small/half_precision.py

The model and its gradients are bfloat16, on the worker and in flight. The servers keep float32 weights, so that updates
too small for bfloat16's 8 bits still add up. A step's gradient comes from several backward passes, each over a part of
the batch. (With `overlap=True` all but the last belong into `with opt.no_sync():`.)
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import whole
from data import Samples, load_digits

BATCH, PARTS = 64, 4


def make_model(features: int) -> torch.nn.Module:
    """Two layers, always the same."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(features, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def train(cluster: wl.Cluster, data: Samples, epochs: int) -> torch.nn.Module:
    """Returns the model, of the same weights on every worker."""
    x, y = torch.from_numpy(data.x_train).bfloat16(), torch.from_numpy(data.y_train)
    model = make_model(x.shape[1]).bfloat16()  # before the optimizer is made
    opt = wl.torch.ServerOptimizer(model, wl.Adam(lr=0.002), cluster=cluster)
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = wl.torch.leased(dataset, batch_size=BATCH, epochs=epochs, cluster=cluster)
    for _ in range(epochs):
        for batch, labels in loader:
            for part, theirs in zip(batch.chunk(PARTS), labels.chunk(PARTS), strict=True):
                (F.cross_entropy(model(part), theirs, reduction="sum") / len(labels)).backward()  # parts add up
            opt.step(weight=len(labels))  # the last batch of an epoch is smaller, and counts for less
            opt.zero_grad()
    return model


def accuracy(model: torch.nn.Module, data: Samples) -> float:
    """On the digits to test on."""
    with torch.no_grad():
        chosen = model(torch.from_numpy(data.x_test).bfloat16()).argmax(dim=1)
    return float((chosen == torch.from_numpy(data.y_test)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="A torch model in bfloat16 with gradient accumulation.")
    parser.add_argument("--epochs", type=whole(1), default=20, metavar="N", help="passes over the data (%(default)s)")
    args = parser.parse_args()
    data = load_digits(fallback=True)
    with wl.connect() as cluster:
        model = train(cluster, data, args.epochs)
        if cluster.rank == 0:
            print(f"{accuracy(model, data):.1%} right")


if __name__ == "__main__":
    main()
