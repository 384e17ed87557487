"""The exact index, by the faults that routers had: every test names its row of known bugs (R9 to R19)."""

from __future__ import annotations

import gc
import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from router.kv_events import Batch, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier, decode
from router.kv_index import Held, KvIndex, RankId, Served
from router.kv_keys import ChainIdentity, chain_keys, prompt_extras, root_key, token_bytes

RECORDED = Path(__file__).parents[2] / "recorded/vllm_0.32.0/kv_events.jsonl"
SECRET = b"secret"
MAX_BYTES = 4 * 2**20
TINY = Served("tiny")
A, B = RankId("a", "1"), RankId("b", "1")
TOKENS = list(range(64))
HASHES = [101, 102, 103, 104]


def index(*ranks: RankId, served: Served = TINY) -> KvIndex:
    made = KvIndex(SECRET, MAX_BYTES)
    for rank in ranks or (A,):
        made.open(rank, served)
    return made


def chain(
    tokens: list[int] | None = None, extras: list[Any] | None = None, block_tokens: int = 16, lora: str | None = None
) -> array[int]:
    root = root_key(SECRET, ChainIdentity("tiny", block_tokens, lora))
    return chain_keys(root, token_bytes(TOKENS if tokens is None else tokens), block_tokens, extras or ())


def stored(hashes: list[int] | None = None, *, start: int = 0, **more: Any) -> BlocksStored:
    """The run of HASHES from `start` on, with the tokens of TOKENS."""
    names = HASHES[start:] if hashes is None else hashes
    text = token_bytes(TOKENS[start * 16 : (start + len(names)) * 16])
    return BlocksStored(names, HASHES[start - 1] if start else None, text, 16)._replace(**more)


def held(made: KvIndex, keys: array[int] | None = None) -> dict[RankId, int]:
    return {each.rank: each.blocks for each in made.lookup(chain() if keys is None else keys)}


def test_a_prompt_is_found_as_far_as_each_rank_holds_it() -> None:
    made = index(A, B)
    made.apply(A, [stored()])
    made.apply(B, [stored(HASHES[:2])])
    assert held(made) == {A: 4, B: 2}
    assert held(made, chain(TOKENS[:40])) == {A: 2, B: 2}
    assert held(made, chain([*TOKENS[:16], *[7] * 48])) == {A: 1, B: 1}
    assert held(made, chain([7] * 64)) == {} and held(made, array("Q")) == {}


def test_an_array_a_list_and_a_numpy_array_are_the_same_chain() -> None:
    made = index()
    made.apply(A, [stored()])
    keys = chain()
    wanted = [Held(A, 4, (4, 0, 0, 0))]
    assert made.lookup(keys) == made.lookup(keys.tolist()) == made.lookup(np.array(keys, np.uint64)) == wanted


def test_r9_a_new_incarnation_starts_empty_and_the_old_one_is_gone() -> None:
    made = index(A, B)
    for rank in (A, B):
        made.apply(rank, [stored(), stored()])
    again = RankId("a", "2")
    made.open(again, TINY)
    assert held(made) == {B: 4} and made.ranks() == [B, again]
    with pytest.raises(KeyError):
        made.apply(A, [stored()])
    made.apply(again, [BlocksRemoved(HASHES), stored(HASHES[:1])])
    assert held(made) == {B: 4, again: 1}
    counters = made.counters(again)
    assert (counters.live_blocks, counters.live_copies_count, counters.unknown_removes_count) == (1, 1, 4)


def test_opening_a_rank_again_changes_nothing_unless_it_serves_something_else() -> None:
    made = index()
    made.apply(A, [stored()])
    made.open(A, TINY)
    assert held(made) == {A: 4}
    made.open(A, Served("tiny", weights="v2"))
    assert held(made) == {} and made.counters(A).live_blocks == 0
    made.apply(A, [stored()])
    assert held(made) == {}, "KV of other weights is another's"
    root = root_key(SECRET, ChainIdentity("tiny", 16, weights="v2"))
    assert held(made, chain_keys(root, token_bytes(TOKENS), 16)) == {A: 4}


def test_r11_copies_are_counted() -> None:
    made = index()
    made.apply(A, [stored(HASHES[:1]), stored(HASHES[:1])])
    made.apply(A, [BlocksRemoved(HASHES[:1])])
    assert held(made) == {A: 1}
    made.apply(A, [BlocksRemoved(HASHES[:1])])
    assert held(made) == {}
    made.apply(A, [BlocksRemoved(HASHES[:1]), stored(HASHES[:1])])
    assert held(made) == {A: 1}, "a removal too many is no debt"
    made.apply(A, [stored(), BlocksCleared(None)])
    assert held(made) == {} and made.counters(A).live_copies_count == 0
    assert made.counters(A).unknown_removes_count == 1


