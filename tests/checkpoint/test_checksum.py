"""The checksum of files, as the core gives it to Python."""

import numpy as np
import pytest

from windlass import _core


def test_a_checksum_of_pieces_chains():
    data = np.random.default_rng(1).bytes(100_000)
    crc = 0
    for begin, end in ((0, 1), (1, 50_000), (50_000, 50_000), (50_000, 100_000)):
        crc = _core.crc32c(data[begin:end], crc)
    assert crc == _core.crc32c(data)
    assert _core.crc32c(b"123456789") == 0xE3069283


def test_any_contiguous_buffer_has_a_checksum_and_no_other():
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert _core.crc32c(numbers) == _core.crc32c(numbers.tobytes()) == _core.crc32c(memoryview(numbers))
    assert _core.crc32c(bytearray()) == 0
    with pytest.raises((ValueError, BufferError)):
        _core.crc32c(numbers[:, 1])
    with pytest.raises(TypeError):
        _core.crc32c("text")
