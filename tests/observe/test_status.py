"""`windlass status` on screens of any width: nothing is cut, and what it counts is what a user would count."""

import concurrent.futures
import fcntl
import io
import json
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

import windlass as wl
from windlass._errors import ServerLost
from windlass.launch.rundir import Run
from windlass.observe.columns import Column, tables
from windlass.observe.status import show, show_runs, watch
from windlass.testing import LocalCluster
from windlass.testing.cluster import until

Json = dict[str, Any]
WIDTHS = [40, 60, 80, 120, 200]


def server(index: int, host: str) -> Json:
    return {
        "role": "server",
        "index": index,
        "host": host,
        "pid": 4194300 + index,
        "address": f"tcp://192.168.100.{100 + index}:6553{index}",
        "heard_seconds": 0.123,
        "away_seconds": None,
        "shards": 1234,
        "placed_bytes": 123_456_789_012,
        "memory_bytes": 123_456_789_012,
        "memory_bytes_max": 999_456_789_012,
        "sessions": 128,
        "requests": 123_456_789,
        "bytes_in": 123_456_789_012_345,
        "bytes_out": 987_654_321_012_345,
    }


def worker(rank: int, host: str) -> Json:
    return {
        "role": "worker",
        "app": "click-through-rate",
        "index": rank,
        "host": host,
        "pid": 4194200 + rank,
        "clock": 12_345_678,
        "pulls": 98_765_432,
        "heard_seconds": 0.4,
        "away_seconds": 3.5 if rank else None,
        "values": {"loss": 0.123456, "accuracy": 0.987654, "gradient norm": 12.5, "samples per second": 123456.0},
    }


def big(hosts: tuple[str, str] = ("node7.example.org", "node8.example.org")) -> Json:
    """A status in which everything is long."""
    sync = {
        "pulls": 98_765_432,
        "waits": 1_234_567,
        "waited_seconds": 12_345.6,
        "staleness": [1] * 16,
        "staleness_mean": 12.34,
        "staleness_p99": 15,
        "late": 1_234_567,
        "waited_for": [{"rank": 100 + i, "seconds": 1234.5, "share": 0.33} for i in range(3)],
    }
    return {
        "cluster": "5f2a0123456789ab",
        "seconds": 100_000.0,
        "generation": 2,
        "returning": ["worker 17 of app 'click-through-rate' (process 4711 on trainer-17)"],
        "servers_expected": 3,
        "missing": ["server 2"],
        "servers_lost": {"1": "its process 4711 has ended"},
        "members": [*(server(i, hosts[i]) for i in range(2)), *(worker(rank, hosts[rank]) for rank in range(2))],
        "apps": [
            {
                "name": "click-through-rate",
                "world_size": 128,
                "workers": 127,
                "view": 1234,
                "started": True,
                "on_worker_loss": "continue",
                "waited": [],
                "left": [],
                "quota_bytes": 64_000_000_000,
                "sync": sync,
            }
        ],
        "objects": [
            {
                "name": "click-through-rate/embedding_of_users",
                "rows": 1_234_567_890,
                "bytes": 123_456_789_012,
                "shards": 256,
                "servers": [0, 1],
                "description": "table of dim 64, RowAdagrad(initial_state=0.1), Normal(std=0.01), ssp:3",
            },
            {
                "name": "click-through-rate/w",
                "rows": None,
                "bytes": 4096,
                "shards": 16,
                "servers": [0],
                "description": "tensor (32, 32) float32",
            },
        ],
        "leases": [
            {
                "app": "click-through-rate",
                "name": "train",
                "epoch": 3,
                "epochs": 10,
                "ranges": 1000,
                "done": 300,
                "held": 128,
                "free": 572,
                "samples_done": 123_456_789,
                "duplicates": 1234,
            }
        ],
        "moves": 3,
        "moving": [
            {"name": "click-through-rate/embedding", "shard": 7 + i, "from": 0, "to": 2, "ordered": i < 2}
            for i in range(3)
        ],
        "level": {
            "drains": [
                {"server": 0, "why": "an operator asked for it", "shards": 256, "shards_left": 100}
                | {"bytes_left": 12_300_000_000, "failed": "move of shard 3: out of reach"}
            ],
            "mean_bytes": 34_000_000_000,
            "furthest": 0.42,
            "even": False,
        },
        "checkpoints": {
            "going": {"id": "0" * 16, "app": "click-through-rate", "clock": 12_345_678, "bytes": 45_600_000_000}
            | {"bytes_all": 123_456_789_012},
            "last": {"click-through-rate": {"id": "89abcdef01234567", "clock": 12_345_600, "age_seconds": 754.0}},
            "failed": {"click-through-rate": "/mnt/checkpoints/x: cannot be written: No space left on device"},
            "resumed": None,
        },
        "timeouts": {"failure_timeout": 10.0, "heartbeat": 1.0, "start_timeout": 60.0, "missing_every": 5.0},
        "settings": {"config": {"value": "/home/somebody/project/windlass.toml", "from": "flag"}},
    }


