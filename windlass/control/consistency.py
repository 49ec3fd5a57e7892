"""What pulls of an app did: how many there were and how long they waited, as workers counted, call by call; how stale
what they read was, and who was waited for, as servers counted, shard by shard. Pure.

server 0   pulls by staleness   90  5  5  0 ...          the app   190  5  5  0 ...   mean 0.07, p99 2
server 1                       100  0  0  0 ...    ->
"""

import dataclasses
import heapq
from collections.abc import Iterable, Mapping
from typing import Any

from windlass.control import messages as m

WORST = 3  # ranks that a status names
_P99 = 0.99
Stats = tuple[str, int, list[int], int, float, dict[int, float], int]  # as the host counts, by app


def sync_reports(stats: Iterable[Stats]) -> dict[str, m.SyncReport]:
    """What a server reports, within the limits of a report."""
    made: dict[str, m.SyncReport] = {}
    for app, reads, staleness, waits, seconds, waited_for, late in list(stats)[: m.APPS_MAX]:
        buckets = [*staleness[: m.STALENESS_MAX], sum(staleness[m.STALENESS_MAX :])]
        ranks = heapq.nlargest(m.RANKS_MAX, waited_for.items(), key=lambda item: item[1])
        made[app] = m.SyncReport(reads, buckets, waits, seconds, dict(sorted(ranks)), late)
    return made


def added(reports: Iterable[m.PullReport]) -> m.PullReport:
    """Those of several workers together."""
    calls, waits, seconds = 0, 0, 0.0
    for one in reports:
        calls, waits, seconds = calls + one.calls, waits + one.waits, seconds + one.waited_seconds
    return m.PullReport(calls, waits, seconds)


@dataclasses.dataclass
class Total:
    """Of one app, over all servers."""

    reads: int = 0
    staleness: list[int] = dataclasses.field(default_factory=lambda: [0] * (m.STALENESS_MAX + 1))
    waits: int = 0
    waited_seconds: float = 0.0
    waited_for: dict[int, float] = dataclasses.field(default_factory=dict)  #: seconds, by rank
    late: int = 0

    def add(self, report: m.SyncReport) -> None:
        """One server's part."""
        self.reads += report.reads
        self.waits += report.waits
        self.waited_seconds += report.waited_seconds
        self.late += report.late
        for i, count in enumerate(report.staleness):
            self.staleness[i] += count
        for rank, seconds in report.waited_for.items():
            self.waited_for[rank] = self.waited_for.get(rank, 0.0) + seconds

    @property
    def stale_iterations(self) -> int:
        """The staleness of all reads together; of the last bucket the least that it can be."""
        return sum(i * count for i, count in enumerate(self.staleness))

    @property
    def mean(self) -> float:
        """Staleness of a read."""
        return self.stale_iterations / max(1, sum(self.staleness))

    @property
    def p99(self) -> int:
        """What 99 of 100 reads do not exceed; STALENESS_MAX stands for itself and all above."""
        enough, seen = _P99 * sum(self.staleness), 0
        for i, count in enumerate(self.staleness):
            seen += count
            if seen >= enough:
                return i
        return m.STALENESS_MAX

    def status(self, pulls: m.PullReport) -> dict[str, Any]:
        """For ``/api/v1/status``. pulls: of the app's workers."""
        all_seconds = sum(self.waited_for.values())
        worst = heapq.nlargest(WORST, self.waited_for.items(), key=lambda item: (item[1], -item[0]))
        return {
            "pulls": pulls.calls,
            "waits": pulls.waits,
            "waited_seconds": round(pulls.waited_seconds, 3),
            "reads": self.reads,
            "staleness": self.staleness,
            "staleness_mean": round(self.mean, 3),
            "staleness_p99": self.p99,
            "reads_waited": self.waits,
            "reads_waited_seconds": round(self.waited_seconds, 3),
            "waited_for": [
                {"rank": rank, "seconds": round(seconds, 3), "share": round(seconds / (all_seconds or 1.0), 3)}
                for rank, seconds in worst
            ],
            "late": self.late,
        }


def totals(reports: Iterable[Mapping[str, m.SyncReport]]) -> dict[str, Total]:
    """By app."""
    made: dict[str, Total] = {}
    for report in reports:
        for app, one in report.items():
            made.setdefault(app, Total()).add(one)
    return made
