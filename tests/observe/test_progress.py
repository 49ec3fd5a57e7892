"""How apps get on: rates, means and lines from statuses, and a display that disturbs nobody."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from windlass._errors import ServerLost
from windlass.observe.display import Display, picture
from windlass.observe.progress import Pace, clocks, line, rows

Json = dict[str, Any]


def worker(rank: int, clock: int, app: str = "default", **values: float | None) -> Json:
    return {"role": "worker", "app": app, "index": rank, "clock": clock, "values": values}


def app(name: str = "default", pulls: int = 0, waited: float = 0.0, left: list[Json] | None = None) -> Json:
    sync = {"pulls": pulls, "waited_seconds": waited, "staleness_mean": 0.25, "staleness_p99": 2}
    return {"name": name, "started": True, "left": left or [], "sync": sync if pulls else None}


def status(seconds: float, members: list[Json], apps: list[Json]) -> Json:
    servers = [{"role": "server", "index": 0}]
    return {"seconds": seconds, "members": [*servers, *members], "apps": apps, "leases": []}


def lease(epoch: int, done: int, duplicates: int = 0) -> Json:
    ledger = {"app": "default", "name": "data", "epochs": 2, "epoch": epoch, "ranges": 50, "done": done}
    return {**ledger, "duplicates": duplicates}


def test_a_line_says_pace_loss_staleness_idle_share_and_clocks():
    pace = Pace()
    assert pace.add(status(1.0, [], [])) == []
    first = pace.add(status(2.0, [worker(0, 10, loss=2.0), worker(1, 12)], [app(pulls=100, waited=1.0)]))
    assert line(first[0]) == "[progress] 2 s, loss 2, staleness 0.25 (p99 2), clocks 10 12"
    # 30 and 20 steps in 5 s, each of 4 shards whose pulls waited for 0.05 s
    members = [worker(1, 32, loss=0.5), worker(0, 40, loss=1.0)]
    (summary,) = pace.add(status(7.0, members, [app(pulls=300, waited=11.0)]))
    assert line(summary) == "[progress] 7 s, 10.0 steps/s, loss 0.75, staleness 0.25 (p99 2), idle 25 %, clocks 40 32"
    assert rows(summary) == (
        ["worker", "clock", "steps/s", "loss"],
        [["0", "40", "6.0", "1"], ["1", "32", "4.0", "0.5"]],
    )


def test_the_pace_is_that_of_the_last_seconds():
    pace = Pace(window_seconds=10)
    for second in range(31):
        clock = 100 * min(second, 10)
        (summary,) = pace.add(status(second, [worker(0, clock)], [app()]))
        if second in (1, 9):
            assert summary.steps_per_second == 100
    assert summary.steps_per_second == 0


def test_a_worker_that_came_anew_makes_no_negative_pace_and_another_scheduler_begins_anew():
    pace = Pace()
    pace.add(status(5.0, [worker(0, 500), worker(1, 500)], [app()]))
    (summary,) = pace.add(status(6.0, [worker(0, 510), worker(1, 3)], [app()]))
    assert summary.steps_per_second == 10
    (summary,) = pace.add(status(0.5, [worker(0, 0)], [app()]))
    assert summary.steps_per_second is None


def test_a_loss_that_is_not_finite_is_seen_and_those_who_left_are_shown():
    left = [{"rank": 1, "clock": 9, "values": {"loss": 0.5, "accuracy": 0.9}}]
    (summary,) = Pace().add(status(1.0, [worker(0, 7, loss=None)], [app(left=left)]))
    assert line(summary) == "[progress] 1 s, loss nan, accuracy 0.9, clocks 7 9"
    assert rows(summary)[1] == [["0", "7", "", "nan", ""], ["1", "9", "done", "0.5", "0.9"]]


def test_apps_are_told_apart_and_those_that_gather_are_not_shown():
    gathering = {"name": "later", "started": False, "left": [], "sync": None}
    members = [worker(0, 1, "ctr"), worker(0, 2), worker(0, 0, "later")]
    summaries = Pace().add(status(1.0, members, [app("ctr"), app(), gathering]))
    assert [line(s) for s in summaries] == ["[progress ctr] 1 s, clock 1", "[progress] 1 s, clock 2"]


def test_leased_data_is_shown():
    now = status(1.0, [worker(0, 1)], [app()])
    for ledger, shown in [
        (lease(0, 10), "data: epoch 1 of 2, 20 %"),
        (lease(1, 50, 64), "data: epoch 2 of 2, 100 %, 64 samples twice"),
        (lease(2, 0), "data: done"),
    ]:
        (summary,) = Pace().add(now | {"leases": [ledger, {**ledger, "app": "another"}]})
        assert line(summary) == f"[progress] 1 s, {shown}, clock 1"


def test_many_workers_are_counted_not_listed():
    (summary,) = Pace().add(status(1.0, [worker(rank, rank) for rank in range(20)], [app()]))
    assert clocks(summary.workers).endswith(" 14 15 and 4 more")
    assert len(rows(summary)[1]) == 16
    console = Console(file=io.StringIO(), width=80)
    console.print(picture([summary]))
    assert "and 4 more" in console.file.getvalue()  # type: ignore[attr-defined]
    assert clocks([]) == "no worker yet"


# -- the display -------------------------------------------------------------------------------------------------------

STATUS = json.dumps(status(3.0, [worker(0, 5, loss=0.5)], [app()]))


def raising(error: Exception) -> Callable[[], str]:
    def fetch() -> str:
        raise error

    return fetch


def on_terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"}), file


def test_where_there_is_no_terminal_the_end_is_a_plain_line(capsys: pytest.CaptureFixture[str]):
    display = Display(lambda: STATUS, Console(file=io.StringIO(), force_terminal=False))
    display.look()
    assert capsys.readouterr().out == ""  # not yet
    display.close()
    display.close()
    assert capsys.readouterr().out == "[progress] 3 s, loss 0.5, clock 5\n"
    assert display.due_seconds is None


def test_on_a_terminal_it_is_drawn_in_place_and_the_terminal_is_left_as_it_was():
    console, file = on_terminal()
    display = Display(lambda: STATUS, console)
    display.look()
    assert "default, 3 s: loss 0.5" in file.getvalue()
    assert "\x1b[?25l" in file.getvalue()  # the cursor is hidden
    print("what a worker says")
    display.close()
    assert "what a worker says" in file.getvalue()  # above the display, not through it
    assert file.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("error", [ServerLost("away"), OSError("gone"), TimeoutError("late")])
def test_a_scheduler_that_does_not_answer_is_asked_again_later(error: Exception, capsys: pytest.CaptureFixture[str]):
    display = Display(raising(error), Console(file=io.StringIO(), force_terminal=False))
    display.look()
    due = display.due_seconds
    assert due is not None
    assert 0.5 < due <= 1.0
    display.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("answer", ["", "[]", "{}", '{"apps": 1}', '{"seconds": 1, "apps": [{}], "members": []}'])
def test_an_answer_that_is_no_status_shows_nothing(answer: str, capsys: pytest.CaptureFixture[str]):
    display = Display(lambda: answer, Console(file=io.StringIO(), force_terminal=False))
    display.look()
    display.close()
    assert capsys.readouterr().out == ""


def test_when_the_reader_of_the_output_has_gone_it_ends_in_silence(monkeypatch: pytest.MonkeyPatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    display = Display(lambda: STATUS, Console(file=io.StringIO(), force_terminal=False))
    monkeypatch.setattr("sys.stdout", Gone())
    display.close()
    assert display.due_seconds is None
    drawn = Display(lambda: STATUS, Console(file=Gone(), force_terminal=True, _environ={"TERM": "xterm"}))
    drawn.look()
    drawn.close()
    assert drawn.due_seconds is None


def test_a_checkpoint_that_is_written_has_a_bar_with_bytes_on_a_terminal():
    going = {"app": "default", "clock": 7, "bytes": 250_000_000, "bytes_all": 1_000_000_000}
    saving = json.dumps({**json.loads(STATUS), "checkpoints": {"going": going}})
    answers = iter([saving, saving, STATUS])
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
    display = Display(lambda: next(answers), console)
    display.look()
    assert isinstance(console.file, io.StringIO)
    assert "clock 7: 250 MB of about 1 GB" in console.file.getvalue()
    bar = next(line for line in console.file.getvalue().splitlines() if "250 MB" in line)
    assert 7 <= bar.split("clock")[0].count("\N{BOX DRAWINGS HEAVY HORIZONTAL}") <= 31
    display.close()
