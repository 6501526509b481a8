"""Opens the database, brings its schema up to date and hands out transactions.

Invariant: one writer at a time within the process. A transaction that acknowledges work to a client is ``durable``: it
is on disk before it returns, also across a power cut. The others survive the death of the process, not of the machine.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event

MIGRATIONS = Path(__file__).parent / "migrations"


class Database:
    """A SQLite database in WAL mode.

    Args:
        path: File of the database; its directory must exist. Created if missing, migrated if older.
    """

    def __init__(self, path: Path) -> None:
        self._write_lock = threading.Lock()
        self._normal = _engine(path, "NORMAL")
        self._full = _engine(path, "FULL")
        with self._full.begin() as connection:
            migrate(connection)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent view of the database."""
        with self._normal.connect() as connection:
            yield connection

    @contextmanager
    def write(self, *, durable: bool = False) -> Iterator[Connection]:
        """A transaction: committed when the block ends, rolled back when it raises."""
        engine = self._full if durable else self._normal
        with self._write_lock, engine.begin() as connection:
            yield connection

    def overwrite_deleted(self) -> None:
        """Fold the WAL into the database and empty it, so that deleted rows are in neither file any more.

        A reader that still uses the WAL keeps it until the next time.
        """
        with closing(self._full.raw_connection()) as connection:
            connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def size(self) -> int:
        """Bytes that the database uses of its file; the rest of it is free for more."""
        with self.read() as connection:
            pages, free, size = (
                int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
                for name in ("page_count", "freelist_count", "page_size")
            )
        return (pages - free) * size

    def close(self) -> None:
        """Close all connections; the WAL is folded into the file."""
        self._normal.dispose()
        self._full.dispose()


def migrate(connection: Connection) -> None:
    """Bring the schema behind ``connection`` to the newest revision."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _engine(path: Path, synchronous: str) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 30, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        # Python's driver would begin transactions late and never around DDL; we begin them ourselves.
        connection.isolation_level = None
        # Of a new file only. Rows with tokens leave less of a page empty than in pages of 4 KiB.
        connection.execute("PRAGMA page_size=8192")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA foreign_keys=ON")
        # Rows are only deleted because somebody wants them gone.
        connection.execute("PRAGMA secure_delete=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine
