"""Helpers that several tests use."""

import contextlib
import os
import pathlib
import re
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import windlass as wl
from windlass import _core
from windlass.testing import Servers

SHARD = 16384  # float32 elements of one shard of a small tensor: 64 KiB
FLOAT32 = np.float32
Connect = Callable[..., wl.Cluster]  # what the fixture `connect` gives
HASTY_SECONDS = 2.0  # what servers of the fixture `hasty` give a function
PATIENCE_S = 300.0  # a deadline far off: what a quiet machine does in seconds has ended by then on a busy one, too
SHARED: dict[str, Servers] = {}  # the pairs of servers that tests share


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Normally distributed float32."""
    return rng(seed).standard_normal(shape).astype(np.float32)


def new_app() -> str:
    """A name that no other app has."""
    return f"test-{secrets.token_hex(8)}"


def servers_of(cluster: wl.Cluster) -> Servers:
    """The shared servers that a cluster is on."""
    assert cluster._remote is not None
    addresses = [str(address) for address in cluster._remote.servers]
    return next(pair for pair in SHARED.values() if pair.addresses == addresses)


@contextlib.contextmanager
def stopped(servers: Servers, *which: int) -> Iterator[Callable[[], None]]:
    """The servers are stopped until the end of the block, or until the function that it gives is called."""

    def go_on() -> None:
        for i in which or (0, 1):
            with contextlib.suppress(ProcessLookupError):  # one that was killed meanwhile
                servers.cont(i)

    try:
        for i in which or (0, 1):
            servers.stop(i)
        yield go_on
    finally:
        go_on()


@contextlib.contextmanager
def held(thing: wl.Tensor | wl.Table, *shards: int) -> Iterator[Callable[[], None]]:
    """The shards are busy until the end of the block, or until the function that it gives is called.

    On servers elsewhere, all shards are: the processes are stopped.
    """
    if thing._cluster._remote is not None:
        with stopped(servers_of(thing._cluster)) as go_on:
            yield go_on
        return
    take = _core.hold_tensor if isinstance(thing, wl.Tensor) else _core.hold_table
    holds = [take(thing._core, shard) for shard in shards or (0,)]

    def release() -> None:
        for hold in holds:
            hold.release()

    try:
        yield release
    finally:
        release()


def in_step(cluster: wl.Cluster, method: str, *arguments: Any) -> None:
    """A step with one request in it."""
    with cluster.step() as step:
        getattr(step, method)(*arguments)


def every_call(
    cluster: wl.Cluster, tensor: wl.Tensor, table: wl.Table, registered: np.ndarray
) -> dict[str, Callable[[], object]]:
    """Every public call that needs the servers, by name. `registered`: an array for the tensor."""
    grad = np.ones(tensor.shape, np.float32)
    rows = np.ones((2, table.dim), np.float32)
    out = np.empty_like(rows)
    return {
        "Cluster.tensor": lambda: cluster.tensor("another", (2,), rule=wl.Sum()),
        "Cluster.table": lambda: cluster.table("further", 2, rule=wl.Sum()),
        "Cluster.tensor by its name": lambda: cluster.tensor(tensor.name),
        "Cluster.table by its name": lambda: cluster.table(table.name),
        "Cluster.objects": lambda: cluster.objects(),
        "Cluster.delete": lambda: cluster.delete("further"),
        "Cluster.empty": lambda: cluster.empty((2, 2)),
        "Cluster.slots": lambda: cluster.slots(3),
        "Cluster.step": lambda: in_step(cluster, "pull", tensor),
        "Cluster.worker": lambda: cluster.worker(0, 1),
        "Cluster.reader": lambda: cluster.reader(),
        "Cluster.tick": lambda: cluster.tick(),
        "Cluster.settle": lambda: cluster.settle(),
        "Cluster.barrier": lambda: cluster.barrier(),
        "Cluster.all_reduce": lambda: cluster.all_reduce(1.0),
        "Cluster.all_reduce_counted": lambda: cluster.all_reduce_counted(1.0),
        "Cluster.local": lambda: cluster.local(np.ones(3, np.float32), every=1, outer=wl.Average()),
        "Cluster.elastic": lambda: cluster.elastic(np.ones(3, np.float32), every=1, alpha=0.5),
        "Cluster.fingerprint": lambda: cluster.fingerprint(),
        "Tensor.pull": lambda: tensor.pull(),
        "Tensor.pull_newer": lambda: tensor.pull_newer(),
        "Tensor.pull of rows": lambda: tensor[0:1].pull(),
        "Tensor.pull of listed rows": lambda: tensor[[1, 0]].pull(),
        "Tensor.pull_async": lambda: tensor.pull_async(),
        "Tensor.pull_async into out": lambda: tensor.pull_async(out=np.empty_like(grad)),
        "Tensor.pull_async into a registered array": lambda: tensor.pull_async(out=registered).wait(),
        "Tensor.push": lambda: tensor.push(grad),
        "Tensor.push of a registered array": lambda: tensor.push(registered).wait(),
        "Tensor.push_async": lambda: tensor.push_async(grad),
        "Tensor.push_pull": lambda: tensor.push_pull(grad),
        "Tensor.push_pull_async": lambda: tensor.push_pull_async(grad),
        "Tensor.delayed": lambda: tensor.delayed(1),
        "Tensor.push in a step": lambda: in_step(cluster, "push", tensor, grad),
        "Tensor.push_pull of a registered array in a step": lambda: in_step(
            cluster, "push_pull", [tensor], [registered]
        ),
        "Tensor.fingerprint": lambda: tensor.fingerprint(),
        "Tensor.snapshot": lambda: tensor.snapshot(),
        "Tensor.put": lambda: tensor.put(grad),
        "Tensor.count": lambda: tensor.count(wl.key > 0),
        "Tensor.top_k": lambda: tensor.top_k(2),
        "Tensor.keys": lambda: list(tensor.keys()),
        "Tensor.sum": lambda: tensor.sum(),
        "Tensor.mean": lambda: tensor.mean(),
        "Tensor.min": lambda: tensor.min(),
        "Tensor.max": lambda: tensor.max(),
        "Tensor.norm": lambda: tensor.norm(),
        "Tensor.nnz": lambda: tensor.nnz(),
        "Tensor.histogram": lambda: tensor.histogram(),
        "Tensor.dot": lambda: tensor.dot(tensor),
        "Tensor.axpy": lambda: tensor.axpy(0.5, tensor),
        "Tensor.scale": lambda: tensor.scale(1.0),
        "Tensor.copy_from": lambda: tensor.copy_from(tensor),
        "Tensor.add": lambda: tensor.add(tensor),
        "Tensor.multiply": lambda: tensor.multiply(tensor),
        "Tensor.fill": lambda: tensor.fill(1.0),
        "Table.pull": lambda: table.pull([1, 2]),
        "Table.pull create=False": lambda: table.pull([1, 2], create=False),
        "Table.pull_async": lambda: table.pull_async([1, 2]),
        "Table.pull_async into out": lambda: table.pull_async([1, 2], out=out),
        "Table.ahead": lambda: list(table.ahead([[1, 2]])),
        "Table.push": lambda: table.push([1, 2], rows),
        "Table.push_async": lambda: table.push_async([1, 2], rows),
        "Table.push_pull": lambda: table.push_pull([1, 2], rows),
        "Table.push_pull_async": lambda: table.push_pull_async([1, 2], rows),
        "Table.pull in a step": lambda: in_step(cluster, "pull", table, [1, 2]),
        "Table.push in a step": lambda: in_step(cluster, "push", table, [1, 2], rows),
        "Table.put": lambda: table.put([1, 2], rows),
        "Table.export with state": lambda: list(table.export(state=True)),
        "Table.delete": lambda: table.delete([1]),
        "Table.export": lambda: list(table.export()),
        "Table.delete where": lambda: table.delete(where=wl.row[0] > 1e9),
        "Table.export where": lambda: list(table.export(where=wl.key > 0)),
        "Table.count": lambda: table.count(wl.key > 0),
        "Table.top_k": lambda: table.top_k(2),
        "Table.keys": lambda: list(table.keys()),
        "Table.sum": lambda: table.sum(),
        "Table.mean": lambda: table.mean(),
        "Table.min": lambda: table.min(),
        "Table.max": lambda: table.max(),
        "Table.norm": lambda: table.norm(),
        "Table.nnz": lambda: table.nnz(),
        "Table.histogram": lambda: table.histogram(),
        "Table.fingerprint": lambda: table.fingerprint(),
        "len(Table)": lambda: len(table),
    }


def connect_here(**options: Any) -> wl.Cluster:
    """For scripts of ``run_python``: a cluster by the transport of the test that started them."""
    if addresses := os.environ.get("TEST_SERVERS"):
        return wl.connect(servers=addresses.split(), app=os.environ["TEST_APP"], **options)
    return wl.connect(threads=2, **options)


def run_python(code: str, *, timeout: float = PATIENCE_S, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a new interpreter where warnings are errors; these helpers can be imported there."""
    here = str(pathlib.Path(__file__).parent)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS") and k != "WORLD_SIZE"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**clean, "PYTHONPATH": here, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def check_python(code: str, *, timeout: float = PATIENCE_S, **env: str) -> str:
    """The same for a script that must end well and in silence on stderr; returns its stdout."""
    done = run_python(code, timeout=timeout, **env)
    assert (done.returncode, done.stderr) == (0, ""), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def unannounced(stderr: str) -> str:
    """What `windlass run` said there behind its name and address."""
    return re.sub(r"\Awindlass run: '[^']+' at tcp://127\.0\.0\.1:\d+\n", "", stderr)
