"""Softmax regression, on handwritten digits unless told otherwise: the parameter server's loop in its smallest form.

The worker computes gradients with numpy; the server keeps the weights and applies SGD to them. Each step is

    1. compute the gradient of the loss at the weights at hand
    2. push_pull: send it, and get back the weights after the step

Alone (python apps/softmax/train.py) the server is an engine inside this process. With several workers (windlass run
--servers 2 --workers 2 apps/softmax/train.py) each takes its share of every epoch. Who waits for whom is the policy's
to say (--sync, or WINDLASS_SYNC); unless told otherwise nobody waits for anybody.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import rich.progress as bars
from numpy.typing import NDArray

import windlass as wl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import positive, whole
from data import DataError, Samples, load

CLASSES = 10
SLOWER, ONE_IN = 4, 8  # steps of uneven workers
Report = Callable[[int, float], None]


class Diverged(Exception):
    """The loss is no longer a number."""


def train(
    cluster: wl.Cluster, data: Samples, args: argparse.Namespace, report: Report
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the weights, (features, CLASSES), and the bias, (CLASSES,)."""
    samples, features = data.x_train.shape

    # Under BSP an update is the mean of all workers' gradients, that of a batch as large as theirs together: fewer
    # steps, so each is as much longer. Elsewhere every push is a step.
    lr = args.lr * cluster.world_size if isinstance(cluster.sync, wl.BSP) else args.lr

    # Two named arrays on the server, both zero at first, and the rule for what a push does to them.
    w = cluster.tensor("w", (features, CLASSES), rule=wl.SGD(lr=lr))
    b = cluster.tensor("b", CLASSES, rule=wl.SGD(lr=lr))

    # Registered arrays: the server reads gradients from them and writes weights into them, without a copy between.
    grad_w, grad_b = cluster.empty(w.shape), cluster.empty(b.shape)
    weights, bias = cluster.empty(w.shape), cluster.empty(b.shape)
    w.pull(out=weights)
    b.pull(out=bias)

    shuffle, chance = np.random.default_rng(args.seed), np.random.default_rng((args.seed, cluster.rank))
    for epoch in range(1, args.epochs + 1):
        order = shuffle.permutation(samples)[cluster.rank :: cluster.world_size]  # the same order for all workers
        loss_sum = 0.0
        for begin in range(0, len(order), args.batch):
            batch = order[begin : begin + args.batch]
            loss_sum += gradients(data.x_train[batch], data.y_train[batch], weights, bias, grad_w, grad_b)
            if args.uneven is not None:
                time.sleep(args.uneven * (SLOWER if chance.random() < 1 / ONE_IN else 1))
            w.push_pull(grad_w, out=weights, weight=len(batch))  # a mean over workers counts samples, not batches
            b.push_pull(grad_b, out=bias, weight=len(batch))
        if not math.isfinite(loss_sum):
            raise Diverged(f"the loss of epoch {epoch} is not a number any more; try a smaller --lr than {args.lr:g}")
        report(epoch, loss_sum / len(order))
    return weights, bias


def gradients(
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    weights: NDArray[np.float32],
    bias: NDArray[np.float32],
    grad_w: NDArray[np.float32],
    grad_b: NDArray[np.float32],
) -> float:
    """Fills grad_w and grad_b with the gradient of the batch's mean cross-entropy; returns the sum over the batch."""
    rows = np.arange(len(y))
    logits = x @ weights + bias
    logits -= logits.max(axis=1, keepdims=True)  # exp() stays within range, and the softmax is the same
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -float(log_p[rows, y].sum())

    # d loss / d logits is the softmax, minus one at the right class.
    delta = np.exp(log_p)
    delta[rows, y] -= 1
    delta /= len(y)
    np.matmul(x.T, delta, out=grad_w)
    np.sum(delta, axis=0, out=grad_b)
    return loss


@contextlib.contextmanager
def progress(epochs: int) -> Iterator[Report]:
    """Yields a function that shows an epoch's loss: a bar on a terminal, about ten lines elsewhere."""
    if not sys.stdout.isatty():
        every = math.ceil(epochs / 10)

        def line(epoch: int, loss: float) -> None:
            if epoch == 1 or epoch % every == 0 or epoch == epochs:
                print(f"epoch {epoch}/{epochs}  loss {loss:.4f}", flush=True)

        yield line
        return
    columns = ("epoch", bars.MofNCompleteColumn(), bars.BarColumn(), "loss {task.fields[loss]:.4f}")
    with bars.Progress(*columns, bars.TimeRemainingColumn(elapsed_when_finished=True)) as shown:
        task = shown.add_task("", total=epochs, loss=math.nan)
        yield lambda epoch, loss: shown.update(task, completed=epoch, loss=loss)


def main() -> None:
    args = arguments()
    data = load("digits" if args.fallback else args.data)
    samples, features = data.x_train.shape
    history: list[tuple[float, float]] = []

    # Overflow ends in a loss that is not a number, which train() reports.
    with np.errstate(over="ignore", invalid="ignore"), wl.connect(sync=args.sync) as cluster:
        if cluster.rank != 0:  # one worker speaks for all
            train(cluster, data, args, lambda epoch, loss: None)
            return
        sizes = f"{samples} to train on, {len(data.x_test)} to test on, {features} {data.features} each"
        print(f"{data.name}: {sizes}", flush=True)
        with progress(args.epochs) as show:
            begin = time.perf_counter()

            def report(epoch: int, loss: float) -> None:
                history.append((time.perf_counter() - begin, loss))
                show(epoch, loss)

            weights, bias = train(cluster, data, args, report)
            seconds = time.perf_counter() - begin

    right = (data.x_test @ weights + bias).argmax(axis=1) == data.y_test
    print(f"test accuracy {right.mean():.4f}")
    print(f"{args.epochs * samples / seconds:,.0f} samples/s ({seconds:.2f} s)", flush=True)
    if args.history is not None:
        args.history.write_text(json.dumps({"accuracy": float(right.mean()), "seconds": seconds, "losses": history}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Softmax regression through windlass.")
    parser.add_argument("--epochs", type=whole(1), default=40, metavar="N", help="passes over the data (%(default)s)")
    parser.add_argument("--batch", type=whole(1), default=32, metavar="N", help="samples per step (%(default)s)")
    parser.add_argument("--lr", type=positive, default=0.1, metavar="X", help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of the order of samples (%(default)s)")
    parser.add_argument("--data", choices=["mnist", "digits", "classification"], default="mnist", help="(%(default)s)")
    parser.add_argument(
        "--sync", metavar="POLICY", help="bsp, bsp:1, ssp:3, asp or maxdelay:0.5 (WINDLASS_SYNC, or asp)"
    )
    parser.add_argument(
        "--uneven",
        type=positive,
        metavar="S",
        help=f"steps that take S seconds, one in {ONE_IN} {SLOWER} times as long",
    )
    parser.add_argument("--history", type=Path, metavar="FILE", help="write losses over time and the accuracy as JSON")
    parser.add_argument("--fallback", action="store_true", help="the same as --data digits: needs no download")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (DataError, Diverged, wl.InvalidArgument) as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has gone; spare the interpreter its own flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
