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

# Characters of a number: more than any quantity has. Any number of so few, in any of YAML's bases, still fits a float,
# and Python spells it out; from some thousands of digits on it does neither.
_MOST_CHARACTERS = 100


def read_yaml(path: Path | Traversable) -> object:
    """What the file holds, as plain values. Raises ConfigError that names the file, and OSError."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)  # noqa: S506  # a safe loader
    except _Refused as fault:
        raise ConfigError(f"{path} has {fault}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; expected YAML") from None
    except yaml.YAMLError as fault:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(fault).split())}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as fault:
        # A day of a 13th month, a tag that does not fit its value (!!bool foo).
        raise ConfigError(f"{path} has a value that cannot be read: {fault}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; expected a few levels of fields") from None


class _Refused(Exception):
    """What YAML allows and we do not, on which lines, and what is expected."""


class _OnceLoader(_Safe):
    """YAML as `safe_load` reads it, but a key that a mapping has twice is refused: the first value would be lost. So is
    a number that is too long to compute with.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """As yaml calls it. Raises _Refused that names the key and both lines: 1, 0x1 and 1.0 are one key."""
        seen: dict[tuple[str, Hashable], yaml.ScalarNode] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE_TAG:
                continue
            # By text as well: a NaN does not equal itself.
            for name in (("text", (key.tag, key.value)), ("value", self.construct_object(key))):
                if name in seen:
                    raise _Refused(f"{_both(seen[name], key)}; expected each key once")
            seen["text", (key.tag, key.value)] = seen["value", self.construct_object(key)] = key
        return super().construct_mapping(node, deep)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        """A whole number of a length that a person writes. Raises _Refused."""
        _check_length(node)
        return self.construct_yaml_int(node)

    def construct_decimal(self, node: yaml.ScalarNode) -> float:
        """A number with a point, the same."""
        _check_length(node)
        return self.construct_yaml_float(node)


_OnceLoader.add_constructor("tag:yaml.org,2002:int", _OnceLoader.construct_whole)
_OnceLoader.add_constructor("tag:yaml.org,2002:float", _OnceLoader.construct_decimal)


def _both(first: yaml.ScalarNode, second: yaml.ScalarNode) -> str:
    lines = first.start_mark.line + 1, second.start_mark.line + 1
    where = f"line {lines[0]}" if lines[0] == lines[1] else f"lines {lines[0]} and {lines[1]}"
    if first.value == second.value:
        return f"{first.value} twice, on {where}"
    return f"{first.value} and {second.value}, which are one key, on {where}"


def _check_length(node: yaml.ScalarNode) -> None:
    if len(node.value) > _MOST_CHARACTERS:
        raise _Refused(
            f"a number of {len(node.value)} characters on line {node.start_mark.line + 1}, {node.value[:10]}...; "
            f"expected at most {_MOST_CHARACTERS}"
        )
