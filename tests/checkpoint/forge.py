"""Files of a checkpoint changed by somebody who also makes the checksums right."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from made import Made

from windlass import _core
from windlass._checkpoint.names import MANIFEST

INDEX, BLOCK = "server-0.index.json", "server-0-0000.safetensors"
Change = Callable[[Any], Any]  # of decoded JSON in place, or to other bytes


def seal(body: bytes, version: object = 1) -> bytes:
    return b'{"format_version":%s,"crc32c":%d,"manifest":%s}' % (
        json.dumps(version).encode(),
        _core.crc32c(body),
        body,
    )


def write(path: pathlib.Path, data: bytes) -> tuple[int, int]:
    """Anew: a file that is cut to nothing and written again makes some file systems wait for the disk."""
    path.unlink()
    path.write_bytes(data)
    return len(data), _core.crc32c(data)


def forge_manifest(made: Made, change: Change) -> None:
    path = made.path / MANIFEST
    manifest = json.loads(path.read_bytes())["manifest"]
    write(path, seal(changed(manifest, change)))


def forge_index(made: Made, change: Change) -> None:
    path = made.path / INDEX
    size, crc = write(path, changed(json.loads(path.read_bytes()), change))
    forge_manifest(made, lambda m: m["indexes"][0].update(bytes=size, crc32c=crc))


def forge_block(made: Made, data: bytes) -> None:
    size, crc = write(made.path / BLOCK, data)
    forge_index(made, lambda index: index["blocks"][0].update(bytes=size, crc32c=crc))


def forge_head(made: Made, change: Change) -> None:
    """The head of a block, with the same numbers behind it."""
    data = (made.path / BLOCK).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head = changed(json.loads(data[8:end]), change)
    forge_block(made, len(head).to_bytes(8, "little") + head + data[end:])


def changed(decoded: Any, change: Change) -> bytes:
    other = change(decoded)
    return other if isinstance(other, bytes) else json.dumps(decoded, separators=(",", ":")).encode()
