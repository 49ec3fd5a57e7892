"""What the scheduler tells people and tools about the cluster."""

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

from windlass.control import messages as m
from windlass.control.consistency import Total
from windlass.control.liveness import GRACE_SECONDS
from windlass.control.model import Moving, Object
from windlass.control.state import State

_MOVES_SHOWN = 64


def status_of(
    state: State,
    heard_seconds: dict[int, float],
    settings: dict[str, object],
    started_at: float,
    away_seconds: dict[int, float] | None = None,
) -> dict[str, Any]:
    """What ``/api/v1/status`` answers.

    heard_seconds: since each member was last heard of. away_seconds: since those that have no connection had one.
    """
    terms = state.terms
    away = away_seconds or {}
    shards: dict[int, int] = {}
    for object_ in state.objects.values():
        for server in object_.owners:
            shards[server] = shards.get(server, 0) + 1
    consistency, table_sizes = state.consistency(), state.table_sizes()
    members = []
    for number, member in state.members.items():
        join, report = member.join, member.report
        one: dict[str, Any] = {
            "role": join.role,
            "index": member.index,
            "host": join.host,
            "pid": join.pid,
            "heard_seconds": round(heard_seconds.get(number, 0.0), 3),
            "away_seconds": round(away[number], 3) if number in away else None,
        }
        if join.role == "server":
            one |= {
                "address": join.addresses[0],
                "shards": shards.get(member.index, 0),
                "placed_bytes": state.load_bytes.get(member.index, 0),
                "memory_bytes": report.memory_bytes,
                "memory_bytes_max": report.memory_bytes_max,
                "sessions": report.sessions,
                "requests": report.requests,
                "bytes_in": report.bytes_in,
                "bytes_out": report.bytes_out,
            }
        if join.role in ("worker", "reader"):
            one |= {"app": join.app, "clock": report.clock, "pulls": report.pulls.calls, "values": report.values}
        members.append(one)
    return {
        "cluster": f"{terms.cluster:016x}",
        "seconds": round(time.time() - started_at, 3),
        "generation": state.generation,
        "returning": sorted(state.members[number].name for number in state.returning),
        "servers_expected": terms.servers,
        "missing": state.missing(),
        "servers_lost": {str(index): why for index, why in state.lost.items()},
        "members": sorted(members, key=lambda one: (one["role"], one.get("app", ""), one["index"])),
        "apps": [
            {
                "name": app.name,
                "world_size": app.world_size,
                "workers": len(app.workers),
                "readers": len(app.readers),
                "view": app.view,
                "started": app.started,
                "on_worker_loss": app.on_worker_loss,
                "waited": sorted(app.waited),
                "left": [
                    {"rank": rank, "clock": last.clock, "values": last.values}
                    for rank, last in sorted(app.left.items())
                ],
                "quota_bytes": terms.quotas.get(app.name),
                "sync": consistency[app.name].status(state.pulls(app)) if app.name in consistency else None,
            }
            for app in state.apps.values()
        ],
        "objects": [
            {
                "name": object_.name,
                "kind": "table" if object_.is_table else "tensor",
                "description": object_.description,
                "shards": len(object_.owners),
                **_size(object_, table_sizes),
                "servers": sorted(set(object_.owners)),
            }
            for object_ in state.objects.values()
        ],
        "leases": [{"app": app, "name": name, **of.status()} for (app, name), of in state.ledgers.items()],
        "moves": len(state.moves.going),
        "moving": [_moving(state, v) for v in itertools.islice(state.moves.going.values(), _MOVES_SHOWN)],
        "servers_retired": {str(index): why for index, why in state.retired.items()},
        "level": state.level.status(),
        "checkpoints": _checkpoints(state) if terms.saves else None,
        "timeouts": {
            "failure_timeout": terms.failure_timeout,
            "heartbeat": terms.beat_seconds,
            "ended_process": GRACE_SECONDS,
            "start_timeout": terms.start_timeout,
            "missing_every": terms.missing_seconds,
        },
        "settings": settings,
    }


