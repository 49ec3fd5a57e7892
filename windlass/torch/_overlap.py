"""Overlap: gradients leave while the backward pass goes on, weights come while the next forward pass does.

A bucket is a run of whole shards. The backward pass completes the last parameters first; when all that lie in a bucket
are complete, it is pushed and its new weights are asked for, in one request. Requests for the first layers have the
highest priority: they leave last and are needed first.

    backward   fc2  fc1        conv2  conv1
    requests       [bucket 2]        [bucket 1]
    forward                                    conv1  conv2  fc1  fc2      each waits for its own bucket

Where the optimizer was given a module, a part of it that has parameters waits for them before its forward pass; else
step() waits for everything. Weights land beside the parameters, which somebody may still be reading, and are copied.
"""

import weakref
from typing import TYPE_CHECKING, Any

from windlass._errors import InvalidArgument
from windlass._objects.future import Future
from windlass.torch._buffers import Buffers
from windlass.torch._device import Sender
from windlass.torch._flat import Flat, Runs, Segment
from windlass.torch._owned_tables import OwnedTables

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

BUCKET_BYTES = 16 << 20
_PRIORITY_MAX = 255


class Bucket:
    """Some shards of a flat, and the parameters that lie in them."""

    def __init__(self, flat: Flat, begin: int, end: int) -> None:
        self.flat = flat
        self.begin, self.end = begin, end
        self.tensor = flat.tensor[begin:end]
        self.segments = [s for s in flat if s.first < end and s.end > begin]
        self.missing = len(self.segments)
        self.priority = 0
        self.sent = False
        self.futures: list[Future[Any]] = []  # until the weights have landed

    def covers(self, runs: Runs) -> Runs:
        """The runs of gradients, as far as they are in here."""
        inside = ((max(begin, self.begin), min(end, self.end)) for begin, end in runs)
        return [(begin, end) for begin, end in inside if begin < end]


