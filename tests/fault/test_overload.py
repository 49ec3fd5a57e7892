"""R14: pushes at full speed against a server that does not keep up. Memory stays bounded, and whoever pushes waits."""

import json
import pathlib

import pytest
from helpers import PATIENCE_S, check_python

KINDS = pytest.mark.parametrize("kind", ["tcp", "unix"])
MIB = 1 << 20
KEPT_BYTES_MAX = 64 * MIB  # limits::kKeptBytesMax: copies of ordinary arrays under way
ROOM_BYTES = 80 * MIB  # what else a process may take meanwhile


def figures_of(call: str) -> dict[str, float]:
    here = pathlib.Path(__file__).parent
    said = check_python(f"import pressure; pressure.{call}", timeout=PATIENCE_S, PYTHONPATH=f"{here}:{here.parent}")
    print(said)
    return json.loads(said)


@pytest.mark.parametrize(
    ("kind", "what", "calls"),
    [("tcp", "large", 50), ("unix", "large", 50), ("tcp", "small", 170), ("unix", "table", 130)],
)
def test_pushes_to_a_stopped_server_wait_within_bounded_memory_and_are_applied_once(kind: str, what: str, calls: int):
    seen = figures_of(f"against_stopped({kind!r}, {what!r}, {calls})")
    assert seen["refused"] > 30, "invalid: nobody had to wait"
    assert seen["applied"] == seen["begun"] > 0
    assert seen["grown_bytes"] < KEPT_BYTES_MAX + ROOM_BYTES


@pytest.mark.parametrize("what", ["large push_pull", "table push_pull"])
def test_push_pulls_that_time_out_take_no_more_memory_than_pushes_and_are_applied_once(what: str):
    """Each leaves a copy of what it pushes behind, which goes on being sent."""
    seen = figures_of(f"against_stopped('tcp', {what!r}, 50)")
    assert seen["late"] + seen["refused"] > 30, "invalid: nobody had to wait"
    assert seen["applied"] == seen["begun"] > 0
    assert seen["grown_bytes"] < KEPT_BYTES_MAX + ROOM_BYTES


def test_requests_that_could_not_begin_take_no_memory():
    seen = figures_of("refused('tcp', 100)")
    assert seen["refused"] == 100, "invalid: some could"
    assert seen["grown_bytes"] < 16 * MIB


@KINDS
def test_pushes_to_a_server_slowed_ten_times_take_bounded_memory_on_both_sides(kind: str, accurate: bool):
    seen = figures_of(f"against_slow({kind!r}, 'large', seconds={30 if accurate else 3})")
    assert seen["applied"] == seen["begun"] > 3
    assert seen["grown_bytes"] < KEPT_BYTES_MAX + ROOM_BYTES
    assert seen["server_grown_bytes"] < ROOM_BYTES
