"""Typed access to the fields of a Hugging Face configuration, with one sentence for a field that is not as expected.

Owns: reading a field under the names that families give it. Does not own: what any field means (`hf_layers`,
`hf_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfmodel.errors import ConfigError


class Fields:
    """The fields of one configuration. Several names of a field are tried in order; null counts as not there."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._content = content
        self.family = str(content.get("model_type") or "").lower()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._content.get(name) is not None

    def optional_count(self, *names: str) -> int | None:
        """A whole number above or at 0; None when none of the names is there."""
        for name in names:
            value = self._content.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.fault(name, value, "a whole number")
            return value
        return None

    def count(self, *names: str) -> int:
        """A whole number above 0 that must be there."""
        value = self.optional_count(*names)
        if value is None:
            raise ConfigError(f"{self.where}: {names[0]} is missing; expected a whole number above 0")
        if value == 0:
            raise self.fault(names[0], value, "a whole number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, value, "true or false")
        return value

    def optional_text(self, *names: str) -> str | None:
        """A text; None when none of the names is there."""
        for name in names:
            value = self._content.get(name)
            if isinstance(value, str):
                return value.removeprefix("torch.")
        return None

    def optional_list(self, name: str) -> list[Any] | None:
        """A list; None when it is not there."""
        value = self._content.get(name)
        if value is not None and not isinstance(value, list):
            raise self.fault(name, value, "a list")
        return value

    def optional_mapping(self, name: str) -> Mapping[str, Any] | None:
        """A mapping; None when it is not there."""
        value = self._content.get(name)
        return value if isinstance(value, dict) else None

    def raw(self, name: str) -> Any:
        """The field as it is."""
        return self._content.get(name)

    def fault(self, name: str, value: object, expected: str) -> ConfigError:
        """The sentence about a field."""
        return ConfigError(f"{self.where}: {name} is {value!r}; expected {expected}")
