"""The settings of the gateway process: one frozen tree, read once, each with its unit, default and reason.

Owns: every environment variable of this package (prefix `INFERPLANE_`). Nothing else reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from controlplane.errors import ConfigError, UsageError


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
    port: int = Field(default=8080, ge=0, le=65535)
    workers: int = Field(default=1, ge=1, le=64)
    """Gateway processes that share the port."""
    node: str = ""
    """Name of this node in spool folders and events; empty: the host name."""

    endpoints_file: Path | None = None
    """YAML or JSON list of engines, re-read when it changes."""
    zone: str = ""
    """Zone of this node: engines elsewhere cost the router's measured hop."""
    region: str = ""
    """Region of this node."""
    endpoints_poll_s: float = Field(default=1.0, gt=0)
    tokenizers: str = ""
    """Models whose engines' KV events are heard: MODEL=FOLDER (its tokenizer and template) or MODEL=engine (its engines
    tokenise), separated by commas; empty: the router guesses from its own requests what engines hold.
    """

    connect_timeout_s: float = Field(default=2.0, gt=0)
    first_byte_timeout_s: float = Field(default=120.0, gt=0)
    """Until a stream's first token; a non-streamed answer may take the total instead."""
    idle_timeout_s: float = Field(default=60.0, gt=0)
    total_timeout_s: float = Field(default=1_800.0, gt=0)
    drain_timeout_s: float = Field(default=30.0, gt=0)
    """After SIGTERM, how long running streams may go on."""
    drain_lead_s: float = Field(default=1.0, ge=0)
    """After SIGTERM, how long new requests are still taken while `/readyz` says no: load balancers need it."""
    max_body_bytes: int = Field(default=32 * 1024 * 1024, gt=0)
    default_max_output_tokens: int = Field(default=4_096, gt=0)
    """Reserved for a request that names no limit of its own and whose model has none."""

    feed_interval_s: float = Field(default=0.5, gt=0)
    """How often the key epoch is read from SQL: the floor of the revocation bound (2 s)."""
    key_grace_s: float = Field(default=60.0, ge=0)
    """How long known keys keep working while the store does not answer."""

    spool_max_bytes: int = Field(default=1024 * 1024 * 1024, gt=0)
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


def load_settings(chosen: Mapping[str, Any]) -> Settings:
    """The settings with the command line's choices on top.

    Raises UsageError for a choice that cannot be, naming the option, and ConfigError for such an environment variable.
    """
    try:
        return Settings(**chosen)
    except ValidationError as fault:
        first = fault.errors()[0]
        name = str(first["loc"][0])
        said = f"is {first['input']!r}; expected {_expected(name)}."
        if name in chosen:
            raise UsageError(f"--{name.replace('_', '-')} {said}") from None
        raise ConfigError(f"INFERPLANE_{name.upper()} {said}") from None


def _expected(name: str) -> str:
    """What a setting takes, in words made of its type and bounds."""
    field = Settings.model_fields[name]
    kind = "a whole number" if field.annotation is int else "a number" if field.annotation is float else "a text"
    bounds = {
        sign: getattr(rule, sign) for rule in field.metadata for sign in ("ge", "gt", "le") if hasattr(rule, sign)
    }
    if "ge" in bounds and "le" in bounds:
        return f"{kind} from {bounds['ge']} to {bounds['le']}"
    if "ge" in bounds:
        return f"{kind} of at least {bounds['ge']}"
    return f"{kind} above {bounds['gt']}" if "gt" in bounds else kind


def tokenizer_sources(text: str, *, option: bool = True) -> dict[str, Path | None]:
    """The folders of `Settings.tokenizers` by model; None: an engine tokenises.

    Raises UsageError, or ConfigError where the environment named them (`option` False).
    """
    said = "--tokenizer" if option else "INFERPLANE_TOKENIZERS"
    error = UsageError if option else ConfigError
    found: dict[str, Path | None] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        model, equals, source = part.partition("=")
        if not equals or not model or not source:
            raise error(f"{said} is {part!r}; expected MODEL=FOLDER, or MODEL=engine.")
        if model in found:
            raise error(f"{said} names {model} twice; expected each model once.")
        folder = None if source == "engine" else Path(source)
        if folder is not None and not (folder / "tokenizer.json").is_file():
            missing = "it has none" if folder.is_dir() else "there is no such folder"
            raise error(f"{said} is {part!r}; expected a folder with a tokenizer.json ({missing}), or the word engine.")
        found[model] = folder
    return found


def check_range(option: str, value: float, low: float, high: float) -> None:
    """Raise UsageError unless an option's value lies from `low` to `high`, both included."""
    if not low <= value <= high:
        raise UsageError(f"{option} is {value:g}; expected a number from {low:g} to {high:g}.")


def engine_secret(variable: str) -> str | None:
    """The API key of an engine, from the environment variable that its endpoint names (`api_key_env`)."""
    return os.environ.get(variable)


def run_dir() -> Path:
    """The folder of sockets and metrics files that the parent process made for its children."""
    return Path(os.environ.get("INFERPLANE_RUN_DIR", ".inferplane/run"))
