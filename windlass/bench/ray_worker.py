"""The worker of ``windlass bench ray``, in a run on Ray and in a `windlass run` alike: calls as often as it is told.

It connects to whoever measures, says who it is, and answers each line of JSON with one::

    {"what": "push_pull", "calls": 30}   ->   [0.00312, 0.00311, ...]
"""

import itertools
import json
import socket
import sys

import numpy as np

import windlass as wl
from windlass.bench._turns import timed, timed_over
from windlass.bench._work import filled

FLOATS = 4_000_000  # 16 MB
DIM, ROWS, KEYS = 64, 200_000, 16_384


def serve(who: str, port: int) -> None:
    """Until nobody asks any more."""
    with wl.connect() as cluster, socket.create_connection(("127.0.0.1", port)) as sock, sock.makefile("rw") as lines:
        w = cluster.tensor("w", FLOATS, rule=wl.SGD(lr=1e-6))
        grad, out = filled(cluster.empty, FLOATS), filled(cluster.empty, FLOATS)
        table = cluster.table("rows", DIM, rule=wl.Sum(), init=wl.Normal(std=0.01))
        rows = cluster.empty((KEYS, DIM))
        for first in range(0, ROWS, KEYS):
            table.pull(np.arange(first, first + KEYS, dtype=np.uint64))  # the initialiser makes them
        draw = np.random.default_rng(0)
        keys = itertools.cycle([draw.integers(0, ROWS, KEYS).astype(np.uint64) for _ in range(16)])
        sides = {
            "push_pull": timed(lambda: w.push_pull(grad, out=out)),
            "pull": timed_over(keys, lambda these: table.pull(these, out=rows)),
        }
        lines.write(json.dumps(who) + "\n")
        lines.flush()
        for line in lines:
            request = json.loads(line)
            lines.write(json.dumps(sides[request["what"]](request["calls"])) + "\n")
            lines.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