def test_r11_the_recorded_session_ends_with_55_blocks_in_94_copies() -> None:
    made = index()
    prompts: list[array[int]] = []
    live: Counter[int] = Counter()
    for line in RECORDED.read_text().splitlines():
        batch = decode(bytes.fromhex(json.loads(line)["payload_hex"]))
        assert isinstance(batch, Batch)
        made.apply(A, batch.events)
        for event in batch.events:
            if isinstance(event, BlocksStored):
                live.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                live.subtract(event.hashes)
            else:
                live.clear()
            if isinstance(event, BlocksStored) and event.parent is None:
                prompts.append(chain_keys(root(32), event.tokens, 32, event.extras or ()))
        counters = made.counters(A)
        assert (counters.live_blocks, counters.live_copies_count) == (len(+live), (+live).total())
    assert (counters.live_blocks, counters.live_copies_count) == (55, 94)
    assert not counters.unknown_removes_count and not counters.unresolved_parents_count
    assert made.block_tokens(A) == 32
    assert max(sum(held(made, keys).values()) for keys in prompts) > 1


def root(block_tokens: int) -> int:
    return root_key(SECRET, ChainIdentity("tiny", block_tokens))


def test_r11_copies_in_one_message_and_removals_of_more_than_are_there() -> None:
    for size in (4, 64):
        made = index()
        names, text = list(range(1, size + 1)), list(range(size * 16))
        run = BlocksStored(names, None, token_bytes(text), 16)
        made.apply(A, [run, run, BlocksRemoved(names * 3)])
        counters = made.counters(A)
        assert (counters.stored_blocks, counters.removed_blocks, counters.unknown_removes_count) == (
            size * 2, size * 2, size,
        )  # fmt: skip
        made.apply(A, [run, run, BlocksRemoved(names)])
        assert held(made, chain(text)) == {A: size}


def messages() -> list[list[KvEvent]]:
    """One session in vLLM's two encodings (with an unknown member in the newer) and SGLang's."""
    text, names = TOKENS, HASHES
    maps = [
        {"type": "BlockStored", "block_hashes": names[:3], "parent_block_hash": None, "token_ids": text[:48],
         "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["salt"], None, None],
         "group_idx": 0, "kv_cache_spec_kind": "full_attention", "tomorrow": {"a": 1}},
        {"type": "BlockStored", "block_hashes": names[3:], "parent_block_hash": names[2], "token_ids": text[48:],
         "block_size": 16, "lora_id": None, "medium": "CPU", "lora_name": None},
        {"type": "BlockRemoved", "block_hashes": names[2:3], "medium": "GPU", "group_idx": 0},
        {"type": "BlockStored", "block_hashes": names[2:3], "parent_block_hash": names[1], "token_ids": text[32:48],
         "block_size": 16, "lora_id": None, "medium": "GPU"},
    ]  # fmt: skip
    arrays = [
        ["BlockStored", names[:3], None, text[:48], 16, None, "GPU", None, [["salt"], None, None], 0, "full_attention"],
        ["BlockStored", names[3:], names[2], text[48:], 16, None, "CPU"],
        ["BlockRemoved", names[2:3], "GPU", 0],
        ["BlockStored", names[2:3], names[1], text[32:48], 16, None, "GPU"],
    ]
    sglang = [
        ["BlockStored", names[:3], None, text[:48], 16, None, "GPU", {"cache_salt": "salt"}],
        ["BlockStored", names[3:], names[2], text[48:], 16, None, "CPU_PINNED", {"cache_salt": "salt"}],
        ["BlockRemoved", names[2:3]],
        ["BlockStored", names[2:3], names[1], text[32:48], 16, None],
    ]
    found = []
    for events in (maps, arrays, sglang):
        batch = decode(msgpack.packb([1.0, events]))
        assert isinstance(batch, Batch) and not batch.faults and not batch.unknown_count
        found.append(batch.events)
    return found


def test_r12_every_encoding_gives_the_same_index() -> None:
    states = []
    for events in messages():
        made = index()
        made.apply(A, events)
        states.append((made.lookup(chain(extras=prompt_extras("salt"))), made.lookup(chain()), made.counters(A)))
    assert states[0][0] == [Held(A, 4, (3, 1, 0, 0))] and states[0][1] == []
    assert states[1] == states[0] and states[2] == states[0]


