"""The ledger of leased data, and what a worker holds of it: pure, with workers that die, stall and are not heard."""

import collections
import random

import pytest
from brain import started

from windlass.control import messages as m
from windlass.control.api import metrics_text, status_of
from windlass.control.holding import Batch, Holding
from windlass.control.leases import BadLease, Ledger, pack, unpack

TERMS = m.LeaseTerms(samples=100, batch=5, range=10, epochs=2, shuffle=True, seed=0)


def terms(**changed: object) -> m.LeaseTerms:
    return m.LeaseTerms(**{f: getattr(TERMS, f) for f in TERMS.__struct_fields__} | changed)  # type: ignore[arg-type]


class Hand:
    """A worker at a ledger that answers at once."""

    def __init__(self, ledger: Ledger, who: int, workers: int = 2) -> None:
        self.ledger, self.who, self.workers = ledger, who, workers
        self.holding = Holding("data", ledger.terms)
        self.open: list[Batch] = []  # the last ones of their ranges, not closed

    def ask(self) -> m.Leased:
        while (answer := self.ledger.ask(self.who, self.workers, self.holding.question(1))).again:
            self.holding.answered(answer)
        self.holding.answered(answer)
        return answer

    def draw(self) -> Batch | None:
        if (batch := self.holding.draw()) is None:
            self.ask()
            batch = self.holding.draw()
        if batch is not None and batch.last:
            self.open.append(batch)
        return batch

    def close(self) -> None:
        for batch in self.open:
            self.holding.done(batch.key)
        self.open.clear()

    def range(self) -> tuple[int, int] | None:
        """Uses up the next range, and reports it."""
        while (batch := self.draw()) is not None:
            if batch.last:
                self.close()
                self.ask()
                return batch.key
        return None


def drain(*hands: Hand) -> list[tuple[int, int]]:
    """What they do in turns until the epoch is over for all of them."""
    used, left = [], list(hands)
    while left:
        for hand in list(left):
            if (key := hand.range()) is None:
                left.remove(hand)
            else:
                used.append(key)
    return used


def test_runs_are_packed_and_unpacked():
    keys = [(0, 1), (0, 2), (0, 4), (1, 5), (1, 6)]
    assert pack(keys) == [(0, 1, 2), (0, 4, 1), (1, 5, 2)]
    assert list(unpack(pack(keys))) == keys


def test_an_epoch_is_done_exactly_and_the_next_follows():
    ledger = Ledger(terms(samples=97))
    hands = [Hand(ledger, i) for i in range(2)]
    for epoch in range(2):
        for hand in hands:
            hand.holding.enter(epoch)
        drain(*hands)
        assert ledger.complete == epoch + 1
        assert ledger.counted == 97 * (epoch + 1)
    assert sum(hand.holding.samples_done for hand in hands) == ledger.counted + ledger.duplicates
    assert sum(hand.holding.duplicates for hand in hands) == ledger.duplicates
    assert ledger.status()["free"] == ledger.status()["held"] == 0


def test_batches_are_cut_within_ranges_and_the_last_is_smaller():
    hand = Hand(Ledger(terms(samples=28, range=10, batch=4)), 1, workers=1)
    batches = []
    while (batch := hand.draw()) is not None:
        batches.append((batch.begin, batch.end, batch.last))
        hand.close()
    expected = [(0, 4, False), (4, 8, False), (8, 10, True), (10, 14, False), (14, 18, False), (18, 20, True)]
    assert batches == [*expected, (20, 24, False), (24, 28, True)]


def test_a_worker_holds_no_more_than_its_share_of_an_epoch_and_goes_on_with_the_next():
    hand = Hand(Ledger(TERMS), 1, workers=4)
    hand.holding.want = 5
    assert hand.ask().held == [(0, 0, 3), (1, 0, 2)]


def test_what_the_dead_held_is_done_by_others():
    ledger = Ledger(TERMS)
    dead, other = Hand(ledger, 1), Hand(ledger, 2)
    dead.holding.want = 5
    dead.draw()
    dead.range()
    dead.draw()  # begun, not done
    ledger.left(1)
    used = drain(other)
    assert sorted(used) == [(0, i) for i in range(1, 10)]
    assert (ledger.complete, ledger.counted, ledger.duplicates) == (1, 100, 0)


class Naive(Ledger):
    """Gives every range once, to whoever asks first, for good."""

    def left(self, who: int) -> None:
        pass

    def _take_back(self, *_: object) -> bool:
        return False

    def _copy(self, *_: object) -> bool:
        return False


