"""reject_nonfinite: nothing but finite numbers is applied, also when lent memory changes after it was checked."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import FLOAT32, PATIENCE_S, SHARD, held, new_app

import windlass as wl
from windlass.testing import Servers

KEYS = np.arange(600)

# A server stops within its pass over a shard; the worker changes what it has lent, and the server continues.
SCENE = """
import os, pathlib, signal, sys, time
import numpy as np
import windlass as wl
from windlass.testing import Servers

dtype = sys.argv[1]
os.environ["WINDLASS_STOP"] = "pass:4"
N = 8_000  # one shard
with Servers(1, kind="unix", threads=1) as servers:
    with wl.connect(servers=servers.addresses, transport="arena", timeout=60) as cluster:
        w = cluster.tensor("w", N, rule=wl.Sum(), dtype=dtype, reject_nonfinite=True)
        grad = cluster.empty(N, dtype=dtype)
        grad[:] = 1
        for _ in range(3):  # until the server knows the array
            w.push(grad).wait()
        future = w.push(grad)
        stat = pathlib.Path(f"/proc/{servers.pids[0]}/stat")
        deadline = time.monotonic() + 60
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "the server did not stop"
            time.sleep(0.001)
        grad[:] = np.nan
        os.kill(servers.pids[0], signal.SIGCONT)
        try:
            future.wait()
            print("no error", end=" ")
        except wl.BufferInUse as error:
            assert "changed while it was on loan" in str(error) and not error.not_applied, error
            print("refused", end=" ")
        print("finite" if np.isfinite(w.pull()).all() else "not finite", sorted(set(w.pull().tolist())))
"""


def play(dtype: str, broken: str = "") -> str:
    environment = {**os.environ, "WINDLASS_BREAK": broken}
    done = subprocess.run(
        [sys.executable, "-c", SCENE, dtype], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_memory_that_changes_within_the_pass_leaves_a_part_of_the_push_and_an_error(dtype: str):
    assert play(dtype) == "refused finite [3.0, 4.0]"


def test_without_a_second_look_it_would_be_applied():
    assert play("float32", "nonfinite").startswith("no error not finite")


@pytest.fixture(scope="module")
def server() -> Iterator[Servers]:
    with Servers(1, kind="unix", threads=2) as servers:
        yield servers


@pytest.mark.parametrize("rule", [wl.SGD(lr=0.5), wl.Adam(lr=0.1), wl.RowAdagrad(lr=0.1), wl.Sum()], ids=str)
def test_a_push_whose_array_changes_while_it_waits_applies_nothing(rule: wl.Rule):
    with wl.connect(threads=2) as cluster:  # servers check when they come to it
        w = cluster.tensor("w", (4 * SHARD // 64, 64), rule=rule, reject_nonfinite=True)
        t = cluster.table("t", 8, rule=rule, reject_nonfinite=True)
        grad, grads = cluster.empty(w.shape), cluster.empty((len(KEYS), 8))
        for a, b, push in ((w, grad, lambda: w.push(grad)), (t, grads, lambda: t.push(KEYS, grads))):
            b[:] = 1
            push().wait()
            before = a.fingerprint()
            with held(a, *range(256 if a is t else 4)):
                future = push()
                b[...] = np.inf
            with pytest.raises(wl.NonFinite, match="nothing was applied to shard"):
                future.wait()
            assert a.fingerprint() == before


@pytest.mark.parametrize("kind", ["tensor", "table"])
@pytest.mark.parametrize("where", ["embedded", "arena"])
def test_under_bsp_a_push_that_changes_until_its_update_is_left_out_and_the_others_make_it(
    where: str, kind: str, server: Servers
):
    app = new_app()
    with contextlib.ExitStack() as stack:
        if where == "embedded":
            cluster = stack.enter_context(wl.connect(threads=2, timeout=60))
            workers = [cluster.worker(rank, 2) for rank in range(2)]
        else:
            arguments = {"transport": "arena", "timeout": 60, "app": app, "world_size": 2}
            workers = [server.connect(**arguments, rank=rank) for rank in range(2)]
        first, other = (stack.enter_context(worker) for worker in workers)
        spec = {"rule": wl.SGD(lr=1.0), "sync": wl.BSP(), "reject_nonfinite": True}
        if kind == "tensor":
            mine, theirs = (c.tensor("w", 4 * SHARD, **spec) for c in (first, other))
            grad, good = first.empty(4 * SHARD), np.full(4 * SHARD, 2, FLOAT32)
            push, push_good, read = (lambda: mine.push(grad)), (lambda: theirs.push(good)), theirs.pull
        else:
            mine, theirs = (c.table("t", 8, **spec) for c in (first, other))
            grad, good = first.empty((len(KEYS), 8)), np.full((len(KEYS), 8), 2, FLOAT32)
            push, push_good = (lambda: mine.push(KEYS, grad)), (lambda: theirs.push(KEYS, good))
            read = lambda: theirs.pull(KEYS)  # noqa: E731
        grad[:] = 1
        for _ in range(3):  # until the server knows the array
            futures = push(), push_good()
            first.tick()
            other.tick()
            for future in futures:
                future.wait()
        changed, applied = push(), push_good()
        time.sleep(0.2)  # it has been checked
        grad[...] = np.nan
        first.tick()
        other.tick()
        applied.wait()
        with pytest.raises(wl.NonFinite, match="nothing was applied to shard"):
            changed.wait()
        assert (read() == 3 * -1.5 - 2).all()  # the mean of those that counted


def test_what_is_put_is_looked_at_where_it_is_used():
    with wl.connect(threads=2) as cluster:
        w = cluster.tensor("w", 100, rule=wl.Sum(), reject_nonfinite=True)
        with pytest.raises(wl.NonFinite):
            w.put(np.full(100, np.nan, FLOAT32))
        w.put(np.ones(100, FLOAT32))
        assert (w.pull() == 1).all()
