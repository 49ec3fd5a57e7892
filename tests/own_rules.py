"""Rules and functions of a user's, as servers of tests import them."""

import time

import numpy as np

import windlass as wl


@wl.rule(state=("momentum",))
def heavy_ball(w, g, momentum, lr, beta=0.9):
    """As wl.SGD with momentum."""
    momentum *= np.float32(beta)
    momentum += g
    w -= np.float32(lr) * momentum


@wl.rule(state=("m", "v"))
def adam(w, g, m, v, count, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-8):
    """As wl.Adam, to some digits. Returns the weights."""
    m += (1 - beta1) * (g - m)
    v *= beta2
    v += (1 - beta2) * g * g
    return w - lr / (1 - beta1**count) * m / (np.sqrt(v) / np.sqrt(1 - beta2**count) + eps)


@wl.rule(row_state=("total",))
def row_adagrad(w, g, total, lr=0.01, eps=1e-10):
    """As wl.RowAdagrad, to some digits."""
    total += (g * g).mean(axis=1)
    w -= lr * g / (np.sqrt(total)[:, None] + eps)


def _from_weights(w, start):
    start[...] = w


@wl.rule(state=("start",), init=_from_weights)
def towards_start(w, g, start, pull=0.5):
    """Descends, and is drawn to where the weights began."""
    w -= g
    w += pull * (start - w)


@wl.rule(whole=True)
def by_norm(w, g, lr=1.0):
    """A step of length lr."""
    w -= lr * g / np.sqrt((g.astype(np.float64) ** 2).sum())


@wl.rule(rows=True)
def centred(w, g):
    """Rows whose mean is zero."""
    w -= g
    w -= w.mean(axis=1, keepdims=True)


@wl.rule(state=("momentum",), arrays="torch")
def heavy_ball_in_torch(w, g, momentum, lr, beta=0.9):
    momentum.mul_(beta).add_(g)
    w.sub_(momentum, alpha=lr)


@wl.rule
def sometimes(w, g, fails=0.0):
    """Changes the weights, and then fails if it is told to."""
    w -= g
    if fails:
        raise ValueError("as it was told")


@wl.rule
def fussy(w, g, most=10.0):
    """As wl.Sum, of gradients that are not too large; fails with any other."""
    if (g > most).any():
        raise ValueError("too large")
    w += g


@wl.rule
def slow(w, g, seconds=0.0):
    """Computes for so long, as a loop that forgot its end would."""
    w -= g
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@wl.rule
def wrong_shape(w, g):
    return w[:1]


@wl.function(merge=sum)
def above(part, limit=0.0):
    """How many weights are above a limit."""
    return int((part.weights > limit).sum())


@wl.function
def far_keys(part, limit):
    return part.keys[np.linalg.norm(part.weights, axis=1) > limit]


@far_keys.merge
def _all_keys(results):
    return np.sort(np.concatenate(results))


@wl.function
def places(part):
    """What it was given, in short."""
    return {"shard": part.shard, "first": part.first, "shape": part.weights.shape, "sum": part.weights.sum()}


@wl.function
def keys(part):
    return part.keys


@wl.function
def much(part, bytes):
    return np.zeros(bytes, np.uint8)


@wl.function
def odd(part):
    return object()


@wl.function
def fails(part):
    raise KeyError("not there")


@wl.function(merge=max)
def waits(part, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    return part.shard


def not_a_rule(w, g):
    raise AssertionError("servers call what is marked, and nothing else")
