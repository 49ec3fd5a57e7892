"""The digits as torch wants them, and how many of them a network gets right."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments import positive, whole
from data import DataError, load_digits, load_mnist
from side_by_side import use_cores

__all__ = ["CHOICES", "DataError", "Pictures", "accuracy", "load", "positive", "use_cores", "whole"]

CHOICES = {
    "mnist": "complete MNIST, or the next best if it cannot be had",
    "5k": "5,000 digits of MNIST, or the next best",
    "digits": "scikit-learn's 1,797 digits; no download",
}
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels in 0..1
ENOUGH = 60_000  # samples that a training sees, unless told otherwise: an epoch of MNIST, several of less


class Pictures:
    """What to train on, of how many, and what to test on."""

    def __init__(self, name: str, train: TensorDataset, there: int, test: TensorDataset) -> None:
        self.name, self.train, self.there, self.test = name, train, there, test

    @property
    def epochs(self) -> int:
        """So many are usual."""
        return max(1, ENOUGH // self.there)

    def __str__(self) -> str:
        of = "" if len(self.train) == self.there else f" of {self.there:,}"
        return f"{self.name}: {len(self.train):,}{of} to train on, {len(self.test):,} to test on"


def load(which: str, samples: int | None = None) -> Pictures:
    """which: one of CHOICES. samples: so many of the first ones to train on."""
    data = load_mnist() if which == "mnist" else load_digits(fallback=which == "digits")
    x, y = torch.from_numpy(data.x_train[:samples]), torch.from_numpy(data.y_train[:samples])
    test = TensorDataset(normalised(torch.from_numpy(data.x_test)), torch.from_numpy(data.y_test))
    return Pictures(data.name, TensorDataset(normalised(x), y), len(data.x_train), test)


def normalised(x: Tensor) -> Tensor:
    """(samples, 1, 28, 28) of mean 0 and deviation 1. Pictures of 8 x 8 are enlarged to 24 x 24, with a frame."""
    if x.shape[1] == 64:
        x = F.pad(x.view(-1, 1, 8, 8).repeat_interleave(3, 2).repeat_interleave(3, 3), (2, 2, 2, 2))
    return ((x - MEAN) / DEVIATION).view(-1, 1, 28, 28)


@torch.no_grad()  # type: ignore[untyped-decorator]
def accuracy(model: nn.Module, test: TensorDataset, batch_size: int = 1000) -> float:
    """The share of the digits that it gets right."""
    training = model.training
    model.eval()
    x, y = test.tensors
    found = torch.cat([model(part).argmax(dim=1) for part in x.split(batch_size)])
    model.train(training)
    return float((found == y).float().mean())
