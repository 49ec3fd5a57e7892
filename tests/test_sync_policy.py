"""Policies of consistency: what they say, how they are written, and what is said of one that is wrong."""

import dataclasses
import math
import pathlib
import re

import numpy as np
import pytest

import windlass as wl
from windlass._rules.sync import parse_sync
from windlass._settings import load
from windlass.testing import LocalCluster, Servers

POLICIES = [
    (wl.ASP(), "asp", (0, 0, 0.0)),
    (wl.BSP(), "bsp", (1, 0, 0.0)),
    (wl.BSP(spare=2), "bsp:2", (1, 2, 0.0)),
    (wl.SSP(3), "ssp:3", (2, 3, 0.0)),
    (wl.SSP(0), "ssp:0", (2, 0, 0.0)),
    (wl.MaxDelay(0.5), "maxdelay:0.5", (3, 0, 0.5)),
    (wl.MaxDelay(2), "maxdelay:2", (3, 0, 2.0)),
    (wl.MaxDelay(1e-7), "maxdelay:1e-07", (3, 0, 1e-7)),
    (wl.MaxDelay(1 / 3), f"maxdelay:{1 / 3!r}", (3, 0, 1 / 3)),
]


@pytest.mark.parametrize(("policy", "text", "spec"), POLICIES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_policy_and_its_short_form_are_one(policy: wl.Sync, text: str, spec: tuple[int, int, float]):
    assert str(policy) == text
    assert parse_sync(text, wl.ASP(), "x") == policy
    assert parse_sync(f" {text.upper()} ", wl.ASP(), "x") == policy
    assert parse_sync(policy, wl.ASP(), "x") is policy
    assert policy._spec() == spec
    assert [type(one) for one in policy._spec()] == [int, int, float]


def test_nothing_is_the_default():
    assert parse_sync(None, wl.SSP(4), "x") == wl.SSP(4)


def test_policies_are_values():
    assert wl.SSP(np.int64(3)) == wl.SSP(3) != wl.SSP(4)
    assert wl.BSP() != wl.ASP()
    assert hash(wl.MaxDelay(1)) == hash(wl.MaxDelay(1.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        wl.SSP(3).staleness = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: wl.SSP(-1), "SSP: staleness must be a whole number between 0 and 4294967295, not -1"),
        (lambda: wl.SSP(2**32), "SSP: staleness must be a whole number"),
        (lambda: wl.SSP(1.0), "SSP: staleness must be a whole number"),
        (lambda: wl.SSP(True), "SSP: staleness must be a whole number"),
        (lambda: wl.SSP("3"), "SSP: staleness must be a whole number between 0 and 4294967295, not '3'"),
        (lambda: wl.BSP(spare=-2), "BSP: spare must be a whole number between 0 and 4294967295, not -2"),
        (lambda: wl.MaxDelay(-0.1), "MaxDelay: seconds must be a finite number of at least 0, not -0.1"),
        (lambda: wl.MaxDelay(math.nan), "MaxDelay: seconds must be a finite number of at least 0, not nan"),
        (lambda: wl.MaxDelay(math.inf), "MaxDelay: seconds must be a finite number of at least 0, not inf"),
        (lambda: wl.MaxDelay(True), "MaxDelay: seconds must be a finite number of at least 0, not True"),
    ],
)
def test_a_number_out_of_range_is_named(make, complaint: str):
    with pytest.raises(wl.InvalidArgument, match=re.escape(complaint)):
        make()


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("ssp", "expected ssp:STALENESS with a whole number, such as ssp:3; seen: 'ssp'"),
        ("ssp:", "expected ssp:STALENESS with a whole number, such as ssp:3; seen: 'ssp:'"),
        ("ssp:many", "expected ssp:STALENESS with a whole number, such as ssp:3; seen: 'ssp:many'"),
        ("ssp:1.5", "expected ssp:STALENESS with a whole number"),
        ("ssp:-1", "SSP: staleness must be a whole number between 0 and 4294967295, not -1; seen: 'ssp:-1'"),
        ("bsp:", "expected bsp:SPARE with a whole number; seen: 'bsp:'"),
        ("bsp:-1", "BSP: spare must be a whole number between 0 and 4294967295, not -1; seen: 'bsp:-1'"),
        ("asp:1", "expected asp without a number; seen: 'asp:1'"),
        ("maxdelay", "expected maxdelay:SECONDS with a number, such as maxdelay:0.5; seen: 'maxdelay'"),
        ("maxdelay:soon", "expected maxdelay:SECONDS with a number"),
        ("maxdelay:nan", "MaxDelay: seconds must be a finite number of at least 0, not nan; seen: 'maxdelay:nan'"),
        ("maxdelay:-1", "MaxDelay: seconds must be a finite number of at least 0, not -1.0"),
        ("bspp", "expected one of bsp, bsp:1, ssp:3, asp or maxdelay:0.5, not 'bspp'; did you mean bsp?"),
        ("max_delay:1", "not 'max_delay:1'; did you mean maxdelay?"),
        ("never", "expected one of bsp, bsp:1, ssp:3, asp or maxdelay:0.5, not 'never'"),
        ("", "expected one of bsp, bsp:1, ssp:3, asp or maxdelay:0.5, not ''"),
        (3, "expected a policy such as BSP() or one of bsp, bsp:1, ssp:3, asp or maxdelay:0.5, not 3"),
        (wl.SSP, "did you mean SSP(...)?"),
        (wl.Sync(), "expected a policy such as BSP()"),
    ],
)
def test_what_is_no_policy_is_an_error_that_says_what_was_expected(value, complaint: str):
    with pytest.raises(wl.InvalidArgument) as caught:
        parse_sync(value, wl.ASP(), "tensor 'w': sync")
    assert str(caught.value).startswith("tensor 'w': sync: ")
    assert complaint in str(caught.value)


