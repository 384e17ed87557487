"""The checker of the fault runs is itself checked: an account that is doctored in one way is always found out.

Each case takes evidence in which nothing is wrong, changes one thing, and names the rule that must see it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.check import CACHED_PRICE, INPUT_PRICE, OUTPUT_PRICE, findings, history
from tests.faults.plan import Wish, tag_of
from tests.faults.truth import Booked, ClientSaw, Ended, EngineSaw, Evidence, read_engine_log

OPENED_NS = 1_000_000_000_000
KILLED_NS = OPENED_NS + 10_000_000_000


def a_wish(tag: str, **changes: object) -> Wish:
    made = Wish(tag, "normal", {"gap_ms": "3"}, stream=True, choices=1, tokens=200, prompt=100, cached=40)
    return replace(made, **changes)  # type: ignore[arg-type] # names of fields


def an_event(tag: str, request: int, **changes: object) -> Booked:
    counts = {"uncached_input_tokens": 60, "cached_input_tokens": 40, "output_tokens": 200}
    fields: dict[str, object] = {
        "event_id": f"{request}-1", "request_id": f"req_{request}", "attempt": 1, "tag": tag, "endpoint": "engine-1",
        "stream": True, "choices": 1, "billable": True, "estimated": False, "outcome": "completed", "status": 200,
        "error_code": None, "reserved_input_tokens": 20, "reserved_output_tokens": 4_096, "first_token_ns": OPENED_NS,
        "opened_ns": OPENED_NS, "ended_ns": OPENED_NS, "posting_id": "p", **counts, **changes,
    }  # fmt: skip
    prices = {"uncached_input_tokens": INPUT_PRICE, "cached_input_tokens": CACHED_PRICE, "output_tokens": OUTPUT_PRICE}
    due = sum(int(str(fields[name] or 0)) * price for name, price in prices.items())
    fields.setdefault("amount_pico", due if fields["billable"] else 0)
    return Booked(**fields)  # type: ignore[arg-type] # names of fields


def a_client(tag: str, request: int, ended: Ended, tokens: int, **changes: object) -> ClientSaw:
    """Its tokens came one by one, 10 ms apart, until it ended at second 100."""
    saw = ClientSaw(a_wish(tag, **changes), 90.0, OPENED_NS, connected=True, request_id=f"req_{request}", status=200)
    saw.ended, saw.ended_s = ended, 100.0
    saw.reads = [(100.0 - 0.01 * (tokens - n), n) for n in range(1, tokens + 1)]
    return saw


def an_engine(tag: str, request: int, tokens: int, ended: str, endpoint: str = "engine-1") -> EngineSaw:
    return EngineSaw(endpoint, f"req_{request}", tag, "normal", tokens, ended, OPENED_NS)


def whole() -> Evidence:
    """One request of each kind; nothing is wrong."""
    clients = [
        a_client("done", 1, Ended.DONE, 200),
        a_client("left", 2, Ended.LEFT, 50),
        a_client("crashed", 3, Ended.CUT, 130),
        a_client("retried", 4, Ended.DONE, 200),
        a_client("untold", 5, Ended.DONE, 200, script="no_usage"),
        a_client("unseen", 6, Ended.REFUSED, 0),
    ]
    clients[-1].status = 502
    nothing = {"uncached_input_tokens": None, "cached_input_tokens": None, "output_tokens": None}
    lost = {**nothing, "outcome": "failed", "status": 502, "first_token_ns": None}
    engines = [
        an_engine("done", 1, 200, "completed"),
        an_engine("left", 2, 53, "client_closed"),
        an_engine("crashed", 3, 131, "client_closed"),
        an_engine("retried", 4, 0, "reset"),
        an_engine("retried", 4, 200, "completed", "engine-2"),
        an_engine("untold", 5, 200, "completed"),
    ]
    events = [
        an_event("done", 1),
        an_event("left", 2, outcome="cancelled", estimated=True, output_tokens=51),
        an_event("crashed", 3, outcome="crashed", estimated=True, output_tokens=70),
        an_event("retried", 4, billable=False, **lost),
        an_event("retried", 4, event_id="4-2", attempt=2, endpoint="engine-2"),
        an_event("untold", 5, estimated=True, **{**nothing, "output_tokens": 200}),
        an_event("unseen", 6, **lost),
    ]
    return Evidence(tuple(clients), tuple(engines), tuple(events), (KILLED_NS,))


def changed(tag: str, **changes: object) -> Callable[[Evidence], Evidence]:
    """The last event of a request with other fields; the amount follows the tokens unless it is given."""

    def change(evidence: Evidence) -> Evidence:
        events = list(evidence.events)
        at = max(n for n, event in enumerate(events) if event.tag == tag)
        old = {name: getattr(events[at], name) for name in Booked.__dataclass_fields__ if name != "amount_pico"}
        request = int(events[at].request_id.removeprefix("req_"))
        events[at] = an_event(tag, request, **{**{k: v for k, v in old.items() if k != "tag"}, **changes})
        return replace(evidence, events=tuple(events))

    return change


def without_event(tag: str) -> Callable[[Evidence], Evidence]:
    return lambda evidence: replace(evidence, events=tuple(one for one in evidence.events if one.tag != tag))


def doubled_event(evidence: Evidence) -> Evidence:
    copy = replace(next(one for one in evidence.events if one.tag == "done"), event_id="1-copy", attempt=2)
    return replace(evidence, events=(*evidence.events, copy))


def second_sight(evidence: Evidence) -> Evidence:
    return replace(evidence, engines=(*evidence.engines, an_engine("done", 1, 7, "reset", "engine-2")))


def sent_twice(evidence: Evidence) -> Evidence:
    return replace(evidence, engines=(*evidence.engines, an_engine("done", 1, 30, "reset")))


def unknown_request(evidence: Evidence) -> Evidence:
    return replace(evidence, events=(*evidence.events, an_event("nobody", 9)))


def no_gateway_killed(evidence: Evidence) -> Evidence:
    return replace(evidence, gateway_kills_ns=(OPENED_NS - 1,))


def slow_tokens(evidence: Evidence) -> Evidence:
    """The 130 tokens came over the last 3.9 s, so the checkpoint of 70 is more than a second behind."""
    clients = list(evidence.clients)
    slow = next(one for one in clients if one.wish.tag == "crashed")
    slow.reads = [(100.0 - 0.03 * (130 - n), n) for n in range(1, 131)]
    return replace(evidence, clients=tuple(clients))


def hung(evidence: Evidence) -> Evidence:
    next(one for one in evidence.clients if one.wish.tag == "left").ended = Ended.GAVE_UP
    return evidence


def billed_for_a_dead_engine(evidence: Evidence) -> Evidence:
    """The engine was killed meanwhile, which explains an input that it did not write down, but never an output."""
    killed = replace(evidence, engine_kills=(("engine-1", OPENED_NS),))
    return changed("unseen", uncached_input_tokens=19, output_tokens=1, estimated=True)(killed)


CASES: list[tuple[str, str, Callable[[Evidence], Evidence]]] = [
    ("lost", "done", without_event("done")),
    ("lost", "left", without_event("left")),
    ("billable", "done", doubled_event),
    ("billable", "done", changed("done", billable=False)),
    ("billable", "retried", changed("retried", billable=False)),
    ("request id", "done", changed("done", request_id="req_99")),
    ("attempt lost", "done", second_sight),
    ("attempt lost", "done", sent_twice),
    ("attempt numbers", "retried", changed("retried", attempt=1)),
    ("attempt numbers", "done", changed("done", attempt=2)),
    ("amount", "done", changed("done", amount_pico=60 * INPUT_PRICE + 40 * CACHED_PRICE + 200 * OUTPUT_PRICE + 1)),
    ("amount", "left", changed("left", amount_pico=0)),
    ("billed unseen", "unseen", changed("unseen", output_tokens=1)),
    ("billed unseen", "unseen", changed("unseen", uncached_input_tokens=19, estimated=True)),
    ("billed unseen", "unseen", billed_for_a_dead_engine),
    ("overbilled", "unseen", changed("unseen", output_tokens=1)),
    ("overbilled", "left", changed("left", output_tokens=54)),
    ("overbilled", "crashed", changed("crashed", output_tokens=132)),
    ("underbilled", "left", changed("left", output_tokens=49)),
    ("underbilled", "crashed", changed("crashed", output_tokens=65)),
    ("underbilled", "crashed", slow_tokens),
    ("counts", "done", changed("done", output_tokens=199)),
    ("counts", "done", changed("done", uncached_input_tokens=61)),
    ("counts", "done", changed("done", uncached_input_tokens=100, cached_input_tokens=0)),
    ("counts", "untold", changed("untold", output_tokens=201)),
    ("flag", "done", changed("done", estimated=True)),
    ("flag", "left", changed("left", estimated=False)),
    ("flag", "crashed", changed("crashed", estimated=False)),
    ("flag", "untold", changed("untold", estimated=False)),
    ("outcome", "done", changed("done", outcome="cancelled", estimated=True)),
    ("crashed", "crashed", no_gateway_killed),
    ("unknown", "nobody", unknown_request),
    ("hung", "left", hung),
]


def test_accounts_that_agree_are_left_alone() -> None:
    assert findings(whole()) == []


@pytest.mark.parametrize(("rule", "tag", "doctored"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_a_doctored_account_is_found_out(rule: str, tag: str, doctored: Callable[[Evidence], Evidence]) -> None:
    found = findings(doctored(whole()))
    assert (rule, tag) in {(one.rule, one.tag) for one in found}, found
    assert {one.tag for one in found} == {tag}


def test_a_client_that_was_told_of_a_fault_has_no_completed_event() -> None:
    evidence = whole()
    next(one for one in evidence.clients if one.wish.tag == "done").ended = Ended.FAULT_SAID
    assert [one.rule for one in findings(evidence)] == ["outcome"]


def test_a_connection_that_was_taken_for_stale_is_no_lost_attempt() -> None:
    evidence = whole()
    again = replace(evidence, engines=(*evidence.engines, an_engine("done", 1, 0, "reset")))
    assert findings(again) == []


def test_the_input_of_a_request_that_a_killed_engine_did_not_write_down_may_be_billed() -> None:
    evidence = changed("unseen", uncached_input_tokens=19, estimated=True)(whole())
    assert findings(replace(evidence, engine_kills=(("engine-1", OPENED_NS),))) == []


def test_the_history_of_a_request_names_every_account() -> None:
    told = history(whole(), "retried")
    assert told.count("engine ") == 2
    assert told.count("event ") == 2
    assert "client status=200" in told


def test_a_log_that_ends_in_the_middle_of_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        '{"number": 1, "request_id": "req_1", "script": "normal", "tag": "a", "tokens_sent": 0, "ended": "",'
        ' "received_ns": 5, "ended_ns": null}\n{"number": 1, "sending": 1}\n{"number": 1, "sending": 2}\n{"num'
    )
    assert read_engine_log("engine-1", log) == [EngineSaw("engine-1", "req_1", "a", "normal", 2, "", 5)]
    assert read_engine_log("engine-1", tmp_path / "none") == []


def test_the_tag_survives_in_the_user_field() -> None:
    assert tag_of(a_wish("s1-c2-3").user) == "s1-c2-3"
    assert tag_of(None) == tag_of("somebody") == ""
