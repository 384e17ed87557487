"""The spool's frames: what is written is read, a torn tail is told from damage, and records become events."""

from __future__ import annotations

import random
import zlib
from struct import pack

import orjson
import pytest

from billing.spool_format import (
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    Damage,
    End,
    Fold,
    Item,
    Record,
    Retried,
    Scanner,
    Unmatched,
    Value,
    encode_checkpoint,
    encode_close,
    encode_end,
    encode_open,
    encode_refusal,
    encode_retried,
)
from billing.usage_event import MalformedEvent, Refusal, UsageEvent
from tests.fakes.usage import START_NS, a_checkpoint, a_close, an_open

REFUSAL = Refusal("org", "proj", "llama", "rate_limit", START_NS, 12)


def a_frame(version: int, kind: int, payload: bytes) -> bytes:
    """A frame whose checksum holds, whatever is in it."""
    crc = zlib.crc32(payload, zlib.crc32(bytes((version, kind))))
    return pack("<2sIIBB", MAGIC, len(payload), crc, version, kind) + payload


def some_frames() -> list[bytes]:
    return [
        encode_open(an_open(1)),
        encode_checkpoint(a_checkpoint(1)),
        encode_open(an_open(2, user="é\u2028🎈")),
        encode_refusal(REFUSAL),
        encode_close(a_close(1)),
        encode_retried(Retried("req_0_2", 2)),
        encode_close(a_close(2)),
        encode_end(),
    ]


def values(items: list[Item]) -> list[Value]:
    return [item.value for item in items if isinstance(item, Record)]


def damages(items: list[Item]) -> list[Damage]:
    return [item for item in items if isinstance(item, Damage)]


def test_every_kind_of_record_is_read_as_it_was_written() -> None:
    data = b"".join(some_frames())
    scanner = Scanner()
    assert values(scanner.feed(data)) == [
        an_open(1),
        a_checkpoint(1),
        an_open(2, user="é\u2028🎈"),
        REFUSAL,
        a_close(1),
        Retried("req_0_2", 2),
        a_close(2),
        End(),
    ]
    assert scanner.offset_bytes == len(data)


def test_fields_of_a_newer_writer_are_kept_by_name() -> None:
    opened = an_open(1, extra={"region": "eu", "schema_version": 2})
    closed = a_close(1, extra={"audio_tokens": 3})
    checkpoint = a_checkpoint(1, extra={"x": None})
    refusal = Refusal("o", "p", "m", "r", 0, 1, {"zone": "z"})
    data = encode_open(opened) + encode_checkpoint(checkpoint) + encode_close(closed) + encode_refusal(refusal)
    assert values(Scanner().feed(data)) == [opened, checkpoint, closed, refusal]


def test_a_segment_cut_at_any_byte_gives_exactly_the_whole_frames_before_the_cut() -> None:
    frames = some_frames()
    data, ends, end = b"".join(frames), [0], 0
    for frame in frames:
        end += len(frame)
        ends.append(end)
    whole = values(Scanner().feed(data))
    for cut in range(len(data) + 1):
        count = sum(1 for end in ends[1:] if end <= cut)
        for final in (False, True):
            scanner = Scanner()
            items = scanner.feed(data[:cut], final=final)
            assert values(items) == whole[:count], cut
            assert not damages(items), cut
            assert scanner.offset_bytes == ends[count], cut


def test_bytes_may_arrive_one_at_a_time() -> None:
    data = b"".join(some_frames())
    scanner, found = Scanner(), []
    for upto in range(len(data) + 1):
        found += scanner.feed(data[scanner.offset_bytes : upto])
    assert found == Scanner().feed(data)


