"""Properties of the watch for volatile prefixes: it names the place of an early change, and is silent about the rest.

Prompts are lines of random words. A change of some bytes at a random place, of the same length or another, with more
said at the end or not, must be found where it is; a prompt that only grows, or that shares but its beginning with the
one before, or quotes a part of it, must not be. Each planted fault breaks one of these.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from router import volatile_prefix
from router.volatile_prefix import Divergence, VolatilePrefixes
from tests.exploring import examples


@dataclass(frozen=True)
class Case:
    """Two prompts of one conversation."""

    seed: int
    size_bytes: int
    place: int
    """Of the change, within the first half."""
    removed: int
    nonce: str
    more: str


cases = st.builds(
    Case,
    seed=st.integers(0, 1_000),
    size_bytes=st.sampled_from([1_000, 3_000, 20_000, 60_000]),
    place=st.integers(0, 400),
    removed=st.sampled_from([0, 1, 8]),
    nonce=st.sampled_from(["#", "########", "nonce=12345678901234567890"]),
    more=st.sampled_from(["", " more", "\nand a line more that nobody has said before"]),
)


def lines(seed: int, size_bytes: int) -> str:
    dice = random.Random(seed)
    found = ""
    while len(found) < size_bytes:
        found += " ".join(f"w{dice.randrange(10**6)}" for _ in range(8)) + "\n"
    return found[:size_bytes]


def second(first: str, then: str) -> Divergence | None:
    seen = volatile_prefix.VolatilePrefixes(b"secret")
    assert seen.turn("o", "m", "c", first.encode()) is None
    assert seen.turn("o", "m", "other", then.encode()) is None, "another conversation's first turn"
    found = seen.turn("o", "m", "c", then.encode())
    assert seen.count("o", "m").volatile_count == (found is not None)
    return found


def check(case: Case) -> None:
    text = lines(case.seed, case.size_bytes)
    changed = text[: case.place] + case.nonce + text[case.place + case.removed :] + case.more
    found = second(text, changed)
    assert found is not None
    assert found.offset_bytes <= case.place < found.offset_bytes + found.width_bytes
    assert found.same_bytes <= min(case.size_bytes, 32 * 1024)
    assert second(text, text + case.nonce + case.more) is None
    assert second(text, text[: len(text) // 2] + lines(case.seed + 5_000, case.size_bytes)) is None
    quoted = text[: len(text) // 4]
    assert second(text, lines(case.seed + 6_000, min(case.size_bytes, 20_000)) + "\n" + quoted) is None


@settings(max_examples=examples(100))
@given(cases)
def test_an_early_change_is_named_and_nothing_else(case: Case) -> None:
    check(case)


@contextmanager
def instead(name: str, value: Any) -> Iterator[None]:
    before = getattr(volatile_prefix, name)
    setattr(volatile_prefix, name, value)
    try:
        yield
    finally:
        setattr(volatile_prefix, name, before)


def last_place(old: Any, new: Any) -> Divergence | None:
    """It names where the two prompts differ last."""
    found = volatile_prefix.Divergence(0, 16, 500)
    places = [n for n, (a, b) in enumerate(zip(old.blocks, new.blocks, strict=False)) if a != b]
    return found._replace(offset_bytes=places[-1] * 16) if places else None


class OneForAll(VolatilePrefixes):
    """Conversations of an organisation are taken for one."""

    def _key(self, *names: str) -> int:
        return super()._key(*names[:2])


FAULTS: dict[str, tuple[str, Any]] = {
    "names the last place": ("_compare", last_place),
    "one conversation for all": ("VolatilePrefixes", OneForAll),
    "lines are not looked at": ("_same_lines", lambda old, new, after: 0),
    "any change will do": ("_SAME_MIN_PART", 0.0),
    "blocks are told apart by their first byte": ("xxh3_64_intdigest", lambda data, seed: data[0] if data else 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_property_finds(fault: str) -> None:
    @settings(max_examples=300, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(cases)
    def run(case: Case) -> None:
        check(case)

    with instead(*FAULTS[fault]), pytest.raises((AssertionError, ExceptionGroup)):
        run()
