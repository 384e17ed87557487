"""Whatever is wrong with a database at the start of a command, as one sentence that names what the person set.

Owns: turning the faults of opening and checking a database into ConfigError. Does not own: the checks (`billing`), nor
faults of later work. A database that is down is the most common fault of a first start in production: a traceback
there hides the one line that helps, and a driver's text may hold a password.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from billing.errors import SchemaOutdated, StoreError, StoreUnavailable
from controlplane.config import Settings
from controlplane.errors import ConfigError

# What a database URL looks like.
_WANTED = "sqlite:///FILE or postgresql://USER@HOST/DATABASE was expected"


@contextmanager
def database_faults(settings: Settings, option: bool = False) -> Iterator[None]:
    """Raise ConfigError, without a password, for any fault of the database. `option`: `--database-url` was typed."""
    if settings.database_url:
        what = "--database-url" if option else "INFERPLANE_DATABASE_URL"
    else:
        what = f"The database {settings.data_dir / 'inferplane.db'}"
    try:
        yield
    except (StoreUnavailable, SchemaOutdated) as fault:
        raise ConfigError(str(fault)) from None  # they name the database and what to do
    except StoreError as fault:
        raise ConfigError(f"{what} cannot be used: {fault}") from None
    except sa.exc.DBAPIError as fault:
        reason = str(fault.orig).strip().splitlines()[0].rstrip(".")  # the driver's words: they quote no URL
        raise ConfigError(f"{what} cannot be used: {reason}.") from None
    except sa.exc.SQLAlchemyError as fault:
        raise ConfigError(f"{what} cannot be used: {type(fault).__name__}; {_WANTED}.") from None
    except OSError as fault:
        raise ConfigError(f"{what} cannot be used: {fault.strerror or type(fault).__name__}.") from None
