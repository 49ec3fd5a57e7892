"""What policies did: what a server reports, what the scheduler adds up, and what people and Prometheus are shown."""

import json
import re

import pytest
from brain import Brain, started
from prometheus_client.parser import text_string_to_metric_families
from specs import table_spec

from windlass.control import messages as m
from windlass.control.api import metrics_text, status_of
from windlass.control.consistency import Total, sync_reports, totals
from windlass.observe.status import show

FIRST = m.SyncReport(1000, [900, 60, 35, 5], 100, 2.5, {0: 0.5, 3: 1.25, 7: 0.75}, 4)
SECOND = m.SyncReport(500, [0] * 15 + [500], 10, 0.5, {7: 1.0, 9: 0.25}, 0)


def reported() -> Brain:
    """Two servers that have reported on two apps."""
    brain = started(linger=True)
    brain.workers(1, app="quiet", first=300)
    brain.workers(1, app="other", first=350)
    brain.say(100, m.Report(sync={"default": FIRST, "other": m.SyncReport(7, [7])}))
    brain.say(101, m.Report(sync={"default": SECOND}))
    brain.say(200, m.Report(pulls=m.PullReport(20, 3, 1.5)))
    brain.say(201, m.Report(pulls=m.PullReport(30, 1, 0.25)))
    return brain


def status(brain: Brain) -> dict[str, dict]:
    """Of the apps, by name."""
    return {app["name"]: app for app in status_of(brain.state, {}, {}, 0.0)["apps"]}


# -- what a server reports -------------------------------------------------------------------------------------------


def test_what_the_host_counts_is_reported_by_app():
    stats = [("a", 10, [9, 1] + [0] * 14, 2, 0.5, {3: 0.5}, 1), ("b", 0, [0] * 16, 0, 0.0, {}, 0)]
    reports = sync_reports(stats)
    assert reports["a"] == m.SyncReport(10, [9, 1] + [0] * 14, 2, 0.5, {3: 0.5}, 1)
    assert reports["b"].reads == 0
    assert m.read_member(m.encode(m.Report(sync=reports))) == m.Report(sync=reports)


def test_a_report_keeps_its_limits_whatever_the_host_counts():
    waited_for = {rank: float(rank) for rank in range(5000)}
    stats = [(f"app {i}", 40, [1] * 40, 0, 0.0, waited_for if i == 0 else {}, 0) for i in range(2000)]
    reports = sync_reports(stats)
    assert len(reports) == m.APPS_MAX
    first = reports["app 0"]
    assert first.staleness == [1] * 15 + [25]  # nothing is lost
    assert set(first.waited_for) == set(range(5000 - m.RANKS_MAX, 5000))  # the worst
    assert m.read_member(m.encode(m.Report(sync=reports))) == m.Report(sync=reports)


# -- what the scheduler adds up --------------------------------------------------------------------------------------


def test_servers_are_added_up_per_app():
    apps = status(reported())
    assert apps["quiet"]["sync"] is None
    assert (apps["other"]["sync"]["pulls"], apps["other"]["sync"]["reads"]) == (0, 7)
    assert apps["default"]["sync"] == {
        "pulls": 50,
        "waits": 4,
        "waited_seconds": 1.75,
        "reads": 1500,
        "staleness": [900, 60, 35, 5] + [0] * 11 + [500],
        "staleness_mean": round((60 + 70 + 15 + 15 * 500) / 1500, 3),
        "staleness_p99": 15,
        "reads_waited": 110,
        "reads_waited_seconds": 3.0,
        "waited_for": [
            {"rank": 7, "seconds": 1.75, "share": 0.467},
            {"rank": 3, "seconds": 1.25, "share": 0.333},
            {"rank": 0, "seconds": 0.5, "share": 0.133},
        ],
        "late": 4,
    }
    json.dumps(apps)


def test_what_a_lost_server_counted_still_counts():
    brain = reported()
    brain.die(101)
    assert status(brain)["default"]["sync"]["reads"] == 1500


def test_only_servers_count_reads_and_only_workers_count_pulls():
    brain = reported()
    brain.say(200, m.Report(sync={"default": FIRST}, pulls=m.PullReport(20, 3, 1.5)))
    brain.say(100, m.Report(sync={"default": FIRST}, pulls=m.PullReport(1000)))
    sync = status(brain)["default"]["sync"]
    assert (sync["reads"], sync["pulls"]) == (1500, 50)


def test_the_pulls_of_workers_that_went_still_count_and_those_of_a_replacement_are_added():
    brain = started(workers=2, on_worker_loss="wait")
    brain.say(100, m.Report(sync={"default": FIRST}))
    brain.say(200, m.Report(pulls=m.PullReport(20, 3, 1.5)))
    brain.say(201, m.Report(pulls=m.PullReport(30)))
    brain.die(200)
    assert status(brain)["default"]["sync"]["pulls"] == 50
    assert brain.join("worker", 300, rank=0, world_size=2, on_worker_loss="wait") is None
    brain.say(300, m.Report(pulls=m.PullReport(5, 1, 0.5)))
    sync = status(brain)["default"]["sync"]
    assert (sync["pulls"], sync["waits"], sync["waited_seconds"]) == (55, 4, 2.0)


