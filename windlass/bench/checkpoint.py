"""``windlass bench checkpoint``: saving beside plain writes, loading beside plain reads, training meanwhile, restarts.

All files lie in one folder, on the disk that is measured. Reads come from the disk, unless they say otherwise: the
system is told to forget a file before. A call is a whole checkpoint, or a run of many steps.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.loading import fill as load
from windlass._checkpoint.reader import Checkpoint, newest
from windlass.bench._figures import Suite
from windlass.bench._turns import Length, Side, in_turns, timed
from windlass.bench._work import MB, filled, keys_of
from windlass.bench.in_run import run_until_it_ends
from windlass.testing import LocalCluster

MEASURED = "Medians of whole checkpoints; ours and the limit take turns in the same run. Files lie on {where}."
DIM, BATCH = 64, 20_000
CHUNK_BYTES = 4 << 20  # of a plain write or read
ROUNDS = Length(rounds=7, calls=1, seconds=0.0, warm_up=False)
RESTARTS = 5
SAVE_S, CONNECT_S = 600.0, 120.0


@dataclasses.dataclass(frozen=True)
class Size:
    """What an app has on its servers: a tensor with Adam, three floats per number, and a table with RowAdagrad."""

    floats: int
    rows: int
    steps: int  #: of a run

    @property
    def bytes(self) -> int:
        """About, in a checkpoint."""
        return self.floats * 12 + self.rows * (DIM * 4 + 20)


FULL, SMALL = Size(floats=32_000_000, rows=2_500_000, steps=150), Size(floats=400_000, rows=20_000, steps=20)


def run(console: Console, rows: int, short: bool = False, where: str = "") -> Suite:
    """All figures. `rows` has no meaning here; short: to see that it works, not how fast. where: a folder on the disk
    to measure; by default that for temporary files."""
    del rows
    size = SMALL if short else FULL
    with tempfile.TemporaryDirectory(prefix="wl-bench-", dir=where or None) as name:
        folder = pathlib.Path(name)
        suite = Suite("checkpoint", console, MEASURED.format(where=file_system(folder)), short=short)
        length = dataclasses.replace(ROUNDS, rounds=1) if short else ROUNDS
        disk = saving(suite, folder, size, length)
        loading(suite, folder, length)
        if importlib.util.find_spec("torch") is not None:
            beside_torch(suite, folder, length)
        shutil.rmtree(folder / "saved")
        training(suite, folder, size, disk / 2, dataclasses.replace(length, rounds=min(length.rounds, 5)))
        restarting(suite, folder, size, 1 if short else RESTARTS)
    return suite


# -- what is saved -----------------------------------------------------------------------------------------------------


def filled_with(cluster: wl.Cluster, size: Size) -> tuple[wl.Tensor, wl.Table, Any]:
    """An app's objects, all of whose numbers are there; and the table's keys."""
    w = cluster.tensor("w", size.floats, rule=wl.Adam(lr=1e-6), init=wl.Normal(std=0.01))
    table = cluster.table("t", DIM, rule=wl.RowAdagrad(lr=1e-6), init=wl.Normal(std=0.01))
    keys = keys_of(size.rows)
    grads = filled(cluster.empty, (BATCH, DIM), 0.01)
    for at in range(0, size.rows, BATCH):
        some = keys[at : at + BATCH]
        table.push(some, grads[: len(some)]).wait()
    w.push(np.full(size.floats, 0.01, np.float32)).wait()
    return w, table, keys


def one_server(folder: pathlib.Path, **settings: Any) -> LocalCluster:
    """A cluster that saves to a folder, and keeps the last of all."""
    return LocalCluster(servers=1, failure_timeout=10.0, checkpoint_dir=folder, checkpoint_keep=1, **settings)


def app_inside() -> str:
    """What the app inside a process is called: its checkpoints can be loaded there."""
    with wl.connect() as cluster:
        cluster.tensor("w", (1,), rule=wl.Sum())
        return _core.Shelf(cluster._engine).objects()[0][1].partition("/")[0]


def saved_bytes(folder: pathlib.Path) -> tuple[Checkpoint, list[pathlib.Path], int]:
    """The newest checkpoint, its blocks, and their bytes."""
    found = newest(Folder(folder), app_inside()).checkpoint
    if found is None:
        raise RuntimeError(f"{folder}: there is no checkpoint")
    blocks = sorted((folder / found.place.path).glob("*.safetensors"))
    return found, blocks, sum(block.stat().st_size for block in blocks)


# -- the figures -------------------------------------------------------------------------------------------------------


def saving(suite: Suite, folder: pathlib.Path, size: Size, length: Length) -> float:
    """A save by one server against a plain write and fsync. Returns the bytes a second of the latter."""
    armed: list[float] = []
    with one_server(folder / "saved") as local, local.connect(app=app_inside(), timeout=CONNECT_S) as cluster:
        filled_with(cluster, size)
        cluster.save(timeout=SAVE_S).wait(SAVE_S)  # the first touches memory
        n = saved_bytes(folder / "saved")[2]

        def save() -> None:
            begun = time.perf_counter()
            saved = cluster.save(timeout=SAVE_S)
            armed.append(time.perf_counter() - begun)
            saved.wait(SAVE_S)

        with plain_write(folder / "plain", n) as plain:
            ours, limit = in_turns(timed(save), plain, length=length)
    suite.rate(f"save {n / 1e9:.2g} GB", n / 1e9, "GB/s", ours, limit, bar=0.8, against="write and fsync")
    suite.value("save() until it returns", 1e3 * sorted(armed)[len(armed) // 2], "ms", calls=len(armed))
    return n / limit.median


@contextlib.contextmanager
def plain_write(path: pathlib.Path, n: int) -> Iterator[Side]:
    """A side that writes so many bytes to one file, and syncs it. The file before it is removed then, untimed, as an
    older checkpoint is: a file that takes the memory of one just removed is written faster."""
    block = np.random.default_rng(0).integers(0, 256, min(n, 16 * CHUNK_BYTES), np.uint8)
    new = path.with_suffix(".new")

    def write() -> float:
        begun = time.perf_counter()
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            left = n
            while left:
                at = (n - left) % len(block)
                left -= os.write(fd, block[at : at + min(left, CHUNK_BYTES)].data)
            os.fsync(fd)
        finally:
            os.close(fd)
        took = time.perf_counter() - begun
        new.replace(path)
        return took

    try:
        yield lambda calls: [write() for _ in range(calls)]
    finally:
        for file in (path, new):
            file.unlink(missing_ok=True)


def loading(suite: Suite, folder: pathlib.Path, length: Length) -> None:
    """A server that fills its shards against reading and checksumming the same files."""
    checkpoint, blocks, n = saved_bytes(folder / "saved")
    with wl.connect() as cluster:
        for one in checkpoint.manifest.objects:
            make_as(cluster, one.kind, one.name.partition("/")[2], one.shape)
        shelf = _core.Shelf(cluster._engine)
        shards = {one.name: one.shards for one in checkpoint.manifest.objects}
        wanted = [(number, range(shards[name])) for number, name in shelf.objects()]
        ours = dropping(blocks, functools.partial(load, shelf, checkpoint, wanted))
        kept = timed(functools.partial(load, shelf, checkpoint, wanted))
        buffer = np.empty(CHUNK_BYTES, np.uint8)
        plain = functools.partial(plain_read, blocks, buffer)
        for name, sides in (("", (ours, dropping(blocks, plain))), (", files in memory", (kept, timed(plain)))):
            loaded, limit = in_turns(*sides, length=length)
            suite.rate(
                f"load {n / 1e9:.2g} GB{name}", n / 1e9, "GB/s", loaded, limit, bar=0.8, against="read and CRC32C"
            )


def make_as(cluster: wl.Cluster, kind: str, name: str, shape: list[int]) -> None:
    """An object as filled_with() makes it."""
    if kind == "tensor":
        cluster.tensor(name, tuple(shape), rule=wl.Adam(lr=1e-6), init=wl.Normal(std=0.01))
    else:
        cluster.table(name, shape[0], rule=wl.RowAdagrad(lr=1e-6), init=wl.Normal(std=0.01))


def plain_read(files: list[pathlib.Path], buffer: Any) -> None:
    """Reads and checksums every byte."""
    for file in files:
        crc = 0
        fd = os.open(file, os.O_RDONLY)
        try:
            while n := os.readv(fd, [buffer.data]):
                crc = _core.crc32c(buffer[:n], crc)
        finally:
            os.close(fd)


def dropping(files: list[pathlib.Path], call: Callable[[], object]) -> Side:
    """A side that calls this after the system was told to forget the files."""

    def turn(calls: int) -> list[float]:
        took = []
        for _ in range(calls):
            for file in files:
                fd = os.open(file, os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)
            took += timed(call)(1)
        return took

    return turn


def beside_torch(suite: Suite, folder: pathlib.Path, length: Length) -> None:
    """What torch.distributed.checkpoint makes of the same arrays, and what the engine inside the process does."""
    import torch
    import torch.distributed.checkpoint as dcp

    checkpoint, _, n = saved_bytes(folder / "saved")
    parts: dict[str, list[Any]] = {}
    for read in checkpoint.read():
        for name, array in read.arrays.items():
            parts.setdefault(f"{read.object}.{name}", []).append(array)
    kinds = {4: np.float32, 8: np.int64}  # torch knows few whole numbers without signs
    state = {
        name: torch.from_numpy(np.concatenate([array.view(kinds[array.itemsize]) for array in arrays]))
        for name, arrays in parts.items()
    }
    parts.clear()
    where = folder / "torch"

    def theirs_save() -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(where, sync_files=True), no_dist=True)

    def theirs_load() -> None:
        dcp.load(state, storage_reader=dcp.FileSystemReader(where), no_dist=True)

    def fresh(call: Callable[[], None]) -> Side:
        def turn(calls: int) -> list[float]:
            took = []
            for _ in range(calls):
                shutil.rmtree(where, ignore_errors=True)
                took += timed(call)(1)
            return took

        return turn

    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    against = "torch.distributed.checkpoint"
    with plain_write(folder / "plain", n) as plain:
        saved, limit = in_turns(fresh(theirs_save), plain, length=length)
    suite.rate(f"{against}, save {n / 1e9:.2g} GB", n / 1e9, "GB/s", saved, limit, against="write and fsync")
    files = [file for file in where.iterdir() if file.is_file()]
    plain_side = dropping(files, functools.partial(plain_read, files, np.empty(CHUNK_BYTES, np.uint8)))
    loaded, limit = in_turns(dropping(files, theirs_load), plain_side, length=length)
    suite.rate(f"{against}, load {n / 1e9:.2g} GB", n / 1e9, "GB/s", loaded, limit, against="read and CRC32C")
    shutil.rmtree(where)


def training(suite: Suite, folder: pathlib.Path, size: Size, rate: float, length: Length) -> None:
    """Steps a second while one checkpoint after the other is written, against those of the same worker undisturbed."""
    with (
        one_server(folder / "twin", checkpoint_rate=rate) as local,
        local.connect(timeout=CONNECT_S) as cluster,
    ):
        w, table, keys = filled_with(cluster, size)
        random = np.random.default_rng(3)
        batches = itertools.cycle([keys[random.choice(size.rows, BATCH // 4, replace=False)] for _ in range(20)])
        grad, out = filled(cluster.empty, size.floats, 0.01), filled(cluster.empty, size.floats)
        rows, row_grads = filled(cluster.empty, (BATCH // 4, DIM)), filled(cluster.empty, (BATCH // 4, DIM), 0.01)
        saves: list[wl.types.SavedCheckpoint] = []

        def step() -> None:
            some = next(batches)
            table.pull(some, out=rows)
            table.push(some, row_grads).wait()
            w.push_pull(grad, out=out)
            cluster.tick()

        def disturbed() -> None:
            for _ in range(size.steps):
                if not saves or saves[-1].done:
                    if saves:
                        saves[-1].wait()
                    saves.append(cluster.save(timeout=SAVE_S))
                step()

        def undisturbed() -> None:
            for _ in range(size.steps):
                step()

        def quiet(calls: int) -> list[float]:
            saves[-1].wait(SAVE_S)
            return timed(undisturbed)(calls)

        disturbed()
        ours, twin = in_turns(timed(disturbed), quiet, length=length)
    suite.rate(
        f"steps while a checkpoint is written at {rate / MB:,.0f} MB/s, half the disk's rate",
        size.steps,
        "steps/s",
        ours,
        twin,
        bar=0.9,
        against="the same without",
    )
    suite.note(f"{len(saves)} checkpoints were begun meanwhile")
    shutil.rmtree(folder / "twin")


def restarting(suite: Suite, folder: pathlib.Path, size: Size, times: int) -> None:
    """From the SIGKILL of a server to the first push that is accepted, in a run that starts again by itself."""
    took = []
    for _ in range(times):
        where = folder / "restart"
        options = {"floats": size.floats, "rows": size.rows, "said": str(folder / "said.json")}
        command = ["run", "--servers", "1", "--workers", "1", "--checkpoint-dir", str(where), "--restarts", "1"]
        worker = [sys.executable, "-m", "windlass.bench.checkpoint_worker", json.dumps(options)]
        run_until_it_ends([sys.executable, "-m", "windlass", *command, *worker], str(folder))
        took.append(json.loads((folder / "said.json").read_text())["seconds"])
        shutil.rmtree(where)
    took.sort()
    suite.value(
        f"restart from {size.bytes / 1e9:.2g} GB: from the kill to the first push, the longest of {times}",
        took[-1],
        "s",
        value_bar=5.0,
        calls=times,
    )


def file_system(folder: pathlib.Path) -> str:
    """The kind of file system that a folder lies on."""
    best, kind = "", "an unknown file system"
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        _, at, of, *_ = line.split()
        if len(at) > len(best) and (at == "/" or f"{folder.resolve()}/".startswith(f"{at}/")):
            best, kind = at, of
    return kind
