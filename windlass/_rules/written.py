"""Rules as text, so that who opens a tensor or table by its name has the rule that it was made with.

What is fixed of a rule is part of an object's spec. Its numbers, such as the step size, travel with every push; the
text has those that its maker chose. Servers keep the text and do not read it:

    {"rule":"SGD","numbers":{"lr":0.1,"momentum":0.9,...},"options":{"clip_value":1.0}}

The text comes from another process and is trusted with nothing: it chooses among the rules here, and a function of the
user's is found only where this process has imported it already. The result must have the spec's own structure.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from windlass import _core
from windlass._errors import InvalidArgument
from windlass._rules import optimizers
from windlass._rules import rule as plain
from windlass._rules.rule import OPTIONS, Rule
from windlass._rules.schedule import Schedule
from windlass._rules.torch_rule import TorchRule
from windlass._rules.user_rules import FunctionRule, Layout, RuleFunction, rule_of_numbers

BYTES_MAX = 2048  # csrc/base/limits.h: kRuleTextBytesMax
_FUNCTION = "@rule"
_OURS: dict[str, type[Rule]] = {
    name: found
    for module in (optimizers, plain)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Rule) and found not in (Rule, optimizers.Optimizer)
}
Find = Callable[[str], object]  # the function of the user's that has a name, or None


class NotWritten(Exception):
    """The text is none that a rule can be made of."""


def write_rule(rule: Rule) -> str:
    """The text of a rule."""
    about: dict[str, Any] = {"rule": type(rule).__name__}
    own = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule) if f.name not in OPTIONS}
    if isinstance(rule, FunctionRule):
        about = {"rule": _FUNCTION, "state": rule._function._state, "row_state": rule._function._row_state}
    elif isinstance(rule, TorchRule):
        own = {"lr": rule.lr}  # the others are in its name on the servers
    about["numbers"] = own
    options = {name: getattr(rule, name) for name in OPTIONS if getattr(rule, name) is not None}
    if isinstance(rule.schedule, Schedule):
        options["schedule"] = dataclasses.asdict(rule.schedule)
    if options:
        about["options"] = options
    text = json.dumps(about, separators=(",", ":"))
    if len(text) > BYTES_MAX:
        raise InvalidArgument(f"{rule}: its names and numbers take {len(text)} bytes as text, at most {BYTES_MAX}")
    return text


def read_rule(text: str, spec: _core.RuleSpec, shape: tuple[int, ...], find: Find) -> Rule:
    """The rule of an object with this spec; `shape` is the tensor's, or that of a table's row. Raises NotWritten."""
    try:
        about = json.loads(text)
        options = dict(about.get("options", {}))
        if "schedule" in options:
            options["schedule"] = Schedule(**options["schedule"])
        for rule in _candidates(about, options, spec, find):
            if rule._spec(shape).same(spec):
                return rule
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NotWritten(f"{type(error).__name__}: {error}") from error
    raise NotWritten("it says another rule than the object has")


def _candidates(about: Any, options: dict[str, Any], spec: _core.RuleSpec, find: Find) -> "list[Rule]":
    """The rules that it may be, the best first."""
    numbers = {**about["numbers"], **options}
    if about["rule"] == _FUNCTION:
        name = spec.foreign[0].partition(" ")[0]
        found = find(name)
        stand_in = rule_of_numbers(_Absent(name, about, spec), dict(about["numbers"]))(**numbers)
        return [found(**numbers), stand_in] if isinstance(found, RuleFunction) else [stand_in]
    if about["rule"] == "TorchRule":
        name, _, said = spec.foreign[0].partition(" ")
        own = json.loads(said)["options"]
        return [TorchRule(name.partition(":")[2], whole=spec.foreign[4], **numbers, **own)]
    return [_OURS[about["rule"]](**numbers)]


class _Absent(RuleFunction):
    """A function of the user's that this process has not imported: enough of it to push, and none to run."""

    is_here = False

    def __init__(self, name: str, about: Any, spec: _core.RuleSpec) -> None:
        self.__module__, _, self.__qualname__ = name.partition(":")
        self.__name__ = self.__qualname__.rpartition(".")[2]
        self._what = f"rule {self.__qualname__!r}"
        self._state, self._row_state = tuple(about["state"]), tuple(about["row_state"])
        self._numbers = tuple(sorted(about["numbers"], key=lambda name: name != "lr"))
        _, *layout = spec.foreign
        self._layout: Layout = tuple(layout)  # type: ignore[assignment]
        self._whole = self._layout[3]

    def layout(self) -> Layout:
        """As it was where the object was made."""
        return self._layout

    def compile(self, dims: int) -> None:
        """There is nothing to compile."""


def imported(name: str) -> object:
    """The function that "module:name" means in this process; None where the module is not imported. Imports nothing."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, RuleFunction) and found.name == name else None
