"""Writes docs/reference.md, every public name with its signature and docstring, from the source.

    python docs/reference.py

What is public is in the ``__all__`` of windlass and of its types, data, torch and ray. Signatures are read from the
source, not from the objects, so that types have the names that the source gives them.
"""

import ast
import functools
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import windlass as wl

PAGE = Path(__file__).with_name("reference.md")
HEAD = """\
# Reference

Every public name, by the docstrings; `make reference` writes this page. `import windlass as wl` has all of them, those
for PyTorch in `wl.torch`, for Ray in `wl.ray`, for files in `wl.data`; `wl.types` has the types of what calls return,
for annotations. The guides say what they are for: start with [start.md](guide/start.md).
"""
#: Chapters, and the modules whose names are in them; the longest that fits counts.
CHAPTERS = {
    "Clusters": ["windlass._client"],
    "Tensors and tables": ["windlass._objects"],
    "Questions and functions": [
        "windlass._objects.expressions",
        "windlass._objects.query",
        "windlass._rules.functions",
    ],
    "Rules": ["windlass._rules"],
    "Initialisers": ["windlass._rules.init"],
    "Policies": ["windlass._rules.sync"],
    "Leased data": ["windlass._data"],
    "Data out of files": ["windlass.data"],
    "PyTorch": ["windlass.torch"],
    "Ray": ["windlass.ray"],
    "Errors": ["windlass._errors"],
}
#: Objects of these modules are returned by calls; users make no new ones.
RETURNED = ("windlass._errors", "windlass._objects", "windlass._rules.functions")
WIDTH = 100
KEPT = "\0"  # a space where a line must not end


def public() -> dict[str, object]:
    """Every public object, by the name that a user types."""
    names = {f"wl.{name}": getattr(wl, name) for name in wl.__all__}
    names |= {f"wl.types.{name}": getattr(wl.types, name) for name in wl.types.__all__}
    for part in ("data", "torch", "ray"):
        module = getattr(wl, part)
        names |= {f"wl.{part}.{name}": getattr(module, name) for name in module.__all__}
    return names