def _moving(state: State, v: Moving) -> dict[str, Any]:
    """A shard on its way."""
    there = state.objects.get(v.object)
    name = "" if there is None else there.name
    return {"name": name, "shard": v.shard, "from": v.source, "to": v.target, "ordered": v.ordered}


def _checkpoints(state: State) -> dict[str, Any]:
    """With the ages of the newest ones, in seconds."""
    found = state.saves.status()
    for one in found["last"].values():
        one["age_seconds"] = round(max(0.0, time.time() - one.pop("at")), 3)
    return found


def _size(object_: Object, table_sizes: dict[int, tuple[int, int]]) -> dict[str, int | None]:
    """The bytes of a tensor are known from its spec, those of a table, and its rows, from servers' reports."""
    if not object_.is_table:
        return {"rows": None, "bytes": sum(object_.shard_bytes)}
    rows, size = table_sizes.get(object_.number, (0, 0))
    return {"rows": rows, "bytes": size}


def metrics_text(state: State, heard_seconds: dict[int, float]) -> bytes:
    """What ``/metrics`` answers, in Prometheus' words."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()

    def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"windlass_{name}", text, labels, registry=registry)

    counts = gauge("members", "Members that are there.", ("role",))
    for role in ("server", "worker", "reader"):
        counts.labels(role).set(sum(1 for x in state.members.values() if x.join.role == role))
    gauge("generation", "How often a scheduler has begun with this journal; 0: it has none.").set(state.generation)
    gauge("returning", "Members of an earlier scheduler that have not come back yet.").set(len(state.returning))
    gauge("servers_expected", "Servers that the cluster was started for.").set(state.terms.servers)
    gauge("servers_lost", "Servers that went while there was work.").set(len(state.lost))
    gauge("objects", "Tensors and tables.").set(len(state.objects))
    gauge("moves", "Shards on their way.").set(len(state.moves.going))
    level = state.level.status()
    gauge("server_bytes_mean", "Bytes of tensors and tables on a server, on average.").set(level["mean_bytes"])
    furthest = gauge("server_bytes_furthest", "How far the server furthest from the mean is, as a part of it.")
    furthest.set(level["furthest"])
    left = gauge("drain_shards_left", "Shards of a server that is drained.", ("server",))
    for drain in level["drains"]:
        left.labels(str(drain["server"])).set(drain["shards_left"])
    rows = gauge("table_rows", "Rows of the table.", ("name",))
    sizes = gauge("object_bytes", "What the tensor or table takes on all servers.", ("name",))
    table_sizes = state.table_sizes()
    for object_ in state.objects.values():
        size = _size(object_, table_sizes)
        sizes.labels(object_.name).set(size["bytes"] or 0)
        if object_.is_table:
            rows.labels(object_.name).set(size["rows"] or 0)
    views = gauge("view", "The number of the app's view.", ("app",))
    workers = gauge("app_workers", "Workers of the app that are there.", ("app",))
    waited = gauge("app_waited", "Workers of the app that were lost and whose replacement is waited for.", ("app",))
    for app in state.apps.values():
        views.labels(app.name).set(app.view)
        workers.labels(app.name).set(len(app.workers))
        waited.labels(app.name).set(len(app.waited))
    placed = gauge("server_placed_bytes", "What shards of tensors take.", ("server",))
    memory = gauge("server_memory_bytes", "What tensors and tables take.", ("server",))
    traffic = {
        field: gauge(f"server_{field}", text, ("server",))
        for field, text in (
            ("requests", "Requests since its start."),
            ("bytes_in", "Bytes received since its start."),
            ("bytes_out", "Bytes sent since its start."),
        )
    }
    for index, number in state.servers.items():
        report = state.members[number].report
        placed.labels(str(index)).set(state.load_bytes[index])
        memory.labels(str(index)).set(report.memory_bytes)
        for field, of in traffic.items():
            of.labels(str(index)).set(getattr(report, field))
    clock = gauge("worker_clock", "Iterations that the worker has closed.", ("app", "rank"))
    heard = gauge("heard_seconds", "Since the member was last heard of.", ("role", "app", "index"))
    for number, member in state.members.items():
        join = member.join
        if join.role == "worker":
            clock.labels(join.app, str(member.index)).set(member.report.clock)
        heard.labels(join.role, join.app, str(member.index)).set(heard_seconds.get(number, 0.0))
    reported = gauge("reported", "What the worker reported last, under this name.", ("app", "rank", "name"))
    for whose, rank, last in _reports(state):
        for name, value in last.values.items():
            reported.labels(whose, str(rank), name).set(math.nan if value is None else value)
    pulls = {name: state.pulls(app) for name, app in state.apps.items()}
    registry.register(_Consistency(state.consistency(), pulls))
    registry.register(_Leases(state))
    return bytes(generate_latest(registry))


def _reports(state: State) -> Iterator[tuple[str, int, m.Report]]:
    """App, rank and report of every worker, those that went included."""
    for app in state.apps.values():
        for rank, last in app.left.items():
            yield app.name, rank, last
        for rank, number in app.workers.items():
            yield app.name, rank, state.members[number].report


class _Leases:
    """What workers have leased, and done."""

    def __init__(self, state: State) -> None:
        self._ledgers = state.ledgers

    def collect(self) -> Iterator[Any]:
        """For the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ["app", "lease"]
        epoch = GaugeMetricFamily("windlass_lease_epoch", "Epochs that are done, from the first on.", labels=labels)
        text = "Ranges of the first epoch that is not done."
        ranges = GaugeMetricFamily("windlass_lease_ranges", text, labels=[*labels, "state"])
        counted = CounterMetricFamily("windlass_lease_samples", "Samples done, each of an epoch once.", labels=labels)
        again = CounterMetricFamily("windlass_lease_duplicates", "Samples that were done again.", labels=labels)
        for key, ledger in self._ledgers.items():
            status = ledger.status()
            epoch.add_metric(key, status["epoch"])
            counted.add_metric(key, status["samples_done"])
            again.add_metric(key, status["duplicates"])
            for state in ("done", "held", "free"):
                ranges.add_metric([*key, state], status[state])
        yield from (epoch, ranges, counted, again)


