"""In which order a server takes what it saves, and with how much of the processors."""

import os
import pathlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass import _core
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import FileRef
from windlass._checkpoint.local import LocalStore
from windlass._checkpoint.names import Place
from windlass._checkpoint.saving import Saving
from windlass._checkpoint.writer import ServerFiles

MIB = 1 << 20


class Noted(ServerFiles):
    """Notes whose numbers come, and lets somebody act before they are kept."""

    def __init__(self, folder: pathlib.Path, act: Any) -> None:
        # With a rate one thread reads, in an order that is known.
        super().__init__(Folder(folder), Place("default", 0, "0" * 16), 0, bytes_per_second=1e12)
        self.order: list[str] = []
        self._act = act

    def add(self, object: str, shard: int, arrays: Any, offset: int | None = None) -> None:
        self.order.append(object.partition("/")[2])
        self._act(len(self.order))
        super().add(object, shard, arrays, offset)


@pytest.mark.embedded("looks at the server inside the process")
@pytest.mark.parametrize("presses", [True, False])
def test_what_was_set_aside_of_any_object_comes_first_once_it_takes_much_room(
    tmp_path: pathlib.Path, presses: bool
) -> None:
    with wl.connect() as cluster:
        first = cluster.tensor("first", 4 * MIB, rule=wl.Sum())
        late = cluster.tensor("late", 4 * MIB, rule=wl.Sum())
        for one in (first, late):
            one.push(np.ones(4 * MIB, np.float32)).wait()
        shelf = _core.Shelf(cluster._engine)
        shelf.set_bytes_max(32 * MIB if presses else 1 << 40)

        def act(n: int) -> None:
            if n == 1:
                late.push(np.ones(4 * MIB, np.float32)).wait()
                assert shelf.aside_presses == presses
                assert shelf.aside_bytes == 16 * MIB

        files = Noted(tmp_path, act)
        saving = Saving(shelf, [number for number, _ in shelf.objects()], 0, files)
        saving.arm()
        saving.write()
        order = [one for at, one in enumerate(files.order) if at == 0 or files.order[at - 1] != one]
        assert order == (["first", "late", "first", "late"] if presses else ["first", "late"])
        assert shelf.aside_bytes == 0


class SlowDisk(LocalStore):
    """Has the numbers, but nothing of them is on the disk until it is told."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.told = threading.Event()
        self.had = 0

    def write(
        self, path: str, name: str, parts: Any, pace: Any = None, taken: Callable[[], None] | None = None
    ) -> FileRef:
        def slow() -> None:
            if taken is not None:
                taken()
                self.had += 1
                assert self.told.wait(PATIENCE_S)

        return super().write(path, name, parts, pace, slow)


def test_blocks_that_the_system_has_take_no_memory_and_hold_up_nobody_until_there_are_many(
    tmp_path: pathlib.Path,
) -> None:
    folder = Folder(tmp_path)
    folder.store = disk = SlowDisk(str(tmp_path))
    files = ServerFiles(folder, Place("a", 0, "0" * 16), 0, block_bytes=1 << 10)
    arrays: list[weakref.ref[Any]] = []

    def add() -> None:
        array = np.ones(256, np.float32)
        arrays.append(weakref.ref(array))
        files.add("a/w", 0, {"weights": array})

    for _ in range(7):
        add()  # six blocks, and one that is assembled
    until = time.monotonic() + PATIENCE_S
    while disk.had < 6 and time.monotonic() < until:
        time.sleep(0.01)
    assert disk.had == 6
    while any(array() is not None for array in arrays[:6]) and time.monotonic() < until:
        time.sleep(0.01)
    assert [array() is None for array in arrays] == [True] * 6 + [False]
    waiting = threading.Thread(target=add, daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    disk.told.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    files.abort()


def test_threads_that_write_at_a_rate_leave_the_processors_to_others_and_others_do_not(tmp_path: pathlib.Path) -> None:
    def nice_of_writers(rate: float | None) -> int:
        files = ServerFiles(Folder(tmp_path), Place("a", 0, "0" * 16), 0, bytes_per_second=rate)
        try:
            writer = files._writers.submit(threading.get_native_id)
            return os.getpriority(os.PRIO_PROCESS, writer.result())
        finally:
            files.abort()

    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice_of_writers(None) == own
    assert nice_of_writers(1e6) == max(own, 10)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
