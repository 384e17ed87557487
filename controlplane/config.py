"""The settings of the gateway process: one frozen tree, read once, each with its unit, default and reason.

Owns: every environment variable of this package (prefix `INFERPLANE_`). Nothing else reads the environment.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of `inferplane serve`, `worker` and the admin commands; a command-line flag overrides a variable."""

    model_config = SettingsConfigDict(env_prefix="INFERPLANE_", frozen=True, extra="ignore")

    data_dir: Path = Path(".inferplane")
    """Where the embedded parts keep their files (SQLite, Redis, spool, pepper)."""
    database_url: str = ""
    """SQLAlchemy URL; empty: an SQLite file in `data_dir`. Production: postgresql+psycopg://..."""
    redis_url: SecretStr = SecretStr("")
    """Redis or Valkey >= 6.2; empty: the embedded server is started on a Unix socket in `data_dir`."""
    key_pepper: SecretStr = SecretStr("")
    """Secret of the keyed hash of API keys, the same on every node; empty: made once in `data_dir/pepper` (0600)."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    workers: int = Field(1, ge=1, le=64)
    """Gateway processes that share the port."""
    node: str = ""
    """Name of this node in spool folders and events; empty: the host name."""

    endpoints_file: Path | None = None
    """YAML or JSON list of engines, re-read when it changes."""
    endpoints_poll_s: float = Field(1.0, gt=0)

    connect_timeout_s: float = Field(2.0, gt=0)
    first_byte_timeout_s: float = Field(120.0, gt=0)
    """Until a stream's first token; a non-streamed answer may take the total instead."""
    idle_timeout_s: float = Field(60.0, gt=0)
    total_timeout_s: float = Field(1_800.0, gt=0)
    drain_timeout_s: float = Field(30.0, gt=0)
    """After SIGTERM, how long running streams may go on."""
    max_body_bytes: int = Field(32 * 1024 * 1024, gt=0)
    default_max_output_tokens: int = Field(4_096, gt=0)
    """Reserved for a request that names no limit of its own and whose model has none."""

    feed_interval_s: float = Field(0.5, gt=0)
    """How often the key epoch is read from SQL: the floor of the revocation bound (2 s)."""
    key_grace_s: float = Field(60.0, ge=0)
    """How long known keys keep working while the store does not answer."""

    spool_max_bytes: int = Field(1024 * 1024 * 1024, gt=0)
    """Bound of the usage spool of a node; full means 503, never unmetered."""
    access_log: str = "-"
    """`-` is standard output, empty is off, else a file."""

    @property
    def sql_url(self) -> str:
        """The database URL with the embedded default applied."""
        return self.database_url or f"sqlite:///{self.data_dir / 'inferplane.db'}"

    @property
    def spool_dir(self) -> Path:
        """Root of the per-process spool folders."""
        return self.data_dir / "spool"
