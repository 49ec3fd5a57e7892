"""A convolutional network on MNIST, trained by several workers whose weights live on servers.

The loop is the one of any PyTorch training. Two lines of it are ours:

    opt = wl.torch.ServerOptimizer(model.parameters(), wl.SGD(lr=lr), sync=sync)    # step() is a push and a pull
    batches = wl.torch.leased(train, batch_size=128)                                # every sample goes to some worker

    windlass run --progress --servers 2 --workers 2 apps/mnist/train.py             # what `make demo` does first
    python apps/mnist/train.py --data 5k                                            # alone, the server in this process
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from model import CNN
from pictures import CHOICES, DataError, Pictures, accuracy, load, positive, use_cores, whole
from side_by_side import run

import windlass as wl

LOSS_LINES = 10  # that worker 0 prints, about
History = list[tuple[float, float]]  # seconds since the first step, and the loss there


class Diverged(Exception):
    """The loss is no longer a number."""


def learning_rate(sync: wl.Sync, workers: int) -> float:
    """Under BSP an update is the mean of all workers' gradients, that of a batch as large as theirs together, and can
    be as many times larger. Elsewhere every push is an update."""
    return 0.25 * workers if isinstance(sync, wl.BSP) else 0.25


def train(cluster: wl.Cluster, pictures: Pictures, args: argparse.Namespace) -> tuple[CNN, History]:
    """This worker's share of the epochs. Returns the network with the last weights it got, and its losses."""
    torch.manual_seed(1000 * args.seed + cluster.rank)  # dropout: each worker has its own
    model = CNN()  # worker 0's initial weights become everybody's
    lr = args.lr if args.lr is not None else learning_rate(cluster.sync, cluster.world_size)
    opt = wl.torch.ServerOptimizer(model.parameters(), wl.SGD(lr=lr), sync=cluster.sync, cluster=cluster)
    batches = wl.torch.leased(
        pictures.train, batch_size=args.batch, cluster=cluster, epochs=args.epochs, seed=args.seed
    )
    if cluster.rank == 0:
        workers = f"{cluster.world_size} worker{'s' if cluster.world_size > 1 else ''}"
        print(f"{pictures}\npolicy {cluster.sync}, {workers}, batch {args.batch}, lr {lr:g}", flush=True)

    every = max(1, args.epochs * len(batches) // LOSS_LINES)
    losses: History = []
    begin = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        for x, y in batches:
            loss = F.nll_loss(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()

            now = loss.item()
            cluster.report(loss=now)
            losses.append((time.perf_counter() - begin, now))
            if not math.isfinite(now):
                raise Diverged(f"the loss of epoch {epoch} is not a number any more; try a smaller --lr than {lr:g}")
            if cluster.rank == 0 and len(losses) % every == 1 % every:
                print(f"epoch {epoch}/{args.epochs}  step {len(losses)}  loss {now:.4f}", flush=True)
    return model, losses


def main() -> None:
    args = arguments()
    pictures = load("digits" if args.fallback else args.data, args.samples)
    args.epochs = args.epochs or pictures.epochs
    with wl.connect(sync=args.sync) as cluster:
        use_cores(workers=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        model, losses = train(cluster, pictures, args)
        if cluster.rank != 0:  # one worker speaks for all
            return
        use_cores(workers=1)  # the others are done
        right = accuracy(model, pictures.test)
        cluster.report(accuracy=right)
    seconds = losses[-1][0] if losses else math.nan
    print(f"test accuracy {right:.4f}")
    print(f"{args.epochs * len(pictures.train) / seconds:,.0f} samples/s ({seconds:.1f} s)", flush=True)
    if args.history is not None:
        about = {"data": pictures.name, "samples": len(pictures.train), "seconds": seconds, "losses": losses}
        args.history.write_text(json.dumps({"accuracy": right, **about}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A convolutional network on MNIST, through windlass.")
    parser.add_argument("--data", choices=list(CHOICES), default="mnist", help=f"{described(CHOICES)} (%(default)s)")
    parser.add_argument("--fallback", action="store_true", help="the same as --data digits: needs no download")
    parser.add_argument("--samples", type=whole(1), metavar="N", help="train on the first N (all)")
    parser.add_argument("--epochs", type=whole(1), metavar="N", help="passes over the data (1 of MNIST, more of less)")
    parser.add_argument("--batch", type=whole(1), default=128, metavar="N", help="samples per step (%(default)s)")
    parser.add_argument("--sync", default="bsp", metavar="POLICY", help="bsp, ssp:3, asp or maxdelay:0.5 (%(default)s)")
    parser.add_argument("--lr", type=positive, metavar="X", help="learning rate (0.25, times the workers under bsp)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--history", type=Path, metavar="FILE", help="write losses over time and the accuracy as JSON")
    return parser.parse_args()


def described(choices: dict[str, str]) -> str:
    """For the help."""
    return "; ".join(f"{name}: {what}" for name, what in choices.items())


if __name__ == "__main__":
    run(main, DataError, Diverged, wl.InvalidArgument)