def test_r15_the_block_size_is_what_the_events_say() -> None:
    made = index(A, B)
    assert made.block_tokens(A) is None
    made.apply(A, [BlocksStored([1, 2], None, token_bytes(TOKENS), 32)])
    made.apply(B, [stored()])
    assert (made.block_tokens(A), made.block_tokens(B)) == (32, 16)
    assert held(made, chain(block_tokens=32)) == {A: 2} and held(made) == {B: 4}


def test_r16_adapters_meet_only_themselves() -> None:
    made = index(A, B)
    made.apply(A, [stored(lora_name="sql")])
    made.apply(B, [stored([1, 2, 3, 4])])
    assert held(made, chain(lora="sql")) == {A: 4} and held(made) == {B: 4}
    assert held(made, chain(lora="other")) == {}


def test_r17_salted_prompts_meet_only_the_same_salt() -> None:
    made = index()
    made.apply(A, [stored(extras=[["a"], None, None, None])])
    assert [held(made, chain(extras=prompt_extras(salt))) for salt in ("a", "b", None)] == [{A: 4}, {}, {}]


def test_r18_the_same_text_with_another_image_is_another_prompt() -> None:
    made = index(A, B)
    made.apply(A, [stored(extras=[None, ["cat"], ["cat"], None])])
    made.apply(B, [stored([1, 2, 3, 4], extras=[None, ["dog"], ["dog"], None])])
    assert held(made, chain(extras=prompt_extras(None, {1: ["cat"], 2: ["cat"]}))) == {A: 4, B: 1}
    assert held(made, chain(extras=prompt_extras(None, {1: ["dog"], 2: ["dog"]}))) == {A: 1, B: 4}


def test_r19_a_slower_copy_stays_when_the_fast_one_goes() -> None:
    made = index()
    offloaded = BlocksStored(HASHES, None, b"", 0, Tier.HOST)
    made.apply(A, [stored(), offloaded])
    assert made.lookup(chain()) == [Held(A, 4, (4, 0, 0, 0))]
    made.apply(A, [BlocksRemoved(HASHES[1:])])
    assert made.lookup(chain()) == [Held(A, 4, (1, 3, 0, 0))]
    made.apply(A, [BlocksRemoved(HASHES, Tier.HOST)])
    assert made.lookup(chain()) == [Held(A, 1, (1, 0, 0, 0))]


def test_r19_each_tier_counts_and_a_removal_without_one_takes_the_fastest() -> None:
    made = index()
    made.apply(A, [stored(HASHES[:1])])
    for tier, name in ((Tier.HOST, 102), (Tier.DISK, 103), (Tier.REMOTE, 104)):
        made.apply(A, [stored([name], start=name - 101, tier=tier)])
    assert made.lookup(chain()) == [Held(A, 4, (1, 1, 1, 1))]
    made.apply(A, [BlocksStored(HASHES[:1], None, b"", 0, Tier.DISK), BlocksRemoved(HASHES[:1], None)])
    assert made.lookup(chain()) == [Held(A, 4, (0, 1, 2, 1))]
    made.apply(A, [BlocksCleared(Tier.DISK)])
    assert held(made) == {}
    made.apply(A, [stored(HASHES[:1])])
    assert made.lookup(chain()) == [Held(A, 2, (1, 1, 0, 0))]


def test_a_hash_told_late_leads_to_its_block_even_when_its_device_copy_is_gone() -> None:
    made = index(A, B)
    made.apply(A, [stored(), BlocksRemoved(HASHES), BlocksStored(HASHES, None, b"", 0, Tier.HOST)])
    made.apply(B, [BlocksStored([*HASHES, 999], None, b"", 0, Tier.HOST)])
    assert made.lookup(chain()) == [Held(A, 4, (0, 4, 0, 0)), Held(B, 4, (0, 4, 0, 0))]
    assert made.counters(B).unresolved_blocks == 1


def test_a_run_after_an_unknown_block_is_counted_and_found_by_hash_alone() -> None:
    made = index(A, B)
    made.apply(A, [stored(start=2)])
    assert held(made) == {} and made.counters(A).unresolved_parents_count == 1
    assert made.counters(A).unresolved_blocks == 2
    made.apply(B, [stored()])
    made.apply(A, [BlocksStored(HASHES[2:], 999, token_bytes(TOKENS[32:]), 16), stored(HASHES[:2])])
    assert held(made) == {A: 4, B: 4}


def test_a_hole_ends_the_prefix_and_closes_again() -> None:
    made = index()
    made.apply(A, [stored(), BlocksRemoved([HASHES[1]])])
    assert held(made) == {A: 1}
    made.apply(A, [stored([HASHES[1]], start=1)])
    assert held(made) == {A: 4}


