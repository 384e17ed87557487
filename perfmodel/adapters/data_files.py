"""The format of the data files: sections, sources, and numbers that each name where they were read.

Owns: sections, entries and every figure's source. Does not own: what the figures mean (`catalog`, `model_file`,
`price_file`). A number whose source cannot be told is an error at load, so that no figure enters the model that nobody
can trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources.abc import Traversable
from typing import Any

from perfmodel.adapters.yaml_text import read_yaml
from perfmodel.errors import ConfigError


class DataFile:
    """One data file.

    An entry is a mapping with `source`: one key of the file's section `sources`, or a list of them. A figure is a plain
    value (the entry's source gave it) or `{value: ..., source: ...}`. null says that it is not known.
    """

    def __init__(self, path: Traversable) -> None:
        self.name = path.name
        try:
            content = read_yaml(path)
        except OSError as fault:
            raise ConfigError(f"{self.name} cannot be read: {fault}") from fault
        if not isinstance(content, dict):
            raise ConfigError(f"{self.name} holds {type(content).__name__}; expected a mapping with 'sources'")
        self._content: dict[str, Any] = content
        self._sources = self.section("sources")

    def section(self, name: str) -> dict[str, Any]:
        """A top-level mapping of the file."""
        section = self._content.get(name)
        if not isinstance(section, dict) or not section:
            raise ConfigError(f"{self.name}: section {name!r} is missing or empty; expected a mapping")
        return section

    def entries(self, section: str) -> dict[str, Entry]:
        """The entries of a section by name."""
        return {str(name): Entry(self, str(name), fields) for name, fields in self.section(section).items()}

    def check_source(self, where: str, source: object) -> None:
        """Refuse what names no source of this file."""
        names = source if isinstance(source, list) else [source]
        for name in names:
            if not isinstance(name, str) or name not in self._sources:
                raise ConfigError(f"{self.name}: {where} names source {name!r}; expected one of 'sources'")
        if not names:
            raise ConfigError(f"{self.name}: {where} names no source; expected one of 'sources'")


class Entry:
    """One entry of a data file: its figures, with their sources checked."""

    def __init__(self, file: DataFile, name: str, fields: object) -> None:
        if not isinstance(fields, dict):
            raise ConfigError(f"{file.name}: {name} is {fields!r}; expected a mapping of fields")
        self.file = file
        self.name = name
        self.fields: Mapping[str, Any] = fields
        file.check_source(name, fields.get("source"))

    def sub(self, name: str, fields: object) -> Entry:
        """A part of this entry, under the same source unless it names its own."""
        inherited = {"source": self.fields["source"], **fields} if isinstance(fields, dict) else fields
        return Entry(self.file, f"{self.name}.{name}", inherited)

    def value(self, field: str) -> Any:
        """The bare value of a field, None when it is null or not there."""
        item = self.fields.get(field)
        if isinstance(item, dict):
            if "value" not in item:
                raise self.fault(field, item, "{value: ..., source: ...} or a bare value")
            self.file.check_source(f"{self.name}.{field}", item.get("source"))
            item = item["value"]
        return item

    def optional_number(self, field: str) -> float | None:
        """A number; None when it is not known."""
        value = self.value(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(field, value, "a number")
        return float(value)

    def number(self, field: str) -> float:
        """A number that must be known."""
        value = self.optional_number(field)
        if value is None:
            raise self.fault(field, value, "a number")
        return value

    def optional_count(self, field: str) -> int | None:
        """A whole number; None when it is not known."""
        value = self.optional_number(field)
        if value is None:
            return None
        if value != int(value):
            raise self.fault(field, value, "a whole number")
        return int(value)

    def count(self, field: str, default: int | None = None) -> int:
        """A whole number that must be known, unless there is a default."""
        value = self.optional_count(field)
        if value is None:
            if default is None:
                raise self.fault(field, value, "a whole number")
            return default
        return value

    def optional_text(self, field: str) -> str | None:
        """A text; None when it is not known."""
        value = self.value(field)
        if value is not None and not isinstance(value, str):
            raise self.fault(field, value, "a text")
        return value

    def text(self, field: str) -> str:
        """A text that must be known."""
        value = self.optional_text(field)
        if value is None:
            raise self.fault(field, value, "a text")
        return value

    def flag(self, field: str) -> bool:
        """true or false; false when it is not there."""
        value = self.value(field)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fault(field, value, "true or false")
        return value

    def parts(self, field: str) -> tuple[Entry, ...]:
        """The parts of a list field (none when it is not there)."""
        value = self.fields.get(field, [])
        if not isinstance(value, list):
            raise self.fault(field, value, "a list")
        return tuple(self.sub(f"{field}[{number}]", fields) for number, fields in enumerate(value))

    def part(self, field: str) -> Entry | None:
        """The mapping of a field; None when it is not there."""
        value = self.fields.get(field)
        return None if value is None else self.sub(field, value)

    def texts(self, field: str) -> tuple[str, ...]:
        """The texts of a list field (none when it is not there)."""
        value = self.fields.get(field, [])
        if not isinstance(value, list):
            raise self.fault(field, value, "a list")
        return tuple(str(item) for item in value)

    def fault(self, field: str, value: object, expected: str) -> ConfigError:
        """The sentence about a field."""
        return ConfigError(f"{self.file.name}: {self.name}.{field} is {value!r}; expected {expected}")
