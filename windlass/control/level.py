"""Servers that join and servers that are drained, as the scheduler sees to them. Pure, like State, whose part it is.

    Drain N, or N says Leaving ---> its shards move, two at a time ---> it has none: Retire ---> it ends, and is no loss

    a server more ---> Servers to all clients ---> KnowsServers from all: shards move to it until bytes are even

A server that got SIGTERM says that it is leaving. It is drained if that was meant for it alone: not if others leave as
well, or workers hold for a last checkpoint. A move that fails is tried again in a moment, with another plan.
"""

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from windlass.control import messages as m
from windlass.control.balance import Item, Step, is_even, plan
from windlass.control.events import Timer
from windlass.control.refusal import Wrong

if TYPE_CHECKING:
    from windlass.control.model import Member, Object
    from windlass.control.state import State

AT_ONCE = 2  # shards, or groups of them that are alike, from or to one server
LEAVING_SECONDS = 1.0  # for others to say that they were told to end as well
AGAIN_SECONDS = 1.0  # after a move that failed


@dataclasses.dataclass
class Drain:
    """Of one server."""

    why: str
    askers: list[tuple[int, int]]  #: operators, and the numbers of their questions
    shards: int  #: that it had


class Level:
    """See the head of this file."""

    def __init__(self, state: "State") -> None:
        self._state = state
        self.drains: dict[int, Drain] = {}  #: by server
        self.leaving: set[int] = set()  #: servers that were told to end, and of which it is not decided
        self.due = False  #: a server has joined, and it is not known that all are even
        self._steps: collections.deque[Step] = collections.deque()
        self._rests = False  # until the timer
        self._why = ""  # the last move failed

    # -- asking ------------------------------------------------------------------------------------------------------

    def asked(self, asker: int, question: m.Drain) -> None:
        """An operator wants a server emptied. Raises Wrong."""
        what = f"drain server {question.server}"
        if question.server in self._state.retired:
            self._state.tell([asker], m.Answer(question.number))
            return
        self._check(question.server, what)
        self.begin(question.server, "an operator asked for it")
        askers = self.drains[question.server].askers
        if (asker, question.number) not in askers:
            askers.append((asker, question.number))
        self.look()

    def joined(self, server: int) -> None:
        """One more than when training began."""
        self._state.log("info", f"server {server} joins: shards move to it")
        self._steps.clear()
        self._set_due(True)
        self.look()

    def _set_due(self, due: bool) -> None:
        if self.due != due:
            self.due = due
            self._state.note("cluster")

    def _clients_know(self) -> bool:
        """Whether whoever pushes and pulls can reach all servers: what it enters later, it enters there, too."""
        state = self._state
        count = len(state.server_peers())
        clients = (member for member in state.members.values() if member.join.role in ("worker", "reader"))
        return all(member.knows_servers >= count for member in clients)

    def _check(self, server: int, what: str) -> None:
        state = self._state
        if server in state.lost:
            raise Wrong("ServerLost", f"{what}: it is lost: {state.lost[server]}")
        if server not in state.servers:
            there = ", ".join(map(str, sorted(state.servers))) or "none"
            raise Wrong("InvalidArgument", f"{what}: there is no such server; expected one of {there}")
        if not state.servers.keys() - self.drains.keys() - {server}:
            raise Wrong("InvalidArgument", f"{what}: it is the last one, and nobody could take what it has")

    def begin(self, server: int, why: str) -> None:
        """Shards leave it from now on, and none come."""
        if server in self.drains:
            return
        state = self._state
        self.drains[server] = Drain(why, [], self.shards_of(server))
        state.note("drains", server)
        state.log("info", f"server {server} is drained of {self.drains[server].shards} shards: {why}")
        self._steps.clear()

    def says_leaving(self, member: "Member") -> None:
        """A server got SIGTERM."""
        if member.index not in self.drains:
            self.leaving.add(member.index)
            self._state.act(Timer("leaving", LEAVING_SECONDS))

    def decide(self) -> None:
        """Whether servers that are leaving were told so alone."""
        state = self._state
        leaving = sorted(self.leaving & state.servers.keys())
        self.leaving.clear()
        all_end = len(leaving) > 1 and 2 * len(leaving) >= len(state.servers)
        held = any(member.holds is not None for member in state.members.values())
        for server in leaving:
            try:
                if all_end or held or state.to_save or not state.ever_started:
                    raise Wrong("Closed", "others end, too")
                self._check(server, f"drain server {server}")
            except Wrong as wrong:
                state.log("info", f"server {server} ends without being drained: {wrong}")
                state.tell([state.servers[server]], m.Retire(str(wrong), drained=False))
            else:
                self.begin(server, "it was told to end")
        self.look()

    # -- moving ------------------------------------------------------------------------------------------------------

    def shards_of(self, server: int) -> int:
        """How many it has."""
        return sum(o.owners.count(server) for o in self._state.objects.values())

    def look(self) -> None:
        """Something has changed: what can be moved is, and who is empty ends."""
        state = self._state
        if not (self.drains or self.due) or state.ended:
            return
        busy = {end for v in state.moves.going.values() for end in (v.source, v.target)}
        for server in sorted(self.drains):
            if server in state.servers and server not in busy and not self.shards_of(server):
                self._retire(server)
        waits = self._rests or state.saves.going is not None or state.returning
        if (self.drains or self.due) and not waits and (not self.due or self._clients_know()):
            self._move_on()

    def _move_on(self) -> None:
        state = self._state
        if not self._steps:
            self._steps.extend(plan(self._items(), self.drains))
            if not self._steps and not state.moves.going and not self.drains:
                self._set_due(False)
        under_way: collections.Counter[int] = collections.Counter()
        for source, target, _ in {(v.source, v.target, v.question) for v in state.moves.going.values()}:
            under_way[source] += 1
            under_way[target] += 1
        waiting: collections.deque[Step] = collections.deque()
        while self._steps:
            step = self._steps.popleft()
            if under_way[step.source] >= AT_ONCE or under_way[step.target] >= AT_ONCE:
                waiting.append(step)
                if len(waiting) > AT_ONCE * len(state.servers):  # others would have to wait, too
                    break
                continue
            if self._set_off(step):
                under_way[step.source] += 1
                under_way[step.target] += 1
        self._steps.extendleft(reversed(waiting))

    def _set_off(self, step: Step) -> bool:
        """Whether anything has."""
        group, shard = step.item.key
        alike = self._groups().get(group, [])
        if step.target not in self._state.servers or step.target in self.drains:
            return False
        leaving = [o for o in alike if shard < len(o.owners) and o.owners[shard] == step.source]
        moving = {(v.object, v.shard) for v in self._state.moves.going.values()}
        leaving = [o for o in leaving if (o.number, shard) not in moving]
        self._state.moves.set_off(leaving, shard, step.target)
        return bool(leaving)

    def _groups(self) -> "dict[str, list[Object]]":
        groups: dict[str, list[Object]] = {}
        for o in self._state.objects.values():
            groups.setdefault(o.group, []).append(o)
        return groups

    def _items(self) -> dict[int, list[Item]]:
        """What every server has, shards that are alike as one; of tables by servers' reports, in equal parts."""
        state = self._state
        reports = {i: state.members[state.servers[i]].report.tables for i in state.load_bytes}
        found: dict[int, dict[tuple[str, int], int]] = {server: {} for server in state.load_bytes}
        for o in state.objects.values():
            counts = collections.Counter(o.owners)
            for shard, server in enumerate(o.owners):
                if server in found:
                    size = o.shard_bytes[shard]
                    if o.is_table:
                        size = reports[server].get(o.number, (0, 0))[1] // counts[server]
                    key = o.group, shard
                    found[server][key] = found[server].get(key, 0) + size
        return {server: [Item(size, key) for key, size in of.items()] for server, of in found.items()}

    def move_over(self, error: str) -> None:
        """One of any moves has ended."""
        if error and (self.drains or self.due):
            if error != self._why:
                self._state.log("warning", f"shards go on moving in a moment: {error}")
            self._why = error
            self._steps.clear()
            self._rests = True
            self._state.act(Timer("level", AGAIN_SECONDS))
            return
        self.look()

    def go_on(self) -> None:
        """After a rest."""
        self._rests = False
        self._steps.clear()
        self.look()

    def _retire(self, server: int) -> None:
        """It is empty."""
        state = self._state
        drain = self.drains.pop(server)
        state.note("drains", server)
        self._why = ""
        state.log("info", f"server {server} is empty, and ends")
        state.tell([state.servers[server]], m.Retire(drain.why, drained=True))
        state.retire(server, f"it was drained: {drain.why}")
        for asker, question in drain.askers:
            if asker in state.members:
                state.tell([asker], m.Answer(question))

    def server_gone(self, server: int, why: str) -> None:
        """It is lost, or has ended: what was planned is not true any more."""
        self.leaving.discard(server)
        self._steps.clear()
        if (drain := self.drains.pop(server, None)) is not None:
            self._state.note("drains", server)
            for asker, question in drain.askers:
                if asker in self._state.members:
                    self._state.tell([asker], m.Answer(question, "ServerLost", f"drain server {server}: {why}"))

    # -- for people --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Drains with what is left, and how even servers are."""
        loads = {server: sum(item.bytes for item in of) for server, of in self._items().items()}
        stays = {server: load for server, load in loads.items() if server not in self.drains}
        mean = sum(stays.values()) / max(1, len(stays))
        furthest = max((abs(load - mean) / mean for load in stays.values()), default=0.0) if mean else 0.0
        return {
            "joins": self.due,
            "drains": [
                {
                    "server": server,
                    "why": drain.why,
                    "shards": drain.shards,
                    "shards_left": self.shards_of(server),
                    "bytes_left": loads.get(server, 0),
                    "failed": self._why,
                }
                for server, drain in sorted(self.drains.items())
            ],
            "mean_bytes": round(mean),
            "furthest": round(furthest, 4),
            "even": is_even(stays),
        }
