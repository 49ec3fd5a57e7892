"""Arrays by name in a file that others wrote: safetensors, or what torch.save made of a state dict.

Nothing in such a file is executed: torch reads numbers alone (weights_only). A local file of safetensors is mapped, so
an array takes memory when it is asked for.
"""

import os
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from windlass._checkpoint.layout import decode
from windlass._checkpoint.reader import BFLOAT16, parse_safetensors
from windlass._checkpoint.store import failed
from windlass._errors import CorruptCheckpoint, InvalidArgument, NotFound
from windlass._extras import need_torch

SAFETENSORS_ENDING, INDEX_ENDING = ".safetensors", ".safetensors.index.json"
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
ENDINGS = (SAFETENSORS_ENDING, INDEX_ENDING, *TORCH_ENDINGS)
_SHARDS_MAX = 1 << 16  # files of one index


class ArraysFile(Mapping[str, Any]):
    """Arrays of numpy's or torch's by name; bfloat16 comes as float32."""

    def __init__(self, where: str, arrays: Mapping[str, Any]) -> None:
        self.where = where
        self._arrays = arrays

    def __getitem__(self, name: str) -> Any:
        found = self._arrays[name]
        return found() if callable(found) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def open_arrays(where: str) -> ArraysFile:
    """The arrays in a file, by its ending, at a path or URL."""
    if where.endswith(INDEX_ENDING):
        return ArraysFile(where, _indexed(where))
    if where.endswith(SAFETENSORS_ENDING):
        return ArraysFile(where, _safetensors(where))
    return ArraysFile(where, _torch(where))


def of_mapping(arrays: Mapping[str, Any]) -> ArraysFile:
    """Arrays that the caller has, such as a state dict."""
    for name, array in arrays.items():
        if not isinstance(name, str) or not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise InvalidArgument(
                f"load: expected arrays by name, saw {name!r} of {type(array).__name__}; give the state dict that is "
                "in it"
            )
    return ArraysFile("the arrays given", arrays)


def _indexed(where: str) -> dict[str, Any]:
    """Several files, and which has what."""
    index: dict[str, Any] = decode(_read(where).tobytes(), dict[str, Any], where)
    names = index.get("weight_map")
    files = sorted({*names.values()}) if isinstance(names, dict) and all(map(_is_name, names.values())) else []
    if not files or len(files) > _SHARDS_MAX:
        raise CorruptCheckpoint(f"{where}: expected a weight_map of array names to file names")
    found: dict[str, Any] = {}
    for file in files:
        found.update(_safetensors(posixpath.join(posixpath.dirname(where), file)))
    return found


def _is_name(file: object) -> bool:
    return isinstance(file, str) and file.endswith(SAFETENSORS_ENDING) and "/" not in file and "\\" not in file


def _safetensors(where: str) -> dict[str, Any]:
    parsed = parse_safetensors(_read(where), where, foreign=True)
    return {name: _widened(array) if array.dtype == BFLOAT16 else array for name, array in parsed.items()}


def _widened(array: "np.ndarray[Any, Any]") -> Any:
    return lambda: (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _torch(where: str) -> dict[str, Any]:
    torch = need_torch(f"load: {where}")
    try:
        if "://" in where:
            import io

            loaded = torch.load(io.BytesIO(_read(where).tobytes()), map_location="cpu", weights_only=True)
        else:
            loaded = torch.load(where, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise NotFound(f"load: {where}: there is no such file") from None
    except Exception as error:
        raise CorruptCheckpoint(f"{where}: torch cannot read it as weights alone: {error}") from error
    if not isinstance(loaded, dict):
        raise CorruptCheckpoint(f"{where}: expected a state dict, saw a {type(loaded).__name__}")
    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if len(tensors) != len(loaded):
        other = next(name for name in loaded if name not in tensors)
        raise InvalidArgument(
            f"load: {where}: expected tensors by name, saw {other!r} of {type(loaded[other]).__name__}; load it with "
            "torch.load(..., weights_only=True), and give the state dict that is in it"
        )
    return tensors


def _read(where: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    try:
        if "://" not in where:
            return np.memmap(where, np.uint8, "r") if os.path.getsize(where) else np.empty(0, np.uint8)
        import fsspec

        with fsspec.open(where, "rb") as file:
            return np.frombuffer(file.read(), np.uint8)
    except FileNotFoundError:
        raise NotFound(f"load: {where}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise failed(where, "cannot be read", error) from error
