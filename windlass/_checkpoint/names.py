"""Names of files and folders in a checkpoint. Whatever they come from, they lead to no other place.

FOLDER/APP/CLOCK-ID/server-0-0000.safetensors     blocks of numbers
                    server-0.index.json           what of which shard is in which block
                    manifest.json                 written last: without it, nothing of this counts
"""

import re

import msgspec

from windlass._errors import InvalidArgument

MANIFEST = "manifest.json"
TEMPORARY = ".tmp"  # at the end of a local file's name until it is complete
CLOCK_MAX = 10**16 - 1
_CLOCK_DIGITS = 16
_NAME_BYTES_MAX = 200  # of a file or folder, with room for the ending of a temporary name

_SAFE = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyz-")
_ESCAPED = re.compile(r"([0-9a-z-]|\.[0-9a-f]{2})+")
_FILE = re.compile(r"[0-9a-z-][0-9a-z.-]*")
_FOLDER = re.compile(r"([0-9]{16})-([0-9a-f]{16})")
_ID = re.compile(r"[0-9a-f]{16}")
_TAG = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,127}")
_BLOCK = re.compile(r"server-(0|[1-9][0-9]{0,6})-([0-9]{4,9})\.safetensors")
_INDEX = re.compile(r"server-(0|[1-9][0-9]{0,6})\.index\.json")


class Place(msgspec.Struct, frozen=True, order=True):
    """Which checkpoint: of an app, at a clock, with an id of 16 hexadecimal digits."""

    app: str
    clock: int
    id: str

    def __post_init__(self) -> None:
        if _ID.fullmatch(self.id) is None:
            raise InvalidArgument(f"checkpoint: expected an id of 16 hexadecimal digits, saw {self.id!r}")
        if not 0 <= self.clock <= CLOCK_MAX:
            raise InvalidArgument(f"checkpoint {self.id}: expected a clock of 0 to {CLOCK_MAX}, saw {self.clock}")
        escape(self.app)

    @property
    def name(self) -> str:
        """Of its folder: names sort as clocks do."""
        return f"{self.clock:0{_CLOCK_DIGITS}d}-{self.id}"

    @property
    def path(self) -> str:
        """Of its folder, below the root."""
        return f"{escape(self.app)}/{self.name}"


def check_tag(tag: str, what: str = "checkpoint") -> str:
    """What a user may call a checkpoint; InvalidArgument."""
    if not isinstance(tag, str) or _TAG.fullmatch(tag) is None:
        raise InvalidArgument(
            f"{what}: expected a name of at most 128 letters, digits, '_', '.' and '-' that begins with a letter or "
            f"digit, saw {tag!r}"
        )
    return tag


def place_of(app: str, folder_name: str) -> Place | None:
    """The checkpoint whose folder is so called; None if that is another folder."""
    found = _FOLDER.fullmatch(folder_name)
    return None if found is None else Place(app, int(found[1]), found[2])


def escape(app: str) -> str:
    """The name of an app's folder: each byte but 0-9, a-z and - as a dot and two hexadecimal digits."""
    try:
        raw = app.encode()
    except UnicodeEncodeError:
        raw = b""
    name = "".join(chr(byte) if byte in _SAFE else f".{byte:02x}" for byte in raw)
    if not name or len(name) > _NAME_BYTES_MAX:
        raise InvalidArgument(f"checkpoint: app {app!r} gives no folder name of 1 to {_NAME_BYTES_MAX} characters")
    return name


def unescape(folder_name: str) -> str | None:
    """The app whose folder is so called; None if that is another folder."""
    if _ESCAPED.fullmatch(folder_name) is None:
        return None
    try:
        app = re.sub(rb"\.(..)", lambda m: bytes([int(m[1], 16)]), folder_name.encode()).decode()
    except UnicodeDecodeError:
        return None
    return app if escape(app) == folder_name else None


def check_file_name(name: str) -> str:
    """The name, if a file of ours can have it: it leads nowhere else."""
    if _FILE.fullmatch(name) is None or len(name) > _NAME_BYTES_MAX:
        raise InvalidArgument(f"checkpoint: expected a file name of [0-9a-z.-], saw {name[:80]!r}")
    return name


def block_name(server: int, number: int) -> str:
    """Of a server's file of numbers."""
    return f"server-{server}-{number:04d}.safetensors"


def index_name(server: int) -> str:
    """Of what says where its shards are."""
    return f"server-{server}.index.json"


def is_ours(name: str) -> bool:
    """Whether a checkpoint has such a file, complete or half-written."""
    name = name.removesuffix(TEMPORARY)
    return name == MANIFEST or any(of.fullmatch(name) is not None for of in (_BLOCK, _INDEX))
