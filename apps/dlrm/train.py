"""DLRM on clicks: embedding tables live on servers, and rows are made for the ids that come.

A model with tables trains like any other. What is ours:

    embeddings = wl.torch.EmbeddingBags(features, dim, table="clicks", rule=wl.Adagrad(lr=lr))    # a module
    opt = wl.torch.ServerOptimizer(model, wl.Adagrad(lr=lr))                    # tables and the network together

or, with --hybrid, the network in DistributedDataParallel with torch's optimizer, and only the tables on servers:

    dense = torch.optim.Adagrad(ddp.parameters(), lr=lr)
    tables = wl.torch.ServerOptimizer(embeddings)

    python apps/dlrm/train.py                                                   # alone, the server in this process
    windlass run --progress --servers 2 --workers 2 apps/dlrm/train.py --hybrid
"""

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from clicks import CHOICES, SAMPLES, Data, DataError, load, positive, whole
from model import DLRM, area, tables_of
from side_by_side import run, use_cores
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import windlass as wl

LOSS_LINES = 10  # that worker 0 prints, about
History = list[tuple[float, float]]  # seconds since the first step, and the loss there


class Diverged(Exception):
    """The loss is no longer a number."""


class Training(NamedTuple):
    """trained: the model, or DistributedDataParallel around it."""

    model: DLRM
    trained: nn.Module
    optimizers: list[torch.optim.Optimizer]


@contextlib.contextmanager
def training(cluster: wl.Cluster, data: Data, args: argparse.Namespace) -> Iterator[Training]:
    """The model and what trains it. Under BSP both ways do what one worker would do with the batches joined: an update
    is the mean of all workers' gradients, in the tables as in DistributedDataParallel."""
    embeddings = tables_of(data, args.dim, args.lr, args.seed, cluster, args.sync)
    torch.manual_seed(args.seed)
    model = DLRM(embeddings, data.train.numbers.shape[1], len(data.train.names), args.dim)
    if not args.hybrid:
        opt = wl.torch.ServerOptimizer(model, wl.Adagrad(lr=args.lr), sync=args.sync, cluster=cluster)
        yield Training(model, model, [opt])
        return
    tables = wl.torch.ServerOptimizer(embeddings, sync=args.sync, cluster=cluster)
    with data_parallel(model, cluster.world_size) as trained:
        dense = torch.optim.Adagrad(trained.parameters(), lr=args.lr)
        yield Training(model, trained, [dense, tables])


@contextlib.contextmanager
def data_parallel(model: nn.Module, workers: int) -> Iterator[nn.Module]:
    """In a group of all workers; the model itself if there is one."""
    if workers == 1:
        yield model
        return
    if os.environ.get("MASTER_ADDR") == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    try:
        yield DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()


def train(cluster: wl.Cluster, data: Data, args: argparse.Namespace) -> tuple[DLRM, History]:
    """This worker's share of the epochs. Returns the model and its losses."""
    steps, losses = args.epochs * data.train.batches(args.batch), History()
    every = max(1, steps // LOSS_LINES)
    rank, workers = cluster.rank, cluster.world_size
    with training(cluster, data, args) as (model, trained, optimizers):
        begin = time.perf_counter()
        for epoch in range(1, args.epochs + 1):
            for batch in data.train.shuffled(args.batch, 1000 * args.seed + epoch, rank, workers):
                loss = F.binary_cross_entropy_with_logits(trained(batch.numbers, batch.sparse), batch.labels)
                loss.backward()
                for opt in optimizers:
                    opt.step()
                    opt.zero_grad()

                now = loss.item()
                cluster.report(loss=now)
                losses.append((time.perf_counter() - begin, now))
                if not math.isfinite(now):
                    raise Diverged(f"the loss of epoch {epoch} is not a number any more; try a smaller --lr")
                if rank == 0 and len(losses) % every == 1 % every:
                    rate = len(losses) * args.batch / losses[-1][0]
                    place = f"epoch {epoch}/{args.epochs}  step {len(losses)}/{steps}"
                    print(f"{place}  loss {now:.4f}  {rate:,.0f} samples/s", flush=True)
    return model, losses


def main() -> None:
    args = arguments()
    data = load(args.data, args.samples, args.rows)
    if not data.train.batches(args.batch):
        raise DataError(
            f"{data.name}: {len(data.train):,} samples are no batch of {args.batch:,}; try a smaller --batch"
        )
    with wl.connect(sync=args.sync) as cluster:
        if args.batch % cluster.world_size:
            raise DataError(f"--batch {args.batch} cannot be split evenly among {cluster.world_size} workers")
        use_cores(workers=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if cluster.rank == 0:
            where = f"{cluster.world_size} worker{'s' if cluster.world_size > 1 else ''}"
            way = "tables on servers, network in DistributedDataParallel" if args.hybrid else "all on servers"
            print(f"{data}\n{way}, {where}, batch {args.batch}, dim {args.dim}, lr {args.lr:g}", flush=True)
        model, losses = train(cluster, data, args)
        if cluster.rank != 0:  # one worker speaks for all
            return
        found = area(model, data.test)
        cluster.report(auc=found)
        rows = len(model.embeddings.table)
    trained = len(losses) * args.batch
    print(f"test AUC {found:.4f}, {rows:,} rows")
    print(f"{trained / losses[-1][0]:,.0f} samples/s ({losses[-1][0]:.1f} s)", flush=True)
    if args.history is not None:
        about = {"data": data.name, "samples": trained, "seconds": losses[-1][0], "losses": losses, "rows": rows}
        args.history.write_text(json.dumps({"auc": found, **about}))


def arguments() -> argparse.Namespace:
    described = "; ".join(f"{name}: {what}" for name, what in CHOICES.items())
    parser = argparse.ArgumentParser(description="DLRM on clicks, with embedding tables on servers.")
    parser.add_argument("--data", choices=list(CHOICES), default="census", help=f"{described} (%(default)s)")
    parser.add_argument("--hybrid", action="store_true", help="the network in DistributedDataParallel, not on servers")
    parser.add_argument("--epochs", type=whole(1), default=1, metavar="N", help="passes over the data (%(default)s)")
    parser.add_argument(
        "--batch", type=whole(1), default=512, metavar="N", help="samples per step, of all workers (%(default)s)"
    )
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="of a row (%(default)s)")
    parser.add_argument("--lr", type=positive, default=0.02, metavar="X", help="learning rate of both (%(default)s)")
    parser.add_argument("--sync", default="bsp", metavar="POLICY", help="bsp, ssp:3, asp or maxdelay:0.5 (%(default)s)")
    parser.add_argument(
        "--samples", type=whole(1), metavar="N", help=f"train on the first N (all); of zipf, draw N ({SAMPLES})"
    )
    parser.add_argument("--rows", type=whole(26), metavar="N", help="of zipf: of all features together (33,762,577)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--history", type=Path, metavar="FILE", help="write losses over time and the AUC as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    run(main, DataError, Diverged, wl.InvalidArgument)
