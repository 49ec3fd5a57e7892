"""Flats: the parameters of one group, device and dtype as one tensor on the servers.

    parameter   conv1.weight  conv1.bias  fc.weight
    segment     [0, 288)      [288, 320)  [320, 10560)     each begins at a multiple of 64 bytes

Weights and gradients lie in registered memory, so that servers on the same host use them in place. The parameters
themselves become views of the weights, the gradients of the parameters views of a gradient slot. A step that does not
wait for its requests needs several slots, and somewhere else for the weights to land.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from windlass._errors import InvalidArgument
from windlass._objects.arrays import as_torch, core_dtype
from windlass._rules.rule import Rule
from windlass._rules.sync import Sync
from windlass.torch._device import Fetch, LockedPages, Mirror, strides_of
from windlass.torch._notes import note
from windlass.torch._rules import changed_in

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

Runs = list[tuple[int, int]]
_ALIGNED = 16  # elements
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Memory:
    """A registered array of `n` numbers, and views of it as torch tensors.

    Every view is a tensor of its own for torch, so that a change of one does not look like a change of another.
    locked: the pages stay where they are, for copies from and to a GPU.
    """

    def __init__(self, cluster: "Cluster", n: int, dtype: torch.dtype, *, locked: bool = False) -> None:
        self._raw = cluster._engine.empty([n], core_dtype(dtype, "memory of parameters"))
        self._raw[...] = 0
        self._shown = self.part(0, n) if locked else None
        self._pages = LockedPages(cluster._engine, self._shown) if locked else None

    def settle(self) -> int:
        """A device knows the present pages of it. Equal numbers before and after a copy: it knew them meanwhile."""
        return 0 if self._pages is None else self._pages.settle()

    def part(self, begin: int, end: int) -> Any:
        """Some of it, in one dimension."""
        return as_torch(self._raw[begin:end])

    def like(self, first: int, tensor: Any) -> Any:
        """The numbers from `first` on, in the shape and strides of a tensor."""
        return self.part(first, first + tensor.numel()).as_strided(tensor.shape, strides_of(tensor))


@dataclasses.dataclass(eq=False)
class Segment:
    """One parameter."""

    name: str
    param: Any
    first: int  #: of its elements in the flat
    end: int
    weight: Any  #: what the parameter's data is
    grads: list[Any]  #: what the parameter's gradient is, in each slot
    version: int = 0  #: of the parameter when it was last written by us: torch counts changes in place
    sent: bool = False  #: the gradient has left already
    gone: int = 0  #: the version of the gradient when it did
    had_grad: bool = False  #: in the last step


class Flat:
    """See the head of this file."""

    def __init__(
        self,
        cluster: "Cluster",
        name: str,
        named: Sequence[tuple[str, Any]],
        rule: Rule,
        sync: Sync,
        group: dict[str, Any],
        slots: int,
        lands: bool,
    ) -> None:
        self.what = f"ServerOptimizer {name!r}"
        self.rule = rule
        self.group = group
        self.slot = 0  #: where gradients go
        self.landed = 0  #: where the weights of the last step land
        first_of, n = [], 0
        for _, param in named:
            first_of.append(n)
            n += -(-param.numel() // _ALIGNED) * _ALIGNED
        self.n = n
        self.dtype, self.device = named[0][1].dtype, named[0][1].device
        self.tensor = cluster.tensor(name, (n,), rule=rule, sync=sync)

        def memory() -> Memory:
            return Memory(cluster, n, self.dtype, locked=self.device.type != "cpu")

        self.weights = memory()
        self.grads = [memory() for _ in range(slots)]
        #: Where weights land: the parameters themselves, unless somebody may be reading them then.
        self.landings = [memory() for _ in range(slots)] if lands else [self.weights]
        self._mirror: Mirror | None = None
        places = [(first, param) for first, (_, param) in zip(first_of, named, strict=True)]
        if self.device.type == "cpu":
            weights = [self.weights.like(first, param) for first, param in places]
            grads = [[slot.like(first, param) for slot in self.grads] for first, param in places]
        else:
            self._mirror = Mirror(n, places, self.dtype, self.device, slots)
            weights, grads = self._mirror.weights, self._mirror.grads
        self.segments = [
            Segment(key, param, first, first + param.numel(), weight, slots_of)
            for (key, param), first, weight, slots_of in zip(named, first_of, weights, grads, strict=True)
        ]
        note(cluster, name, [(key, param, first) for (key, param), first in zip(named, first_of, strict=True)])
        with torch.no_grad():
            for segment in self.segments:
                segment.weight.copy_(segment.param)
                segment.param.data = segment.weight
        self.written()

    def describe(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """What all workers must agree on."""
        return [(s.name, str(self.dtype), tuple(s.param.shape)) for s in self.segments]

    # -- gradients ---------------------------------------------------------------------------------------------------

    def take(self, segment: Segment) -> None:
        """The gradient of a parameter moves into its slot, unless it is there."""
        param, slot = segment.param, segment.grads[self.slot]
        grad = param.grad
        if grad is slot:
            return
        if grad.layout is not torch.strided:
            raise InvalidArgument(
                f"{self.what}: the gradient of {segment.name!r} is sparse; a table is for that (cluster.table)"
            )
        slot.copy_(grad)
        param.grad = slot

    def gather(self) -> Runs:
        """Every gradient is in its slot. Returns where there are any: neighbours as one run."""
        runs: Runs = []
        for i, segment in enumerate(self.segments):
            if segment.param.grad is None:
                continue
            self.take(segment)
            end = self.segments[i + 1].first if i + 1 < len(self.segments) else self.n
            if runs and runs[-1][1] == segment.first:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((segment.first, end))
        return runs

    def fetch(self, begin: int, end: int) -> Fetch | None:
        """Gradients of a device come to the host. Returns what says when they have; None: they are there."""
        if self._mirror is None:
            return None
        return self._mirror.fetch(self.slot, begin, end, self.grads[self.slot])

    def hyper(self) -> dict[str, Any]:
        """What the group says differently from the rule, such as the lr that a scheduler has set."""
        return changed_in(self.rule, self.group)

    @property
    def is_frozen(self) -> bool:
        """Whether nothing in it is trained at present."""
        return not any(segment.param.requires_grad for segment in self.segments)

    def is_whole(self, runs: Runs) -> bool:
        """Whether every parameter has a gradient."""
        return runs == [(0, self.n)]

    # -- weights -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The parameters are still ours. Raises for what the user changed and servers do not know."""
        for segment in self.segments:
            param = segment.param
            if param.data_ptr() != segment.weight.data_ptr():
                self._adopt_again(segment)
            elif param._version != segment.version:
                raise InvalidArgument(
                    f"{self.what}: parameter {segment.name!r} was changed in place since the last step; the weights "
                    "that count are on the servers: call put_weights() of the optimizer, in every worker, after that"
                )

    def _adopt_again(self, segment: Segment) -> None:
        """Somebody gave the parameter another storage."""
        param, weight = segment.param, segment.weight
        if (param.device, param.dtype, param.shape) != (weight.device, weight.dtype, weight.shape):
            raise InvalidArgument(
                f"{self.what}: parameter {segment.name!r} was {weight.dtype}{tuple(weight.shape)} on {weight.device}, "
                f"and is {param.dtype}{tuple(param.shape)} on {param.device} now; make the optimizer after such changes"
            )
        if not torch.equal(param.detach(), weight):
            raise InvalidArgument(
                f"{self.what}: parameter {segment.name!r} has another storage and other values since the last step; "
                "the weights that count are on the servers: call put_weights() of the optimizer, in every worker"
            )
        param.data = weight
        segment.version = param._version

    def collect(self) -> None:
        """The values that parameters have now, wherever they are, are in `weights`."""
        with torch.no_grad():
            for segment in self.segments:
                if segment.param.data_ptr() != segment.weight.data_ptr():
                    segment.weight.copy_(segment.param)
                    segment.param.data = segment.weight
            if self._mirror is not None:
                self._mirror.collect(self.weights)

    def land(self, landing: Memory, begin: int, end: int) -> None:
        """What has landed becomes the parameters'."""
        if self._mirror is not None:
            landing.settle()
            self._mirror.home[begin:end].copy_(landing.part(begin, end), non_blocking=True)
        elif landing is not self.weights:
            self.weights.part(begin, end).copy_(landing.part(begin, end))

    def written(self, segments: list[Segment] | None = None) -> None:
        """The servers wrote the parameters: whoever kept them for a backward pass is told by torch."""
        segments = self.segments if segments is None else segments
        torch.autograd.graph.increment_version([segment.param for segment in segments])
        for segment in segments:
            segment.version = segment.param._version

    def next_slot(self) -> None:
        """What travels is not to be written: the next gradients go elsewhere, and parameters have none until then."""
        self.landed, self.slot = self.slot, (self.slot + 1) % len(self.grads)
        for segment in self.segments:
            segment.sent = False
            segment.had_grad = segment.param.grad is not None
            segment.param.grad = None

    def zero(self) -> None:
        """Those that had a gradient in the last step have one of zeros."""
        for segment in self.segments:
            if segment.had_grad and segment.param.grad is None:
                segment.param.grad = segment.grads[self.slot].zero_()

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)


def put_weights(flats: list[Flat]) -> None:
    """What the parameters are now becomes what is on the servers."""
    for flat in flats:
        flat.collect()
        flat.tensor.put(flat.weights.part(0, flat.n))


def pull_weights(flats: list[Flat]) -> None:
    """What is on the servers becomes what the parameters are."""
    for flat in flats:
        flat.collect()
        flat.tensor.pull(out=flat.weights.part(0, flat.n))
        flat.land(flat.weights, 0, flat.n)
        flat.written()


def check_parameter(name: str, param: Any, what: str) -> None:
    """Whether servers can keep it."""
    if isinstance(param, torch.nn.parameter.UninitializedParameter):
        raise InvalidArgument(f"{what}: parameter {name!r} has no shape yet; run the module once before")
    if param.dtype not in _DTYPES:
        raise InvalidArgument(
            f"{what}: parameter {name!r} is {param.dtype}; expected float32, bfloat16 or float16 (servers keep float32)"
        )
    if param.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{what}: parameter {name!r} is on {param.device}; expected the cpu or a CUDA device")
    if param.layout is not torch.strided:
        raise InvalidArgument(f"{what}: parameter {name!r} is {param.layout}; expected a dense one")
