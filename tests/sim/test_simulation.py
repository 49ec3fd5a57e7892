"""V3: the control plane and the session logic under seeded fates; what runs here is what ships."""

import collections
import re

import pytest

from windlass.testing.simulation import Violation, simulate

SEEDS, EACH, SEEDS_LONG = 200, 100, 10_000


def histories(seeds: range) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        try:
            counts += simulate(seed).counts
        except Violation as violation:
            pytest.fail(f"seed {seed} (python -m windlass.testing.simulation --seed {seed} --seeds 1): {violation}")
    return counts


def check_load(counts: collections.Counter[str], seeds: int) -> None:
    """A run in which too little happened would be no evidence."""
    print(f"{seeds} histories: {dict(counts)}")
    least = {"pushes": 500, "frames dropped": 50, "frames duplicated": 50, "moves done": 2, "break": 2, "partition": 1}
    least |= {"deaths": 1, "crash": 0.5, "still": 1, "jump": 0.5, "shards checked": 2}
    least |= {"views checked": 1.5, "views that wait": 2, "views of a start": 2.5, "views without workers": 0.1}
    least |= {"blackout": 0.1, "servers back": 5, "moves cancelled": 0.1, "apps that grew": 0.5}
    least |= {"iterations": 100, "pulls": 200, "waits": 100, "updates": 25, "workers that go on": 1}
    least |= {"batches": 50, "recalls": 2, "ranges taken back": 2, "duplicates": 5, "leases asked for again": 1}
    least |= {"resets of who stands still": 0.5, "ends known": 0.2, "living given up": 0.2}
    least |= {"ledgers checked": 0.15, "shards alike": 0.5}
    least |= {"join": 0.5, "servers drained": 0.1}
    least |= {"schedulers killed": 0.4, "journals checked": 4, "joins that wait": 1, "ledgers made again": 0.08}
    least |= {
        "barriers": 100,
        "barriers passed": 30,
        "all-reduces": 30,
        "arrivals repeated": 20,
        "arrivals asked for again": 2,
        "workers that pass barriers": 2,
    }
    for what, per_seed in least.items():
        assert counts[what] >= per_seed * seeds, f"{what}: {counts[what]}"


@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_promises_are_kept_under_two_hundred_fates(first: int):
    check_load(histories(range(first, first + EACH)), EACH)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_promises_are_kept_under_ten_thousand_fates():
    check_load(histories(range(SEEDS_LONG)), SEEDS_LONG)


def test_a_seed_gives_the_same_history_again():
    first, again = simulate(11), simulate(11)
    assert first.history.hexdigest() == again.history.hexdigest()
    assert first.counts == again.counts
    assert simulate(12).history.hexdigest() != first.history.hexdigest()


def complaints(broken: str, seeds: range, complaint: str, enough: int) -> list[str]:
    """What simulations of a broken mechanism say, until so many of them have said what they should."""
    said: list[str] = []
    for seed in seeds:
        try:
            simulate(seed, broken)
        except Violation as violation:
            said.append(str(violation))
        if sum(bool(re.search(complaint, text)) for text in said) >= enough:
            return said
    pytest.fail(f"of {len(seeds)} simulations too few said {complaint!r}: {said}")


def test_a_gate_that_is_loose_by_one_is_noticed():
    said = complaints("gate", range(12), "pulls", 10)
    assert all("pulls" in text for text in said)


def test_clocks_that_do_not_move_with_their_shard_are_noticed():
    assert len(complaints("clocks", range(24), "", 4)) == 4
    complaints("clocks", range(24), "waits for ever", 1)


@pytest.mark.parametrize("broken", ["sequence", "records"])
def test_a_mechanism_that_is_off_is_noticed(broken: str):
    complaints(broken, range(10), "", 5)


def test_a_broken_connection_that_counts_as_the_end_of_its_process_is_noticed():
    complaints("grace", range(10), "was given up after", 5)


def test_a_move_that_is_given_up_without_a_word_of_its_source_is_noticed():
    complaints("moves", range(120), "; the map says", 3)


def test_tensors_that_are_alike_and_placed_each_for_itself_are_noticed():
    complaints("alike", range(10), "of two tensors that are alike is on", 4)


def test_a_server_that_is_not_told_what_it_missed_is_noticed():
    said = complaints("views", range(40), "", 8)
    assert all(re.fullmatch(r"server \d has come back and does not know view \d+", text) for text in said)


def test_a_journal_that_lags_behind_what_was_told_is_noticed():
    complaints("journal", range(24), "", 6)


@pytest.mark.parametrize(
    ("broken", "complaint", "least"), [("leases", "epochs are done", 6), ("reports", "are counted as duplicates", 2)]
)
def test_a_ledger_that_forgets_the_dead_or_counts_twice_is_noticed(broken: str, complaint: str, least: int):
    complaints(broken, range(0, 48, 3), complaint, least)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ("replacement", "being waited for"),
        ("departure", "all have arrived at barrier"),
        ("repeats", "is passed without"),
        ("sums", "the result of barrier"),
    ],
)
def test_a_barrier_that_miscounts_is_noticed(broken: str, complaint: str):
    complaints(broken, range(30), complaint, 4)