def shown(status: Json, width: int, address: str = "tcp://192.168.100.100:65530") -> str:
    console = Console(file=io.StringIO(), width=width)
    show(json.dumps(status), address, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def numbers_of(status: Json) -> list[str]:
    """Words that must be found whole."""
    found = []
    for member in status["members"]:
        found += [str(member["pid"])]
        found += [member["address"], "123 GB of 999 GB", "123456789"] if member["role"] == "server" else ["98765432"]
    return [
        *found,
        "89abcdef01234567",
        "12345600",
        "1234567890",
        "123 GB",
        "12345678",
        "64 GB",
        "15 or more",
        "1234567",
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_at_any_width(width: int):
    text = shown(big(), width)
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width, text
    assert "\u2026" not in text
    for word in numbers_of(big()):
        assert word in text, f"{word} at width {width}:\n{text}"
    titles = ["servers", "workers and readers", "apps", "pulls", "objects", "leases", "checkpoints"]
    titles += ["timeouts", "settings"]
    assert [line.strip() for line in lines if line.strip() in titles] == titles


def test_at_200_columns_every_table_is_in_one_part_and_at_80_in_several():
    narrow, wide = shown(big(), 80), shown(big(), 200)
    for column in ("address", "requests"):
        assert len(re.findall(rf"\b{column}\b", wide)) == 1

    def header(text: str, column: str) -> str:
        return next(line for line in text.splitlines() if re.search(rf"\b{column}\b", line))

    assert header(wide, "address") == header(wide, "requests")
    assert header(narrow, "address") != header(narrow, "requests")
    assert header(narrow, "requests").split()[0] == "server"  # the first column comes again


def test_one_host_is_named_once_and_several_with_every_process():
    assert ", all on here" in shown(big(("here", "here")), 80)
    assert "host" not in shown(big(("here", "here")), 200)
    text = shown(big(), 200)
    assert text.count("node7.example.org") == 2
    assert "all on" not in text


def test_checkpoints_are_shown_with_their_age_what_is_written_and_why_there_is_none():
    text = shown(big(), 200)
    line = next(line for line in text.splitlines() if "89abcdef01234567" in line)
    assert re.search(r"12345600 +13 min +clock 12345678: 45\.6 GB of about 123 GB", line)
    assert "No space left on device" in text
    status = big()
    status["checkpoints"] |= {"going": None, "last": {}, "failed": {"a": "server 1 is gone"}}
    assert re.search(r"^a +none +server 1 is gone", shown(status, 200), re.M)
    assert "checkpoints" not in shown(big() | {"checkpoints": None}, 200)


def test_what_is_in_brackets_is_shown_as_it_is():
    status = big()
    status["objects"][0]["name"] = "app/[bold]w[/bold]"
    status["servers_lost"] = {"1": "it said [red]"}
    text = shown(status, 200)
    assert "app/[bold]w[/bold]" in text
    assert "it said [red]" in text


def test_columns_without_content_are_left_out_and_text_may_be_broken():
    def lines(width: int) -> list[str]:
        columns = [Column("name"), Column("empty"), Column("what", text=True)]
        console = Console(file=io.StringIO(), width=width)
        for part in tables("things", columns, [("w", "", "a text of some words"), ("v", "", "short")], width):
            console.print(part)
        assert isinstance(console.file, io.StringIO)
        return [line.rstrip() for line in console.file.getvalue().splitlines()]

    assert lines(80) == ["", "things", "name  what", "w     a text of some words", "v     short"]
    assert lines(20) == ["", "things", "name  what", "w     a text of some", "      words", "v     short"]
    assert tables("none", [Column("name")], [], 80) == []
    assert isinstance(tables("one", [Column("name")], [("w",)], 80)[1], Text)


@pytest.mark.parametrize("width", [80, 200])
def test_runs_are_listed_with_whole_addresses(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setenv("COLUMNS", str(width))
    script = "/home/somebody/projects/recommendation/experiments/2026-11/train_click_through_rate.py"
    run = Run("train_click_through_rate", script, time.time(), "tcp://127.0.0.1:65530", pathlib.Path("/tmp"))
    show_runs([run])
    text = capsys.readouterr().out
    assert max(map(cell_len, text.splitlines())) <= width
    assert "tcp://127.0.0.1:65530" in text
    assert script in re.sub(r"\n? +", "", text) or script in text


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_pulls_are_calls_and_tables_have_rows_and_bytes():
    with LocalCluster(servers=2) as cluster, cluster.connect() as worker:
        w = worker.tensor("w", (1000, 1000), rule=wl.SGD(lr=0.1))  # many shards, on both servers
        users = worker.table("user", dim=16, rule=wl.Adam())
        for _ in range(3):
            w.pull()
        out = w.push_pull(np.ones((1000, 1000), np.float32))
        w.push(out).wait()
        users.pull(np.arange(2500))
        users.push(np.arange(2000, 3000), np.ones((1000, 16), np.float32)).wait()
        users.delete(np.arange(10))
        with worker.step() as step:
            step.push_pull(w, out, out=np.empty_like(out))
            step.pull(users, np.arange(100, 110))
        calls = 3 + 1 + 1 + 2

        def now() -> Json:
            return cluster.status()

        def found(name: str) -> Json:
            return next(x for x in now()["objects"] if x["name"] == f"default/{name}")

        until(lambda: found("user")["rows"] == 2990, "rows are reported", PATIENCE_S)
        until(lambda: now()["apps"][0]["sync"]["pulls"] == calls, f"{calls} pulls: {now()['apps']}", PATIENCE_S)
        assert next(x for x in now()["members"] if x["role"] == "worker")["pulls"] == calls
        assert found("user")["bytes"] >= 2990 * 16 * 4 * 3
        assert found("user")["bytes"] <= sum(x["memory_bytes"] for x in cluster.members("server"))
        assert found("w")["rows"] is None
        assert len(users) == 2990
        text = shown(now(), 80, cluster.address)
        assert re.search(r"^default/user +2990 ", text, re.M), text
        assert cluster.address in text


def test_a_pull_that_waits_is_counted_once_whatever_it_reads():
    with LocalCluster(servers=2) as cluster:
        begun = time.monotonic()

        def work(rank: int) -> None:
            with cluster.connect(rank=rank, world_size=2) as worker:
                w = worker.tensor("w", 1 << 20, rule=wl.Sum(), sync="bsp")  # many shards, all of which wait
                if rank == 1:
                    time.sleep(0.5)
                w.push_pull(np.ones(1 << 20, np.float32))

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2)))
        took = time.monotonic() - begun
        until(lambda: (cluster.status()["apps"][0]["sync"] or {}).get("reads", 0) > 2, "servers report", PATIENCE_S)
        sync = cluster.status()["apps"][0]["sync"]
        assert sync["pulls"] == 2
        assert 1 <= sync["waits"] <= 2
        assert 0.0 < sync["waited_seconds"] <= 2 * took