class _Consistency:
    """What workers and servers have counted, as counters and a histogram."""

    def __init__(self, totals: dict[str, Total], pulls: dict[str, m.PullReport]) -> None:
        self._totals = totals
        self._pulls = pulls

    def collect(self) -> Iterator[Any]:
        """For the registry."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"windlass_{name}", text, labels=["app", *labels])

        pulls = counter("pulls", "Pulls and push_pulls of the app's workers.")
        waits = counter("pull_waits", "Pulls that waited.")
        seconds = counter("pull_waited_seconds", "What they waited, together.")
        reads = counter("shard_reads", "Shards that pulls have read.")
        ranks = counter("waited_for_seconds", "What reads of shards waited for this worker.", "rank")
        late = counter("pushes_late", "Pushes that came after their update was made, and were dropped.")
        text = "Iterations that a pull was behind at a shard."
        stale = HistogramMetricFamily("windlass_pull_staleness", text, labels=["app"])
        for app, total in self._totals.items():
            calls = self._pulls.get(app, m.PullReport())
            pulls.add_metric([app], calls.calls)
            waits.add_metric([app], calls.waits)
            seconds.add_metric([app], calls.waited_seconds)
            reads.add_metric([app], total.reads)
            late.add_metric([app], total.late)
            for rank, waited in total.waited_for.items():
                ranks.add_metric([app, str(rank)], waited)
            sums = list(itertools.accumulate(total.staleness))
            buckets = [(str(i), float(count)) for i, count in enumerate(sums[:-1])]
            stale.add_metric([app], [*buckets, ("+Inf", float(sums[-1]))], total.stale_iterations)
        yield from (pulls, waits, seconds, reads, ranks, late, stale)
