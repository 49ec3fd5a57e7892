"""Objects that are deleted: their memory is free, their names, too, and whoever has them open is told."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, Connect, every_call, new_app, numbers, servers_of

import windlass as wl
from windlass.testing import LocalCluster, Servers
from windlass.testing.cluster import until


def test_a_deleted_object_is_gone_and_its_name_can_be_used_again(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", 1000, rule=wl.Sum())
    t = cluster.table("t", 3, rule=wl.Adam())
    for _ in range(5):  # sequences of the new objects begin anew
        w.push(np.ones(1000, np.float32)).wait()
        t.push([1, 2], numbers(2, 3)).wait()
    empty = cluster.fingerprint()
    cluster.delete("w")
    cluster.delete("t")
    assert cluster.fingerprint() != empty
    other = cluster.table("w", 8, rule=wl.Sum())  # another kind, dim and rule
    again = cluster.tensor("t", (3, 4), rule=wl.Assign(), dtype=np.int64)
    other.push([5], np.ones((1, 8), np.float32)).wait()
    again.push(np.full((3, 4), 7)).wait()
    assert other.pull([5]).tolist() == [[1] * 8]
    assert (again.pull() == 7).all()
    with pytest.raises(wl.Deleted, match="tensor 'w' was deleted"):
        w.pull()
    with pytest.raises(wl.Deleted, match="table 't' was deleted"):
        t.pull([1])


def test_every_call_of_an_old_handle_says_that_it_was_deleted(connect: Connect) -> None:
    with connect() as cluster:
        tensor, table = cluster.tensor("w", (4, 3), rule=wl.Sum()), cluster.table("t", 3, rule=wl.Sum())
        registered = cluster.empty((4, 3))
        registered[:] = 0
        tensor.push(registered).wait()
        table.push([1, 2], np.ones((2, 3), np.float32)).wait()
        calls = every_call(cluster, tensor, table, registered)
        cluster.delete("w")
        cluster.delete("t")
        mine = ("Tensor.", "Table.", "len(")
        silent = {"Tensor.delayed"}  # asks nobody
        for name, call in calls.items():
            if not name.startswith(mine) or name in silent:
                continue
            with pytest.raises(wl.Deleted, match="was deleted"):  # noqa: PT012 (a future is waited for)
                result = call()
                if isinstance(result, wl.types.Future):
                    result.wait()
        cluster.tick()
        cluster.settle()


@pytest.mark.embedded("reads what the server inside the process has taken; below the servers of a scheduler report it")
def test_memory_is_free_although_handles_are_kept(cluster: wl.Cluster) -> None:
    before, kept = cluster.memory_bytes, []
    for i in range(4):
        kept.append(cluster.tensor("w", 1 << 20, rule=wl.Adam()))
        kept.append(cluster.table("t", 64, rule=wl.Adam()))
        kept[-2].push(np.ones(1 << 20, np.float32)).wait()
        kept[-1].push(np.arange(20_000), np.ones((20_000, 64), np.float32)).wait()
        assert cluster.memory_bytes > before + (12 << 20)
        cluster.delete("w")
        cluster.delete("t")
        assert cluster.memory_bytes <= before + (1 << 20), f"round {i}"


def test_other_workers_are_told(connect: Connect) -> None:
    with connect() as cluster:
        one, two = (cluster.worker(rank, 2) for rank in range(2))
        mine, theirs = one.table("t", 2, rule=wl.Sum()), two.table("t", 2, rule=wl.Sum())
        mine.push([1], np.ones((1, 2), np.float32)).wait()
        assert theirs.pull([1]).tolist() == [[1, 1]]
        one.delete("t")
        with pytest.raises(wl.Deleted, match="table 't' was deleted"):
            theirs.pull([1])
        with pytest.raises(wl.Deleted):
            theirs.push([1], np.ones((1, 2), np.float32)).wait()
        again = two.table("t", 4, rule=wl.Sum())
        again.push([1], np.ones((1, 4), np.float32)).wait()
        assert one.table("t", 4, rule=wl.Sum()).pull([1]).tolist() == [[1] * 4]
        for worker in (one, two):
            worker.tick()
            worker.close()


@pytest.mark.parametrize("sync", ["bsp", "ssp:1"])
def test_requests_that_wait_end_with_it(connect: Connect, sync: str) -> None:
    """A push that waits for its update, and a pull for another worker."""
    with connect(sync=sync) as cluster:
        one, two = (cluster.worker(rank, 2) for rank in range(2))
        mine, theirs = one.tensor("w", 100, rule=wl.Sum()), two.tensor("w", 100, rule=wl.Sum())
        kept = [worker.tensor("kept", 100, rule=wl.Sum()) for worker in (one, two)]
        pushed = mine.push(np.ones(100, np.float32))
        for _ in range(2):
            one.tick()
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                mine.pull(timeout=PATIENCE_S)
            except wl.WindlassError as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        two.delete("w")
        thread.join(PATIENCE_S)
        assert [type(error) for error in ended] == [wl.Deleted]
        if sync == "bsp":
            with pytest.raises(wl.Deleted):
                pushed.wait(timeout=PATIENCE_S)
        with pytest.raises(wl.Deleted):
            theirs.pull()
        for _ in range(2):
            two.tick()
        again = [worker.tensor("w", 10, rule=wl.Sum()) for worker in (one, two)]
        for tensors in (kept, again):  # the others go on, and so does another of this name
            pushes = [tensor.push(np.ones(tensor.shape, np.float32)) for tensor in tensors]
            for worker in (one, two):
                worker.tick()
            for push in pushes:
                push.wait(timeout=PATIENCE_S)
            for tensor in tensors:
                assert (tensor.pull() == 2).all()
        for worker in (one, two):
            worker.close()


def test_an_anchor_is_kept_while_tensors_are_like_it(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", 10, rule=wl.Sum())
    cluster.tensor("y", like=w)
    cluster.tensor("x", like=w)
    with pytest.raises(wl.InvalidArgument, match=r"delete of 'w'.*deleted first: 'x', 'y'"):
        cluster.delete("w")
    w.pull()
    cluster.delete("x")
    with pytest.raises(wl.InvalidArgument, match="deleted first: 'y'"):
        cluster.delete("w")
    cluster.delete("y")
    cluster.delete("w")
    with pytest.raises(wl.Deleted):
        w.pull()


@pytest.mark.parametrize("name", ["nothing", "", "a\nb", 5, None])
def test_what_is_not_there_is_not_deleted(cluster: wl.Cluster, name: Any) -> None:
    error = wl.NotFound if isinstance(name, str) and name.isprintable() else wl.InvalidArgument
    with pytest.raises(error, match="delete"):
        cluster.delete(name)
    cluster.table("t", 2, rule=wl.Sum())
    cluster.delete("t")
    with pytest.raises(wl.NotFound, match="there is no such object"):
        cluster.delete("t")


def test_names_come_and_go_while_others_use_them(connect: Connect) -> None:
    """Each round either does all of its work or is told that the object was deleted; nothing hangs."""
    with connect() as cluster:
        workers = [cluster.worker(rank, 2) for rank in range(2)]
        stop, trouble = threading.Event(), []

        def use() -> None:
            while not stop.is_set():
                try:
                    table = workers[0].table("t", 4, rule=wl.Sum())
                    for _ in range(5):
                        table.push(np.arange(600), np.ones((600, 4), np.float32)).wait(timeout=PATIENCE_S)
                        table.pull(np.arange(600), timeout=PATIENCE_S)
                except wl.Deleted:
                    pass
                except Exception as error:
                    trouble.append(repr(error))
                    return

        thread = threading.Thread(target=use)
        thread.start()
        deleted = 0
        for _ in range(40):
            try:
                workers[1].delete("t", timeout=PATIENCE_S)
                deleted += 1
            except wl.NotFound:
                time.sleep(0.002)
        stop.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert not trouble, trouble
        assert deleted >= 3
        for worker in workers:
            worker.close()


def test_servers_that_hold_nothing_any_more_can_form_another_cluster() -> None:
    """Numbers of deleted objects are not used again, whoever gives them."""
    with Servers(2, kind="unix") as servers:
        for order in (servers.addresses, servers.addresses[::-1], servers.addresses):
            for name in ("w", "t"):
                with servers.connect(servers=list(order), app="app") as cluster:
                    w = cluster.tensor(name, 100_000, rule=wl.Sum())
                    w.push(np.ones(100_000, np.float32)).wait()
                    cluster.delete(name)
                    with pytest.raises(wl.Deleted, match=f"tensor '{name}' was deleted"):
                        w.pull()


# -- with a scheduler ------------------------------------------------------------------------------------------------


def test_a_scheduler_forgets_it_and_its_servers_free_the_memory() -> None:
    with LocalCluster(servers=2) as local, local.connect() as cluster:
        w = cluster.tensor("w", 4_000_000, rule=wl.Adam())
        w.push(np.ones(4_000_000, np.float32)).wait()

        def held() -> int:
            return sum(server["memory_bytes"] for server in local.members("server"))

        until(lambda: held() >= 48_000_000, "the servers report what they hold", PATIENCE_S)
        begun = w.fingerprint()
        cluster.delete("w")
        with pytest.raises(wl.Deleted, match="tensor 'w' was deleted"):
            w.pull()
        until(lambda: held() < 1_000_000, "the servers report that it is free", PATIENCE_S)
        again = cluster.tensor("w", 4_000_000, rule=wl.Adam())
        again.push(np.ones(4_000_000, np.float32)).wait()
        assert again.fingerprint() == begun


def test_only_its_own_app_may_delete_an_object_and_a_reader_nothing() -> None:
    with LocalCluster(servers=2) as local, local.connect() as cluster:
        w = cluster.tensor("w", 10, rule=wl.Sum())
        with local.connect(app="other") as other:
            with pytest.raises(wl.AccessDenied, match="only app 'default' may delete its objects"):
                other.delete("default/w")
            with pytest.raises(wl.NotFound):
                other.delete("w")
        with local.connect(reader=True) as reader:
            with pytest.raises(wl.AccessDenied, match="a reader deletes nothing"):
                reader.delete("w")
            reader.tensor("w", 10, rule=wl.Sum()).pull()  # it is still a member
        w.pull()


def test_an_object_whose_shards_move_can_be_deleted() -> None:
    """The move is over, whether it is ordered, under way or done; who waits for shards that moved is told, too."""
    with LocalCluster(servers=3) as local, local.connect() as cluster, local.operator() as operator:
        for attempt in range(6):
            table = cluster.table("t", 64, rule=wl.Sum())
            table.put(np.arange(20_000), np.ones((20_000, 64), np.float32))
            order: list[str] = []

            def move(order: list[str] = order) -> None:
                for shard in range(24):
                    try:
                        operator.move("default/t", shard, 2, PATIENCE_S)
                    except wl.WindlassError as error:
                        order.append(type(error).__name__)

            thread = threading.Thread(target=move)
            thread.start()
            time.sleep(0.02 * attempt)
            cluster.delete("t", timeout=PATIENCE_S)
            with pytest.raises(wl.Deleted):
                table.pull(np.arange(20_000), timeout=PATIENCE_S)
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
            assert set(order) <= {"ServerLost", "NotFound", "InvalidArgument"}, order
        until(lambda: sum(s["memory_bytes"] for s in local.members("server")) < 1_000_000, "all is free", PATIENCE_S)


def test_a_list_of_servers_suffices_and_apps_keep_their_own(connect: Connect) -> None:
    with connect() as cluster:
        if cluster._remote is None:
            return  # inside the process there is one app
        servers = servers_of(cluster)
        with servers.connect(app=new_app()) as other:
            mine = cluster.tensor("w", 10, rule=wl.Sum())
            theirs = other.tensor("w", 10, rule=wl.Sum())
            with pytest.raises(wl.AccessDenied, match="may delete its objects"):
                other.delete(f"{cluster._remote.app}/w")
            other.delete("w")
            mine.pull()
            with pytest.raises(wl.Deleted):
                theirs.pull()
