"""What the package shows to its users."""

import dataclasses
import importlib.metadata
import inspect
import pathlib
import re
import types

import pytest

import windlass as wl
from windlass import _core, _errors, _public
from windlass._objects.query import Queries
from windlass._objects.vector import VectorOperations

CSRC = pathlib.Path(__file__).parents[1] / "csrc"


def visible() -> list[str]:
    """Public names of the package; its own submodules are visible once somebody has imported them."""
    return [
        name
        for name, value in (vars(wl) | vars(_public)).items()
        if not name.startswith("_")
        and not (isinstance(value, types.ModuleType) and value.__name__ == f"windlass.{name}")
    ]


def sort_key(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions: the order that the linter keeps in imports."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def public_members() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = [(name, getattr(wl, name)) for name in wl.__all__]
    found += [(name, getattr(wl.types, name)) for name in wl.types.__all__]
    for name, value in list(found):
        if not isinstance(value, type):
            continue
        fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        fields |= set(getattr(value, "_fields", ()))
        bases = [base for base in (Queries, VectorOperations) if issubclass(value, base)]
        inherited = {attribute: member for base in bases for attribute, member in vars(base).items()}
        for attribute, member in {**inherited, **vars(value)}.items():
            slot = isinstance(member, types.MemberDescriptorType)
            if not attribute.startswith("_") and attribute not in fields and not slot:
                found.append((f"{name}.{attribute}", member))
    return found


def test_all_is_exactly_what_is_visible_and_sorted():
    assert wl.__all__ == sorted(visible(), key=sort_key)


def returned() -> set[str]:
    """The classes that public methods and properties of clusters, tensors, tables and errors say that they return."""
    found: set[str] = set()
    for kind in (wl.Cluster, wl.Tensor, wl.Table, wl.types.Future, wl.WindlassError):
        for base in kind.__mro__:
            if not base.__module__.startswith("windlass."):
                continue
            for name, member in vars(base).items():
                function = member.fget if isinstance(member, property) else member
                if not name.startswith("_") and isinstance(function, types.FunctionType):
                    found |= set(re.findall(r"\b[A-Z]\w+", str(function.__annotations__.get("return", ""))))
    return found


def test_what_users_make_is_in_the_package_and_what_calls_return_is_in_its_types():
    assert not set(wl.__all__) & set(wl.types.__all__)
    made = {name for name in wl.__all__ if "made by" in (getattr(wl, name).__doc__ or "").lower()}
    assert made == {"Cluster", "Table", "Tensor"}  # of what calls return, these stand in every annotation
    assert {"Pulled", "Histogram", "Local", "Step", "NotApplied"} <= returned()
    assert returned() & set(wl.__all__) <= {*made, "Sync"}
    strange = {"Any", "Iterator", "EllipsisType", "Keys", "NoneType", "None", "T"}
    assert returned() - strange <= {*wl.__all__, *wl.types.__all__}


def test_types_are_exactly_those_that_are_listed_and_sorted():
    listed = [name for name in vars(wl.types) if not name.startswith("_")]
    assert wl.types.__all__ == sorted(listed)


@pytest.mark.parametrize("kind", [wl.Tensor, wl.Table])
def test_every_question_has_its_arguments_in_one_order(kind: type):
    """What cannot be left out, then the condition, then all else by its name."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    asked = {name: inspect.signature(method) for name, method in methods if not name.startswith("_")}
    asked = {name: signature for name, signature in asked.items() if "where" in signature.parameters}
    assert {"count", "keys", "sum", "norm", "top_k", "histogram"} <= set(asked)
    for name, signature in asked.items():
        if name == "delete":  # its keys are what it is about, and may be left out
            continue
        _, *given = signature.parameters.values()
        needed = [p for p in given if p.default is p.empty]
        plain = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert plain == [*(p.name for p in needed), "where"], name


@pytest.mark.parametrize(("name", "value"), public_members(), ids=lambda x: x if isinstance(x, str) else "")
def test_every_public_thing_has_a_docstring(name: str, value: object):
    doc = value.__doc__ or ""
    generated = f"{name}("  # what dataclass and NamedTuple write where nobody did
    assert doc.strip()
    assert not doc.startswith(generated)


def test_public_members_are_looked_into():
    names = {name for name, _ in public_members()}
    assert {
        "connect",
        "Cluster.tensor",
        "Tensor.push_pull",
        "Tensor.shape",
        "Tensor.axpy",
        "Table.export",
        "Table.top_k",
        "Future.wait",
    } <= names


def test_the_version_is_the_distributions():
    assert wl.__version__ == importlib.metadata.version("windlass")


def test_errors_are_in_the_order_of_the_cores_codes():
    text = (CSRC / "base" / "status.h").read_text()
    body = re.search(r"enum class Code[^{]*\{(.*?)\};", text, re.DOTALL)
    assert body is not None
    codes = re.findall(r"^\s*k(\w+)", body.group(1), re.MULTILINE)
    assert codes[0] == "Ok"
    names = {"Corrupt": "ProtocolError", "OutOfSequence": "ProtocolError", "Internal": "InternalError"}
    assert [e.__name__ for e in _errors.ERRORS] == ["InternalError", *(names.get(c, c) for c in codes[1:])]


def test_every_error_is_public_and_a_windlass_error():
    for error in _errors.ERRORS:
        assert getattr(wl, error.__name__) is error
        assert issubclass(error, wl.WindlassError)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (wl.InvalidArgument, ValueError),
        (wl.ShapeMismatch, TypeError),
        (wl.SpecMismatch, ValueError),
        (wl.NotFound, KeyError),
        (wl.Timeout, TimeoutError),
        (wl.ResourceExhausted, MemoryError),
        (wl.NonFinite, ValueError),
    ],
)
def test_an_error_is_also_the_builtin_that_one_would_catch(error: type, builtin: type):
    assert issubclass(error, builtin)
    assert str(error("what was seen")) == "what was seen"


def test_every_rule_of_the_core_has_a_class():
    text = (CSRC / "rule" / "rules.def").read_text()
    in_core = len(re.findall(r"^WL_RULE\(", text, re.MULTILINE))
    rules = [wl.SGD(lr=0.1), wl.SGD(lr=0.1, momentum=0.9)]
    rules += [wl.Adagrad(), wl.RowAdagrad(), wl.Adam(), wl.AdamW(), wl.Sum(), wl.Assign(), wl.Max(), wl.Average()]
    rules += [wl.RMSProp(momentum=m, centered=c) for m in (0.0, 0.9) for c in (False, True)]
    rules += [wl.Adadelta(), wl.Adamax(), wl.NAdam(), wl.Lion(), wl.FTRL(), wl.Min()]
    rules.append(wl.rule(lambda w, g: None)())
    assert {r._kind for r in rules} == set(_core.RuleKind)
    assert len(_core.RuleKind) == in_core


def test_values_are_values():
    assert wl.SGD(lr=0.1) == wl.SGD(lr=0.1)
    assert wl.SGD(lr=0.1) != wl.SGD(lr=0.2)
    assert hash(wl.Normal(std=0.5)) == hash(wl.Normal(std=0.5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        wl.SGD(lr=0.1).lr = 0.2  # type: ignore[misc]
