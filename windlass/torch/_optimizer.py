"""ServerOptimizer: an optimizer of torch whose parameters live on the servers."""

import atexit
import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from windlass._client.cluster import Cluster
from windlass._client.first_weights import Agreement
from windlass._client.open_clusters import default_cluster
from windlass._errors import InvalidArgument
from windlass._objects.delay import check_delay
from windlass._objects.outputs import check_weight
from windlass._rules.rule import Rule
from windlass._rules.sync import BSP, Sync, parse_sync
from windlass.torch._buffers import buffers_of
from windlass.torch._ddp import watch_group
from windlass.torch._exchange import Exchange, Late, Plain
from windlass.torch._flat import Flat, Segment, check_parameter, pull_weights, put_weights
from windlass.torch._overlap import BUCKET_BYTES, Overlap
from windlass.torch._owned_tables import OwnedTables, cluster_of, table_modules
from windlass.torch._rules import groups_of, numbers_of, rule_of
from windlass.torch._state import load_state, state_of

# What torch wraps around these, so that torch.compile does not trace them, imports all of torch.compile when they are
# called: a second of the start of every training. So we call what is underneath, and wrap our own.
_add_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


def _untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that torch.compile leaves alone, and that does not import it."""
    disabled = torch._disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled if torch.compiler.is_compiling() else method)(*args, **kwargs)

    return call


_OF_PARAMS = ("params", "param_names")  # keys of a group that say nothing of a table
_all: "weakref.WeakSet[ServerOptimizer]" = weakref.WeakSet()
_made: "weakref.WeakKeyDictionary[Cluster, int]" = weakref.WeakKeyDictionary()


class ServerOptimizer(torch.optim.Optimizer, Joinable):  # type: ignore[misc]
    """An optimizer whose parameters and tables live on servers: ``step()`` pushes gradients and pulls weights. ::

        opt = wl.torch.ServerOptimizer(model.parameters(), wl.SGD(lr=0.1), sync=wl.SSP(3))
        loss.backward()
        opt.step()
        opt.zero_grad()

    params: parameters, named parameters, groups (each may have a "rule" and numbers such as "lr" of its own), a module
        (then its tables are trained and its BatchNorm statistics averaged, too), or an instance of torch.optim.SGD,
        Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax or NAdam, whose rule is used. A group of tables is
        ``{"tables": [model.emb], "lr": 0.05}``; those of a module are a group each.
    rule: what servers do with a gradient (not for an instance of torch.optim). A table's own counts more.
    sync: how tightly workers are coupled (default: what ``connect(sync=)`` or ``--sync`` says, else ``BSP()``).
    name: of its tensors on the servers. A second optimizer of a worker gets another name by itself.
    cluster: ``connect()``'s; without it, that of the table modules, or the one that this process has, or a new one.
    overlap: gradients leave while the backward pass goes on.
    delay: ``step()`` does not wait; the weights are up to so many steps old.
    clip_norm: gradients of this worker are scaled to this norm, as by torch.nn.utils.clip_grad_norm_; those of tables,
        each key's added up, count in it. With `overlap` this is the only way to clip, and gradients leave when the norm
        is known, in ``step()``.
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
        given = cluster_of(params) if cluster is None else cluster
        self._cluster = default_cluster() if given is None else given
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
        self._tables = OwnedTables(self._cluster, self._what)
        self.param_groups: list[dict[str, Any]]
        self._agreement: Agreement | None = None
        self._hooks: list[Any] = []
        Joinable.__init__(self)
        groups = self._groups(params)
        super().__init__(groups, numbers_of(self._rule_in(groups[0])))
        for group in self.param_groups:
            self._flats += self._make_flats(group)
        if not self._flats and not self._tables:
            raise InvalidArgument(f"{self._what}: expected at least one parameter or table")
        if not self._flats and (self._delay or overlap):
            raise InvalidArgument(f"{self._what}: delay and overlap are for parameters, and there are tables alone")
        module = params if isinstance(params, torch.nn.Module) else None
        self._buffers = buffers_of(self._cluster, self._name, module, self._sync, self._delay + 1)
        self._exchange = self._make_exchange(module, bucket_bytes)
        described = [x for flat in self._flats for x in flat.describe()]
        described += [] if self._buffers is None else self._buffers.describe()
        described += self._tables.describe()
        self._agreement = Agreement(self._cluster, self._name, described, what=self._what)
        self._agreement.begin(self._put)
        self._pull()
        for flat in self._flats:
            self._watch(flat)
        _all.add(self)
        watch_group(self._cluster, hybrid=not self._flats)

    # -- what it is made of ------------------------------------------------------------------------------------------

    def _groups(self, params: Any) -> list[dict[str, Any]]:
        """Groups as torch takes them, each with its rule."""
        if isinstance(params, torch.optim.Optimizer):
            if self._rule is not None:
                raise InvalidArgument(f"{self._what}: either a rule, or the instance of torch.optim that says which")
            return groups_of(params, self._what)
        modules = [params] if isinstance(params, torch.nn.Module) else []
        if isinstance(params, torch.Tensor) or not (modules or isinstance(params, Iterable)):
            raise InvalidArgument(f"{self._what}: expected parameters, groups or a module, not {type(params).__name__}")
        found = [] if modules else list(params)
        if found and all(isinstance(one, torch.nn.Module) for one in found):
            modules, found = found, []
        if modules:
            return self._groups_of_modules(modules)
        if not found:
            raise InvalidArgument(f"{self._what}: expected at least one parameter")
        if not isinstance(found[0], dict):
            return [{"params": found}]
        return sorted(found, key=lambda group: isinstance(group, dict) and "tables" in group)

    def _groups_of_modules(self, modules: list[Any]) -> list[dict[str, Any]]:
        """Parameters as one group, and a group for each table."""
        if len(modules) == 1:
            named = list(modules[0].named_parameters())
        else:
            named = [(f"{i}.{name}", p) for i, one in enumerate(modules) for name, p in one.named_parameters()]
        groups: list[dict[str, Any]] = [{"params": named}] if named else []
        tables: dict[str, list[Any]] = {}
        for module in table_modules(modules, self._what):
            tables.setdefault(module.table_name, []).append(module)
        groups += [{"tables": of_one} for of_one in tables.values()]
        if not groups:
            raise InvalidArgument(f"{self._what}: expected at least one parameter or table in the module")
        return groups

    def _rule_in(self, group: dict[str, Any]) -> Rule:
        """The rule of a group, with the group's numbers: its own, its tables' or the common one."""
        default = self._rule
        for module in table_modules(group.get("tables", []), self._what):
            default = module._spec.rule or default
            break
        return rule_of(group, default, self._what)

    def _add_tables(self, param_group: dict[str, Any]) -> None:
        if "params" in param_group and list(param_group["params"]):
            raise InvalidArgument(f"{self._what}: a group has either 'params' or 'tables'")
        modules = table_modules(param_group["tables"], self._what)
        if not modules:
            raise InvalidArgument(f"{self._what}: a group of 'tables' without a table in it")
        rule = self._rule_in(param_group)
        named: dict[str, Any] = {"param_names": []} if any("param_names" in one for one in self.param_groups) else {}
        opened = {module.table_name: module._open(rule, self._sync) for module in modules}
        rest = {key: value for key, value in param_group.items() if key not in ("rule", "params", "tables")}
        group = {"params": [], "tables": list(opened), "rule": rule} | named | numbers_of(rule) | rest
        _add_group(self, group)
        for table in opened.values():
            self._tables.add(table, group, self)

    @_untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A further group, with a rule and numbers of its own or the common ones; the same in every worker."""
        if not isinstance(param_group, dict):
            raise InvalidArgument(f"{self._what}: expected a group with the key 'params', not {param_group!r}")
        if "tables" in param_group:
            self._add_tables(param_group)
            return
        rule = rule_of(param_group, self._rule, self._what)
        group = {"rule": rule} | numbers_of(rule) | {k: v for k, v in param_group.items() if k != "rule"}
        _add_group(self, group)
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
        tables = self._tables
        if self._overlap:
            return Overlap(cluster, flats, buffers, tables, module, bucket_bytes, holds=self._clip_norm is not None)
        if self._delay:
            return Late(cluster, flats, buffers, tables, self._delay)
        return Plain(cluster, flats, buffers, tables)

    def _watch(self, flat: Flat) -> None:
        """From now on gradients are taken as the backward pass completes them."""
        for segment in flat:
            if segment.param.requires_grad:
                hook = _hook(weakref.ref(self), weakref.ref(flat), weakref.ref(segment))
                self._hooks.append(segment.param.register_post_accumulate_grad_hook(hook))

    def _arrived(self, flat: Flat, segment: Segment) -> None:
        self._exchange.arrived(flat, segment, self._accumulates)

    # -- steps -------------------------------------------------------------------------------------------------------

    @_untraced
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
        Join.notify_join_context(self)
        self._tables.check(self)
        for flat in self._flats:
            flat.check()
        self._exchange.check()
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self._exchange.step(weight)
        self._tables.stepped()
        return loss

    def _clip(self, norm: float) -> None:
        params = [segment.param for flat in self._flats for segment in flat if segment.param.grad is not None]
        for flat in self._flats:
            flat.gather()
        if not self._tables:
            torch.nn.utils.clip_grad_norm_(params, norm)
            return
        squares = self._tables.squares() + [param.grad.double().square().sum().cpu() for param in params]
        factor = norm / (float(sum(squares)) ** 0.5 + 1e-6)  # as torch's
        if factor < 1.0:
            self._tables.scale(factor)
            for param in params:
                param.grad.mul_(factor)

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
        if not tensors:
            raise InvalidArgument(f"{self._what}: global_step counts updates of parameters, and there are tables alone")
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

    @_untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; tables' gradients are forgotten, too. (``model.zero_grad()`` does not know of those.)

        While gradients are being sent, the next ones go into other memory.
        """
        _zero_grad(self, set_to_none=set_to_none)
        self._tables.drop()
        if not set_to_none:
            for flat in self._flats:
                flat.zero()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What lives on the servers, in torch's form: of every parameter its weight and the rule's state.

        ``torch.optim``'s optimizer of the same name can load it. Of tables it has the groups' numbers, under "tables";
        their rows are in the cluster's checkpoints.
        """
        self.finish()
        for flat in self._flats:
            self.state.update(state_of(flat))
        try:
            with self._dense_alone() as tables:
                made: dict[str, Any] = super().state_dict()
        finally:
            self.state.clear()
        if tables:
            made["tables"] = [{k: v for k, v in group.items() if k not in _OF_PARAMS} for group in tables]
        for group in [*made["param_groups"], *made.get("tables", [])]:
            group["rule"] = type(group["rule"]).__name__
        return made

    @contextlib.contextmanager
    def _dense_alone(self) -> Iterator[list[dict[str, Any]]]:
        """Inside, the groups are those of parameters, which torch's optimizers know; gives those of tables."""
        everything = self.param_groups
        tables = [group for group in everything if "tables" in group]
        self.param_groups = [group for group in everything if "tables" not in group]
        try:
            yield tables
        finally:  # load_state_dict() makes new groups of parameters, in the same order
            dense = iter(self.param_groups)
            self.param_groups = [group if "tables" in group else next(dense) for group in everything]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Every worker calls it; the lowest rank's is put on the servers.

        Takes what ``state_dict()`` made, of any number of servers, or that of torch.optim's optimizer of the same name,
        which has no weights: then the parameters are put as they are.
        """
        assert self._agreement is not None
        self.finish()
        with self._dense_alone() as tables:
            rules = [group["rule"] for group in self.param_groups]
            _check_rules(rules, state_dict["param_groups"], self._what)
            _check_rules([group["rule"] for group in tables], state_dict.get("tables", []), self._what)
            groups = [{k: v for k, v in group.items() if k != "rule"} for group in state_dict["param_groups"]]
            super().load_state_dict({"state": {}, "param_groups": groups})
            for rule, group in zip(rules, self.param_groups, strict=True):
                group["rule"] = rule
        saved = {tuple(group["tables"]): group for group in state_dict.get("tables", [])}
        for group in tables:
            numbers = saved.get(tuple(group["tables"]), {})
            group.update({key: value for key, value in numbers.items() if key not in ("rule", "tables")})
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

    # -- beside torch's own ------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's ``Join([ddp, optimizer])``: a worker that has no inputs left closes the others' iterations.

        It counts in the mean of tables, as DistributedDataParallel divides by all workers. Name that one first.
        """
        return _Shadow(self)

    @property
    def join_device(self) -> Any:
        """Where ``Join`` counts who is left."""
        gpu = torch.distributed.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """Of all workers."""
        return torch.distributed.group.WORLD

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler, which would unscale parameters' gradients alone."""
        if self._tables:
            raise InvalidArgument(
                f"{self._what}: a GradScaler does not reach gradients of tables; train in bfloat16, which needs none"
            )
        return False

    def __repr__(self) -> str:
        objects = [f"{flat.tensor.name!r} of {flat.n}" for flat in self._flats]
        objects += [repr(self._tables)] if self._tables else []
        return f"<{self._what}, {self._sync}, {', '.join(objects)}>"


class _Shadow(JoinHook):  # type: ignore[misc]
    """What an optimizer does for a worker that has no inputs left."""

    def __init__(self, optimizer: ServerOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """The others make a step."""
        self._optimizer.zero_grad()
        self._optimizer._exchange.step(1.0)
        self._optimizer._tables.stepped()


def _check_rules(rules: list[Rule], groups: list[dict[str, Any]], what: str) -> None:
    """Whether saved groups are of these rules."""
    for rule, group in zip(rules, groups, strict=False):
        if group.get("rule", type(rule).__name__) != type(rule).__name__:
            raise InvalidArgument(f"{what}: the state is of {group['rule']}, not of {type(rule).__name__}")


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
