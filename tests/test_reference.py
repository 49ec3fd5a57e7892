"""The reference is what the docstrings say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="the reference has wl.torch in it")

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(reference: ModuleType):
    assert (DOCS / "reference.md").read_text() == reference.page(), "`make reference` writes it anew"


def test_every_public_name_and_member_has_a_docstring_and_a_heading(reference: ModuleType):
    page = reference.page()
    for name, value in reference.public().items():
        assert reference.doc_of(value).strip(), name
        assert f"### {name}\n" in page or f"**`{name}`**" in page
        if isinstance(value, type) and not issubclass(value, Exception):
            for member, _, described in reference.members(value):
                assert reference.doc_of(described).strip(), f"{name}.{member}"
    assert {"wl.connect", "wl.Table", "wl.torch.ServerOptimizer"} <= set(reference.public())