def cut(flat: Flat, bucket_bytes: int) -> list[Bucket]:
    """Buckets from the last parameters to the first.

    A shard is complete with the earliest parameter in it. So a bucket also ends, once it is a quarter of the size it
    may have, where an earlier parameter begins: a large one would else wait for all those before it.
    """
    per_shard = flat.tensor.shard_elements
    wanted = max(1, bucket_bytes // flat.weights.part(0, 0).element_size())
    buckets, end, earliest = [], flat.n, -1
    for first in range((flat.n - 1) // per_shard * per_shard, -1, -per_shard):
        here = next((i for i, s in enumerate(flat.segments) if s.end > first), len(flat.segments) - 1)
        size = end - (first + per_shard)  # without this shard
        if size > 0 and (size + per_shard > wanted or (here != earliest and 4 * size >= wanted)):
            buckets.append(Bucket(flat, first + per_shard, end))
            end = first + per_shard
        earliest = here
    buckets.append(Bucket(flat, 0, end))
    return buckets


class Overlap:
    """See the head of this file."""

    def __init__(
        self,
        cluster: "Cluster",
        flats: list[Flat],
        buffers: Buffers | None,
        tables: OwnedTables,
        module: Any,
        bucket_bytes: int,
        holds: bool,
    ) -> None:
        self._cluster = cluster
        self._flats = flats
        self._buffers = buffers
        self._tables = tables
        self._sender: Sender | None = None  # where parameters are on a device
        self._averaging: Future[Any] | None = None  # of the buffers
        self._holds = holds  # until step(), which scales gradients by the norm of all of them
        self._module = module
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self._of: dict[Segment, list[Bucket]] = {}
        self.hooks: list[Any] = []
        self._cut(flats)

    def add(self, flats: list[Flat]) -> None:
        """Of a further group."""
        self._flats += flats
        self._cut(flats)

    def _cut(self, flats: list[Flat]) -> None:
        for flat in flats:
            buckets = cut(flat, self._bucket_bytes)
            self._buckets += buckets
            self._of |= {segment: [b for b in buckets if segment in b.segments] for segment in flat}
        for place, bucket in enumerate(sorted(self._buckets, key=lambda b: b.begin)):
            bucket.priority = max(0, _PRIORITY_MAX - place)
        for hook in self.hooks:
            hook.remove()
        self.hooks = [] if self._module is None else self._hook(self._module)

    # -- while the backward pass goes on -----------------------------------------------------------------------------

    def arrived(self, flat: Flat, segment: Segment, accumulates: bool) -> None:
        """A gradient is complete; so may be its buckets."""
        if segment.sent:
            raise InvalidArgument(
                f"{flat.what}: the gradient of {segment.name!r} was sent by an earlier backward pass of this step; "
                "with overlap, run all but the last in `with optimizer.no_sync():`"
            )
        if any(bucket.futures for bucket in self._of[segment]):
            raise InvalidArgument(
                f"{flat.what}: {segment.name!r} was used before its new weights had come, not by the forward() of "
                "the module that has it; give the optimizer parameters instead of the module: step() then waits"
            )
        flat.take(segment)
        if accumulates:
            return
        segment.sent = True
        segment.gone = segment.grads[flat.slot]._version
        for bucket in self._of[segment]:
            bucket.missing -= 1
            if bucket.missing == 0 and not self._holds:
                self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        bucket.sent = True
        copied = bucket.flat.fetch(bucket.begin, bucket.end)
        if copied is None:
            self._send_now(bucket)
            return
        if self._sender is None:
            self._sender = Sender()
            weakref.finalize(self, self._sender.close)
        self._sender.send(copied, lambda: self._send_now(bucket))

    def _send_now(self, bucket: Bucket) -> None:
        flat = bucket.flat
        grads = flat.grads[flat.slot].part(bucket.begin, bucket.end)
        landing = flat.landings[flat.slot].part(bucket.begin, bucket.end)
        bucket.futures.append(
            bucket.tensor.push_pull_async(grads, out=landing, priority=bucket.priority, **flat.hyper())
        )

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self, weight: float) -> None:
        """What has not left yet leaves; the iteration is closed."""
        if weight != 1.0:
            raise InvalidArgument(f"{self._flats[0].what}: weight={weight!r}, but with overlap gradients leave before")
        late: list[Bucket] = []
        for flat in self._flats:
            runs = flat.gather()
            if not runs and flat.is_frozen:
                continue
            for bucket in self._buckets:
                if bucket.flat is not flat or bucket.sent:
                    continue
                self._land(bucket)
                if bucket.covers(runs) == [(bucket.begin, bucket.end)]:
                    self._send(bucket)
                    continue
                late.append(bucket)
                grads = flat.grads[flat.slot]
                for begin, end in bucket.covers(runs):
                    if (copied := flat.fetch(begin, end)) is not None:
                        copied.synchronize()
                bucket.futures += [
                    flat.tensor[begin:end].push(grads.part(begin, end), **flat.hyper())
                    for begin, end in bucket.covers(runs)
                ]
        if self._sender is not None:
            self._sender.drain()
        if self._buffers is not None:
            self._land_buffers()
            self._averaging = self._buffers.send(0, _PRIORITY_MAX)
        self._tables.push(weight)
        self._cluster.tick()
        for bucket in sorted(late, key=lambda b: -b.priority):
            landing = bucket.flat.landings[bucket.flat.slot].part(bucket.begin, bucket.end)
            bucket.futures.append(bucket.tensor.pull_async(out=landing, priority=bucket.priority))
        self._begin_next()
        if self._module is None:
            self.finish()

    def check(self) -> None:
        """Gradients are as they were when they left."""
        for flat in self._flats:
            for segment in flat:
                slot = segment.grads[flat.slot]
                if segment.sent and (slot._version != segment.gone or segment.param.grad is not slot):
                    raise InvalidArgument(
                        f"{flat.what}: the gradient of {segment.name!r} was changed after it had been sent; with "
                        "overlap, use clip_norm= of the optimizer to clip gradients, and change them in no other way"
                    )

    def _begin_next(self) -> None:
        for bucket in self._buckets:
            bucket.sent, bucket.missing = False, len(bucket.segments)
        for flat in self._flats:
            flat.next_slot()

    # -- weights -----------------------------------------------------------------------------------------------------

    def _land(self, bucket: Bucket) -> None:
        if not bucket.futures:
            return
        for future in bucket.futures:
            future.wait()
        bucket.futures = []
        flat = bucket.flat
        flat.land(flat.landings[flat.landed], bucket.begin, bucket.end)
        flat.written(bucket.segments)

    def ready(self, segments: list[Segment]) -> None:
        """Returns when these parameters have their new weights."""
        for segment in segments:
            for bucket in self._of[segment]:
                if bucket.futures:
                    self._land(bucket)

    def _land_buffers(self) -> None:
        if self._averaging is not None and self._buffers is not None:
            self._averaging.wait()
            self._averaging = None
            self._buffers.land(0)

    def finish(self, *, buffers_alone: bool = False) -> None:
        """Waits for all weights, first layers first."""
        self._land_buffers()
        if buffers_alone:
            return
        self._tables.finish()
        for bucket in reversed(self._buckets):
            if not bucket.sent:
                self._land(bucket)

    def _hook(self, module: Any) -> list[Any]:
        """Parts of the module wait for their parameters, also when the optimizer is gone and weights still travel."""
        by_param = {segment.param: segment for segment in self._of}

        def begin(root: Any, args: Any) -> None:  # evaluation may read parameters in its own ways; and buffers are few
            self.finish(buffers_alone=root.training)

        def read(*args: Any) -> None:
            self.finish()

        hooks = [module.register_forward_pre_hook(begin)]
        for part in module.modules():
            # Attention reads the parameters of its parts without calling them.
            whole = type(part).__module__.startswith("torch.nn.") and "ttention" in type(part).__name__
            own = [by_param[p] for p in part.parameters(recurse=whole) if p in by_param]
            if own:
                hooks.append(part.register_forward_pre_hook(self._wait_for(own)))
                hooks.append(part.register_state_dict_pre_hook(read))
        return hooks

    def _wait_for(self, segments: list[Segment]) -> Any:
        def before_forward(part: Any, args: Any) -> None:
            self.ready(segments)

        return before_forward
