"""Layers of the core point down: what a file may include."""

import pathlib
import re

import pytest

CSRC = pathlib.Path(__file__).resolve().parents[1] / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

#: Lowest first. A file includes files of its own folder and of layers below, not of its neighbours in the same layer.
LAYERS = (
    {"base"},
    {"wire", "rule", "sync", "exec"},
    {"session", "query"},
    {"tensor"},
    {"table"},
    {"messages"},
    {"server"},
    {"client"},
    {"bench"},
    {"bind"},
)
HEIGHT = {folder: height for height, layer in enumerate(LAYERS) for folder in layer}
PYTHON = ("Python.h", "nanobind/", "numpy/")

#: Files of windlass.bench._native, and what they may use: it has its own copy of the core's globals (bind/bench.h).
BENCH = ("bench/", "bind/bench")
BENCH_USES = (*BENCH, "base/", "rule/", "sync/")


def complaints(path: str, text: str) -> list[str]:
    """What is wrong with the includes of a file of the core; `path` as others include it."""
    folder = path.partition("/")[0]
    found = []
    for name in INCLUDE.findall(text):
        other = name.partition("/")[0]
        if name.startswith(PYTHON) and folder != "bind":
            found.append(f"{path} includes {name}: only bind/ knows Python")
        elif other in HEIGHT and other != folder and HEIGHT[other] >= HEIGHT[folder]:
            found.append(f"{path} includes {name}: {other}/ is not below {folder}/")
        elif other in HEIGHT and path.startswith(BENCH) and not name.startswith(BENCH_USES):
            found.append(f"{path} includes {name}: windlass.bench._native uses base/, rule/ and sync/ alone")
        elif name.startswith(BENCH) and not path.startswith(BENCH):
            found.append(f"{path} includes {name}: only windlass.bench._native has the limits")
    return found


def test_no_include_points_up():
    files = sorted(file for ending in ("h", "cc", "def") for file in CSRC.rglob(f"*.{ending}"))
    assert len(files) > 200
    assert {file.relative_to(CSRC).parts[0] for file in files} == set(HEIGHT), "each folder has its place in LAYERS"
    names = {str(file.relative_to(CSRC)): file.read_text() for file in files}
    assert [line for name, text in names.items() for line in complaints(name, text)] == []


@pytest.mark.parametrize(
    ("path", "line", "wrong"),
    [
        ("session/record.h", '#include "server/host.h"', True),
        ("rule/sgd.h", '#  include "wire/frame.h"', True),
        ("server/host.h", "#include <nanobind/nanobind.h>", True),
        ("server/host.h", '#include "session/record.h"', False),
        ("server/host.h", '#include "server/crew.h"', False),
        ("bind/host.cc", "#include <nanobind/nanobind.h>", False),
        ("server/host.h", '// #include "client/net/lane.h"', False),
        ("bench/gate.cc", '#include "sync/gate.h"', False),
        ("bench/wire.cc", '#include "server/host.h"', True),
        ("bind/bench.cc", '#include "bench/loops.h"', False),
        ("bind/bench.cc", '#include "bind/bind.h"', True),
        ("bind/engine.cc", '#include "bench/loops.h"', True),
    ],
)
def test_an_include_that_points_up_is_noticed(path: str, line: str, wrong: bool):
    assert bool(complaints(path, f"#pragma once\n\n{line}\n")) == wrong
