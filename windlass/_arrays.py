"""Between the arrays of users and the core: numpy in, numpy out; torch in, torch out.

The core takes contiguous arrays by the buffer protocol or DLPack. Numpy has no bfloat16 of its own; an array of
ml_dtypes.bfloat16 crosses as its bits, in uint16.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from windlass import _core
from windlass._errors import InvalidArgument, ShapeMismatch

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
ArrayLike: TypeAlias = "Array | list[Any] | tuple[Any, ...] | float | int"

_FLOAT32 = np.dtype(np.float32)
_CORE_DTYPES = {
    "float32": _core.Dtype.FLOAT32,
    "float64": _core.Dtype.FLOAT64,
    "int64": _core.Dtype.INT64,
    "bfloat16": _core.Dtype.BFLOAT16,
    "float16": _core.Dtype.FLOAT16,
}


def is_torch(x: object) -> bool:
    """Whether x is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_name(dtype: object) -> str:
    """'float32' for np.float32, 'float32', np.dtype('float32'), torch.float32, ..."""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return np.dtype(dtype).name  # type: ignore[call-overload, no-any-return]
    except TypeError:
        return text


def core_dtype(dtype: object, what: str) -> _core.Dtype:
    """The core's name of a dtype."""
    name = dtype_name(dtype)
    if name not in _CORE_DTYPES:
        raise InvalidArgument(f"{what}: dtype must be one of {', '.join(_CORE_DTYPES)}, not {name}")
    return _CORE_DTYPES[name]


def as_input(x: Any, what: str) -> Any:
    """What the core reads: x itself where it can be read in place, else a contiguous copy."""
    if type(x) is np.ndarray and x.dtype is _FLOAT32 and x.flags.c_contiguous and x.flags.aligned:
        return x
    if is_torch(x):
        if x.device.type != "cpu":
            raise ShapeMismatch(f"{what}: expected a tensor on the cpu, saw one on {x.device}")
        return x.detach().contiguous()
    array = np.require(x, requirements=["C", "A"])
    if np.ndim(x) == 0:
        array = array.reshape(())
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    if array.dtype == np.uint16 or array.dtype.kind not in "fiub":
        raise ShapeMismatch(f"{what}: expected numbers, saw {array.dtype.name}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_output(x: Any, what: str) -> Any:
    """What the core writes; it must be writable in place."""
    if type(x) is np.ndarray and x.dtype is _FLOAT32 and x.flags.carray:
        return x
    if is_torch(x):
        if x.device.type != "cpu":
            raise ShapeMismatch(f"{what}: expected a tensor on the cpu, saw one on {x.device}")
        if not x.is_contiguous():
            raise ShapeMismatch(f"{what}: the tensor is not contiguous")
        return x.detach()
    if not isinstance(x, np.ndarray):
        raise ShapeMismatch(f"{what}: expected a numpy array or a torch tensor, saw {type(x).__name__}")
    if not x.flags.writeable:
        raise ShapeMismatch(f"{what}: the array is read-only")
    if not x.flags.c_contiguous:
        raise ShapeMismatch(f"{what}: the array is not contiguous in C order")
    if not x.flags.aligned or not x.dtype.isnative:
        raise ShapeMismatch(f"{what}: the array is not aligned or not in native byte order")
    if x.dtype.name == "bfloat16":
        return x.view(np.uint16)
    if x.dtype == np.uint16:
        raise ShapeMismatch(f"{what}: expected floating point, saw uint16")
    return x


def as_keys(x: Any, what: str) -> Any:
    """Keys as a contiguous one-dimensional array of int64, uint64 or int32."""
    if is_torch(x):
        if x.device.type != "cpu":
            raise ShapeMismatch(f"{what}, keys: expected a tensor on the cpu, saw one on {x.device}")
        return x.detach().contiguous()
    array = np.asarray(x)
    if array.size == 0 and not isinstance(x, np.ndarray):
        array = array.astype(np.int64)  # an empty list has no type of its own
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 4 or array.dtype == np.uint32:
        raise ShapeMismatch(f"{what}, keys: expected int64, uint64 or int32, saw {array.dtype.name}")
    return np.require(array, requirements=["C", "A"])


def as_torch(array: "np.ndarray[Any, Any]") -> Any:
    """The same memory as a torch tensor; bits of bfloat16 in uint16 become bfloat16."""
    torch = sys.modules["torch"]
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_numpy(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """The array, with bits of bfloat16 as ml_dtypes.bfloat16."""
    if array.dtype == np.uint16:
        try:
            import ml_dtypes
        except ImportError:
            raise InvalidArgument("numpy needs the package ml_dtypes for bfloat16") from None
        return array.view(ml_dtypes.bfloat16)
    return array
