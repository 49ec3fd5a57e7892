"""The scheduler's journal: what it must not forget, as rows in SQLite, written before anybody is told.

    cluster, members, apps, objects, shards, moves, ...     a table each: key, value (JSON), CRC-32 of both
    journal                                                 the generation: how often a scheduler has begun with it

One process at a time has it: SQLite's own lock, which the kernel releases when the process ends, however that happens.
So a second scheduler is refused, and whoever begins has the highest generation, which is written before anything else.
docs/formats/journal.md describes the file.
"""

import contextlib
import os
import pathlib
import sqlite3
import zlib
from collections.abc import Mapping

from windlass._errors import InvalidArgument, StorageFailed

FORMAT = 1
APPLICATION = 0x77696E64  # "wind", in the head of the file
TABLES = (
    "cluster",
    "members",
    "dead",
    "lost",
    "retired",
    "drains",
    "apps",
    "left",
    "objects",
    "shards",
    "moves",
    "errands",
    "ledgers",
    "saves",
    "saving",
    "resume",
)
Key = tuple[str, str]  # table and key in it


class Journal:
    """An open one. commit() may be called from a thread of its own; everything else is the opener's."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens it, or makes it, and begins the next generation. Raises InvalidArgument and StorageFailed."""
        self.path = pathlib.Path(path)
        self.broken = "journal" in os.environ.get("WINDLASS_BREAK", "").split(",")  # only tests: nothing is kept
        if not self.path.parent.is_dir():
            raise InvalidArgument(f"state {self.path}: there is no folder {self.path.parent}")
        new = not self.path.exists() or self.path.stat().st_size == 0
        try:
            if new:
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StorageFailed(f"state {self.path}: cannot be opened: {error}") from error
        try:
            self.rows: dict[Key, bytes] = self._begin(new)  #: what it had
        except BaseException:
            self._db.close()
            raise

    def _begin(self, new: bool) -> dict[Key, bytes]:
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("BEGIN EXCLUSIVE")  # now, not at the first write: whoever is second must not speak
            self._db.execute("COMMIT")
            if not new:
                self._check()
            mode = self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            if mode != "wal":
                raise StorageFailed(f"state {self.path}: this file system takes no write-ahead log (mode {mode})")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("BEGIN EXCLUSIVE")
            if new:
                self._make()
            rows = {} if new else self._read()
            before = self._db.execute("SELECT generation FROM journal").fetchone()
            self.generation: int = (0 if before is None else before[0]) + 1
            self._db.execute("DELETE FROM journal")
            self._db.execute("INSERT INTO journal VALUES (?)", (self.generation,))
            self._db.execute("COMMIT")
            return rows
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise InvalidArgument(f"state {self.path}: another scheduler has it; expected one at a time") from None
            raise StorageFailed(f"state {self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise _damaged(self.path, str(error)) from error

    def _check(self) -> None:
        """Whether it is one, and whole."""
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION:
            raise InvalidArgument(f"state {self.path}: expected a scheduler's journal, saw another SQLite file")
        if version != FORMAT:
            raise InvalidArgument(f"state {self.path}: expected format {FORMAT}, saw {version}")
        said = [line for (line,) in self._db.execute("PRAGMA integrity_check(1)")]
        if said != ["ok"]:
            raise _damaged(self.path, " ".join(said[0].split()) if said else "no integrity")

    def _make(self) -> None:
        self._db.execute(f"PRAGMA application_id={APPLICATION}")
        self._db.execute(f"PRAGMA user_version={FORMAT}")
        self._db.execute("CREATE TABLE journal (generation INTEGER NOT NULL)")
        for table in TABLES:
            columns = "key TEXT PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL"
            self._db.execute(f'CREATE TABLE "{table}" ({columns}) WITHOUT ROWID')

    def _read(self) -> dict[Key, bytes]:
        rows: dict[Key, bytes] = {}
        for table in TABLES:
            for key, value, crc in self._db.execute(f'SELECT key, value, crc FROM "{table}"'):
                if not isinstance(key, str) or not isinstance(value, bytes) or crc != _crc(table, key, value):
                    raise _damaged(self.path, f"row {key!r} of table {table} has another checksum than it was given")
                rows[table, key] = value
        return rows

    def commit(self, rows: Mapping[Key, bytes | None]) -> None:
        """Writes them, all or none, and waits until the disk has them. None: the row goes. Raises StorageFailed."""
        if self.broken:
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for (table, key), value in rows.items():
                    if value is None:
                        self._db.execute(f'DELETE FROM "{table}" WHERE key = ?', (key,))
                    else:
                        row = (key, value, _crc(table, key, value))
                        self._db.execute(f'INSERT OR REPLACE INTO "{table}" VALUES (?, ?, ?)', row)
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StorageFailed(f"state {self.path}: {error}") from error

    def write(self, rows: Mapping[Key, bytes | None]) -> str:
        """The same. What went wrong, if anything did."""
        try:
            self.commit(rows)
        except StorageFailed as error:
            return str(error)
        return ""

    def clear(self) -> None:
        """What a cluster had that is over goes; the generation goes on."""
        self.commit(dict.fromkeys(self.rows))
        self.rows = {}

    def close(self) -> None:
        """Lets go of the file."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


def _crc(table: str, key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(f"{table}\0{key}\0".encode()))


def _damaged(path: pathlib.Path, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"state {path}: the journal is damaged ({why}); nothing in it is used. Start without it, from a checkpoint, or "
        "put a good copy in its place"
    )