def test_without_taking_back_from_the_dead_the_epoch_is_never_done():
    ledger = Naive(TERMS)
    dead, other = Hand(ledger, 1), Hand(ledger, 2)
    dead.draw()
    ledger.left(1)
    drain(other)
    assert (ledger.complete, ledger.counted) == (0, 80)


def test_what_a_slow_worker_has_not_begun_is_taken_back_and_what_it_has_begun_is_given_twice():
    ledger = Ledger(TERMS)
    slow, quick = Hand(ledger, 1), Hand(ledger, 2)
    slow.holding.want = 5
    slow.draw()
    used = drain(quick)
    assert sorted(used) == [(0, i) for i in range(10)]
    assert slow.who in ledger.recalled
    assert ledger.complete == 1
    slow.ask()
    assert slow.holding.taken_back == 4
    assert slow.holding.draw() is None  # the rest of a range that another has done is of no use
    slow.ask()
    assert (ledger.counted, ledger.duplicates, slow.holding.duplicates) == (100, 5, 5)


def test_what_was_begun_before_the_taking_back_was_heard_of_is_gone_on_with_and_counted_once():
    ledger = Ledger(TERMS)
    slow, quick = Hand(ledger, 1), Hand(ledger, 2)
    slow.holding.want = 5
    slow.ask()
    question = slow.holding.question(2)  # nothing is begun, it says
    slow.draw()
    drain(quick)  # takes everything
    slow.holding.answered(ledger.ask(1, 2, question))
    batch = slow.draw()
    assert batch is not None
    assert batch.last
    slow.close()
    slow.ask()
    assert (ledger.counted, ledger.duplicates) == (100, 10)


def test_nobody_gets_a_range_that_two_have_and_its_epoch_ends():
    ledger = Ledger(terms(samples=10, epochs=1))
    hands = [Hand(ledger, i, workers=3) for i in range(3)]
    assert [hand.draw() is not None for hand in hands] == [True, True, False]
    assert hands[2].holding.ended
    ledger.left(0)
    ledger.left(1)
    hands[2].holding.enter(0)
    assert hands[2].draw() is not None


def test_a_range_of_an_epoch_before_that_comes_back_goes_first():
    ledger = Ledger(terms(samples=20))
    one, other, third = (Hand(ledger, i, workers=3) for i in range(3))
    for hand in (one, other):
        hand.draw()
    one.draw(), one.draw()
    other.draw(), other.draw()  # both have begun both
    assert third.draw() is None
    third.holding.enter(1)
    third.holding.want = 1
    assert third.range() == (1, 0)
    ledger.left(0)
    ledger.left(1)
    assert drain(third) == [(0, 0), (0, 1), (1, 1)]
    assert (ledger.complete, ledger.counted) == (2, 40)


def test_questions_and_answers_may_be_lost_and_repeated():
    for seed in range(200):
        draw = random.Random(seed)
        ledger = Ledger(TERMS)
        hands = [Hand(ledger, i, 3) for i in range(3)]
        seen: collections.Counter[tuple[int, int, int]] = collections.Counter()
        left = dict.fromkeys(range(3), 0)
        number = 3
        for _ in range(3000):
            if not left:
                break
            who = draw.choice(list(left))
            hand = next(hand for hand in hands if hand.who == who)
            hand.holding.want = draw.randrange(6)
            if draw.random() < 0.3:
                question = hand.holding.question(1)
                answers = [ledger.ask(who, 3, question) for _ in range(draw.randrange(1, 3))]
                if draw.random() < 0.7:
                    hand.holding.answered(draw.choice(answers))
                continue
            if draw.random() < 0.01 and len(left) > 1:
                ledger.left(who)
                hands.append(Hand(ledger, number, 3))
                left[number] = 0
                number += 1
                del left[who]
                continue
            if (batch := hand.draw()) is not None:
                seen[batch.key[0], batch.begin, batch.end] += 1
                if draw.random() < 0.5:
                    hand.close()
                    hand.ask()
            else:
                hand.close()
                hand.ask()
                if left[who] == 0:
                    left[who] = 1
                    hand.holding.enter(1)
                elif ledger.complete == 2 or not hand.open:
                    ledger.left(who)
                    del left[who]
        assert ledger.complete == 2, f"seed {seed}: {ledger.status()}"
        assert ledger.counted == 200
        assert len(seen) == 40