def test_ranks_of_one_engine_are_candidates_of_their_own() -> None:
    second = RankId("a", "1", 1)
    made = index(A, second)
    made.apply(A, [stored()])
    made.apply(second, [stored(HASHES[:1])])
    assert held(made) == {A: 4, second: 1}
    made.apply(A, [BlocksCleared(None)])
    assert held(made) == {second: 1}
    made.apply(A, [stored()])
    made.clear(second)
    assert held(made) == {A: 4}
    made.drop_engine("a")
    assert held(made) == {} and made.ranks() == []
    made.drop(A)


def test_groups_of_states_stay_out_and_of_several_chains_the_shortest_counts() -> None:
    made = index()
    state = BlocksStored([900], None, b"", 16, group_id=1, chained=False)
    made.apply(A, [state, BlocksRemoved([900], group_id=1), stored(group_id=0)])
    assert held(made) == {A: 4} and made.counters(A).state_events_count == 2
    assert made.counters(A).unknown_removes_count == 0
    made.apply(A, [stored(HASHES[:3], group_id=2)])
    assert held(made) == {A: 3}
    made.apply(A, [BlocksRemoved(HASHES[:1], group_id=2)])
    assert held(made) == {}
    made.apply(A, [stored(HASHES[:1], group_id=2), BlocksStored(HASHES[2:], None, b"", 0, Tier.HOST)])
    assert made.lookup(chain()) == [Held(A, 3, (3, 0, 0, 0))], "an event without a group means the first chain"
    assert made.counters(A).live_blocks == 7


def test_engines_that_hash_otherwise_meet_by_their_tokens() -> None:
    made = index(A)
    made.open(B, Served("tiny", namespace="other kind"))
    made.apply(A, [stored()])
    made.apply(B, [stored([1, 2, 3, 4])])
    assert held(made) == {A: 4, B: 4}
    totals = made.totals()
    assert (totals.known_blocks, totals.second_aliases_count) == (4, 4)
    made.apply(B, [BlocksRemoved([3, 4]), BlocksRemoved(HASHES)])
    assert held(made) == {A: 4, B: 2} and made.counters(B).unknown_removes_count == 4


def test_a_hash_of_one_kind_of_engine_is_not_anothers() -> None:
    made = index(A)
    made.open(B, Served("another model"))
    made.apply(A, [stored()])
    made.apply(B, [BlocksStored(HASHES, None, b"", 0, Tier.HOST)])
    assert held(made) == {A: 4} and made.counters(B).unresolved_blocks == 4


def test_one_hash_twice_in_an_event_is_the_chain_that_its_tokens_make() -> None:
    made = index()
    made.apply(A, [BlocksStored([1, 2, 1], None, token_bytes([*TOKENS[:32], *TOKENS[:16]]), 16)])
    assert held(made) == {A: 2} and made.counters(A).refused_blocks == 1


def test_failures_are_counted_and_totals_add_up() -> None:
    made = index()
    made.decode_failed(A)
    made.decode_failed(A, 3)
    assert made.counters(A).decode_failures_count == 4
    made.apply(A, [stored(), BlocksRemoved(HASHES[3:])])
    totals = made.totals()
    assert (totals.known_blocks, totals.unheld_blocks, totals.holder_sets_count) == (4, 1, 1)
    assert totals.size_bytes == made.size_bytes < made.max_bytes == MAX_BYTES


def test_more_ranks_than_a_machine_word_has_bits() -> None:
    ranks = [RankId(f"e{number}", "1") for number in range(200)]
    made = index(*ranks)
    for number, rank in enumerate(ranks):
        made.apply(rank, [stored(HASHES[: number % 4 + 1])])
    assert held(made) == {rank: number % 4 + 1 for number, rank in enumerate(ranks)}
    for rank in ranks[::2]:
        made.drop(rank)
    assert held(made) == {rank: number % 4 + 1 for number, rank in enumerate(ranks) if number % 2}


def test_no_text_and_no_token_ids_are_kept() -> None:
    made = index()
    text, salt = token_bytes([123_456_789] * 16), "canary-salt"
    made.apply(A, [BlocksStored([1], None, text, 16, extras=[[salt]])])
    seen: set[int] = set()
    reached: list[object] = [made]
    while reached:
        each = reached.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        assert each is not text and not (isinstance(each, str) and each == salt)
        if isinstance(each, np.ndarray):
            assert text[:8] not in each.tobytes()
        elif isinstance(each, array | memoryview | bytes):
            assert text[:8] not in bytes(each)
        reached += gc.get_referents(each)
    assert len(seen) > 50
