"""Typed access to the members of a JSON body, with pydantic's words for what is wrong.

Owns: type checks and their messages as vLLM 0.32 reports them (all faults of a body in one error). Does not own: which
members there are or what their values may be (`engine_wire`). Numbers in strings are taken as pydantic takes them.
"""

from __future__ import annotations

import math
from typing import Any

from perfmodel.errors import ClientError

# Strings a boolean may be given as, by pydantic's lax mode.
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
# Items of `stop` by vLLM's openapi.
_MAX_STOPS = 4


def invalid(faults: list[dict[str, Any]]) -> ClientError:
    """The error of a body that does not fit its schema."""
    told = "\n".join("  " + str({**fault, "input": _summary(fault["input"])}) for fault in faults)
    errors = "error" if len(faults) == 1 else "errors"
    return ClientError(f"{len(faults)} validation {errors}:\n{told}", kind="Bad Request", param=str(faults[0]["loc"]))


def _summary(value: Any) -> Any:
    """Inputs are not echoed at length: containers by their size, long strings cut."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, str) and len(value) > 64:
        return value[:61] + "..."
    return value


class Fields:
    """The members of one body. Faults are collected; `finish` raises them all at once."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self._faults: list[dict[str, Any]] = []

    def finish(self) -> None:
        """Raises ClientError when a member had the wrong type or was missing."""
        if self._faults:
            raise invalid(self._faults)

    def sequence(self, name: str, *, required: bool = False) -> list[Any] | None:
        """A list, or None when absent or null."""
        value = self._present(name, required)
        if value is None or isinstance(value, list):
            return value
        self._wrong(name, "list_type", "Input should be a valid list", value)
        return None

    def mapping(self, name: str) -> dict[str, Any] | None:
        """An object, or None when absent or null."""
        value = self.body.get(name)
        if value is None or isinstance(value, dict):
            return value
        self._wrong(name, "model_attributes_type", "Input should be a valid dictionary", value)
        return None

    def string(self, name: str, *, required: bool = False) -> str | None:
        """A string, or None when absent or null."""
        value = self._present(name, required)
        if value is None or isinstance(value, str):
            return value
        self._wrong(name, "string_type", "Input should be a valid string", value)
        return None

    def boolean(self, name: str, *, default: bool) -> bool:
        """A boolean; absent or null is the default."""
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        known = _BOOLEANS.get(str(value).lower()) if isinstance(value, int | str) else None
        if known is None:
            self._wrong(name, "bool_parsing", "Input should be a valid boolean, unable to interpret input", value)
            return default
        return known

    def integer(self, name: str, *, default: int | None = None) -> int | None:
        """An integer; absent is the default, null is None."""
        if name not in self.body:
            return default
        number = self.number(name, kind="integer")
        if number is not None and number != int(number):
            told = "Input should be a valid integer, got a number with a fractional part"
            self._wrong(name, "int_from_float", told, self.body[name])
            return None
        return None if number is None else int(number)

    def number(self, name: str, *, kind: str = "number") -> float | None:
        """A number, or None when absent or null."""
        value = self.body.get(name)
        short = "int" if kind == "integer" else "float"
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = float(value) if kind == "number" else int(value)
            except ValueError:
                article = "an" if kind == "integer" else "a"
                told = f"Input should be a valid {kind}, unable to parse string as {article} {kind}"
                self._wrong(name, f"{short}_parsing", told, value)
                return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(name, f"{short}_type", f"Input should be a valid {kind}", value)
            return None
        if not math.isfinite(value):
            self._wrong(name, "finite_number", "Input should be a finite number", value)
            return None
        return value if kind == "integer" else float(value)

    def stop_strings(self) -> None:
        """`stop` is checked and has no effect: no stop string ends a simulated answer."""
        stop = self.body.get("stop")
        if stop is None or isinstance(stop, str):
            return
        if not isinstance(stop, list) or not all(isinstance(item, str) for item in stop):
            self._wrong("stop", "string_type", "Input should be a valid string", stop)
        elif len(stop) > _MAX_STOPS:
            told = f"List should have at most {_MAX_STOPS} items after validation, not {len(stop)}"
            self._wrong("stop", "too_long", told, stop)

    def _present(self, name: str, required: bool) -> Any:
        value = self.body.get(name)
        if value is None and required:
            given = name in self.body
            kind, told = ("list_type", "Input should be a valid list") if given else ("missing", "Field required")
            self._faults.append(
                {"type": kind, "loc": f"body.{name}", "msg": told, "input": None if given else self.body}
            )
        return value

    def _wrong(self, name: str, kind: str, told: str, value: Any) -> None:
        self._faults.append({"type": kind, "loc": f"body.{name}", "msg": told, "input": value})
