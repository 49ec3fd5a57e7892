"""What tests of consistency share."""

from collections.abc import Iterator

import pytest
from crew import Crew

import windlass as wl


@pytest.fixture
def crew(cluster: wl.Cluster) -> Iterator[Crew]:
    crew = Crew(cluster)
    yield crew
    crew.leave()
