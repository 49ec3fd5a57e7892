"""Shards on their way from one server to another, as the scheduler orders them. Pure, like State, whose part it is.

    Move ---> MoveShard to the source ---> Moved: the map changes, ShardMoved to all, Answer
                         its target is gone ---> CancelMove to the source ---> Moved: it has left, or stays

Shards of tensors that are alike move together, at most four to one server at a time. Only the source ends a move, or
its own end. A term is used once, also by a move that fails.
"""

from typing import TYPE_CHECKING

from windlass.control import messages as m
from windlass.control.model import Moving, Object
from windlass.control.refusal import Wrong

if TYPE_CHECKING:
    from windlass.control.state import State

TO_ONE_MAX = 4  # at once; a server takes twice as many, since one that was given up may still hold a place


class Moves:
    """See the head of this file."""

    def __init__(self, state: "State") -> None:
        self._state = state
        self.going: dict[int, Moving] = {}
        self.next = 1  #: the number of the next one
        self.last_term: dict[tuple[int, int], int] = {}  #: of shards that were to move: a failed move uses its term up
        self.errors: dict[tuple[int, int], str] = {}  #: the first one, by who asked for moves and under which number

    def asked(self, asker: int, question: m.Move) -> None:
        """An operator wants a shard elsewhere. Raises Wrong."""
        state = self._state
        what = f"move of shard {question.shard} of {question.name!r}"
        if question.name not in state.by_name:
            raise Wrong("NotFound", f"{what}: there is no such object")
        there = state.objects[state.by_name[question.name]]
        if question.shard >= len(there.owners):
            raise Wrong("InvalidArgument", f"{what}: it has shards 0 to {len(there.owners) - 1}")
        alike = [o for o in state.objects.values() if o.group == there.group]
        for server in (*(o.owners[question.shard] for o in alike), question.server):
            if server not in state.servers:
                raise Wrong("ServerLost", f"{what}: there is no server {server}")
        if question.server in state.level.drains:
            raise Wrong("InvalidArgument", f"{what}: server {question.server} is being drained")
        if (going := state.saves.going) is not None and any(o.number in going.objects for o in alike):
            raise Wrong("InvalidArgument", f"{what}: checkpoint {going.id} is being taken of it; try again")
        leaving = [o for o in alike if o.owners[question.shard] != question.server]
        if not leaving:
            state.tell([asker], m.Answer(question.number))
            return
        if any((v.asker, v.question) == (asker, question.number) for v in self.going.values()):
            return  # it was away, and asks again
        numbers = {o.number for o in alike}
        if any(v.object in numbers and v.shard == question.shard for v in self.going.values()):
            raise Wrong("InvalidArgument", f"{what}: it is on its way already")
        for o in leaving:
            self._set_off(o, question.shard, question.server, asker, question.number)

    def set_off(self, alike: list[Object], shard: int, target: int) -> None:
        """The scheduler's own wish: shards of tensors that are alike, as one errand."""
        question = self.next
        for o in alike:
            self._set_off(o, shard, target, 0, question)

    def _set_off(self, there: Object, shard: int, target: int, asker: int, question: int) -> None:
        at, source = (there.number, shard), there.owners[shard]
        term = self.last_term[at] = max(self.last_term.get(at, 0), there.terms[shard]) + 1
        move, self.next = self.next, self.next + 1
        self.going[move] = Moving(*at, source, target, term, asker, question)
        self._state.note("moves", move)
        self._state.note("shards", f"{at[0]}/{at[1]}")
        self._state.note("cluster")
        self._order_to(target)

    def _order_to(self, target: int) -> None:
        """To a server that has room for them, the oldest first."""
        state = self._state
        to = [(move, v) for move, v in self.going.items() if v.target == target and not v.gone]
        room = TO_ONE_MAX - sum(v.ordered for _, v in to)
        waiting = [(move, v) for move, v in to if not v.ordered and v.source in state.servers]
        for move, v in waiting[: max(0, room)]:
            v.ordered = True
            state.note("moves", move)
            state.tell([state.servers[v.source]], self._order(move, v))

    def follow(self, made: Object) -> None:
        """A tensor that is like others, some of whose shards are on their way: its own go along."""
        state = self._state
        alike = {o.number for o in state.objects.values() if o.group == made.group and o is not made}
        under_way = {v.shard: v for v in self.going.values() if v.object in alike and not v.gone}
        for shard, v in under_way.items():
            if v.target != made.owners[shard]:
                self._set_off(made, shard, v.target, v.asker, v.question)

    def _order(self, move: int, v: Moving) -> m.MoveShard | m.CancelMove:
        """With what the object is: whoever opened it may not have told the server yet."""
        state = self._state
        if v.gone:
            return m.CancelMove(move, v.object, v.shard, v.target, v.term)
        address = state.members[state.servers[v.target]].join.addresses[0]
        placed = state.objects[v.object].placed()
        return m.MoveShard(move, v.object, v.shard, v.target, address, v.term, placed.spec, placed.runs)

    def _target_gone(self, move: int, v: Moving, why: str) -> None:
        """The shard may have left for it, or may still do so: only its source knows, if it was told."""
        state = self._state
        v.gone = why
        state.note("moves", move)
        if not v.ordered:
            self._over(move, why)
            return
        state.tell([state.servers[v.source]], self._order(move, v))

    def said(self, server: int, move: int, error: str) -> None:
        """The source's word."""
        v = self.going.get(move)
        if v is not None and v.ordered and v.source == server:
            self._over(move, error)

    def server_gone(self, index: int, why: str) -> None:
        """What was on its way from there or to there."""
        for move, v in list(self.going.items()):
            if index == v.source:
                self._over(move, why)
            elif index == v.target:
                self._target_gone(move, v, why)

    def object_over(self, number: int, why: str) -> None:
        """It is no more."""
        for at in self.last_term:
            if at[0] == number:
                self._state.note("shards", f"{at[0]}/{at[1]}")
        self.last_term = {at: term for at, term in self.last_term.items() if at[0] != number}
        for move, v in list(self.going.items()):
            if v.object == number:
                self._over(move, why)

    def catch_up(self, member: int) -> None:
        """What somebody who was away may have missed."""
        state = self._state
        for object_, shard in self.last_term:
            if (there := state.objects.get(object_)) is not None:
                state.tell([member], m.ShardMoved(object_, shard, there.owners[shard], there.terms[shard]))
        for move, v in self.going.items():
            if state.servers.get(v.source) == member and v.ordered:
                state.tell([member], self._order(move, v))

    def _over(self, move: int, error: str) -> None:
        state = self._state
        v = self.going.pop(move)
        state.note("moves", move)
        state.note("shards", f"{v.object}/{v.shard}")
        if v.target in state.servers:
            self._order_to(v.target)
        there = state.objects.get(v.object)
        if not error and there is not None:
            there.owners[v.shard], there.terms[v.shard] = v.target, v.term
            state.load_bytes[v.source] -= there.shard_bytes[v.shard]
            if not v.gone:
                state.load_bytes[v.target] += there.shard_bytes[v.shard]
            others = [n for n, other in state.members.items() if other.join.role != "operator"]
            state.tell(others, m.ShardMoved(v.object, v.shard, v.target, v.term))
            state.tell_objects(state.servers.values(), [there])
            state.log("info", f"shard {v.shard} of {there.name!r} moved from server {v.source} to {v.target}")
            if v.gone:
                state.shards_lost += 1
                state.note("cluster")
                state.log("error", f"shard {v.shard} of {there.name!r} is lost: {v.gone}")
        error = error or v.gone
        errand = (v.asker, v.question)
        if error:
            self.errors.setdefault(errand, error)
            state.note("errands", f"{v.asker}/{v.question}")
        if any((other.asker, other.question) == errand for other in self.going.values()):
            return  # it is answered when all shards that are alike have come
        error = self.errors.pop(errand, "")
        state.note("errands", f"{v.asker}/{v.question}")
        if error and there is not None and v.asker:
            self._bring_together(there.group, v.shard, v.source)
        if v.asker in state.members:
            state.tell([v.asker], m.Answer(v.question, "ServerLost" if error else "", error))
        state.level.move_over(error)

    def _bring_together(self, group: str, shard: int, home: int) -> None:
        """Some shards that are alike have moved and some could not: those that did go back, once."""
        state = self._state
        away = [o for o in state.objects.values() if o.group == group and o.owners[shard] != home]
        apart = len({o.owners[shard] for o in state.objects.values() if o.group == group}) > 1
        if not apart or home not in state.servers or any(o.owners[shard] not in state.servers for o in away):
            return
        for o in away:
            self._set_off(o, shard, home, 0, self.next)
