"""What a worker reports: kept, checked, carried to the scheduler, and still there when the worker has left."""

import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
from brain import started
from helpers import PATIENCE_S

import windlass as wl
from windlass.control import messages as m
from windlass.control.api import metrics_text, status_of
from windlass.control.model import App
from windlass.observe.picture import number
from windlass.observe.status import fetch, show
from windlass.testing import LocalCluster
from windlass.testing.cluster import until


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    with LocalCluster(servers=1) as cluster:
        yield cluster


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_newest_of_each_name_is_kept_without_a_scheduler_too():
    with wl.connect() as cluster:
        assert cluster.reported == {}
        cluster.report(loss=2, accuracy=np.float32(0.5))
        cluster.report(loss=np.array(1.5))
        assert cluster.reported == {"loss": 1.5, "accuracy": 0.5}
        cluster.report(loss=math.nan, accuracy=math.inf)
        assert cluster.reported == {"loss": None, "accuracy": None}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"loss": "low"}, "report: loss must be a number, not 'low' (str)"),
        ({"loss": None}, "report: loss must be a number, not 'None' (NoneType)"),
        ({"loss": True}, "report: loss must be a number, not 'True' (bool)"),
        ({"loss": np.ones(1)}, "report: loss must be a number, not '[1.]' (ndarray)"),
        ({"loss": 10**400}, "report: loss must be a number, not '1000"),
        ({"x" * 65: 1.0}, "report: a name is 1 to 64 printable characters, not 'xxxx"),
        ({"": 1.0}, "report: a name is 1 to 64 printable characters, not ''"),
        ({"a\nb": 1.0}, r"report: a name is 1 to 64 printable characters, not 'a\nb'"),
        ({f"n{i}": 1.0 for i in range(32)}, "report: at most 32 names are kept, and n0, n1, "),
    ],
)
def test_what_cannot_be_reported_is_named_and_changes_nothing(values: dict[str, object], complaint: str):
    with wl.connect() as cluster:
        cluster.report(kept=1)
        with pytest.raises(wl.InvalidArgument, match="^" + re.escape(complaint)):
            cluster.report(kept=2, **values)
        assert cluster.reported == {"kept": 1.0}


# -- what the scheduler knows ------------------------------------------------------------------------------------------


def app_of(brain_app: dict[str, App]) -> App:
    return brain_app["default"]


def test_status_and_metrics_have_the_values_of_those_who_are_there_and_of_those_who_left():
    brain = started(workers=2)
    one, two = (app_of(brain.state.apps).workers[rank] for rank in (0, 1))
    brain.say(one, m.Report(clock=7, values={"loss": 0.25, "seen": None}))
    brain.say(two, m.Report(clock=8, values={"loss": 0.5}))
    brain.say(two, m.Leave())
    status = status_of(brain.state, {}, {}, 0.0)
    (worker,) = (x for x in status["members"] if x["role"] == "worker")
    assert (worker["index"], worker["clock"], worker["values"]) == (0, 7, {"loss": 0.25, "seen": None})
    assert status["apps"][0]["left"] == [{"rank": 1, "clock": 8, "values": {"loss": 0.5}}]
    text = metrics_text(brain.state, {}).decode()
    assert 'windlass_reported{app="default",name="loss",rank="0"} 0.25' in text
    assert 'windlass_reported{app="default",name="loss",rank="1"} 0.5' in text
    assert 'windlass_reported{app="default",name="seen",rank="0"} NaN' in text


def test_a_new_start_forgets_those_who_left():
    brain = started(workers=1, linger=True)
    app = app_of(brain.state.apps)
    brain.say(app.workers[0], m.Report(clock=3))
    brain.say(app.workers[0], m.Leave())
    assert {rank: last.clock for rank, last in app.left.items()} == {0: 3}
    assert brain.join("worker", 600, rank=0, world_size=1) is None
    assert app.left == {}


def told(shared: LocalCluster) -> list[dict[str, float]]:
    return [x["values"] for x in shared.members("worker") if x["app"] == "told"]


def test_values_arrive_within_seconds_and_the_last_are_not_lost(
    shared: LocalCluster, capsys: pytest.CaptureFixture[str]
):
    with shared.connect(app="told") as cluster, shared.connect(app="other"):
        cluster.report(loss=0.125)
        until(lambda: told(shared) == [{"loss": 0.125}], "the loss is reported", PATIENCE_S)
        show(fetch(cluster._attendance.at.address, shared.token.encode()))  # type: ignore[union-attr]
        assert "reported" in capsys.readouterr().out
        cluster.tick()
        cluster.report(loss=0.0625, steps=1)
    until(lambda: not told(shared), "the worker has left", PATIENCE_S)
    (left,) = next(x for x in shared.status()["apps"] if x["name"] == "told")["left"]
    assert left == {"rank": 0, "clock": 1, "values": {"loss": 0.0625, "steps": 1.0}}


def test_numbers_are_short_for_people():
    assert [number(x) for x in (0.123456, 12345678.0, None)] == ["0.1235", "1.235e+07", "nan"]
