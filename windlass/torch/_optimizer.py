"""ServerOptimizer: an optimizer of torch whose parameters live on the servers."""

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from windlass._client.cluster import Cluster
from windlass._client.first_weights import Agreement
from windlass._client.open_clusters import default_cluster
from windlass._errors import InvalidArgument
from windlass._objects.delay import check_delay
from windlass._objects.outputs import check_weight
from windlass._rules.rule import Rule
from windlass._rules.sync import BSP, Sync, parse_sync
from windlass.torch._buffers import buffers_of
from windlass.torch._exchange import Exchange, Late, Plain
from windlass.torch._flat import Flat, Segment, check_parameter, pull_weights, put_weights
from windlass.torch._overlap import BUCKET_BYTES, Overlap
from windlass.torch._rules import groups_of, numbers_of, rule_of
from windlass.torch._state import load_state, state_of

_all: "weakref.WeakSet[ServerOptimizer]" = weakref.WeakSet()
_made: "weakref.WeakKeyDictionary[Cluster, int]" = weakref.WeakKeyDictionary()


class ServerOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose parameters live on servers: ``step()`` pushes gradients and pulls weights. ::

        opt = wl.torch.ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), sync=wl.SSP(3))
        loss.backward()
        opt.step()
        opt.zero_grad()

    params: parameters, named parameters, groups (each may have a "rule" and numbers such as "lr" of its own), a module
        (then its BatchNorm statistics are averaged, too), or an instance of torch.optim.SGD, Adam, AdamW, Adagrad,
        RMSprop, Adadelta, Adamax or NAdam, whose rule is used.
    rule: what servers do with a gradient (not for an instance of torch.optim).
    sync: how tightly workers are coupled (default: what ``connect(sync=)`` or ``--sync`` says, else ``BSP()``).
    name: of its tensors on the servers. A second optimizer of a worker gets another name by itself.
    cluster: ``connect()``'s; without it, the one that this process has, or a new one.
    overlap: gradients leave while the backward pass goes on.
    delay: ``step()`` does not wait; the weights are up to so many steps old.
    clip_norm: gradients of this worker are scaled to this norm, as by torch.nn.utils.clip_grad_norm_. With `overlap`
        this is the only way to clip, and gradients leave when the norm is known, in ``step()``.
    bucket_bytes: with `overlap`, about how much leaves at once.

    All workers start with the lowest rank's weights, or with those on the servers where there are any. A parameter's
    data and gradient are views of memory that servers on this host use in place.
    """

    def __init__(
        self,
        params: Any,
        rule: Rule | None = None,
        *,
        sync: Sync | str | None = None,
        name: str | None = None,
        cluster: Cluster | None = None,
        overlap: bool = False,
        delay: int = 0,
        clip_norm: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._cluster = default_cluster() if cluster is None else cluster
        self._name = _name_for(self._cluster, name)
        self._what = f"ServerOptimizer {self._name!r}"
        self._sync = parse_sync(sync, self._cluster._sync or BSP(), self._what)
        self._rule = rule
        self._delay = check_delay(delay, self._what)
        if clip_norm is not None and not clip_norm > 0:
            raise InvalidArgument(f"{self._what}: clip_norm must be a number above 0, not {clip_norm!r}")
        if overlap and self._delay:
            raise InvalidArgument(f"{self._what}: either overlap, which waits for each step, or delay={delay}")
        if not bucket_bytes > 0:
            raise InvalidArgument(f"{self._what}: bucket_bytes must be above 0, not {bucket_bytes!r}")
        self._overlap = overlap
        self._clip_norm = clip_norm
        self._accumulates = False
        self._flats: list[Flat] = []
        self._agreement: Agreement | None = None
        self._hooks: list[Any] = []
        groups = self._groups(params)
        super().__init__(groups, numbers_of(rule_of(groups[0], rule, self._what)))
        for group in self.param_groups:
            self._flats += self._make_flats(group)
        if not self._flats:
            raise InvalidArgument(f"{self._what}: expected at least one parameter")
        module = params if isinstance(params, torch.nn.Module) else None
        self._buffers = buffers_of(self._cluster, self._name, module, self._sync, self._delay + 1)
        self._exchange = self._make_exchange(module, bucket_bytes)
        described = [x for flat in self._flats for x in flat.describe()]
        described += [] if self._buffers is None else self._buffers.describe()
        self._agreement = Agreement(self._cluster, self._name, described, what=self._what)
        self._agreement.begin(self._put)
        self._pull()
        for flat in self._flats:
            self._watch(flat)
        _all.add(self)

    # -- what it is made of ------------------------------------------------------------------------------------------

    def _groups(self, params: Any) -> list[dict[str, Any]]:
        """Groups as torch takes them, each with its rule."""
        if isinstance(params, torch.optim.Optimizer):
            if self._rule is not None:
                raise InvalidArgument(f"{self._what}: either a rule, or the instance of torch.optim that says which")
            return groups_of(params, self._what)
        if isinstance(params, torch.nn.Module):
            params = list(params.named_parameters())
        if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
            raise InvalidArgument(f"{self._what}: expected parameters, groups or a module, not {type(params).__name__}")
        found = list(params)
        if not found:
            raise InvalidArgument(f"{self._what}: expected at least one parameter")
        return found if isinstance(found[0], dict) else [{"params": found}]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A further group, with a rule and numbers of its own or the common ones; the same in every worker."""
        if not isinstance(param_group, dict):
            raise InvalidArgument(f"{self._what}: expected a group with the key 'params', not {param_group!r}")
        rule = rule_of(param_group, self._rule, self._what)
        group = {"rule": rule} | numbers_of(rule) | {k: v for k, v in param_group.items() if k != "rule"}
        super().add_param_group(group)
        if self._agreement is None:  # the optimizer is being made
            return
        self.finish()
        index, flats = len(self.param_groups) - 1, self._make_flats(group)
        self._exchange.add(flats)
        described = [x for flat in flats for x in flat.describe()]
        agreement = Agreement(self._cluster, f"{self._name}.{index}", described, what=self._what)
        agreement.begin(lambda: put_weights(flats))
        pull_weights(flats)
        for flat in flats:
            self._watch(flat)

    def _make_flats(self, group: dict[str, Any]) -> list[Flat]:
        index = next(i for i, one in enumerate(self.param_groups) if one is group)
        names = group.get("param_names") or [f"{index}.{i}" for i in range(len(group["params"]))]
        kinds: dict[str, list[tuple[str, Any]]] = {}
        devices: list[Any] = []
        for name, param in zip(names, group["params"], strict=True):
            check_parameter(name, param, self._what)
            if param.device not in devices:
                devices.append(param.device)
            kind = str(param.dtype).removeprefix("torch.")
            kind += ("" if param.requires_grad else ".frozen") + f".{devices.index(param.device)}".removesuffix(".0")
            kinds.setdefault(kind, []).append((name, param))
        slots = self._delay + 1 + int(self._overlap)
        return [
            Flat(
                self._cluster,
                f"{self._name}.{index}.{kind}",
                named,
                group["rule"],
                self._sync,
                group,
                slots,
                lands=slots > 1,
            )
            for kind, named in kinds.items()
        ]

    def _make_exchange(self, module: Any, bucket_bytes: int) -> Exchange:
        cluster, flats, buffers = self._cluster, self._flats, self._buffers
        if self._overlap:
            return Overlap(cluster, flats, buffers, module, bucket_bytes, holds=self._clip_norm is not None)
        return Late(cluster, flats, buffers, self._delay) if self._delay else Plain(cluster, flats, buffers)

    def _watch(self, flat: Flat) -> None:
        """From now on gradients are taken as the backward pass completes them."""
        for segment in flat:
            if segment.param.requires_grad:
                hook = _hook(weakref.ref(self), weakref.ref(flat), weakref.ref(segment))
                self._hooks.append(segment.param.register_post_accumulate_grad_hook(hook))

    def _arrived(self, flat: Flat, segment: Segment) -> None:
        self._exchange.arrived(flat, segment, self._accumulates)

    # -- steps -------------------------------------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Gradients go to the servers, weights come back; this worker's iteration is closed.

        weight: this worker's share where an update is a mean over workers (under BSP), such as its batch's size.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._accumulates:
            raise InvalidArgument(f"{self._what}: step() inside no_sync(), where gradients are only gathered")
        check_weight(weight, "optimizer", self._name)
        for flat in self._flats:
            flat.check()
        self._exchange.check()
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self._exchange.step(weight)
        return loss

    def _clip(self, norm: float) -> None:
        params = [segment.param for flat in self._flats for segment in flat if segment.param.grad is not None]
        for flat in self._flats:
            flat.gather()
        torch.nn.utils.clip_grad_norm_(params, norm)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to the gradients; the one behind it, and ``step()``, use the sum."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    @property
    def global_step(self) -> int:
        """How many updates the servers have made of the parameters: the same count for all workers.

        An update is an iteration under BSP, and any worker's step otherwise. Asking is one small request. For a
        learning rate that must not follow a worker's own steps, such as with leased data.
        """
        tensors = [flat.tensor for flat in self._flats]
        seconds = self._cluster._timeout
        return max(count for tensor in tensors for count in tensor._core.counts(seconds))

    def finish(self) -> None:
        """Waits for what is under way; the parameters are then those after the last step. For `delay` and `overlap`."""
        self._exchange.finish()

    def put_weights(self) -> None:
        """Every worker calls it: the lowest rank's parameters, as they are now, become the weights of all.

        For weights that were changed after the optimizer was made, by ``load_state_dict`` or an initialiser.
        """
        assert self._agreement is not None
        self._exchange.finish()
        self._agreement.again(self._put)
        self._pull()

    def _put(self) -> None:
        put_weights(self._flats)
        if self._buffers is not None:
            self._buffers.put()

    def _pull(self) -> None:
        pull_weights(self._flats)
        if self._buffers is not None:
            self._buffers.pull()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. While gradients are being sent, the next ones go into other memory."""
        super().zero_grad(set_to_none=set_to_none)
        if not set_to_none:
            for flat in self._flats:
                flat.zero()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What lives on the servers, in torch's form: of every parameter its weight and the rule's state.

        ``torch.optim``'s optimizer of the same name can load it.
        """
        self.finish()
        for flat in self._flats:
            self.state.update(state_of(flat))
        try:
            made: dict[str, Any] = super().state_dict()
        finally:
            self.state.clear()
        for group in made["param_groups"]:
            group["rule"] = type(group["rule"]).__name__
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Every worker calls it; the lowest rank's is put on the servers.

        Takes what ``state_dict()`` made, of any number of servers, or that of torch.optim's optimizer of the same name,
        which has no weights: then the parameters are put as they are.
        """
        assert self._agreement is not None
        self.finish()
        rules = [group["rule"] for group in self.param_groups]
        groups = [{k: v for k, v in group.items() if k != "rule"} for group in state_dict["param_groups"]]
        for rule, group in zip(rules, state_dict["param_groups"], strict=False):
            if group.get("rule", type(rule).__name__) != type(rule).__name__:
                raise InvalidArgument(f"{self._what}: the state is of {group['rule']}, not of {type(rule).__name__}")
        super().load_state_dict({"state": {}, "param_groups": groups})
        for rule, group in zip(rules, self.param_groups, strict=True):
            group["rule"] = rule
        for flat, group in zip(self._flats, self._groups_of_flats(), strict=True):
            flat.group = group
        numbered = [p for group in self.param_groups for p in group["params"]]
        state = {p: state_dict["state"][i] for i, p in enumerate(numbered) if i in state_dict["state"]}

        def put() -> None:
            for flat in self._flats:
                load_state(flat, state)
            if self._buffers is not None:
                self._buffers.put()

        self._agreement.again(put)
        self._pull()

    def _groups_of_flats(self) -> list[dict[str, Any]]:
        """load_state_dict() makes new groups."""
        of = {p: group for group in self.param_groups for p in group["params"]}
        return [of[flat.segments[0].param] for flat in self._flats]

    def __repr__(self) -> str:
        tensors = ", ".join(f"{flat.tensor.name!r} of {flat.n}" for flat in self._flats)
        return f"<{self._what}, {self._sync}, {tensors}>"


def _hook(
    optimizer: "weakref.ref[ServerOptimizer]", flat: "weakref.ref[Flat]", segment: "weakref.ref[Segment]"
) -> Callable[[Any], None]:
    """A parameter keeps its hooks for ever; so they keep nothing."""

    def arrived(param: Any) -> None:
        to, its, of = optimizer(), flat(), segment()
        if to is not None and its is not None and of is not None:
            to._arrived(its, of)

    return arrived


def _name_for(cluster: Cluster, name: str | None) -> str:
    if name is not None:
        if not isinstance(name, str) or not name or not name.isprintable() or "/" in name:
            raise InvalidArgument(f"ServerOptimizer: name must be printable text without '/', not {name!r}")
        return name
    count = _made.get(cluster, 0)
    _made[cluster] = count + 1
    return "optimizer" if count == 0 else f"optimizer-{count}"


@atexit.register
def _unhook() -> None:
    """Torch holds hooks where Python's collector does not look; at the end they would keep everything alive."""
    for optimizer in list(_all):
        for hook in [*optimizer._hooks, *optimizer._exchange.hooks]:
            hook.remove()
