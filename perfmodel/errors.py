"""The faults of the performance model.

    PerfModelError
    +-- ConfigError        a setting or a data file cannot be used (also: an unknown device or model name)
    +-- RequestError       a request handed to the simulated engine is malformed (a fault of the caller, never of load)
    +-- BlockPoolError     the block pool was asked for what its invariants forbid (a bug in this package)
    +-- PortError          a port or address cannot be bound (adapters only)
    +-- PlotError          a plot cannot be drawn on this machine (adapters only)
    +-- SweepError         a job of a sweep failed, or its workers cannot be reached (adapters only)
    +-- ScrapeError        metrics of a live pool cannot be fetched (adapters only)
    +-- ClientError        an HTTP request cannot be answered; carries the engine's error object (adapters only)

Expected outcomes (the queue is full, the request can never fit) are values of `scheduler.SubmitOutcome`, not
exceptions.
"""

from __future__ import annotations


class PerfModelError(Exception):
    """Root of this package's faults."""


class ConfigError(PerfModelError):
    """A setting or a data file cannot be used. The message names the field, the value and what was expected."""


class RequestError(PerfModelError):
    """A request is malformed. The message names the request, the field and what was expected."""


class BlockPoolError(PerfModelError):
    """An invariant of the block pool would break. Seeing this means a bug, never load."""


class PortError(PerfModelError):
    """A socket cannot be bound. The message names the address and says why."""


class PlotError(PerfModelError):
    """A plot cannot be drawn. The message says what is missing and how to get it."""


class SweepError(PerfModelError):
    """A job of a sweep failed, or its workers cannot be reached. The message names the job and the reason."""


class ScrapeError(PerfModelError):
    """A metrics page cannot be fetched. The message names its address and says why."""


class ClientError(PerfModelError):
    """An HTTP request is refused with `status`; `kind` is the error's type and `param` the field at fault, if one."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
