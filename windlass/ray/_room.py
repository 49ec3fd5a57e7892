"""A placement group: the room that servers and workers have on the nodes of a Ray cluster.

    bundle   0 .. S-1    servers; the scheduler is in bundle 0, too, and takes nothing of it
             S .. S+W-1  workers, by rank

Ray gives all of it or nothing, so no part of a run holds resources while the rest waits for them. A bundle stays its
owner's: who is started again comes back to it, and if its node is lost, Ray finds the bundle another.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from windlass._errors import InvalidArgument, Timeout

Resources = Mapping[str, float]
_SAID_SECONDS = 5.0  # until a wait for room is explained
_PLAIN = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # what Ray calls them as options of an actor
_log = logging.getLogger("windlass")


def checked(resources: Resources | None, who: str) -> dict[str, float]:
    """What one server or worker is to have: a CPU, unless it says otherwise."""
    given = dict(resources or {})
    for name, amount in given.items():
        if not isinstance(name, str) or isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0:
            raise InvalidArgument(f'{who}: expected amounts by name, such as {{"CPU": 4}}, not {name!r}: {amount!r}')
    wanted = {name: float(amount) for name, amount in {"CPU": 1, **given}.items() if amount > 0}
    if not wanted:
        raise InvalidArgument(f"{who}: expected at least one resource, for Ray has no place for who needs none")
    return wanted


class Room:
    """See the head of this file. ray: the package."""

    def __init__(
        self, ray: Any, servers: list[dict[str, float]], workers: list[dict[str, float]], strategy: str
    ) -> None:
        from ray.util import placement_group

        self._ray = ray
        self._kinds = {"server": servers, "worker": workers}
        self._bundles = [*servers, *workers]
        self._strategy = strategy
        self._group = placement_group([dict(bundle) for bundle in self._bundles], strategy=strategy)

    def wait(self, seconds: float, who: str) -> None:
        """Until all of it is there. Raises Timeout, which says what there is and what is missing."""
        deadline = time.monotonic() + seconds
        if self._group.wait(min(seconds, _SAID_SECONDS)):
            return
        if (left := deadline - time.monotonic()) > 0:
            _log.warning("%s: waits up to %g s for room; %s", who, left, self.missing())
            if self._group.wait(left):
                return
        raise Timeout(f"{who}: Ray has had no room within {seconds:g} s\n{self.missing()}")

    def options(self, bundle: int, *, takes_nothing: bool = False) -> dict[str, Any]:
        """For an actor that is to be in a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = {} if takes_nothing else self._bundles[bundle]
        return {
            "num_cpus": 0,
            **{option: wanted[name] for name, option in _PLAIN.items() if name in wanted},
            "resources": {name: amount for name, amount in wanted.items() if name not in _PLAIN},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            ),
            "max_restarts": 0,
        }

    def node_of(self, bundle: int) -> str:
        """The id of the node where it is; empty while Ray looks for another one."""
        from ray.util import placement_group_table

        return str(placement_group_table(self._group)["bundles_to_node_id"].get(bundle, ""))

    def missing(self) -> str:
        """What is wanted, what there is, and what of it is missing."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        total, free = (_numbers(found()) for found in (self._ray.cluster_resources, self._ray.available_resources))
        wanted: dict[str, float] = {}
        for bundle in self._bundles:
            for name, amount in bundle.items():
                wanted[name] = wanted.get(name, 0.0) + amount
        kinds = [f"{_count(len(each), kind)} of {_said(each[0])}" for kind, each in self._kinds.items() if each]
        there = "; ".join(f"{node['NodeManagerAddress']}: {_said(_only(node['Resources'], wanted))}" for node in nodes)
        lines = [
            f"  wanted:   {' and '.join(kinds)}, {self._strategy}: {_said(wanted)}",
            f"  there is: {_said(_only(total, wanted))} on {_count(len(nodes), 'node')} ({there})",
            f"  free:     {_said(_only(free, wanted))}",
        ]
        short = {
            name: amount - total.get(name, 0.0) for name, amount in wanted.items() if amount > total.get(name, 0.0)
        }
        held = {name: amount - free.get(name, 0.0) for name, amount in wanted.items() if amount > free.get(name, 0.0)}
        if short:
            lines.append(f"  missing:  {_said(short)}, which the cluster does not have")
        elif held:
            lines.append(f"  missing:  {_said(held)}, which others use")
        else:
            lines.append(f"  missing:  {self._fits_nowhere(nodes)}")
        return "\n".join(lines)

    def _fits_nowhere(self, nodes: list[dict[str, Any]]) -> str:
        """What is wrong where there is enough of everything in all."""
        for kind, each in self._kinds.items():
            if each and not any(_fits(each[0], node["Resources"]) for node in nodes):
                return f"a node with {_said(each[0])} for a {kind}"
        if self._strategy == "STRICT_PACK":
            return "a node that has it all, as STRICT_PACK wants"
        if self._strategy == "STRICT_SPREAD" and len(nodes) < len(self._bundles):
            return f"a node for each of {len(self._bundles)}, as STRICT_SPREAD wants; there are {len(nodes)}"
        return "nodes with enough of everything free at once"

    def close(self) -> None:
        """Gives it back; Ray ends what is still in it."""
        from ray.util import remove_placement_group

        remove_placement_group(self._group)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(amount) for name, amount in found.items()}


def _only(there: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
    return {name: there.get(name, 0.0) for name in wanted}


def _less(wanted: Mapping[str, float], there: Mapping[str, float]) -> dict[str, float]:
    """What of it is not there."""
    left = {name: amount - there.get(name, 0.0) for name, amount in wanted.items()}
    return {name: amount for name, amount in left.items() if amount > 0}


def _fits(bundle: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in bundle.items())


def _said(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