def test_rows_and_bytes_of_a_table_are_those_of_all_servers_that_are_there():
    brain = started()
    spec = table_spec("default/t", 8)
    number = brain.ask(200, m.Open(1, spec)).placed[0].object
    brain.open(200, size=1000, number=2)

    def objects() -> dict[str, tuple[int | None, int]]:
        return {x["name"]: (x["rows"], x["bytes"]) for x in status_of(brain.state, {}, {}, 0.0)["objects"]}

    tensor_bytes = objects()["default/w"][1]
    assert objects() == {"default/t": (0, 0), "default/w": (None, tensor_bytes)}
    assert tensor_bytes >= 4000
    brain.say(100, m.Report(tables={number: (30, 4096), 99: (1, 1)}))
    brain.say(101, m.Report(tables={number: (12, 8192)}))
    assert objects()["default/t"] == (42, 12288)
    text = metrics_text(brain.state, {}).decode()
    assert 'windlass_table_rows{name="default/t"} 42.0' in text
    assert 'windlass_object_bytes{name="default/t"} 12288.0' in text
    assert f'windlass_object_bytes{{name="default/w"}} {float(tensor_bytes)}' in text
    assert 'windlass_table_rows{name="default/w"}' not in text
    brain.die(101)
    assert objects()["default/t"] == (30, 4096)


@pytest.mark.parametrize(
    ("staleness", "mean", "p99"),
    [
        ([], 0.0, 0),
        ([10], 0.0, 0),
        ([99, 1], 0.01, 0),
        ([98, 2], 0.02, 1),
        ([0, 0, 5], 2.0, 2),
        ([0] * 15 + [1], 15.0, 15),
        ([1000, 0, 0, 11], 33 / 1011, 3),
    ],
)
def test_mean_and_p99_are_those_of_the_histogram(staleness: list[int], mean: float, p99: int):
    total = totals([{"a": m.SyncReport(staleness=staleness)}])["a"]
    assert total.mean == pytest.approx(mean)
    assert total.p99 == p99


def test_nothing_reported_is_nothing():
    assert totals([{}, {}]) == {}
    assert Total().p99 == 0


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_prometheus_gets_counters_and_a_histogram():
    text = metrics_text(reported().state, {}).decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["windlass_pulls_total", "default"] == 50
    assert found["windlass_shard_reads_total", "default"] == 1500
    assert found["windlass_shard_reads_total", "other"] == 7
    assert found["windlass_pull_waits_total", "default"] == 4
    assert found["windlass_pull_waited_seconds_total", "default"] == 1.75
    assert found["windlass_waited_for_seconds_total", "default", "7"] == 1.75
    assert found["windlass_waited_for_seconds_total", "default", "9"] == 0.25  # also those who are not the worst
    assert found["windlass_pushes_late_total", "default"] == 4
    buckets = [found["windlass_pull_staleness_bucket", "default", str(le)] for le in [*range(15), "+Inf"]]
    assert buckets == [900, 960, 995] + [1000] * 12 + [1500]
    assert found["windlass_pull_staleness_count", "default"] == 1500
    assert found["windlass_pull_staleness_sum", "default"] == 60 + 70 + 15 + 15 * 500
    assert not any(name[1:2] == ("quiet",) and "pull" in name[0] for name in found)


def test_prometheus_gets_how_many_are_waited_for():
    brain = started(workers=3, on_worker_loss="wait")
    brain.die(200)
    brain.die(202)
    assert 'windlass_app_waited{app="default"} 2.0' in metrics_text(brain.state, {}).decode()


def shown(brain: Brain, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "300")
    show(json.dumps(status_of(brain.state, {}, {}, 0.0)))
    return re.sub(r" +", " ", capsys.readouterr().out)


def test_people_get_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    text = shown(reported(), capsys, monkeypatch)
    assert "\npulls\n" in text
    assert "\ndefault 50 4 1.8 s 5.10 15 or more 4 rank 7 47 %, rank 3 33 %, rank 0 13 %" in text
    assert "\nother 0 0 0.0 s 0.00 0 0" in text


def test_people_get_no_table_where_there_is_nothing_to_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    text = shown(started(), capsys, monkeypatch)
    assert "\npulls\n" not in text
    assert "waits for" not in text


def test_people_are_told_who_is_waited_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    brain = started(workers=4, on_worker_loss="wait")
    brain.die(201)
    brain.die(203)
    assert status(brain)["default"]["waited"] == [1, 3]
    assert status(brain)["default"]["on_worker_loss"] == "wait"
    text = shown(brain, capsys, monkeypatch)
    assert "app 'default' waits for a replacement of rank 1, 3\n" in text
    assert "\ndefault 2 of 4 3 yes wait" in text
