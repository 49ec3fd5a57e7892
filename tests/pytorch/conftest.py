"""What tests of the PyTorch side share."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the PyTorch side needs torch")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, and workers are threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
