"""Reads YAML: one loader and one set of words for every file that a person writes or the project ships.

Owns: what is accepted (YAML's safe subset, each key of a mapping once) and the sentence about what is not. Does not
own: what a file means, or a file that is not there (OSError, for the command to word).
"""

from __future__ import annotations

from collections.abc import Hashable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from perfmodel.errors import ConfigError

if TYPE_CHECKING:
    _Safe = yaml.SafeLoader
else:
    # libyaml's loader is some ten times faster than the one in Python; a wheel of PyYAML without it still works.
    _Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# The key `<<`, which takes another mapping's keys in: it may come more than once.
_MERGE_TAG = "tag:yaml.org,2002:merge"


def read_yaml(path: Path | Traversable) -> object:
    """What the file holds, as plain values. Raises ConfigError that names the file, and OSError."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)  # noqa: S506  # a safe loader
    except _Twice as fault:
        raise ConfigError(f"{path} has {fault}; expected each key once") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; expected YAML") from None
    except yaml.YAMLError as fault:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(fault).split())}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as fault:
        # A day of a 13th month, a number of thousands of digits, a tag that does not fit its value (!!bool foo).
        raise ConfigError(f"{path} has a value that cannot be read: {fault}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; expected a few levels of fields") from None


class _Twice(Exception):
    """A key that stands twice, and on which lines."""


class _OnceLoader(_Safe):
    """YAML as `safe_load` reads it, but a key that a mapping has twice is refused: the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """As yaml calls it. Raises _Twice that names the key and both lines."""
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE_TAG:
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                where = f"lines {lines[name]} and {line}" if lines[name] != line else f"line {line}"
                raise _Twice(f"{key.value} twice, on {where}")
            lines[name] = line
        return super().construct_mapping(node, deep)