# -- again and again ---------------------------------------------------------------------------------------------------


def test_watching_shows_it_again_until_the_cluster_has_ended():
    answers = iter([json.dumps(big() | {"seconds": float(second)}) for second in range(3)])

    def ask() -> str:
        try:
            return next(answers)
        except StopIteration:
            raise ServerLost("status: the scheduler cannot be reached") from None

    console = Console(file=io.StringIO(), width=80)
    watch(ask, "tcp://127.0.0.1:1", console, 0.0)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert [f"{second}.0 s old" in text for second in range(3)] == [True] * 3
    assert text.endswith("the cluster has ended\n")
    with pytest.raises(ServerLost):  # nobody was ever there
        watch(ask, "tcp://127.0.0.1:1", console, 0.0)


class Screen:
    """A command on a terminal of its own."""

    def __init__(self, columns: int, *command: str, **environment: str) -> None:
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        own = {n: v for n, v in os.environ.items() if not n.startswith("WINDLASS_") and n not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "windlass", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**own, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        os.close(theirs)
        self.text = ""

    def read(self, seconds: float = 0.1) -> bool:
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            self.text += os.read(self.fd, 1 << 16).decode()
            return True
        except OSError:  # the terminal's other end is closed
            return False

    def until(self, pattern: str, times: int = 1) -> None:
        until(lambda: self.read() and len(re.findall(pattern, self.text)) >= times, pattern, PATIENCE_S)

    def plain(self) -> list[str]:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text).replace("\r", "").split("\n")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.fd)


