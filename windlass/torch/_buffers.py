"""Buffers: what a module keeps beside its parameters, such as BatchNorm's statistics, averaged over workers.

They are no weights: every worker makes its own from its own batches. At each step all push theirs, and take the mean;
where a policy makes every push an update of its own, the mean is what was pushed last.
"""

import itertools
from typing import TYPE_CHECKING, Any

import torch

from windlass._objects.future import Future
from windlass._objects.step import Step
from windlass._rules.rule import Average
from windlass._rules.sync import Sync
from windlass.torch._flat import Memory
from windlass.torch._notes import note

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster


class Buffers:
    """The buffers of a module that are numbers with a point; counters stay the worker's own."""

    def __init__(self, cluster: "Cluster", name: str, module: Any, sync: Sync, slots: int) -> None:
        self._module = module
        self.names = [key for key, buffer in module.named_buffers() if _is_averaged(buffer)]
        self.n = sum(buffer.numel() for buffer in self._all())
        self.tensor = cluster.tensor(f"{name}.buffers", (self.n,), rule=Average(), sync=sync)
        firsts = itertools.accumulate((buffer.numel() for buffer in self._all()), initial=0)
        note(cluster, f"{name}.buffers", zip(self.names, self._all(), firsts, strict=False))
        self._sent = [Memory(cluster, self.n, torch.float32) for _ in range(slots)]
        self._landed = [Memory(cluster, self.n, torch.float32) for _ in range(slots)]

    def describe(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """What all workers must agree on."""
        return [(f"buffer {key}", "", tuple(b.shape)) for key, b in zip(self.names, self._all(), strict=True)]

    def put(self) -> None:
        """Ours become everybody's."""
        self._gather(0)
        self.tensor.put(self._sent[0].part(0, self.n))

    def pull(self) -> None:
        """What is on the servers becomes ours."""
        self.tensor.pull(out=self._landed[0].part(0, self.n))
        self.land(0)

    def join(self, step: Step) -> None:
        """As part of a step; land() comes after it."""
        self._gather(0)
        step.push_pull(self.tensor, self._sent[0].part(0, self.n), out=self._landed[0].part(0, self.n))

    def send(self, slot: int, priority: int = 0) -> Future[Any]:
        """On its own; land() comes when the future is done."""
        self._gather(slot)
        sent, landed = self._sent[slot].part(0, self.n), self._landed[slot].part(0, self.n)
        return self.tensor.push_pull_async(sent, out=landed, priority=priority)

    def land(self, slot: int, *, late: bool = False) -> None:
        """The mean becomes ours. `late`: what batches have changed since it was sent is kept."""
        sent, landed, first = self._sent[slot], self._landed[slot], 0
        with torch.no_grad():
            for buffer in self._all():
                end = first + buffer.numel()
                mean = landed.part(first, end).view(buffer.shape)
                if late:
                    buffer += (mean - sent.part(first, end).view(buffer.shape)).to(buffer)
                else:
                    buffer.copy_(mean)
                first = end

    def _gather(self, slot: int) -> None:
        first = 0
        for buffer in self._all():
            end = first + buffer.numel()
            self._sent[slot].part(first, end).view(buffer.shape).copy_(buffer)
            first = end

    def _all(self) -> list[Any]:
        """As they are now: a module may replace them."""
        there = dict(self._module.named_buffers())
        return [there[name] for name in self.names]


def buffers_of(cluster: "Cluster", name: str, module: Any, sync: Sync, slots: int) -> Buffers | None:
    """None where there are none."""
    if module is None or not any(_is_averaged(buffer) for buffer in module.buffers()):
        return None
    return Buffers(cluster, name, module, sync, slots)


def _is_averaged(buffer: Any) -> bool:
    return bool(buffer.is_floating_point()) and buffer.numel() > 0
