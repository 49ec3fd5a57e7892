"""These tests are about what travels: nothing is shared, unless a test asks for it."""

import pytest


@pytest.fixture(autouse=True)
def sockets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of ``connect()`` here, in scripts that a test starts, too."""
    monkeypatch.setenv("WINDLASS_TRANSPORT", "socket")
