"""Properties of the exact KV index under any events, each shown to fail on a planted fault.

Engines store, duplicate, offload, evict in any order, clear and restart; two of them hash alike, one with a seed of its
own, and each tells what it does in vLLM's bytes. A model that counts copies by content in plain dicts says after every
step what each rank holds of every prompt that was ever used.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgpack
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from router.kv_blocks import BlockRows
from router.kv_events import Batch, Tier, decode
from router.kv_index import Held, KvIndex, RankId, Served
from router.kv_keys import ChainIdentity, chain_keys, prompt_extras, root_key, token_bytes
from router.kv_table import RowNumbers, Values
from tests.exploring import examples

SECRET = b"0123456789abcdef"
BLOCK_TOKENS = 2
MEDIA = ("GPU", "CPU", "DISK", "STORAGE")
# Content of a block: the prompt's first tokens (0 or 1 a block) and its salt.
Path = tuple[int, ...]
Content = tuple[str | None, Path]


@dataclass(frozen=True)
class Step:
    """One thing that an engine does: `depth` says how much of the path, from `start` on."""

    kind: str
    engine: int
    path: Path
    start: int
    salt: str | None
    tier: int


@dataclass
class Engine:
    """One rank as its events describe it."""

    seed: bytes
    incarnation: int = 0
    events: list[dict[str, object]] = field(default_factory=list)
    copies: Counter[tuple[Content, int]] = field(default_factory=Counter)

    def hash_of(self, content: Content) -> int:
        return int.from_bytes(blake2b(repr(content).encode(), key=self.seed, digest_size=8).digest(), "big")

    def hashes(self, salt: str | None, path: Path, start: int) -> list[int]:
        return [self.hash_of((salt, path[: end + 1])) for end in range(start, len(path))]

    def contents(self, step: Step) -> list[Content]:
        return [(step.salt, step.path[: end + 1]) for end in range(step.start, len(step.path))]


def tokens_of(path: Path) -> list[int]:
    return [token for each in path for token in (each, 7)]


def chain(salt: str | None, path: Path) -> array[int]:
    root = root_key(SECRET, ChainIdentity("m", BLOCK_TOKENS))
    return chain_keys(root, token_bytes(tokens_of(path)), BLOCK_TOKENS, prompt_extras(salt))


class Play:
    """Plays steps on an index and on the model, and compares them."""

    def __init__(self, index: KvIndex) -> None:
        self.index = index
        self.engines = [Engine(b"alike"), Engine(b"alike"), Engine(b"other")]
        self.used: set[Content] = set()
        self.told: set[int] = set()
        """Hashes whose tokens were told at some time: while there is room the index knows them for ever."""
        for number in range(3):
            self.index.open(self.rank(number), Served("m"))

    def rank(self, number: int) -> RankId:
        return RankId(f"e{number}", str(self.engines[number].incarnation))

    def play(self, steps: Sequence[Sequence[Step]]) -> None:
        for message in steps:
            sender = message[0].engine
            for step in message:
                if step.kind == "restart" or step.engine != sender:
                    self.send(sender)
                sender = step.engine
                self.engines[sender].events += self.events(step)
            self.send(sender)
            self.compare()

    def send(self, number: int) -> None:
        engine = self.engines[number]
        batch = decode(msgpack.packb([1.0, engine.events, 0]))
        assert isinstance(batch, Batch) and not batch.faults
        engine.events = []
        self.index.apply(self.rank(number), batch.events)

    def events(self, step: Step) -> list[dict[str, object]]:
        engine = self.engines[step.engine]
        medium, hashes = MEDIA[step.tier], engine.hashes(step.salt, step.path, step.start)
        if step.kind == "restart":
            engine.copies = Counter()
            engine.incarnation += 1
            self.index.open(self.rank(step.engine), Served("m"))
            return []
        if step.kind == "clear":
            engine.copies = Counter()
        elif step.kind in ("remove", "remove twice"):
            times = 1 if step.kind == "remove" else 2
            for content in engine.contents(step) * times:
                engine.copies[content, step.tier] = max(0, engine.copies[content, step.tier] - 1)
            return [{"type": "BlockRemoved", "block_hashes": hashes * times, "medium": medium, "group_idx": 0}]
        elif step.kind in ("store", "offload"):
            self.used |= {(step.salt, step.path)}
            known = step.start == 0 or engine.hash_of((step.salt, step.path[: step.start])) in self.told
            for content in engine.contents(step):
                if (known and step.kind == "store") or engine.hash_of(content) in self.told:
                    engine.copies[content, step.tier] += 1
            if known and step.kind == "store":
                self.told |= set(hashes)
            return [self.stored(step, hashes, medium)]
        return [{"type": "AllBlocksCleared"}]

    def stored(self, step: Step, hashes: list[int], medium: str) -> dict[str, object]:
        parent = self.engines[step.engine].hash_of((step.salt, step.path[: step.start])) if step.start else None
        extra = [[step.salt], *[None] * (len(hashes) - 1)] if step.salt and not step.start else [None] * len(hashes)
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens_of(step.path[step.start :]) if step.kind == "store" else [],
            "block_size": BLOCK_TOKENS if step.kind == "store" else 0,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "extra_keys": extra,
            "group_idx": 0 if step.kind == "store" else None,
            "kv_cache_spec_kind": "full_attention",
        }

    def compare(self) -> None:
        for salt, path in self.used:
            found = {held.rank: held for held in self.index.lookup(chain(salt, path))}
            for number, engine in enumerate(self.engines):
                wanted = self.held(engine, salt, path)
                got = found.pop(self.rank(number), None)
                assert (got and (got.blocks, got.tiers)) == wanted
            assert not found, "nobody else holds anything"
        for number, engine in enumerate(self.engines):
            copies = +engine.copies
            counters = self.index.counters(self.rank(number))
            assert counters.live_copies_count == copies.total()
            assert counters.live_blocks == len({content for content, _ in copies})
        totals = self.index.totals()
        assert totals.known_blocks >= totals.unheld_blocks >= 0

    def held(self, engine: Engine, salt: str | None, path: Path) -> tuple[int, tuple[int, ...]] | None:
        tiers = [0, 0, 0, 0]
        for end in range(len(path)):
            best = next((tier for tier in Tier if engine.copies[(salt, path[: end + 1]), tier]), None)
            if best is None:
                break
            tiers[best] += 1
        return (sum(tiers), tuple(tiers)) if sum(tiers) else None


paths = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
kinds = ["store"] * 7 + ["remove"] * 3 + ["remove twice"] * 2 + ["offload"] * 2 + ["clear", "restart"]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    path = draw(paths)
    return Step(
        draw(st.sampled_from(kinds)),
        draw(st.integers(0, 2)),
        path,
        draw(st.sampled_from([0, 0, draw(st.integers(0, len(path) - 1))])),
        draw(st.sampled_from([None, None, "a"])),
        draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
    )


plays = st.lists(st.lists(steps(), min_size=1, max_size=4), max_size=12)


class SideBySide(KvIndex):
    """Every batch in numpy, however small."""

    few_blocks = 0


class OneByOne(KvIndex):
    """Every batch block by block."""

    few_blocks = 1 << 30


@pytest.mark.parametrize("index_type", [SideBySide, OneByOne])
@given(play=plays)
@settings(max_examples=examples(250), deadline=None)
def test_the_index_says_what_the_engines_hold(index_type: type[KvIndex], play: list[list[Step]]) -> None:
    Play(index_type(SECRET, 4 * 2**20)).play(play)


def faulty_blocks(blocks_type: type[BlockRows], base: type[KvIndex] = SideBySide) -> type[KvIndex]:
    """An index whose rows have a fault."""

    class Faulty(base):  # type: ignore[misc, valid-type]  # one of two
        def __init__(self, secret: bytes, max_bytes: int) -> None:
            super().__init__(secret, max_bytes)
            self._blocks = blocks_type(max_bytes)

    Faulty.__name__ = f"{base.__name__}, {blocks_type.__name__}"
    return Faulty


class CountsNoCopies(BlockRows):
    def _add_copies(self, seat: int, tier: Tier, rows: list[int]) -> None:
        pass


class ForgetsAllCopiesAtOnce(BlockRows):
    def _drop_copies(self, place: int, rows: list[int]) -> list[int]:
        self._copies.pop(place, None)
        return rows


class TakesADeviceRemovalForAll(BlockRows):
    def _give_set(self, rows, old, masks):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        super()._give_set(rows, old, masks if masks[0] or masks == self.sets.masks[old] else (0, 0, 0, 0))


class KeepsCopiesOfTheCleared(BlockRows):
    def clear_seat(self, seat: int, tier: Tier | None = None) -> None:
        kept = {place: dict(rows) for place, rows in self._copies.items() if place >> 2 == seat}
        super().clear_seat(seat, tier)
        self._copies.update(kept)


class SkipsHoles(BlockRows):
    def runs(self, keys):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        for numbers in super().runs(keys):
            yield numbers[self.sets.worths[numbers] != 0]


class ComparesOnlyTheLast(BlockRows):
    def runs(self, keys):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        for numbers in super().runs(keys):
            yield numbers[[-1] * len(numbers)]


class FindsAnyAlias(BlockRows):
    def _find(self, aliases: Values) -> RowNumbers:
        return np.where(super()._find(aliases) < 0, np.int64(self.count - 1), super()._find(aliases))


class LosesFurtherAliases(BlockRows):
    def _add_aliases(self, aliases, rows):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        return np.zeros(len(rows), np.bool_)


class KeepsTheOldIncarnation(SideBySide):
    def open(self, rank: RankId, served: Served) -> None:
        if rank.incarnation == "0":
            super().open(rank, served)
        else:
            old = next(each for each in self._ranks if each.engine_id == rank.engine_id)
            state = self._ranks.pop(old)
            state.rank_id = rank
            self._ranks[rank] = state


class IgnoresClears(SideBySide):
    def _clear(self, state, event):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        pass


class DropsTheSalt(SideBySide):
    def _store(self, state, run, event):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        return super()._store(state, run, event._replace(extras=None))


class ReusesSeatsAsTheyAre(SideBySide):
    def drop(self, rank: RankId) -> None:
        state = self._ranks.pop(rank, None)
        if state is not None:
            self._free_seats += state.seats.values()


class RemovesAHashOnce(SideBySide):
    def _remove(self, state, place, hashes):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        super()._remove(state, place, list(dict.fromkeys(hashes)))


class CountsTheSlowestTier(OneByOne):
    def _held(self, ends, slower):  # type: ignore[no-untyped-def]  # a fault, its types are the parent's
        return [
            Held(each.rank, each.blocks, (each.tiers[0], 0, 0, sum(each.tiers[1:])))
            for each in super()._held(ends, slower)
        ]


@pytest.mark.parametrize(
    "index_type",
    [
        faulty_blocks(CountsNoCopies),
        faulty_blocks(CountsNoCopies, OneByOne),
        faulty_blocks(ForgetsAllCopiesAtOnce),
        faulty_blocks(ForgetsAllCopiesAtOnce, OneByOne),
        faulty_blocks(TakesADeviceRemovalForAll),
        faulty_blocks(TakesADeviceRemovalForAll, OneByOne),
        faulty_blocks(KeepsCopiesOfTheCleared),
        faulty_blocks(SkipsHoles),
        faulty_blocks(ComparesOnlyTheLast),
        faulty_blocks(FindsAnyAlias),
        faulty_blocks(LosesFurtherAliases),
        KeepsTheOldIncarnation,
        IgnoresClears,
        DropsTheSalt,
        ReusesSeatsAsTheyAre,
        RemovesAHashOnce,
        CountsTheSlowestTier,
    ],
    ids=lambda index_type: index_type.__name__,
)
def test_a_planted_fault_is_caught(index_type: type[KvIndex]) -> None:
    @given(plays)
    @settings(
        max_examples=400, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    def attempt(play: list[list[Step]]) -> None:
        Play(index_type(SECRET, 4 * 2**20)).play(play)

    with pytest.raises((AssertionError, KeyError, IndexError, ValueError, StopIteration)):
        attempt()