def test_a_real_screen_of_80_columns_is_enough():
    with LocalCluster(servers=2) as cluster, cluster.connect() as worker:
        worker.table("user", dim=16, rule=wl.Adam()).pull(np.arange(1234))
        worker.report(loss=0.25)
        until(lambda: any(x["rows"] == 1234 for x in cluster.status()["objects"]), "rows", PATIENCE_S)
        screen = Screen(80, "status", "--address", cluster.address, WINDLASS_TOKEN=cluster.token)
        try:
            while screen.read():
                pass
            assert screen.process.wait(PATIENCE_S) == 0
        finally:
            screen.close()
        lines = screen.plain()
        assert max(map(cell_len, lines)) <= 80
        assert "\u2026" not in screen.text
        text = "\n".join(lines)
        for process in [*cluster.servers, cluster.scheduler]:
            assert process is cluster.scheduler or str(process.pid) in text
        for one in cluster.members("server"):
            assert one["address"] in text
        assert re.search(r"default/user +1234 ", text)


@pytest.mark.parametrize("command", [["status", "--watch"], ["top"]])
def test_top_redraws_the_screen_until_ctrl_c(command: list[str]):
    with LocalCluster(servers=1) as cluster:
        until(lambda: cluster.members("server"), "the server is there", PATIENCE_S)
        screen = Screen(80, *command, "--address", cluster.address, WINDLASS_TOKEN=cluster.token)
        try:
            screen.until(r"scheduler at", times=3)
            screen.process.send_signal(signal.SIGINT)
            while screen.read():
                pass
            assert screen.process.wait(PATIENCE_S) == 0
        finally:
            screen.close()
        assert "\x1b[?1049h" in screen.text  # the other screen
        assert screen.text.rindex("\x1b[?1049l") > screen.text.rindex("scheduler at")  # and back
        assert "Traceback" not in screen.text


def test_json_is_not_watched():
    command = [sys.executable, "-m", "windlass", "status", "--json", "--watch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "either --json or --watch" in done.stderr


def test_drains_moves_and_members_that_have_not_returned_are_shown():
    text = " ".join(shown(big(), 200).split())
    assert "generation 2 of its scheduler" in text
    assert "not back yet since the scheduler began again: worker 17" in text
    assert "an operator asked for it" in text
    assert "156 of 256" in text
    assert "click-through-rate/embedding 9 0 2 waits for room" in text
    assert "servers are uneven: one is 42 % off the mean, 34 GB" in text
