"""What a usage event is: settling, joining, hashing, and passing on what a newer writer wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from billing.usage_event import (
    MalformedEvent,
    Outcome,
    close_from_row,
    decode_event,
    encode_event,
    event_fields,
    event_from_fields,
    join,
    open_from_row,
    payload_hash,
    settle_orphan,
)
from tests.fakes.usage import a_checkpoint, a_close, an_open


def test_an_orphan_is_billed_by_its_last_checkpoint_and_says_so() -> None:
    closed = settle_orphan(an_open(7), a_checkpoint(7, output_tokens=128))
    assert closed.outcome is Outcome.CRASHED
    assert closed.estimated
    assert closed.billable
    assert closed.status is None
    assert (closed.uncached_input_tokens, closed.cached_input_tokens, closed.output_tokens) == (7, 512, 128)
    assert closed.first_token_ns == a_checkpoint(7).first_token_ns
    assert closed.ended_ns == a_checkpoint(7).at_ns


def test_an_orphan_without_a_checkpoint_has_unknown_counts_not_zero() -> None:
    closed = settle_orphan(an_open(7), None)
    assert closed.estimated
    counts = (closed.uncached_input_tokens, closed.cached_input_tokens, closed.output_tokens, closed.reasoning_tokens)
    assert counts == (None, None, None, None)
    assert closed.first_token_ns is None
    assert closed.ended_ns == an_open(7).opened_ns


def test_an_orphan_with_a_later_attempt_is_not_billable() -> None:
    assert not settle_orphan(an_open(7), None, billable=False).billable


def test_records_of_different_attempts_cannot_be_joined() -> None:
    with pytest.raises(MalformedEvent, match="cannot be joined"):
        join(an_open(1), a_close(2))


def test_an_event_survives_its_json() -> None:
    event = replace(join(an_open(3), a_close(3)), amount_pico=123_456)
    assert decode_event(encode_event(event)) == event


@pytest.mark.parametrize("amount_pico", [2**63, -(2**63) - 1, 10**37])
def test_an_amount_beyond_64_bits_survives_json(amount_pico: int) -> None:
    event = replace(join(an_open(3), a_close(3)), amount_pico=amount_pico)
    assert decode_event(encode_event(event)).amount_pico == amount_pico


def test_fields_of_a_newer_writer_survive_reading_and_writing() -> None:
    opened = an_open(3, extra={"schema_version": 2, "region": "eu", "nested": {"a": [1, None]}})
    event = join(opened, a_close(3, extra={"audio_tokens": 9}))
    assert event.schema_version == 2
    assert event.extra == {"region": "eu", "nested": {"a": [1, None]}, "audio_tokens": 9}
    again = decode_event(encode_event(event))
    assert again == event
    assert orjson.loads(encode_event(again)) == orjson.loads(encode_event(event))
    assert payload_hash(again) == event.payload_hash


def test_the_hash_does_not_depend_on_field_order() -> None:
    event = join(an_open(3, extra={"b": 1, "a": {"y": 1, "x": 2}}), a_close(3))
    backwards = dict(reversed(event_fields(event).items()))
    backwards["a"] = {"x": 2, "y": 1}
    assert payload_hash(event_from_fields(backwards)) == event.payload_hash


def test_the_hash_leaves_the_rating_out() -> None:
    event = join(an_open(3), a_close(3))
    rated = replace(event, amount_pico=5, open=event.open._replace(price_version="2026-02"))
    assert payload_hash(rated) == event.payload_hash


def test_the_hash_ignores_a_field_that_only_a_newer_reader_knows_and_nobody_set() -> None:
    event = join(an_open(3), a_close(3))
    newer = event_from_fields({**event_fields(event), "region": None})
    assert payload_hash(newer) == event.payload_hash


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("output_tokens", 999),
        ("output_tokens", None),
        ("org_id", "org_b"),
        ("billable", False),
        ("estimated", True),
        ("outcome", "cancelled"),
        ("user", "u"),
        ("attempt", 2),
        ("ended_ns", 1),
        ("unknown_of_tomorrow", 1),
    ],
)
def test_any_other_change_changes_the_hash(field: str, value: Any) -> None:
    event = join(an_open(3), a_close(3))
    assert payload_hash(event_from_fields({**event_fields(event), field: value})) != event.payload_hash


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("output_tokens", -1, "output_tokens is -1"),
        ("output_tokens", 2**63, "output_tokens is"),
        ("output_tokens", 1.5, "output_tokens is of type float; int or NoneType was expected"),
        ("attempt", True, "attempt is of type bool; int was expected"),
        ("stream", 1, "stream is of type int; bool was expected"),
        ("org_id", None, "org_id is of type NoneType; str was expected"),
        ("outcome", "exploded", "outcome is 'exploded'; one of completed, cancelled"),
        ("amount_pico", "12x", "amount_pico is '12x'"),
        ("amount_pico", True, "amount_pico is True"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, sentence: str) -> None:
    flat = {**event_fields(join(an_open(3), a_close(3))), field: value}
    with pytest.raises(MalformedEvent) as refused:
        decode_event(orjson.dumps(flat))
    assert sentence in str(refused.value)


def test_a_missing_field_is_named() -> None:
    flat = event_fields(join(an_open(3), a_close(3)))
    del flat["org_id"]
    with pytest.raises(MalformedEvent, match="lacks the field 'org_id'"):
        event_from_fields(flat)


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"{", b"\xff"])
def test_what_is_no_json_object_is_no_event(raw: bytes) -> None:
    with pytest.raises(MalformedEvent):
        decode_event(raw)


@pytest.mark.parametrize("row", [[], ["a"], None, {}, ["x"] * 60])
def test_a_row_of_the_wrong_shape_is_refused(row: Any) -> None:
    for reader in (open_from_row, close_from_row):
        with pytest.raises(MalformedEvent):
            reader(row)
