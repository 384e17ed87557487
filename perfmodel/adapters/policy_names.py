"""Routing policies by name: whatever the installed packages registered as entry points `inferplane.policies`.

Owns: the look-up and its sentence. Does not own: any policy; `router` registers its own and any other package may, so
that the simulation compares rules without importing one.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from perfmodel.errors import ConfigError
from perfmodel.simulation.policy import PolicyFactory

GROUP = "inferplane.policies"


def policy_factory(name: str) -> PolicyFactory:
    """The factory of this policy.

    Raises ConfigError that offers the names there are, or says why the policy's code cannot be loaded.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or f"nothing is registered under {GROUP}; install the distribution again"
        raise ConfigError(f"--policy is {name!r}; expected one of {known}")
    try:
        factory: PolicyFactory = found[name].load()
    except Exception as fault:  # another package's code: anything can be wrong with it
        said = " ".join(str(fault).split()) or "no message"
        raise ConfigError(
            f"--policy {name} cannot be loaded ({type(fault).__name__}: {said}); expected code that can be imported"
        ) from fault
    return factory