def test_a_ledger_that_is_made_again_asks_for_everything_and_counts_nothing_twice():
    ledger = Ledger(TERMS)
    hands = [Hand(ledger, i) for i in range(2)]
    for _ in range(3):
        for hand in hands:
            hand.range()
    assert (ledger.counted, ledger.duplicates) == (60, 0)
    anew = Ledger(TERMS)
    for hand in hands:
        hand.ledger = anew
        hand.ask()
    assert (anew.counted, anew.duplicates) == (60, 0)
    drain(*hands)
    assert (anew.complete, anew.counted, anew.duplicates) == (1, 100, 0)
    for hand in hands:
        hand.holding.enter(1)
    hands[0].range()
    last = Ledger(TERMS)
    for hand in hands:
        hand.ledger = last
        hand.ask()
    assert last.complete == 1  # that is known, so all of it was done
    assert (last.counted, last.duplicates) == (110, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"held": [(2, 0, 1)]},
        {"begun": [(0, 9, 2)]},
        {"held": [(0, 0, 2**32 - 1)]},
        {"done": [(0, 10, 1)]},
        {"done": [(0, 0, 11)]},
        {"epoch": 2},
        {"complete": 3},
    ],
)
def test_what_does_not_fit_the_terms_is_refused(wrong: dict[str, object]):
    said = {"epoch": 0, "complete": 0, **wrong}
    question = m.Lease(1, "data", TERMS, hungry=False, want=1, whole=True, **said)  # type: ignore[arg-type]
    with pytest.raises(BadLease):
        Ledger(TERMS).ask(1, 1, question)


# -- in the scheduler ------------------------------------------------------------------------------------------------


def ask(number: int = 1, of: m.LeaseTerms = TERMS, **said: object) -> m.Lease:
    said = {"epoch": 0, "hungry": True, "want": 4, "complete": 0, "whole": True, **said}
    return m.Lease(number, "data", of, **said)  # type: ignore[arg-type]


def test_the_scheduler_leases_takes_back_from_the_dead_and_shows_it():
    brain = started(workers=2, linger=True)
    first = brain.ask(200, ask()).leased
    assert first is not None
    assert first.held == [(0, 0, 4)]
    second = brain.ask(201, ask(want=10)).leased
    assert second is not None
    assert second.held == [(0, 4, 5), (1, 0, 5)]
    ledger = brain.state.ledgers["default", "data"]
    assert (ledger.status()["held"], ledger.status()["free"]) == (9, 1)
    brain.die(200)
    assert (ledger.status()["held"], ledger.status()["free"]) == (5, 5)
    brain.say(201, m.Leave())
    assert brain.state.ledgers["default", "data"].status()["free"] == 10  # shown until the app starts again
    brain.workers(2, first=500)
    assert not brain.state.ledgers


def test_status_and_metrics_show_ledgers():
    brain = started(workers=2)
    brain.ask(200, ask())
    brain.ask(200, ask(2, done=[(0, 0, 10), (0, 1, 10), (0, 0, 5)], hungry=False))
    [shown] = status_of(brain.state, {}, {}, 0.0)["leases"]
    expected = {"app": "default", "name": "data", "samples": 100, "epochs": 2, "epoch": 0, "ranges": 10, "done": 2}
    assert expected.items() <= shown.items()
    assert (shown["held"], shown["free"], shown["samples_done"], shown["duplicates"]) == (4, 4, 20, 5)
    text = metrics_text(brain.state, {}).decode()
    for line in (
        'windlass_lease_epoch{app="default",lease="data"} 0.0',
        'windlass_lease_ranges{app="default",lease="data",state="held"} 4.0',
        'windlass_lease_samples_total{app="default",lease="data"} 20.0',
        'windlass_lease_duplicates_total{app="default",lease="data"} 5.0',
    ):
        assert line in text


def test_the_scheduler_tells_who_holds_less():
    brain = started(workers=2)
    brain.ask(200, ask(want=10, hungry=False, of=(of := terms(epochs=1, samples=40))))
    brain.ask(201, ask(want=10, hungry=False, of=of))
    brain.ask(201, ask(2, begun=[(0, 2, 2)], whole=False, of=of))
    assert brain.last(200, m.Recall).name == "data"


def test_other_terms_under_the_same_name_are_refused():
    brain = started(workers=2)
    brain.ask(200, ask())
    answer = brain.ask(201, ask(of=terms(seed=1)))
    assert answer.error == "SpecMismatch"
    assert "shuffled by seed 0" in answer.why
    assert "shuffled by seed 1" in answer.why
    assert brain.ask(201, ask(epoch=5)).error == "InvalidArgument"


def test_a_reader_takes_no_leases():
    brain = started()
    brain.join("reader", 400)
    brain.say(400, ask())
    assert brain.last(400, m.Refused).error == "ProtocolError"