def members(kind: type) -> Iterator[tuple[str, type, Any]]:
    """Public methods and properties of a class and its bases in Windlass, with the class that has them."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("windlass."):
            continue
        for name, member in vars(base).items():
            described = callable(member) or isinstance(member, (property, classmethod, staticmethod))
            if not name.startswith("_") and name not in seen and described:
                seen.add(name)
                yield name, base, member


def page() -> str:
    """The whole page."""
    found: dict[str, list[str]] = {title: [] for title in CHAPTERS}
    for name, value in public().items():
        found[chapter(value)].append(entry(name, value))
    return HEAD + "".join(f"\n## {title}\n\n" + "\n".join(entries) for title, entries in found.items() if entries)


def chapter(value: object) -> str:
    """The title of the chapter that an object is in."""
    module = value.__module__ if hasattr(value, "__qualname__") else type(value).__module__
    fits = [(len(start), title) for title, starts in CHAPTERS.items() for start in starts if module.startswith(start)]
    return max(fits)[1]


def entry(name: str, value: object) -> str:
    """One name, with the members that it has."""
    if isinstance(value, type) and issubclass(value, Exception):
        return f"**`{name}`**: {prose(doc_of(value), '')}"
    if not isinstance(value, type):
        if isinstance(value, types.FunctionType):
            return block("###", name, signature(node_of(value.__module__, value.__name__)), doc_of(value))
        value = type(value)
        return block("###", name, "", doc_of(value)) + listed(name, value)
    given = made_by(value)
    return block("###", name, given, doc_of(value)) + ("" if given else fields(value)) + listed(value.__name__, value)


def listed(owner: str, kind: type) -> str:
    """The members of a class."""
    parts = []
    for name, base, member in members(kind):
        if isinstance(member, property):
            returned = node_of(base.__module__, base.__name__, name).returns
            parts.append(block("####", f"{owner}.{name}", f": {unquoted(returned)}", doc_of(member)))
        elif isinstance(member, types.FunctionType) and member.__name__ == name:  # not a second name of a method
            node = node_of(base.__module__, base.__name__, name)
            parts.append(block("####", f"{owner}.{name}", signature(node), doc_of(member)))
    return "".join("\n" + part for part in parts)


def block(level: str, name: str, form: str, doc: str) -> str:
    """A heading, the signature if there is one, and the docstring."""
    if not form:
        return f"{level} {name}\n\n{prose(doc, form)}"
    whole = name.rpartition(".")[2] + form
    lines = textwrap.wrap(whole, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    code = "\n".join(lines).replace(KEPT, " ")
    return f"{level} {name}\n\n```\n{code}\n```\n\n{prose(doc, form)}"


def doc_of(value: object) -> str:
    """Its docstring, without indentation."""
    return inspect.cleandoc(value.__doc__ or "")


def prose(doc: str, form: str) -> str:
    """A docstring as Markdown: literals, code that is indented, and what it says of parameters as a list."""
    parameters = set(re.findall(r"[(, *]([a-z_]\w*)", form))
    lines = []
    for line in doc.replace("``", "`").splitlines():
        line = re.sub(r"(^| )::$", "", line)
        about = re.match(r"([a-z_]+(?:, [a-z_]+)*): ", line)
        if about is not None and set(about[1].split(", ")) <= parameters:
            line = f"- `{about[1]}`: {line[about.end() :]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


# -- from the source ---------------------------------------------------------------------------------------------------


@functools.cache
def source(module: str) -> tuple[ast.Module, list[str]]:
    """A module as a tree, and its lines."""
    text = inspect.getsource(importlib.import_module(module))
    return ast.parse(text), text.splitlines()


def node_of(module: str, *path: str) -> Any:
    """The definition of a function, a class or a method; of several, such as overloads, the last."""
    node: Any = source(module)[0]
    for name in path:
        found = [one for one in node.body if getattr(one, "name", None) == name]
        node = found[-1]
    return node


def signature(node: Any) -> str:
    """Its parameters without self, and what it returns."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    shown = [parameter(arg, default) for arg, default in zip(plain, defaults, strict=True)]
    shown = shown[1:] if plain and plain[0].arg in ("self", "cls") else shown
    if args.vararg:
        shown.append("*" + parameter(args.vararg, None))
    elif args.kwonlyargs:
        shown.append("*")
    shown += [parameter(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        shown.append("**" + parameter(args.kwarg, None))
    returned = f" -> {unquoted(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    return joined(shown) + returned.replace(" ", KEPT)


def joined(parameters: list[str]) -> str:
    """A list of them, whose lines may end between two of them only."""
    return f"({', '.join(one.replace(' ', KEPT) for one in parameters)})"


def parameter(arg: ast.arg, default: ast.expr | None) -> str:
    """A parameter with its type and default."""
    typed = f"{arg.arg}: {unquoted(arg.annotation)}" if arg.annotation is not None else arg.arg
    return typed if default is None else f"{typed} = {ast.unparse(default)}"


def unquoted(annotation: ast.expr | None) -> str:
    """A type, without the quotes of one that is not defined yet."""
    text = "" if annotation is None else ast.unparse(annotation)
    return text if "Literal[" in text else re.sub(r"'([^']*)'", r"\1", text)


def made_by(kind: type) -> str:
    """The signature of its constructor, where users call it."""
    if "made by" in doc_of(kind).lower() or kind.__module__.startswith(RETURNED):
        return ""
    node = node_of(kind.__module__, kind.__name__)
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return signature(one)
    if hasattr(kind, "__dataclass_fields__"):
        given = [str(p.replace(annotation=p.empty)) for p in inspect.signature(kind).parameters.values()]
        return joined(given)
    return ""


def fields(kind: type) -> str:
    """The fields of a value, with the comments beside them."""
    node, lines = node_of(kind.__module__, kind.__name__), source(kind.__module__)[1]
    parts = []
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name) or one.target.id[0] == "_":
            continue
        beside = lines[one.end_lineno - 1].partition("#: ")[2] if one.end_lineno is not None else ""
        above: list[str] = []
        while (line := lines[one.lineno - 2 - len(above)].strip()).startswith("#: "):
            above.insert(0, line.removeprefix("#: "))
        if said := beside or " ".join(above):
            parts.append(textwrap.fill(f"- `{one.target.id}`: {said}", 120, subsequent_indent="  ") + "\n")
    return "\n" + "".join(parts) if parts else ""


if __name__ == "__main__":
    PAGE.write_text(page())
