"""Who is who among holders of the token: ranks are those of the view, and numbers of objects are the scheduler's."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import own_rules
import pytest
import raw
from helpers import PATIENCE_S, new_app
from specs import tensor_spec

import windlass as wl
from windlass import _core
from windlass._errors import ERRORS
from windlass._net.address import Address
from windlass.control import messages as m
from windlass.control.member import Member, new_incarnation
from windlass.testing import LocalCluster
from windlass.testing.cluster import until


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    """A cluster that tests leave as they found it; each takes an app of its own."""
    with LocalCluster(servers=2) as cluster:
        until(lambda: len(cluster.members("server")) == 2, "the servers have come", PATIENCE_S)
        yield cluster


def workers(local: LocalCluster, app: str, count: int) -> list[wl.Cluster]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: local.connect(app=app, rank=rank, world_size=count), range(count)))


def incarnation_of(cluster: wl.Cluster) -> int:
    assert cluster._attendance is not None
    return cluster._attendance.incarnation


class Stranger(raw.RawClient):
    """Somebody who knows the token, and says what it likes to server 0 of the cluster."""

    def __init__(self, local: LocalCluster, session: int | None = None) -> None:
        servers = sorted(local.members("server"), key=lambda server: server["index"])
        self.about = {"servers": [s["address"] for s in servers], "cluster": int(local.status()["cluster"], 16)}
        super().__init__(self.about["servers"][0], local.token.encode(), session, hello=False)

    def came_in(self, **who: object) -> type[wl.WindlassError] | None:
        """What it is refused with, if it is."""
        answer = self.try_hello(**self.about, **who)  # type: ignore[arg-type]
        return ERRORS[answer.status] if answer.status else None


# -- ranks -----------------------------------------------------------------------------------------------------------


def test_whoever_is_not_in_the_view_cannot_say_hello_as_a_worker(local: LocalCluster):
    app = new_app()
    one, two = workers(local, app, 2)
    with one, two:
        mine = incarnation_of(one)
        claims = {
            "another process as rank 0": (None, {"app": app, "rank": 0, "world_size": 2}),
            "a rank that nobody has": (None, {"app": app, "rank": 2, "world_size": 3}),
            "rank 0's number as rank 1": (mine, {"app": app, "rank": 1, "world_size": 2}),
            "rank 0's number in another app": (mine, {"app": new_app(), "rank": 0, "world_size": 2}),
            "an app that nobody has": (None, {"app": new_app(), "rank": 0, "world_size": 1}),
            "rank 0 itself a second time": (mine, {"app": app, "rank": 0, "world_size": 2}),
        }

        def claim(name: str) -> type[wl.WindlassError] | None:
            session, who = claims[name]
            with Stranger(local, session) as stranger:
                return stranger.came_in(**who)  # type: ignore[arg-type]

        with ThreadPoolExecutor(len(claims)) as pool:
            seen = dict(zip(claims, pool.map(claim, claims), strict=True))
        assert seen == {name: wl.AccessDenied if "itself" in name else wl.Timeout for name in claims}
        with Stranger(local) as reader:
            assert reader.came_in(app=app, world_size=0) is None


def test_a_stranger_does_not_close_iterations_for_rank_0_and_rank_0_loses_no_push(local: LocalCluster):
    app = new_app()
    one, two = workers(local, app, 2)
    with one, two:
        first, second = (c.tensor("w", 100, rule=wl.Sum(), dtype=np.int64, sync=wl.SSP(0)) for c in (one, two))
        with Stranger(local) as stranger:
            if stranger.came_in(app=app, rank=0, world_size=2) is None:
                stranger.ask(raw.TICK, [raw.Part(clock=10)])
            second.push(np.ones(100, np.int64)).wait()
            two.tick()
            pulled = second.pull_async()
            time.sleep(0.3)
            assert not pulled.done()  # SSP(0): rank 0 has not closed its first iteration
            first.push(np.ones(100, np.int64)).wait()
            one.tick()
            assert pulled.wait(timeout=PATIENCE_S).tolist() == [2] * 100


def test_nobody_but_servers_is_told_the_numbers_that_workers_are_known_by(local: LocalCluster):
    app = new_app()
    (one,) = workers(local, app, 1)
    views: list[m.View] = []
    with one:
        join = m.Join("reader", new_incarnation(), app)
        reader = Member(Address.parse(local.address), local.token.encode(), join, views.append)  # type: ignore[arg-type]
        reader.start(time.monotonic() + PATIENCE_S)
        until(lambda: views, "the view", PATIENCE_S)
        reader.close()
        assert [peer.index for peer in views[0].workers] == [0]
        assert incarnation_of(one) not in [peer.incarnation for peer in views[0].workers]
        assert f"{incarnation_of(one):x}" not in str(local.status())


def test_a_replacement_comes_in_and_the_one_that_was_given_up_does_not_come_back(local: LocalCluster):
    app, token, address = new_app(), local.token.encode(), Address.parse(local.address)
    view = threading.Event()

    def heard(message: m.Message) -> None:
        if isinstance(message, m.View):
            view.set()

    join = m.Join("worker", new_incarnation(), app, 0, 1, on_worker_loss="wait")
    lost = Member(address, token, join, heard)
    lost.start(time.monotonic() + PATIENCE_S)
    assert view.wait(PATIENCE_S)
    with Stranger(local, join.incarnation) as former:
        assert former.came_in(app=app, rank=0) is None
        lost.close(failed=True)
        with local.connect(app=app, rank=0, world_size=1, on_worker_loss="wait") as replacement:
            w = replacement.tensor("w", 10, rule=wl.Sum(), dtype=np.int64, sync=wl.SSP(0))
            former.ask(raw.TICK, [raw.Part(clock=10)])
            with Stranger(local, join.incarnation) as again:
                assert again.came_in(app=app, rank=0) is wl.Closed
            w.push(np.ones(10, np.int64)).wait()
            replacement.tick()
            assert w.pull().tolist() == [1] * 10
            assert replacement.clock == 1


def test_without_the_mechanism_a_stranger_is_rank_0_and_makes_objects_of_any_number(monkeypatch: pytest.MonkeyPatch):
    """The check notices servers that believe what they are told."""
    with monkeypatch.context() as patch:
        patch.setenv("WINDLASS_BREAK", "identity")
        local = LocalCluster(servers=1).__enter__()
    app = new_app()
    with contextlib.closing(local):
        until(lambda: len(local.members("server")) == 1, "the server has come", PATIENCE_S)
        one, two = workers(local, app, 2)
        with one, two, Stranger(local) as stranger:
            second = two.tensor("w", 100, rule=wl.Sum(), dtype=np.int64, sync=wl.SSP(0))
            assert stranger.came_in(app=app, rank=0, world_size=2) is None
            two.tick()
            pulled = second.pull_async()
            stranger.ask(raw.TICK, [raw.Part(clock=10)])
            pulled.wait(timeout=PATIENCE_S)  # rank 0 has closed nothing
            evil = _core.write_map(second._core.object + 7, [(0, 0, 1)]) + tensor_spec("evil/w", (10,))
            (answer,) = stranger.ask(raw.ATTACH, [raw.Part(items=evil)])
            assert answer.status == 0


# -- objects ---------------------------------------------------------------------------------------------------------


def test_an_attach_with_a_number_that_nobody_assigned_is_refused_and_poisons_nothing(local: LocalCluster):
    app = new_app()
    (one,) = workers(local, app, 1)
    with one, Stranger(local) as reader:
        one.tensor("before", 10, rule=wl.Sum())
        assert reader.came_in(app=app, world_size=0) is None
        newest = one.tensor("newest", 10, rule=wl.Sum())._core.object
        evil = tensor_spec("evil/w", (10,))
        for number in range(newest + 1, newest + 4):
            (answer,) = reader.ask(raw.ATTACH, [raw.Part(items=_core.write_map(number, [(0, 0, 1)]) + evil)])
            assert ERRORS[answer.status] is wl.Timeout
            assert b"none that the scheduler has told us of" in answer.items
        for i in range(4):
            next_one = one.tensor(f"next{i}", 10, rule=wl.Sum())
            next_one.push(np.ones(10, np.float32)).wait()
            assert next_one.pull().tolist() == [1] * 10


def test_a_client_cannot_make_another_object_of_a_number_or_take_one_away(local: LocalCluster):
    app = new_app()
    (one,) = workers(local, app, 1)
    with one, Stranger(local) as reader:
        w = one.tensor("w", 100_000, rule=wl.Sum(), dtype=np.int64)
        number, spec = w._core.object, tensor_spec(f"{app}/w", (100_000,))
        assert reader.came_in(app=app, world_size=0) is None

        def ask(op: int, body: bytes) -> type[wl.WindlassError] | None:
            (answer,) = reader.ask(op, [raw.Part(items=body)])
            return ERRORS[answer.status] if answer.status else None

        placed = _core.write_map(number, [(0, 0, 1)])
        assert ask(raw.ATTACH, placed + tensor_spec(f"{app}/other", (100_000,))) is wl.SpecMismatch
        assert ask(raw.ATTACH, placed + tensor_spec(f"{app}/w", (50,))) is wl.SpecMismatch
        assert ask(raw.ATTACH, placed + spec) is None  # the scheduler's map counts
        assert ask(raw.DETACH, placed + spec) is wl.AccessDenied
        assert ask(raw.OPEN, tensor_spec("evil/w", (10,))) is wl.InvalidArgument
        assert ask(raw.LIST, b"") is wl.InvalidArgument
        w.push(np.ones(100_000, np.int64)).wait()
        assert (w.pull() == 1).all()


def test_an_object_that_was_forgotten_leaves_its_number_to_nobody(local: LocalCluster):
    app = new_app()
    (one,) = workers(local, app, 1)
    with one, Stranger(local) as reader:
        with pytest.raises(wl.AccessDenied):  # no server allows the rule
            one.tensor("w", 10, rule=own_rules.heavy_ball(lr=0.1))
        w = one.tensor("w", 10, rule=wl.Sum())  # its name is free again
        assert reader.came_in(app=app, world_size=0) is None
        gone = _core.write_map(w._core.object - 1, [(0, 0, 1)]) + tensor_spec(f"{app}/w", (10,))
        (answer,) = reader.ask(raw.ATTACH, [raw.Part(items=gone)])
        assert ERRORS[answer.status] is wl.Deleted


def test_only_workers_of_an_app_make_objects_of_its_name(local: LocalCluster):
    apps = [new_app(), new_app()]
    (one,), (two,) = (workers(local, app, 1) for app in apps)
    with one, two:
        with pytest.raises(wl.NotFound, match=f"only app '{apps[0]}' can make it"):
            two.tensor(f"{apps[0]}/w", 10, rule=wl.Sum())
        one.tensor("w", 10, rule=wl.Sum()).push(np.ones(10, np.float32)).wait()
        assert two.tensor(f"{apps[0]}/w", 10, rule=wl.Sum()).pull().tolist() == [1] * 10
