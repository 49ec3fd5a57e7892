"""Plain values as bytes: numbers, texts, lists, dicts and numpy arrays, nothing executable. MessagePack."""

from typing import Any

import msgspec
import numpy as np

from windlass._errors import InvalidArgument

_ARRAY = 1
_KINDS = "biuf"


def pack(value: Any, what: str) -> bytes:
    """The value as bytes; `what` it is, for errors."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=_encode)
    except (TypeError, NotImplementedError, OverflowError, RecursionError) as error:
        expected = "expected None, numbers, texts, bytes, lists, dicts and numpy arrays"
        raise InvalidArgument(f"{what}: {expected}: {error}") from None


def unpack(data: bytes, what: str) -> Any:
    """The value that was packed."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"{what}: malformed: {error}") from None


def _encode(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "detach"):  # of torch
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in _KINDS:
        raise NotImplementedError(f"{type(value).__name__} cannot travel")
    head = msgspec.msgpack.encode((value.dtype.str, value.shape))
    return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(2, "little") + head + np.ascontiguousarray(value).tobytes())


def _decode(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"an extension {code}")
    end = 2 + int.from_bytes(data[:2], "little")
    text, shape = msgspec.msgpack.decode(data[2:end], type=tuple[str, tuple[int, ...]])
    dtype = np.dtype(text)
    if dtype.kind not in _KINDS or dtype.hasobject:
        raise ValueError(f"an array of {text}")
    return np.frombuffer(data[end:], dtype).reshape(shape).copy()
