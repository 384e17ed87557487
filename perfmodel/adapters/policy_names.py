"""Routing policies by name: whatever the installed packages registered as entry points `inferplane.policies`.

Owns: the look-up, other settings for a policy that has some, and the sentences. Does not own: any policy; `router`
registers its own and any other package may, so that the simulation compares rules without importing one. A policy has
settings where its factory has a parameter `settings` whose default is a dataclass: a setting is a number, a truth value
or a word, by the type of its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from inspect import signature
from math import isfinite
from typing import Any, cast

from perfmodel.errors import ConfigError
from perfmodel.simulation.policy import PolicyFactory

GROUP = "inferplane.policies"

# What a truth value may be typed as.
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def policy_factory(name: str, settings: Mapping[str, str] | None = None) -> PolicyFactory:
    """The factory of this policy, with these of its settings changed: names and values as typed.

    Raises ConfigError that offers the names there are, or says why the policy's code cannot be loaded, or what is
    wrong with a setting.
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
    return _tuned(name, factory, settings) if settings else factory


def settings_by_policy(typed: list[str], policies: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """What `--policy-settings` says, by policy: [POLICY:]NAME=VALUE[,NAME=VALUE...], once or more.

    Without POLICY it is that of the only policy. Raises ConfigError for another form and a policy that is not run.
    """
    found: dict[str, dict[str, str]] = {}
    for text in typed:
        policy, colon, words = text.rpartition(":")
        if not colon and len(policies) > 1:
            raise ConfigError(
                f"--policy-settings is {text!r} and there are {len(policies)} policies; expected POLICY:NAME=VALUE"
            )
        policy = policy.strip() if colon else policies[0]
        if policy not in policies:
            raise ConfigError(
                f"--policy-settings is of {policy!r}; expected a policy of this run: {', '.join(policies)}"
            )
        for word in words.split(","):
            setting, equals, value = (part.strip() for part in word.partition("="))
            if not (setting and equals and value):
                raise ConfigError(f"--policy-settings is {text!r}; expected NAME=VALUE, or several with commas between")
            found.setdefault(policy, {})[setting] = value
    return found


def _tuned(name: str, factory: PolicyFactory, typed: Mapping[str, str]) -> PolicyFactory:
    """The factory with some of its settings changed."""
    defaults = _default_settings(factory)
    if defaults is None:
        raise ConfigError(f"--policy-settings: the policy {name} has no settings; expected a policy that has some")
    known = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    changed: dict[str, object] = {}
    for setting, text in typed.items():
        if setting not in known:
            near = get_close_matches(setting, known, n=1)
            guess = f"; did you mean {near[0]}" if near else ""
            raise ConfigError(
                f"--policy-settings: {name} has no setting {setting!r}; expected one of {', '.join(known)}{guess}"
            )
        changed[setting] = _value(f"{name}:{setting}", text, known[setting])
    try:
        settings = replace(defaults, **changed)
    except Exception as fault:  # another package's check of its own settings
        raise ConfigError(f"--policy-settings of {name}: {fault}") from fault
    return cast(PolicyFactory, partial(cast(Any, factory), settings=settings))


def _default_settings(factory: PolicyFactory) -> Any:
    """The default of the factory's parameter `settings`; None: it has none that can be changed."""
    parameter = signature(factory).parameters.get("settings")
    if parameter is None or not is_dataclass(parameter.default) or isinstance(parameter.default, type):
        return None
    return parameter.default


def _value(place: str, text: str, default: object) -> object:
    """A typed value as the type of the default."""
    if isinstance(default, bool):
        if text.lower() not in _TRUTHS:
            raise ConfigError(f"--policy-settings: {place} is {text!r}; expected true or false")
        return _TRUTHS[text.lower()]
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"--policy-settings: {place} is {text!r}; expected a whole number") from None
    if isinstance(default, float):
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            raise ConfigError(f"--policy-settings: {place} is {text!r}; expected a number")
        return value
    return text
