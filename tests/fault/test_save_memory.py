"""A checkpoint needs no second copy of the model: what changes meanwhile is set aside, up to a limit."""

import pathlib
import threading
import time

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.reader import newest
from windlass.testing.cluster import LocalCluster

MIB = 1 << 20
DIM = 64
BLOCKS = 3 * 64 * MIB  # that are assembled and written
ROW_BYTES = 4 * DIM + 20  # as a checkpoint has it


def memory_of(pid: int) -> int:
    """The anonymous memory of a process."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def grown(folder: pathlib.Path, *, mib: int, bytes_max: int, rate: float) -> tuple[int, int]:
    """Saves so much while all of it changes; by how much the server grew meanwhile, and the bytes that were saved."""
    floats, rows = mib * MIB // 2 // 12, mib * MIB // 2 // ROW_BYTES
    settings = {"checkpoint_dir": folder, "checkpoint_bytes_max": bytes_max, "checkpoint_rate": rate}
    stop = threading.Event()
    with LocalCluster(servers=1, failure_timeout=30.0, **settings) as local, local.connect(timeout=PATIENCE_S) as one:
        w = one.tensor("w", floats, rule=wl.Adam(lr=1e-3))
        t = one.table("t", DIM, rule=wl.RowAdagrad(lr=1e-3))
        keys = np.arange(rows, dtype=np.uint64)
        gradient, of_rows = np.full(floats, 0.01, np.float32), np.full((20_000, DIM), 0.01, np.float32)
        w.push(gradient).wait()
        for at in range(0, rows, len(of_rows)):
            some = keys[at : at + len(of_rows)]
            t.push(some, of_rows[: len(some)]).wait()
        pid = local.servers[0].pid
        before = most = memory_of(pid)

        def change() -> None:
            while not stop.is_set():
                w.push(gradient).wait(PATIENCE_S)
                for at in range(0, rows, len(of_rows)):
                    some = keys[at : at + len(of_rows)]
                    t.push(some, of_rows[: len(some)]).wait(PATIENCE_S)

        changing = threading.Thread(target=change)
        changing.start()
        try:
            saved = one.save(timeout=PATIENCE_S)
            deadline = time.monotonic() + PATIENCE_S
            while not saved.done:
                most = max(most, memory_of(pid))
                assert time.monotonic() < deadline
                time.sleep(0.01)
            saved.wait()
        finally:
            stop.set()
            changing.join(PATIENCE_S)
    checkpoint = newest(Folder(folder), "default").checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    return most - before, checkpoint.bytes


@pytest.mark.alone("measures the memory of a server")
def test_a_server_grows_by_its_limit_and_some_blocks_while_it_saves(tmp_path: pathlib.Path, accurate: bool) -> None:
    mib, bytes_max = (2048, 256 * MIB) if accurate else (448, 16 * MIB)
    growth, saved = grown(tmp_path, mib=mib, bytes_max=bytes_max, rate=mib * MIB / 4)
    print(f"{growth / MIB:.0f} MiB more while {saved / MIB:.0f} MiB were saved")
    assert saved > 0.9 * mib * MIB
    assert growth <= bytes_max + BLOCKS + 64 * MIB  # of 2 GiB: 512 MiB


@pytest.mark.long
@pytest.mark.alone("measures the memory of a server")
def test_without_the_limit_it_grows_by_all_that_changes(tmp_path: pathlib.Path) -> None:
    growth, saved = grown(tmp_path, mib=448, bytes_max=1 << 40, rate=448 * MIB / 4)
    print(f"{growth / MIB:.0f} MiB more while {saved / MIB:.0f} MiB were saved")
    assert growth > 16 * MIB + BLOCKS + 64 * MIB
