"""How good scores are."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """The share of pairs, a positive and a negative one, of which the positive one has the higher score."""
    _, at, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[at]  # equal scores share their mean rank
    positive = labels > 0
    count = int(positive.sum())
    others = len(ranks) - count
    if not count or not others:
        raise ValueError(f"auc: expected labels of both kinds, not {count} positive and {others} negative ones")
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))
