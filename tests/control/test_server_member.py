"""A server as a member: what it passes on to the core, and what it reports of it."""

import threading
import time
from collections.abc import Iterator

import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass import _core
from windlass._net.address import Address
from windlass._net.serve import Stop
from windlass._settings import load
from windlass.control import messages as m
from windlass.control.member import Member
from windlass.control.server import ServerMember
from windlass.testing import LocalCluster
from windlass.testing.cluster import until

SOMEWHERE = Address.parse("tcp://127.0.0.1:1")
STATS = [("default", 10, [9, 1] + [0] * 14, 2, 0.5, {3: 0.5}, 1)]


class FakeHost:
    """Stands in for the native host: notes what it is told."""

    memory_bytes = sessions = lanes = 0
    traffic = (0, 0, 0)
    quotas_used: dict[str, int] = {}

    def __init__(self) -> None:
        self.cluster = 0
        self.known: list[tuple[int, list[tuple[int, int, int]]]] = []  # objects, and who has their shards
        self.at: tuple[int, int] | None = None  # the server and the term of every shard
        self.views: list[tuple[str, int, list[tuple[int, int, bool]], list[int]]] = []

    def set_cluster(self, cluster: int, index: int) -> None:
        self.cluster = cluster

    def set_view(
        self, app: str, number: int, workers: list[tuple[int, int, bool]], waited: list[int], clock: int
    ) -> None:
        self.views.append((app, number, workers, waited))

    def know_object(self, map_and_spec: bytes) -> None:
        self.known.append(_core.read_map(map_and_spec))

    def forget_object(self, number: int) -> None:
        self.known = [(other, runs) for other, runs in self.known if other != number]

    def attach(self, map_and_spec: bytes) -> None:
        pass

    def whereabouts(self, object: int, shard: int) -> tuple[int, int]:
        if self.at is None:
            raise wl.NotFound("it is not known here")
        return self.at

    @property
    def table_sizes(self) -> dict[int, tuple[int, int]]:
        return {7: (1000, 65536)}

    def sync_stats(self) -> list[tuple]:
        return STATS


def member_of(
    host: FakeHost,
    address: Address = SOMEWHERE,
    token: str = "",
    number: int = 0,
    stop: Stop = lambda code: None,
    **settings: str,
) -> ServerMember:
    loaded = load({"number": str(number), **settings}, None, {})
    return ServerMember(address, token.encode(), [SOMEWHERE], host, loaded, stop)  # type: ignore[arg-type]


def test_a_server_that_is_refused_may_ask_to_be_started_again():
    for settings, code in (({}, 1), ({"unfinished_code": "75"}, 75)):
        codes: list[int] = []
        member = member_of(FakeHost(), stop=codes.append, **settings)
        member._heard(m.Refused("AccessDenied", "this is another cluster"))
        assert codes == [code]
        assert not member.finished


def test_a_server_knows_whether_its_cluster_had_done_its_work():
    codes: list[int] = []
    member = member_of(FakeHost(), stop=codes.append)
    member._heard(m.Shutdown("a server was lost", unfinished=True))
    assert (codes, member.finished) == ([0], False)
    member._heard(m.Shutdown("all workers have left"))
    assert (codes, member.finished) == ([0, 0], True)


def test_a_view_is_passed_on_with_who_begins_at_clock_0():
    host = FakeHost()
    member = member_of(host)
    workers = [m.Peer(0, 70, since=4), m.Peer(2, 72, since=6)]
    member._heard(m.View("default", 6, 3, workers, [m.Peer(0, 9, "tcp://h:1")], started=4, waited=[1]))
    member._heard(m.View("default", 9, 3, [], [m.Peer(0, 9, "tcp://h:1")], started=4))
    assert host.views == [("default", 6, [(0, 70, True), (2, 72, False)], [1]), ("default", 9, [], [])]


def test_who_comes_in_a_lost_workers_place_is_waited_for_at_once_and_who_comes_beside_the_others_is_not():
    host = FakeHost()
    workers = [m.Peer(0, 70, since=1), m.Peer(1, 71, since=3, instead=True), m.Peer(2, 72, since=4)]
    member_of(host)._heard(m.View("default", 4, 4, workers, [], started=1, waited=[3]))
    assert host.views == [("default", 4, [(0, 70, True), (1, 71, False), (2, 72, False)], [3, 1])]


def test_what_the_scheduler_says_of_objects_is_passed_on():
    host = FakeHost()
    member = member_of(host)
    member._heard(m.Objects([m.Placed(1, b"spec", [(0, 1, 1)]), m.Placed(2, b"", [(0, 0, 1), (4, 1, 2)])]))
    assert host.known == [(1, [(0, 1, 1)]), (2, [(0, 0, 1), (4, 1, 2)])]
    member._heard(m.Forgotten(1))
    assert host.known == [(2, [(0, 0, 1), (4, 1, 2)])]


