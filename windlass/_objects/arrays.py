"""Between the arrays of users and the core: numpy in, numpy out; torch in, torch out.

The core takes contiguous arrays by the buffer protocol or DLPack. Numpy has no bfloat16 of its own; an array of
ml_dtypes.bfloat16 crosses as its bits, in uint16.
"""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from windlass import _core
from windlass._errors import InvalidArgument, ShapeMismatch

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
ArrayLike: TypeAlias = "Array | list[Any] | tuple[Any, ...] | float | int"

_FLOAT32 = np.dtype(np.float32)
#: The rule for dtypes. An object takes arrays of its own kind, floats or integers. What the core does not read as it is
#: (``_READ``) is converted to what the object stores. Everything else is refused.
_TAKEN = {
    "float32": ("float32", "float64", "bfloat16", "float16"),
    "float64": ("float64", "float32", "bfloat16", "float16"),
    "int64": ("int64", "int32"),
}
_KEYS = ("int64", "uint64", "int32")
_READ = {"float32": ("float32", "bfloat16", "float16"), "float64": ("float64",), "int64": ("int64",)}
_CORE_DTYPES = {
    "float32": _core.Dtype.FLOAT32,
    "float64": _core.Dtype.FLOAT64,
    "int64": _core.Dtype.INT64,
    "bfloat16": _core.Dtype.BFLOAT16,
    "float16": _core.Dtype.FLOAT16,
}


def is_whole(x: object) -> bool:
    """Whether it is an integer, Python's or numpy's."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def dims_of(what: str, shape: Any) -> tuple[int, ...]:
    """A shape as it was given, checked."""
    dims = (shape,) if is_whole(shape) or not isinstance(shape, Iterable) else tuple(shape)
    if not all(is_whole(d) and d >= 0 for d in dims):
        raise InvalidArgument(f"{what}: shape must be whole numbers of at least 0, not {shape!r}")
    return tuple(int(d) for d in dims)


def is_torch(x: object) -> bool:
    """Whether x is a torch tensor; never imports torch."""
    if type(x) is np.ndarray:
        return False
    return isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ()))  # another thread may just be importing it


def is_torch_dtype(dtype: object) -> bool:
    """Whether it is one of torch's, such as torch.float32; never imports torch."""
    return isinstance(dtype, getattr(sys.modules.get("torch"), "dtype", ()))


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


def _asarray(x: Any, what: str) -> "np.ndarray[Any, Any]":
    try:
        return np.asanyarray(x)
    except (ValueError, OverflowError) as error:  # such as a list of lists of different lengths
        raise ShapeMismatch(f"{what}: {error}") from None


def check_torch(x: Any, what: str) -> None:
    """Raises unless it is on the cpu and dense."""
    torch = sys.modules["torch"]
    if x.device.type != "cpu":
        raise ShapeMismatch(f"{what}: expected a tensor on the cpu, saw one on {x.device}")
    if x.layout is not torch.strided:
        raise ShapeMismatch(f"{what}: expected a dense tensor, saw one of layout {x.layout}")


def _check_dtype(seen: object, among: tuple[str, ...], what: str) -> str:
    """The name of a dtype; raises unless it is among these."""
    name = dtype_name(seen)
    if name not in among:
        accepted = f"{', '.join(among[:-1])} or {among[-1]}" if len(among) > 1 else among[0]
        raise InvalidArgument(f"{what}: expected dtype {accepted}, saw {name}")
    return name


def as_input(x: Any, what: str, stored: str = "float32") -> Any:
    """What the core reads, of an object that stores such a dtype: x itself where it can be read in place, else a copy.

    Lists and Python's numbers have no dtype of their own: they take that of the object, as long as nothing is lost.
    """
    if type(x) is np.ndarray and x.dtype is _FLOAT32 and stored == "float32":
        flags = x.flags
        if flags.c_contiguous and flags.aligned:
            return x
    if is_torch(x):
        check_torch(x, what)
        x = x.detach()
        if _check_dtype(x.dtype, _TAKEN[stored], what) not in _READ[stored]:
            x = x.to(getattr(sys.modules["torch"], stored))
        return x.contiguous()
    array = np.require(_asarray(x, what), requirements=["C", "A"])
    if not hasattr(x, "dtype") and array.dtype.kind in ("ib" if stored == "int64" else "fiub"):
        array = array.astype(stored)
    if _check_dtype(array.dtype, _TAKEN[stored], what) not in _READ[stored]:
        return array.astype(stored)
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_rows(x: Any, what: str, dim: int) -> Any:
    """What the core reads of a table's rows. Where they have one number each, a list of numbers will do."""
    rows = as_input(x, what)
    return rows.reshape(-1, 1) if dim == 1 and rows.ndim == 1 else rows


def as_output(x: Any, what: str, stored: str = "float32") -> Any:
    """What the core writes, of an object that stores such a dtype; it must be writable in place."""
    if type(x) is np.ndarray and x.dtype is _FLOAT32 and stored == "float32" and x.flags.carray:
        return x
    if is_torch(x):
        check_torch(x, what)
        _check_dtype(x.dtype, _READ[stored], f"{what}, out")
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
    name = _check_dtype(x.dtype, _READ[stored], f"{what}, out")
    return x.view(np.uint16) if name == "bfloat16" else x


def as_keys(x: Any, what: str) -> Any:
    """Keys as a contiguous one-dimensional array of int64, uint64 or int32."""
    if is_torch(x):
        check_torch(x, f"{what}, keys")
        _check_dtype(x.dtype, _KEYS, f"{what}, keys")
        return x.detach().contiguous()
    array = _asarray(x, f"{what}, keys")
    if array.size == 0 and not isinstance(x, np.ndarray):
        array = array.astype(np.int64)  # an empty list has no type of its own
    _check_dtype(array.dtype, _KEYS, f"{what}, keys")
    return np.require(array, dtype=array.dtype.newbyteorder("="), requirements=["C", "A"])


def as_torch(array: "np.ndarray[Any, Any]") -> Any:
    """The same memory as a torch tensor; bits of bfloat16 in uint16 become bfloat16, keys in uint64 int64."""
    torch = sys.modules["torch"]
    if array.dtype == np.uint64:
        return torch.from_numpy(array.view(np.int64))
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
