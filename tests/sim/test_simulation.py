"""V3: the control plane and the session logic under seeded fates; what runs here is what ships."""

import collections
import re

import pytest

from windlass.testing.simulation import Violation, simulate

SEEDS, SEEDS_LONG = 200, 10_000


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
    least |= {"ledgers checked": 0.25, "shards alike": 0.5}
    for what, per_seed in least.items():
        assert counts[what] >= per_seed * seeds, f"{what}: {counts[what]}"


def test_promises_are_kept_under_two_hundred_fates():
    check_load(histories(range(SEEDS)), SEEDS)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_promises_are_kept_under_ten_thousand_fates():
    check_load(histories(range(SEEDS_LONG)), SEEDS_LONG)


def test_a_seed_gives_the_same_history_again():
    first, again = simulate(11), simulate(11)
    assert first.history.hexdigest() == again.history.hexdigest()
    assert first.counts == again.counts
    assert simulate(12).history.hexdigest() != first.history.hexdigest()


def test_a_gate_that_is_loose_by_one_is_noticed():
    complaints = []
    for seed in range(12):
        try:
            simulate(seed, "gate")
        except Violation as violation:
            complaints.append(str(violation))
    print(complaints)
    assert len(complaints) >= 10
    assert all("pulls" in text for text in complaints)


def test_clocks_that_do_not_move_with_their_shard_are_noticed():
    complaints = []
    for seed in range(24):
        try:
            simulate(seed, "clocks")
        except Violation as violation:
            complaints.append(str(violation))
    print(complaints)
    assert len(complaints) >= 4
    assert any("waits for ever" in text for text in complaints)


@pytest.mark.parametrize("broken", ["sequence", "records"])
def test_a_mechanism_that_is_off_is_noticed(broken: str):
    red = 0
    for seed in range(10):
        try:
            simulate(seed, broken)
        except Violation:
            red += 1
    assert red >= 5


def test_a_move_that_is_given_up_without_a_word_of_its_source_is_noticed():
    complaints = []
    for seed in range(40):
        try:
            simulate(seed, "moves")
        except Violation as violation:
            complaints.append(str(violation))
    print(complaints)
    assert sum("; the map says" in text for text in complaints) >= 4


def test_tensors_that_are_alike_and_placed_each_for_itself_are_noticed():
    complaints = []
    for seed in range(10):
        try:
            simulate(seed, "alike")
        except Violation as violation:
            complaints.append(str(violation))
    print(complaints)
    assert sum("of two tensors that are alike is on" in text for text in complaints) >= 4


def test_a_server_that_is_not_told_what_it_missed_is_noticed():
    complaints = []
    for seed in range(40):
        try:
            simulate(seed, "views")
        except Violation as violation:
            complaints.append(str(violation))
    print(complaints)
    assert len(complaints) >= 8
    assert all(re.fullmatch(r"server \d has come back and does not know view \d+", text) for text in complaints)


@pytest.mark.parametrize(
    ("broken", "complaint", "least"), [("leases", "epochs are done", 6), ("reports", "are counted as duplicates", 2)]
)
def test_a_ledger_that_forgets_the_dead_or_counts_twice_is_noticed(broken: str, complaint: str, least: int):
    complaints = []
    for seed in range(0, 48, 3):
        try:
            simulate(seed, broken)
        except Violation as violation:
            complaints.append(str(violation))
    print(complaints)
    assert sum(complaint in text for text in complaints) >= least
