"""R14 for what a server holds for clients: requests that wait, and answers that nobody reads. Memory stays within the
caps, and whoever reads goes on. With the mechanism switched off (WINDLASS_BREAK), the same load is red."""

import json
import pathlib

import pytest
from helpers import PATIENCE_S, check_python

MIB = 1 << 20
ROOM_BYTES = 64 * MIB  # what the process may take besides its caps


def figures_of(call: str, **environment: str) -> dict[str, int]:
    here = pathlib.Path(__file__).parent
    path = f"{here}:{here.parent}"
    said = check_python(f"import hoarders; hoarders.{call}", timeout=PATIENCE_S, PYTHONPATH=path, **environment)
    print(said)
    return json.loads(said)


def is_within_caps(seen: dict[str, int]) -> bool:
    return seen["rss_bytes"] <= seen["caps_bytes"] + ROOM_BYTES


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_pulls_at_a_gate_stay_within_the_caps_before_and_after_it_opens(kind: str, accurate: bool):
    seen = figures_of(f"at_a_gate({kind!r}, {6000 if accurate else 600})")
    assert seen["taken"] >= 30, "invalid: they did not wait at the server"
    assert is_within_caps(seen)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_clients_that_read_nothing_stay_within_the_caps_and_a_worker_trains_on(kind: str, accurate: bool):
    seen = figures_of(f"without_reading({kind!r}, {64 if accurate else 32}, 15)")
    assert seen["taken"] >= 16, "invalid: they did not ask"
    assert is_within_caps(seen)


def test_a_pull_of_more_than_there_is_room_for_is_refused():
    """Four clients ask for 150 MiB each, in one answer."""
    seen = figures_of("without_reading('unix', 4, 600)")
    assert is_within_caps(seen)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_bsp_over_sockets_holds_no_copy_of_the_model_per_worker(kind: str, accurate: bool):
    workers = 16
    seen = figures_of(f"honest_bsp({kind!r}, {workers}, {20 if accurate else 2})")
    assert is_within_caps(seen)


def test_without_the_mechanism_the_same_load_is_red():
    """Answers are made when the gate opens, and nobody asks how much memory they take."""
    seen = figures_of("at_a_gate('unix', 600)", WINDLASS_BREAK="answers")
    assert not is_within_caps(seen)
