"""Waits that last: inside the process, who waits says for whom."""

import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from crew import ONE, Crew
from helpers import check_python

import windlass as wl
from windlass._client import connect as connecting


class Said(logging.Handler):
    """The lines of the log, for who waits for some to come."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: queue.Queue[tuple[str, str]] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put((record.levelname, record.getMessage()))


@pytest.fixture
def said() -> Iterator[Said]:
    handler, logger = Said(), logging.getLogger("windlass")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


WHO = r"has waited for \d+ s: rank 0 at clock 1 waits for rank 1, whose clock is 0"


def test_who_waits_for_long_inside_the_process_says_for_whom(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setattr(connecting, "OVERDUE_SECONDS", 0.2)
    with wl.connect() as cluster:
        crew = Crew(cluster)
        first, second = crew.tensor("bsp")
        begun, got = time.monotonic(), []
        threads = [threading.Thread(target=lambda: got.append(first.push_pull(ONE)[0]))]
        threads[0].start()
        level, line = said.lines.get(timeout=10)
        assert level == "WARNING"
        assert re.fullmatch(f"embedded: push_pull of tensor 'w' {WHO}", line)
        assert re.search(WHO, said.lines.get(timeout=10)[1])  # and again, since it goes on
        assert time.monotonic() - begun >= 0.4
        # One line for all that a worker waits for.
        threads += [threading.Thread(target=first.pull) for _ in range(4)]
        for thread in threads[1:]:
            thread.start()
        begun = time.monotonic()
        for _ in range(3):
            said.lines.get(timeout=10)
        assert time.monotonic() - begun >= 0.4
        second.push_pull(10 * ONE)
        for thread in threads:
            thread.join(10)
        assert got == [11]
        crew.leave()


@pytest.mark.parametrize("how", ["a step", "a future asked for again and again", "rows"])
def test_every_kind_of_wait_inside_the_process_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, said: Said, how: str
) -> None:
    monkeypatch.setattr(connecting, "OVERDUE_SECONDS", 0.2)
    with wl.connect() as cluster:
        crew = Crew(cluster)
        first, _ = crew.tensor("ssp:0")
        table = crew.workers[0].table("t", 2, rule=wl.Sum(), sync="ssp:0")

        def work() -> None:
            if how == "rows":
                table.push_pull([1], np.ones((1, 2), np.float32))
            elif how == "a step":
                with crew.workers[0].step() as s:
                    s.push_pull(first, ONE)
            else:
                future = first.push_pull_async(ONE)
                while not future.done():
                    with contextlib.suppress(wl.Timeout):
                        future.wait(0.01)

        thread = threading.Thread(target=work)
        thread.start()
        assert re.search(WHO, said.lines.get(timeout=10)[1])
        crew.workers[1].tick()
        thread.join(10)
        assert not thread.is_alive()


def test_who_waits_when_the_process_ends_does_not_keep_it() -> None:
    check_python(
        """
        import logging, threading
        import numpy as np
        import windlass as wl
        from windlass._client import connect as connecting

        said = threading.Event()

        class Handler(logging.Handler):
            def emit(self, record):
                said.set()

        logging.getLogger("windlass").addHandler(Handler())
        connecting.OVERDUE_SECONDS = 0.05
        cluster = wl.connect()
        first, second = (cluster.worker(rank, 2) for rank in range(2))
        w = first.tensor("w", 4, rule=wl.Sum(), sync="bsp")

        def wait():
            try:
                w.push_pull(np.ones(4, np.float32))
            except wl.Closed:
                pass

        threading.Thread(target=wait, daemon=True).start()
        assert said.wait(30)
        """,
        timeout=50,  # not the 60 s that a call may take
    )
