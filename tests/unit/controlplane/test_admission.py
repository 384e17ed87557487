"""What a client is told about limits: sentences, codes, headers, and the outage policy."""

from __future__ import annotations

import pytest

from controlplane.admission import (
    RefusalFacts,
    after_outage,
    duration,
    limit_headers,
    limit_sentence,
    refusal_facts,
    retry_headers,
)
from controlplane.ports import Header
from controlplane.rate_limit import NO_LIMITS, Admitted, Cost, LimitView, RefusalReason, Refused, Ticket
from controlplane.tenancy import Dimension, Limit, OutagePolicy


def limit(dimension: Dimension, amount: int = 1_000, period_s: int = 60, model: str | None = None) -> Limit:
    return Limit("l", "org", "o", model, dimension, amount, period_s, amount)


def refused(reason: RefusalReason, one: Limit | None, wait_s: float | None = 13.68) -> Refused:
    return Refused(reason, one, 240, 12, wait_s, NO_LIMITS)


def told(facts: RefusalFacts) -> list[Header]:
    return retry_headers(facts.retry_after_s, facts.should_retry)


def test_a_token_limit_is_told_with_limit_need_and_rest() -> None:
    facts = refusal_facts(refused(RefusalReason.RATE_LIMIT, limit(Dimension.INPUT_TOKENS)))
    assert facts.message == "Input token limit of 1000 per minute reached; 240 needed, 12 left."
    assert (facts.status, facts.type, facts.code) == (429, "tokens", "rate_limit_exceeded")
    assert told(facts) == [(b"retry-after", b"14"), (b"retry-after-ms", b"13680")]


@pytest.mark.parametrize(
    ("one", "sentence", "kind"),
    [
        (limit(Dimension.REQUESTS, 60), "Request limit of 60 per minute", "requests"),
        (limit(Dimension.REQUESTS, 5, 1, "m"), "Request limit of 5 per second for model m", "requests"),
        (limit(Dimension.OUTPUT_TOKENS, 9, 3_600), "Output token limit of 9 per hour", "tokens"),
        (limit(Dimension.OUTPUT_TOKENS, 9, 86_400), "Output token limit of 9 per day", "tokens"),
        (limit(Dimension.INPUT_TOKENS, 9, 90), "Input token limit of 9 per 90 seconds", "tokens"),
        (limit(Dimension.CONCURRENCY, 4), "Concurrency limit of 4 requests in flight", "requests"),
    ],
)
def test_every_dimension_has_a_sentence_and_a_type(one: Limit, sentence: str, kind: str) -> None:
    assert limit_sentence(one) == sentence
    assert refusal_facts(refused(RefusalReason.RATE_LIMIT, one)).type == kind


def test_what_can_never_pass_must_not_be_retried() -> None:
    facts = refusal_facts(refused(RefusalReason.TOO_LARGE, limit(Dimension.OUTPUT_TOKENS), None))
    assert facts.status == 429
    assert told(facts) == [(b"x-should-retry", b"false")]
    assert "never" in facts.message


def test_a_limit_that_never_refills_must_not_be_retried() -> None:
    facts = refusal_facts(refused(RefusalReason.RATE_LIMIT, limit(Dimension.REQUESTS, 0), None))
    assert told(facts) == [(b"x-should-retry", b"false")]


def test_a_store_that_is_gone_is_a_503_worth_retrying() -> None:
    facts = refusal_facts(refused(RefusalReason.STORE_UNAVAILABLE, None, 1.0))
    assert (facts.status, facts.type) == (503, "server_error")
    assert told(facts) == [(b"retry-after", b"1"), (b"retry-after-ms", b"1000")]


@pytest.mark.parametrize(
    ("wait_s", "seconds", "ms"),
    [(0.0, b"1", b"1"), (0.0001, b"1", b"1"), (1.0, b"1", b"1000"), (1.0001, b"2", b"1001")],
)
def test_waits_round_up_and_are_never_zero(wait_s: float, seconds: bytes, ms: bytes) -> None:
    facts = refusal_facts(refused(RefusalReason.RATE_LIMIT, limit(Dimension.REQUESTS), wait_s))
    assert told(facts) == [(b"retry-after", seconds), (b"retry-after-ms", ms)]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"), (0.12, "120ms"), (0.0001, "1ms"), (0.9991, "1s"), (1.0, "1s"), (59.28, "59.28s"),
        (59.9999, "1m0s"), (360.0, "6m0s"), (61.5, "1m1.5s"), (3_600.0, "1h0m0s"), (90_061.0, "25h1m1s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_the_hosted_api_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_name_only_limits_that_exist() -> None:
    assert limit_headers(NO_LIMITS) == []
    assert limit_headers(LimitView(60, 41, 19.0)) == [
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"41"),
        (b"x-ratelimit-reset-requests", b"19s"),
    ]
    tokens = LimitView(None, None, None, 1_000, -3, None)
    assert limit_headers(tokens) == [(b"x-ratelimit-limit-tokens", b"1000"), (b"x-ratelimit-remaining-tokens", b"0")]


def test_only_a_declared_tenant_is_served_while_the_store_is_gone() -> None:
    gone = refused(RefusalReason.STORE_UNAVAILABLE, None)
    assert after_outage(gone, Cost(1, 1), OutagePolicy.REFUSE) is gone
    served = after_outage(gone, Cost(1, 1), OutagePolicy.ALLOW)
    assert isinstance(served, Admitted)
    assert served.ticket.spends == []


def test_the_outage_policy_changes_no_other_decision() -> None:
    limited = refused(RefusalReason.RATE_LIMIT, limit(Dimension.REQUESTS))
    admitted = Admitted(Ticket(Cost(0, 0), []), NO_LIMITS)
    assert after_outage(limited, Cost(0, 0), OutagePolicy.ALLOW) is limited
    assert after_outage(admitted, Cost(0, 0), OutagePolicy.ALLOW) is admitted
