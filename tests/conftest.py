"""What all tests share: the option --accurate and a cluster that closes."""

from collections.abc import Iterator

import hypothesis
import pytest

import windlass as wl

ALWAYS = {"deadline": None, "print_blob": True, "database": None}
hypothesis.settings.register_profile("short", max_examples=400, stateful_step_count=25, **ALWAYS)
hypothesis.settings.register_profile("accurate", max_examples=1500, stateful_step_count=60, **ALWAYS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accurate", action="store_true", help="also run the long forms of tests")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("accurate" if config.getoption("--accurate") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--accurate"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="the long form; runs with --accurate"))


@pytest.fixture
def accurate(request: pytest.FixtureRequest) -> bool:
    """Whether the long form is asked for."""
    return bool(request.config.getoption("--accurate"))


@pytest.fixture
def cluster() -> Iterator[wl.Cluster]:
    """A cluster with two threads, whatever the machine has. Closing it raises the error of a dropped future."""
    with wl.connect(threads=2) as opened:
        yield opened