def test_a_flipped_bit_anywhere_costs_one_record_and_its_bytes_are_handed_out() -> None:
    frames = some_frames()
    before, hit, after = b"".join(frames[:2]), frames[2], b"".join(frames[3:])
    dice = random.Random(1)
    for place in range(len(hit)):
        broken = bytearray(hit)
        broken[place] ^= 1 << dice.randrange(8)
        items = Scanner().feed(before + bytes(broken) + after, final=True)
        assert [item.raw for item in damages(items)] == [bytes(broken)], place
        assert len(values(items)) == len(frames) - 1, place
        start = len(before)
        assert (damages(items)[0].start_bytes, damages(items)[0].end_bytes) == (start, start + len(hit))


def test_damage_in_a_live_segment_does_not_hold_up_what_follows() -> None:
    frames = some_frames()
    too_long = bytearray(frames[1])
    too_long[2:6] = (60_000).to_bytes(4, "little")
    scanner = Scanner()
    items = scanner.feed(frames[0] + bytes(too_long) + frames[2])
    assert len(values(items)) == 2
    assert [item.raw for item in damages(items)] == [bytes(too_long)]


def test_unreadable_bytes_at_a_live_end_are_waited_for_and_at_a_final_end_are_damage() -> None:
    broken = bytearray(some_frames()[0])
    broken[-1] ^= 1
    live, final = Scanner(), Scanner()
    assert live.feed(bytes(broken)) == []
    assert live.offset_bytes == 0
    assert [item.raw for item in damages(final.feed(bytes(broken), final=True))] == [bytes(broken)]
    assert final.offset_bytes == len(broken)


def test_a_region_of_zeros_as_after_loss_of_power_is_damage_not_a_torn_tail() -> None:
    frame = some_frames()[0]
    items = Scanner().feed(frame + bytes(4096), final=True)
    assert len(values(items)) == 1
    assert [len(item.raw) for item in damages(items)] == [4096]


def test_a_live_reader_gets_past_more_rubbish_than_a_frame_can_be() -> None:
    scanner = Scanner()
    rubbish = bytes(MAX_FRAME_BYTES + 1_000)
    first = scanner.feed(rubbish)
    assert sum(len(item.raw) for item in damages(first)) == 1_000
    data = rubbish + some_frames()[0]
    second = scanner.feed(data[scanner.offset_bytes :])
    assert len(values(second)) == 1
    assert sum(len(item.raw) for item in damages(first + second)) == len(rubbish)


def test_a_writer_that_cut_a_half_written_frame_off_is_followed() -> None:
    frames = some_frames()
    scanner = Scanner()
    assert len(scanner.feed(frames[0] + frames[1][:20])) == 1
    items = scanner.feed((frames[0] + frames[4])[scanner.offset_bytes :])
    assert values(items) == [a_close(1)]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (a_frame(2, 1, b"[]"), "version 2 and kind 1"),
        (a_frame(1, 99, b"[]"), "version 1 and kind 99"),
        (a_frame(1, 1, b"[1]"), "The record open is"),
        (a_frame(1, 3, b"{"), ""),
        (a_frame(1, 5, b'["a"]'), "retry"),
    ],
)
def test_a_frame_that_this_version_cannot_read_is_kept_whole(frame: bytes, reason: str) -> None:
    follower = encode_end()
    items = Scanner().feed(frame + follower)
    assert [item.raw for item in damages(items)] == [frame]
    assert reason in damages(items)[0].reason
    assert values(items) == [End()]


def test_no_payload_can_look_like_a_frame() -> None:
    tricky = encode_end().decode("latin-1")
    opened = an_open(1, user=tricky, custom_id="\xffU" * 20)
    frame = encode_open(opened)
    assert frame.count(MAGIC) == 1
    broken = bytearray(frame)
    broken[7] ^= 255
    assert values(Scanner().feed(bytes(broken) + encode_end())) == [End()]


def test_a_record_longer_than_a_frame_may_be_is_refused_with_the_bound() -> None:
    with pytest.raises(MalformedEvent, match=f"at most {MAX_PAYLOAD_BYTES}"):
        encode_open(an_open(1, user="u" * (MAX_PAYLOAD_BYTES + 1)))


