"""Rules that numba compiles."""

import numba
import numpy as np

import windlass as wl


@wl.rule(state=("momentum",))
@numba.njit(nogil=True, cache=True)  # compiled once for all servers of the tests
def heavy_ball_compiled(w, g, momentum, lr, beta=0.9):
    m, v, d = momentum.ravel(), w.ravel(), g.ravel()
    for i in range(v.size):
        m[i] = np.float32(beta) * m[i] + d[i]
        v[i] -= np.float32(lr) * m[i]


@wl.rule
@numba.njit
def spins(w, g, rounds=0.0):
    x = 0.0
    for i in range(int(rounds)):
        x += np.sin(x + i)
    w[0] += np.float32(x * 0) + 1
