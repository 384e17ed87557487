"""The faults of the routing library.

    RouterError
    +-- EndpointsError   an endpoints file cannot be used as written (fatal at start; later the last good one stays)
    +-- SiblingsError    the run folder of the sibling sockets cannot be used (fatal at start)
    +-- PolicyError      a setting of a policy for the simulation has a value that it cannot have

Expected outcomes (no endpoint can take a request, an engine is busy) are values: `route.NoRoute`, `endpoints.Ending`.
This module knows no HTTP and no file system; the adapters raise these.
"""

from __future__ import annotations


class RouterError(Exception):
    """Root of this package's faults."""


class EndpointsError(RouterError):
    """One sentence that names the file, the entry, the field, the value and what was expected."""


class SiblingsError(RouterError):
    """The run folder cannot hold the sibling sockets; the message names the folder and the reason."""


class PolicyError(RouterError):
    """One sentence that names the setting, its value and what was expected."""