def test_the_frame_is_what_the_format_says() -> None:
    frame = encode_open(an_open(1))
    assert frame[:2] == b"\xffU"
    assert int.from_bytes(frame[2:6], "little") == len(frame) - HEADER_BYTES
    assert frame[10:12] == b"\x01\x01"
    assert zlib.crc32(b"\x01\x01" + frame[HEADER_BYTES:]) == int.from_bytes(frame[6:10], "little")
    assert orjson.loads(frame[HEADER_BYTES:])[0] == an_open(1).event_id


def folded(fold: Fold, *records: Value) -> list[UsageEvent | Refusal | Unmatched | None]:
    return [fold.add(record) for record in records]


def test_an_open_and_its_close_make_one_event() -> None:
    fold = Fold()
    made = folded(fold, an_open(1), a_checkpoint(1), a_close(1))
    assert made[:2] == [None, None]
    assert isinstance(made[2], UsageEvent)
    assert (made[2].open, made[2].close) == (an_open(1), a_close(1))
    assert fold.open_count == 0
    assert fold.settle() == []


def test_records_that_were_carried_over_change_nothing() -> None:
    fold = Fold()
    folded(fold, an_open(1), a_checkpoint(1), an_open(1), a_checkpoint(1))
    assert fold.open_count == 1
    assert isinstance(fold.add(a_close(1)), UsageEvent)
    assert fold.open_count == 0


def test_what_is_left_open_is_settled_from_its_last_checkpoint() -> None:
    fold = Fold()
    folded(fold, an_open(1), an_open(2), a_checkpoint(1), a_checkpoint(1, output_tokens=128))
    first, second = fold.settle()
    assert first.close.output_tokens == 128
    assert second.close.output_tokens is None
    assert first.close.billable
    assert second.close.billable
    assert fold.open_count == 0


def test_of_the_attempts_of_one_request_only_the_last_is_billable() -> None:
    fold = Fold()
    folded(fold, an_open(1, request_id="r", attempt=1), an_open(2, request_id="r", attempt=2))
    assert [event.close.billable for event in fold.settle()] == [False, True]


def test_a_later_attempt_that_is_closed_already_still_counts() -> None:
    fold = Fold()
    folded(fold, an_open(1, request_id="r"), an_open(2, request_id="r", attempt=2), a_close(2))
    assert [event.close.billable for event in fold.settle()] == [False]


def test_a_later_attempt_in_a_deleted_segment_still_counts() -> None:
    fold = Fold()
    folded(fold, an_open(1, request_id="r"), Retried("r", 2))
    assert [event.close.billable for event in fold.settle()] == [False]


def test_a_record_without_its_open_is_reported() -> None:
    fold = Fold()
    assert isinstance(fold.add(a_close(1)), Unmatched)
    assert isinstance(fold.add(a_checkpoint(1)), Unmatched)
    folded(fold, an_open(2), a_close(2))
    assert isinstance(fold.add(a_close(2)), Unmatched)


def test_open_attempts_are_bounded() -> None:
    fold = Fold(max_open_count=2)
    made = folded(fold, an_open(1), an_open(2), an_open(3))
    assert isinstance(made[2], Unmatched)
    assert fold.open_count == 2


def test_a_refusal_passes_and_an_end_is_noted() -> None:
    fold = Fold()
    assert folded(fold, REFUSAL, End()) == [REFUSAL, None]
    assert fold.ended


def test_the_earliest_possible_end_is_that_of_the_least_advanced_attempt() -> None:
    fold = Fold()
    assert fold.ends_not_before_ns() is None
    folded(fold, an_open(1), an_open(2))
    assert fold.ends_not_before_ns() == an_open(1).opened_ns
    fold.add(a_checkpoint(1, at_ns=START_NS + 10**9))
    assert fold.ends_not_before_ns() == an_open(2).opened_ns