def test_what_the_host_counts_is_in_the_report():
    report = member_of(FakeHost())._report()
    assert report.sync == {"default": m.SyncReport(10, [9, 1] + [0] * 14, 2, 0.5, {3: 0.5}, 1)}
    assert report.tables == {7: (1000, 65536)}


def order_of(member: ServerMember, host: FakeHost) -> tuple[m.MoveShard, m.CancelMove, list[m.Message]]:
    """A move and its end, and what the member says of them."""
    told: list[m.Message] = []
    member._member.tell = lambda message: told.append(message) or True  # type: ignore[method-assign, func-returns-value]
    return m.MoveShard(5, 1, 0, 1, str(SOMEWHERE), 2, b"", [(0, 0, 1)]), m.CancelMove(5, 1, 0, 1, 2), told


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ((1, 2), ""),
        ((0, 1), "server 1 is gone; the shard stays"),
        (None, "server 1 is gone; the shard stays"),
    ],
)
def test_a_move_that_is_cancelled_when_nobody_is_at_it_is_answered_with_where_the_shard_is(
    at: tuple[int, int] | None, error: str
):
    host = FakeHost()
    host.at = at
    member = member_of(host)
    _, cancel, told = order_of(member, host)
    member._heard(cancel)
    assert told == [m.Moved(5, error)]


def test_a_move_that_is_cancelled_under_way_is_answered_by_who_is_at_it(monkeypatch: pytest.MonkeyPatch):
    host = FakeHost()
    member = member_of(host)
    order, cancel, told = order_of(member, host)
    begun, over = threading.Event(), threading.Event()

    def send(*_: object, cancelled: threading.Event, **__: object) -> None:
        begun.set()
        assert cancelled.wait(10)
        over.wait(10)
        raise wl.ServerLost("given up")

    monkeypatch.setattr("windlass.control.server.send_shard", send)
    member._heard(order)
    assert begun.wait(10)
    member._heard(cancel)
    assert told == []
    over.set()
    until(lambda: told, "its word", PATIENCE_S)
    assert told == [m.Moved(5, "given up")]


@pytest.fixture
def joined() -> Iterator[tuple[LocalCluster, FakeHost, ServerMember]]:
    """A scheduler in a process of its own, whose only server is the fake."""
    with LocalCluster(servers=1) as cluster:
        cluster.servers.pop().close()
        until(lambda: not cluster.members("server"), "the real one has left", PATIENCE_S)
        host = FakeHost()
        member = member_of(host, Address.parse(cluster.address), cluster.token)
        member.start()
        until(lambda: host.cluster not in (0, 2**64 - 1), "it has joined", PATIENCE_S)
        yield cluster, host, member
        member.close()


def attend(cluster: LocalCluster, incarnation: int, app: str = "default") -> m.View:
    """A worker that only joins; it is told its first view."""
    views: list[m.View] = []
    come = threading.Event()

    def heard(message: m.Message) -> None:
        if isinstance(message, m.View):
            views.append(message)
            come.set()

    join = m.Join("worker", incarnation, app, 0, 1)
    worker = Member(Address.parse(cluster.address), cluster.token.encode(), join, heard)
    worker.start(time.monotonic() + 10)
    assert come.wait(10)
    worker.close()
    return views[0]


def test_a_server_whose_connection_breaks_hears_of_what_it_missed(
    joined: tuple[LocalCluster, FakeHost, ServerMember], caplog: pytest.LogCaptureFixture
):
    cluster, host, member = joined
    attend(cluster, 70)
    until(lambda: len(host.views) == 2, "both views", PATIENCE_S)
    assert host.views == [("default", 1, [(0, 70, True)], []), ("default", 2, [], [])]
    attend(cluster, 71)
    until(lambda: len(host.views) == 4, "both views of the second start", PATIENCE_S)
    assert host.views[2:] == [("default", 3, [(0, 71, True)], []), ("default", 4, [], [])]
    ws = member._member._ws
    assert ws is not None
    ws.close()
    until(lambda: len(host.views) == 5, "the last one again", PATIENCE_S)
    assert host.views[4] == ("default", 4, [], [])


def test_workers_that_disagree_on_a_loss_are_refused_with_both_words(
    joined: tuple[LocalCluster, FakeHost, ServerMember],
):
    cluster, _, _ = joined
    join = m.Join("worker", 80, "two", 0, 2, on_worker_loss="wait")
    first = Member(Address.parse(cluster.address), cluster.token.encode(), join, lambda _: None)
    first.start(time.monotonic() + 10)
    with pytest.raises(wl.InvalidArgument, match=r"app 'two' has on_worker_loss='wait', not 'continue'"):
        cluster.connect(app="two", rank=1, world_size=2, timeout=10)
    first.close()
