"""The same training without windlass: plain torch, or, with WORLD_SIZE and RANK set, torch's DistributedDataParallel.

What compare.py holds train.py against. Alone, its batches are as large as those of all workers together.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import CNN
from pictures import CHOICES, Pictures, accuracy, load, use_cores
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 0.25  # for each 128 samples of a batch, as in train.py under BSP


def train(
    model: nn.Module, pictures: Pictures, rank: int, workers: int, args: argparse.Namespace
) -> list[tuple[float, float]]:
    """Seconds and loss of every step."""
    x, y = pictures.train.tensors
    opt = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * args.workers)
    joined = args.batch * args.workers
    losses: list[tuple[float, float]] = []
    begin = time.perf_counter()
    for epoch in range(args.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * args.seed + epoch))
        for batch in order.split(joined):
            mine = batch.chunk(workers)[rank]
            loss = F.nll_loss(model(x[mine]), y[mine])
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append((time.perf_counter() - begin, loss.item()))
    return losses


def main() -> None:
    args = arguments()
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    pictures = load(args.data, args.samples)
    use_cores(workers)
    torch.manual_seed(1000 * args.seed + rank)
    model = CNN()
    if workers > 1:
        dist.init_process_group("gloo", init_method=args.store.resolve().as_uri(), rank=rank, world_size=workers)
    losses = train(DistributedDataParallel(model) if workers > 1 else model, pictures, rank, workers, args)
    if workers > 1:
        dist.destroy_process_group()
    if rank == 0:
        use_cores(workers=1)
        about = {"data": pictures.name, "samples": len(pictures.train), "seconds": losses[-1][0], "losses": losses}
        args.history.write_text(json.dumps({"accuracy": accuracy(model, pictures.test), **about}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The MNIST training of compare.py, without windlass.")
    parser.add_argument(
        "--history", type=Path, required=True, metavar="FILE", help="where losses and accuracy go, JSON"
    )
    parser.add_argument("--store", type=Path, metavar="FILE", help="where DistributedDataParallel's processes meet")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="whose batches are joined (%(default)s)")
    parser.add_argument("--data", choices=list(CHOICES), default="mnist", help="(%(default)s)")
    parser.add_argument("--samples", type=int, metavar="N", help="train on the first N (all)")
    parser.add_argument("--epochs", type=int, required=True, metavar="N", help="passes over the data")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="of each worker (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
