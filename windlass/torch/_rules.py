"""Between torch.optim's groups and our rules: the same numbers under torch's names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from windlass._errors import InvalidArgument
from windlass._rules.optimizers import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RMSProp
from windlass._rules.rule import OPTIONS, Rule
from windlass._rules.user_rules import UserRule

#: Options of torch.optim that change what an update is, and that our rules do not have.
_FOREIGN = ("maximize", "amsgrad")
_KNOWN = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.Adagrad: Adagrad,
    torch.optim.RMSprop: RMSProp,
    torch.optim.Adadelta: Adadelta,
    torch.optim.Adamax: Adamax,
    torch.optim.NAdam: NAdam,
}


def numbers_of(rule: Rule) -> dict[str, Any]:
    """A rule's numbers as a group of torch.optim has them."""
    numbers = {name: getattr(rule, name) for name in _names(rule)}
    if "beta1" in numbers and "beta2" in numbers:
        numbers["betas"] = (numbers.pop("beta1"), numbers.pop("beta2"))
    return numbers


def numbers_in(rule: Rule, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's numbers under our names; those that the group does not have are the rule's."""
    numbers = {}
    for name in _names(rule):
        if name in ("beta1", "beta2") and "betas" in group:
            value = group["betas"][int(name == "beta2")]
        else:
            value = group.get(name, getattr(rule, name))
        numbers[name] = value.item() if isinstance(value, torch.Tensor) else value
    return numbers


def _names(rule: Rule) -> list[str]:
    """Of its numbers: the options of any rule are nothing that torch's groups have."""
    return [field.name for field in dataclasses.fields(rule) if field.name not in OPTIONS]


def changed_in(rule: Rule, group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says differently from its rule: it travels with the push."""
    return {name: value for name, value in numbers_in(rule, group).items() if value != getattr(rule, name)}


def rule_of(group: Mapping[str, Any], default: Rule | None, what: str) -> Rule:
    """The rule of a group: its own or the common one, with the group's numbers."""
    rule = group.get("rule", default)
    if not isinstance(rule, Rule):
        raise InvalidArgument(f"{what}: expected a windlass rule such as SGD(lr=0.1), not {rule!r}")
    if not isinstance(rule, UserRule):
        return dataclasses.replace(rule, **changed_in(rule, group))
    _, _, per_shard, whole, by_row, _ = rule._layout((1,))
    if whole or by_row or per_shard:
        raise InvalidArgument(
            f"{what}: {rule} looks at more than single numbers, and parameters are one flat tensor on the servers; "
            "expected a rule that updates every number by itself"
        )
    return rule._with(changed_in(rule, group))


def groups_of(optimizer: Any, what: str) -> list[dict[str, Any]]:
    """The groups of an instance of torch.optim, each with the rule that does the same."""
    kind = _KNOWN.get(type(optimizer))
    if kind is None:
        known = ", ".join(sorted(k.__name__ for k in _KNOWN))
        raise InvalidArgument(
            f"{what}: torch.optim.{type(optimizer).__name__} is none of those that servers have: {known}; "
            "give the parameters and a rule instead"
        )
    if any(one.get("step", 1) != 0 for one in optimizer.state.values()):  # Adagrad has a state from the beginning
        raise InvalidArgument(f"{what}: the {type(optimizer).__name__} has made steps already; its state would be lost")
    groups = []
    for group in optimizer.param_groups:
        for option in _FOREIGN:
            if group.get(option):
                raise InvalidArgument(f"{what}: servers have no {type(optimizer).__name__} with {option}=True")
        own = AdamW if kind is Adam and group.get("decoupled_weight_decay") else kind
        params = group["params"]
        if "param_names" in group:
            params = list(zip(group["param_names"], params, strict=True))
        groups.append({"params": params, "rule": rule_of(group, own(lr=1.0), what)})
    return groups
