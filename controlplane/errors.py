"""The faults of the gateway process.

    GatewayError
    +-- ConfigError            a setting or a file it names cannot be used (fatal at start, later the last good stays)
    |   +-- UsageError         an option of the command line has a value that can never be right (exit status 2)
    +-- BadRequest             the caller's request cannot be served as written (4xx, never retried)
    +-- EngineError            an engine failed us
    |   +-- EngineUnreachable  the request never left: safe to try another engine
    |   +-- EngineLost         the connection ended before the answer did
    |   +-- EngineTimeout      one of the four deadlines passed
    +-- SpoolFull              usage cannot be recorded, so nothing may be served (503)
    +-- StoreUnavailable       a database or Redis did not answer in time

Expected outcomes (a refusal by a limit, a denied key, no endpoint) are values, not exceptions. These classes know no
HTTP; `controlplane.adapters.openai_wire` maps them.
"""

from __future__ import annotations

from typing import Literal


class GatewayError(Exception):
    """Root of this package's faults."""


class ConfigError(GatewayError):
    """A setting or a file it names cannot be used. The message names the field, the value and what was expected."""


class UsageError(ConfigError):
    """An option has a value that can never be right. The message names the option, its value and what was expected."""


class BadRequest(GatewayError):
    """The request cannot be served as written.

    `status` is the HTTP status (400, 404, 413, 415), `param` the offending field, `code` the OpenAI error code.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class EngineError(GatewayError):
    """An engine failed. `endpoint_id` names it."""

    def __init__(self, endpoint_id: str, message: str) -> None:
        super().__init__(message)
        self.endpoint_id = endpoint_id


class EngineUnreachable(EngineError):
    """No connection could be made, or it died before one request byte was accepted."""


class EngineLost(EngineError):
    """The connection ended before the response did."""


Deadline = Literal["connect", "first_byte", "idle", "total"]


class EngineTimeout(EngineError):
    """A deadline passed; `deadline` says which one."""

    def __init__(self, endpoint_id: str, deadline: Deadline, limit_s: float) -> None:
        super().__init__(endpoint_id, f"The engine passed its {deadline.replace('_', ' ')} deadline of {limit_s:g} s.")
        self.deadline = deadline


class SpoolFull(GatewayError):
    """The usage spool cannot take another record (its byte bound or the disk)."""


class StoreUnavailable(GatewayError):
    """A database or Redis did not answer in time. The message never contains a URL with credentials."""