# -- where it comes from ---------------------------------------------------------------------------------------------


def test_the_setting_comes_from_flag_environment_or_file(tmp_path: pathlib.Path):
    file = tmp_path / "windlass.toml"
    file.write_text('sync = "SSP:2"\n')
    environ = {"WINDLASS_SYNC": "bsp:1"}
    assert load({"sync": "maxdelay:1"}, file, environ).sync == "maxdelay:1"
    assert load({}, file, environ).sync == "bsp:1"
    assert load({}, file, {}).sync == "ssp:2"
    assert load({}, None, {}).sync is None
    for given, where in (
        (({"sync": "ssp"}, None, {}), "--sync: "),
        (({}, None, {"WINDLASS_SYNC": "ssp"}), "WINDLASS_SYNC: "),
    ):
        with pytest.raises(wl.InvalidArgument) as caught:
            load(*given)
        assert str(caught.value).startswith(f"{where}expected ssp:STALENESS")
    file.write_text("sync = 3\n")
    with pytest.raises(wl.InvalidArgument, match=r"windlass\.toml: sync: expected a policy"):
        load({}, file, {})


def test_an_embedded_cluster_has_the_policy_it_was_given_and_so_have_its_workers(monkeypatch: pytest.MonkeyPatch):
    with wl.connect() as cluster:
        assert cluster.sync == wl.ASP()
    monkeypatch.setenv("WINDLASS_SYNC", "ssp:5")
    with wl.connect() as cluster:
        assert cluster.sync == cluster.worker(0, 2).sync == wl.SSP(5)
    with wl.connect(sync="bsp") as cluster:  # what the call says wins
        assert cluster.sync == cluster.worker(1, 2).sync == wl.BSP()
    with pytest.raises(wl.InvalidArgument, match="connect: sync: expected ssp:STALENESS"):
        wl.connect(sync="ssp")


def test_clients_of_servers_have_it_too():
    with Servers(1) as servers, servers.connect(sync=wl.SSP(1)) as cluster, cluster.worker(1, 2) as other:
        assert cluster.sync == other.sync == wl.SSP(1)


def test_workers_of_a_scheduler_have_it_too():
    with LocalCluster(servers=1) as local, local.connect(sync=wl.MaxDelay(2)) as cluster:
        assert cluster.sync == wl.MaxDelay(2)
        with local.connect(app="other", sync="bsp:1") as other:
            assert other.sync == wl.BSP(spare=1)


@pytest.mark.parametrize("servers", [None, ["tcp://127.0.0.1:1"]])
def test_what_is_done_about_a_lost_worker_is_for_those_who_have_a_scheduler(servers):
    with pytest.raises(wl.InvalidArgument, match="connect: on_worker_loss needs the address of a scheduler"):
        wl.connect(servers=servers, on_worker_loss="wait")
    with pytest.raises(wl.InvalidArgument, match='on_worker_loss must be "continue" or "wait", not \'panic\''):
        wl.connect(servers=servers, on_worker_loss="panic")
