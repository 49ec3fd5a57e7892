"""Who counts as dead, and when: a process that is known to be gone at once, anybody else after failure_timeout."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._net.address import Address
from windlass.control import messages as m
from windlass.control.evidence import Evidence
from windlass.control.liveness import GRACE_SECONDS, Liveness
from windlass.control.member import Member, here, new_incarnation
from windlass.testing import LocalCluster, Proxy
from windlass.testing.cluster import until

TIMEOUT = 4.0


# -- the rule itself -------------------------------------------------------------------------------------------------


def beating(at: float = 0.0) -> Liveness:
    alive = Liveness(TIMEOUT)
    alive.add(7, at)
    assert alive.connected(7, at)
    return alive


def look_until(alive: Liveness, begin: float, end: float) -> list[tuple[float, str]]:
    """When somebody was found dead, and why."""
    now = begin
    while now < end:
        now += alive.period
        if dead := alive.look(now):
            return [(now, why) for _, why in dead]
    return []


def crowd(members: int) -> Liveness:
    alive = Liveness(TIMEOUT)
    for member in range(members):
        alive.add(member, 0.0)
        assert alive.connected(member, 0.0)
    return alive


def deaths(alive: Liveness, silent: int, members: int, until_: float) -> list[tuple[float, int]]:
    """When who is found dead if the first so many say nothing from now on; beats do not come at the same moment."""
    found, now = [], 0.0
    while now < until_:
        now += alive.period
        for member in range(members):
            if member >= silent or now < 0.05 * member:
                alive.heard(member, now)
        found += [(now, member) for member, _ in alive.look(now)]
        for _, member in found:
            alive.remove(member)
    return found


@pytest.mark.parametrize(("silent", "members"), [(2, 3), (3, 5), (10, 10)])
def test_a_scheduler_that_is_cut_off_gives_nobody_up_for_three_failure_timeouts(silent: int, members: int):
    alive = crowd(members)
    assert deaths(alive, silent, members, 2.9 * TIMEOUT) == []
    assert alive.cut_off
    assert sorted(member for _, member in deaths(crowd(members), silent, members, 4 * TIMEOUT)) == list(range(silent))


@pytest.mark.parametrize(("silent", "members"), [(1, 3), (2, 5), (5, 10), (1, 1), (2, 2)])
def test_half_of_the_members_or_fewer_than_three_are_given_up_in_time(silent: int, members: int):
    found = deaths(crowd(members), silent, members, 2 * TIMEOUT)
    assert sorted(member for _, member in found) == list(range(silent))
    assert max(when for when, _ in found) < TIMEOUT + 1.0


def test_a_scheduler_that_is_cut_off_still_believes_what_is_known_and_broken_connections():
    alive = crowd(5)
    alive.disconnected(3, 0.0)
    alive.gone(4, "its process 1 has ended", 0.0)
    found = {member: when for when, member in deaths(alive, 5, 5, 1.5 * TIMEOUT)}
    assert sorted(found) == [3, 4]
    assert found[4] < 1.0
    assert TIMEOUT < found[3] < TIMEOUT + 1.0


def test_a_broken_connection_alone_has_the_whole_failure_timeout_to_be_made_again():
    alive = beating()
    alive.disconnected(7, 1.0)
    assert look_until(alive, 1.0, 1.0 + TIMEOUT) == []
    alive.connected(7, 1.0 + TIMEOUT)
    assert look_until(alive, 1.0 + TIMEOUT, 2 * TIMEOUT) == []


def test_a_connection_that_is_not_made_again_is_a_death_after_the_failure_timeout():
    alive = beating()
    alive.disconnected(7, 1.0)
    assert alive.away(1.5) == {7: 0.5}
    [(now, why)] = look_until(alive, 1.0, 100.0)
    assert 1.0 + TIMEOUT < now < 1.0 + TIMEOUT + 0.5
    assert why == "its connection broke and was not made again within 4 s"


def test_a_process_that_is_known_to_be_gone_is_dead_after_the_grace():
    alive = beating()
    alive.disconnected(7, 1.0)
    alive.gone(7, "its process 5 has ended", 1.0)
    [(now, why)] = look_until(alive, 1.0, 100.0)
    assert 1.0 + GRACE_SECONDS < now < 1.0 + 2 * GRACE_SECONDS
    assert why == "its process 5 has ended"


def test_a_process_that_comes_back_was_not_gone():
    alive = beating()
    alive.disconnected(7, 1.0)
    alive.gone(7, "tcp://h:1 refuses connections", 1.0)
    alive.connected(7, 1.1)
    assert look_until(alive, 1.1, 1.1 + TIMEOUT - 0.5) == []


def test_a_scheduler_that_slept_gives_everybody_the_time_to_be_heard_again():
    alive = beating()
    alive.look(0.0)
    alive.disconnected(7, 1.0)
    alive.gone(7, "its process 5 has ended", 1.0)
    assert alive.look(100.0) == []
    assert look_until(alive, 100.0, 200.0)[0][0] < 100.0 + 2 * GRACE_SECONDS


# -- evidence, and what follows from it ------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=2, failure_timeout=1000.0) as made:
        made.servers.pop().close()
        until(lambda: len(made.members("server")) == 1, "the other server has come", PATIENCE_S)
        yield made


def come(cluster: LocalCluster, role: str, **fields: object) -> Member:
    """A member that is this process, and says of itself what it likes."""
    join = m.Join(role, new_incarnation(), **{**here(), **fields})  # type: ignore[arg-type]
    member = Member(Address.parse(cluster.address), cluster.token.encode(), join, lambda _: None)
    member.start(time.monotonic() + PATIENCE_S)
    assert member.beating.wait(PATIENCE_S)
    return member


def fall_silent(member: Member) -> None:
    """Its heartbeat breaks and is not made again, as if its process or the network were gone."""
    member._closed.set()
    assert member._beat is not None
    member._beat.stop()


def gone(cluster: LocalCluster) -> list[str]:
    return [line for line in cluster.scheduler.output().splitlines() if " is gone: " in line]


def test_a_server_elsewhere_whose_port_refuses_connections_is_gone_at_once(cluster: LocalCluster):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        member = come(cluster, "server", home="elsewhere", addresses=[address])
        fall_silent(member)
        listener.settimeout(PATIENCE_S)
        listener.accept()[0].close()  # it is asked whether it is there
        time.sleep(1.0)
        assert gone(cluster) == []
        [away] = [one for one in cluster.members("server") if one["address"] == address]
        assert away["away_seconds"] >= 1.0
    until(lambda: gone(cluster), "its end is known", PATIENCE_S)
    assert f"is gone: {address} refuses connections" in gone(cluster)[0]


def test_a_worker_elsewhere_whose_connection_breaks_is_waited_for(cluster: LocalCluster):
    fall_silent(come(cluster, "reader", app="default", home="elsewhere"))
    time.sleep(1.0)
    assert gone(cluster) == []


def test_a_process_of_another_namespace_is_not_taken_for_one_of_the_same_number():
    told: list[int] = []
    evidence = Evidence(lambda member, how: told.append(member))
    evidence.watch(1, m.Join("worker", 1, pid=os.getpid(), home="elsewhere"))
    assert evidence._processes == {}


SLEEP = [sys.executable, "-c", "print(flush=True); import time; time.sleep(1000)"]


def test_a_process_that_ends_on_the_schedulers_host_is_gone_at_once_and_one_that_stands_still_is_not(
    cluster: LocalCluster,
):
    with subprocess.Popen(SLEEP, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        member = come(cluster, "reader", app="default", pid=process.pid)
        fall_silent(member)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        assert gone(cluster) == []
        process.kill()
        until(lambda: gone(cluster), "its end is known", PATIENCE_S)
        assert f"is gone: its process {process.pid} has ended" in gone(cluster)[0]


def test_a_server_whose_connection_is_reset_in_a_pause_comes_back_with_all_it_holds(accurate: bool):
    resets = 30 if accurate else 3
    with LocalCluster(servers=1, failure_timeout=30.0) as direct:
        until(lambda: len(direct.members("server")) == 1, "its first server has come", PATIENCE_S)
        direct.servers[0].close()
        until(lambda: not direct.members("server"), "and left", PATIENCE_S)
        with Proxy(direct.address) as proxy:
            direct.servers[0] = direct.start_server(0, WINDLASS_ADDRESS=proxy.address)
            with direct.connect(timeout=PATIENCE_S) as worker:
                w = worker.tensor("w", 1000, rule=wl.Sum(), dtype="int64")
                w.push(np.ones(1000, np.int64)).wait()
                for _ in range(resets):
                    direct.servers[0].stop()
                    proxy.cut()
                    time.sleep(0.6)
                    direct.servers[0].cont()
                    until(lambda: direct.members("server")[0]["away_seconds"] is None, "it is back", PATIENCE_S)
                    w.push(np.ones(1000, np.int64)).wait()
                assert (w.pull() == 1 + resets).all()
                print(f"{resets} resets, and the server was back after each")
                assert gone(direct) == []
                assert direct.status()["servers_lost"] == {}


def test_a_worker_that_is_lost_is_replaced_at_once_where_its_end_is_known():
    with LocalCluster(servers=1, failure_timeout=1000.0) as cluster:
        code = (
            "import time, windlass as wl; c = wl.connect(timeout=300); print('connected', flush=True); time.sleep(1000)"
        )
        worker = cluster.worker(code, WINDLASS_ON_WORKER_LOSS="wait")
        until(lambda: "connected" in worker.output(), "it has come", PATIENCE_S)
        worker.kill()
        until(lambda: cluster.status()["apps"][0]["waited"] == [0], "it is waited for", PATIENCE_S)
        come_back = threading.Thread(target=lambda: cluster.connect(on_worker_loss="wait", timeout=PATIENCE_S).close())
        come_back.start()
        come_back.join(PATIENCE_S)
        assert cluster.status()["apps"][0]["waited"] == []
