"""What tests of the PyTorch side share."""

import pytest

pytest.importorskip("torch", reason="the PyTorch side needs torch")


@pytest.fixture(autouse=True)
def single_threaded(one_thread: None) -> None:
    """Bits are compared, and workers are threads."""
