"""What must hold between what clients got, what engines sent and what the books say, after any kills.

Owns: every rule, as a pure function from the evidence to findings. Does not own: the evidence (`truth`), or comparing
the books with themselves, which is `bill reconcile`'s work. Each rule is shown to bite by `test_checker.py`.

The books are wrong unless, for every request that an engine saw or whose client got a 2xx head:
- it has one event per attempt that an engine saw, and exactly one of its events is billable;
- what is billed lies between what the client received and what the engine sent; after a crash of the gateway it may
  lie behind what was received by 64 tokens or by what came in the last second, whichever is less (DESIGN 4.3);
- `estimated` says exactly that the counts are not the engine's own final ones;
- the amount is tokens times price; a lost attempt, and one that no engine saw, costs nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from billing.metering import CHECKPOINT_S, CHECKPOINT_TOKENS
from tests.faults.plan import Wish
from tests.faults.truth import Booked, ClientSaw, Ended, EngineSaw, Evidence, by_tag

# Micro-USD per 1,000,000 tokens of the only model.
INPUT_PRICE, CACHED_PRICE, OUTPUT_PRICE = 3_000_000, 300_000, 15_000_000
# A clock of ours and one of the gateway's: a checkpoint that is due is written when the process next runs. On a machine
# that is three times overbooked that was seen to take 0.3 s.
_SCHEDULING_S = 0.5
# How much later than a kill its victim's end can be booked, or earlier than we note it.
_NOTICED_NS = 100_000_000
_ENDED_WHOLE = frozenset({"completed"})
_CUT_SHORT = frozenset({"failed", "truncated", "cancelled", "crashed"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    rule: str
    tag: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule} [{self.tag}] {self.detail}"


@dataclass(frozen=True, slots=True)
class _Request:
    """One request in all accounts."""

    tag: str
    client: ClientSaw | None
    engines: tuple[EngineSaw, ...]
    events: tuple[Booked, ...]

    def found(self, rule: str, detail: str) -> Finding:
        return Finding(rule, self.tag, detail)


def findings(evidence: Evidence) -> list[Finding]:
    """Everything that is wrong, request by request."""
    found: list[Finding] = []
    for request in _requests(evidence):
        found += _check_count(request)
        found += _check_attempts(request)
        for event in request.events:
            found += _check_money(request, event, evidence)
            found += _check_crash(request, event, evidence)
        billable = [event for event in request.events if event.billable]
        if len(billable) == 1 and request.client is not None:
            found += _check_billed(request, request.client, billable[0])
    return found


def _requests(evidence: Evidence) -> list[_Request]:
    clients = by_tag(evidence.clients)
    tags = {*clients, *(saw.tag for saw in evidence.engines), *(event.tag for event in evidence.events)}
    engines: dict[str, list[EngineSaw]] = {tag: [] for tag in tags}
    events: dict[str, list[Booked]] = {tag: [] for tag in tags}
    for saw in evidence.engines:
        engines[saw.tag].append(saw)
    for event in evidence.events:
        events[event.tag].append(event)
    return [_Request(tag, clients.get(tag), tuple(engines[tag]), tuple(events[tag])) for tag in sorted(tags)]


def _check_count(request: _Request) -> list[Finding]:
    client, events = request.client, request.events
    if client is None:
        return [request.found("unknown", f"no client sent this; the books hold {len(events)} events of it")]
    accepted = bool(request.engines) or (client.status is not None and client.status < 300)
    billable = sum(event.billable for event in events)
    if accepted and not events:
        return [request.found("lost", "the request was accepted, and the books hold no event of it")]
    if events and billable != 1:
        return [request.found("billable", f"{billable} of its {len(events)} events are billable; expected exactly 1")]
    ids = {event.request_id for event in events}
    if len(ids) > 1:
        return [request.found("request id", f"its events name {sorted(ids)}")]
    if client.request_id and ids - {client.request_id}:
        return [request.found("request id", f"the client was told {client.request_id}, the books say {ids}")]
    return []


def _check_attempts(request: _Request) -> list[Finding]:
    """Each attempt that an engine saw is one event; attempts are numbered from 1.

    An engine may see one attempt twice: a kept-alive connection that is lost before a byte of the answer is taken for
    stale, and the request is sent again on a new one (as every HTTP client does). The first then has sent nothing.
    """
    found = []
    seen = Counter({(saw.request_id, saw.endpoint): 1 for saw in request.engines})
    seen.update((saw.request_id, saw.endpoint) for saw in _without_first(request.engines) if saw.tokens_sent)
    booked = Counter((event.request_id, event.endpoint) for event in request.events)
    for where, times in (seen - booked).items():
        found.append(request.found("attempt lost", f"{times} attempts at {where} have no event"))
    numbers = sorted(event.attempt for event in request.events)
    if numbers != list(range(1, len(numbers) + 1)):
        found.append(request.found("attempt numbers", f"its events are attempts {numbers}"))
    return found


def _check_money(request: _Request, event: Booked, evidence: Evidence) -> list[Finding]:
    """The amount is tokens times price, and nothing where nothing may be billed.

    An engine that was killed may have died before it wrote down a request that the gateway had sent: then its input may
    be billed.
    """
    found = []
    saw = _sight(request, event)
    due = 0
    if event.billable:
        due = (event.uncached_input_tokens or 0) * INPUT_PRICE
        due += (event.cached_input_tokens or 0) * CACHED_PRICE
        due += (event.output_tokens or 0) * OUTPUT_PRICE
    if event.amount_pico != due:
        detail = f"event {event.event_id} costs {event.amount_pico} picodollars; its tokens make {due}"
        found.append(request.found("amount", detail))
    killed = any(
        name == event.endpoint and event.opened_ns <= at_ns <= event.ended_ns + _NOTICED_NS
        for name, at_ns in evidence.engine_kills
    )
    if saw is None and event.amount_pico and (event.output_tokens or not killed):
        detail = f"event {event.event_id} ({event.outcome}) is billed, and {event.endpoint} never saw the request"
        found.append(request.found("billed unseen", detail))
    return found


def _check_crash(request: _Request, event: Booked, evidence: Evidence) -> list[Finding]:
    """Only a killed gateway leaves an attempt to be settled for it."""
    if event.outcome == "crashed" and not any(at_ns >= event.opened_ns for at_ns in evidence.gateway_kills_ns):
        return [request.found("crashed", f"event {event.event_id} is settled as a crash, and no gateway was killed")]
    return []


def _check_billed(request: _Request, client: ClientSaw, event: Booked) -> list[Finding]:
    """Outcome, tokens and the flag of the billable event."""
    found = []
    saw = _sight(request, event)
    output = event.output_tokens or 0
    sent = _most(client.wish, saw)
    if output > sent:
        detail = f"{output} output tokens are billed, the engine sent {sent} ({event.outcome})"
        found.append(request.found("overbilled", detail))
    least = _least(client, event)
    if output < least:
        detail = f"{output} output tokens are billed; the client received {client.tokens}, so at least {least} are due"
        found.append(request.found("underbilled", f"{detail} ({event.outcome})"))
    found += _check_outcome(request, client, event)
    found += _check_flag(request, client, event, saw)
    return found


def _check_outcome(request: _Request, client: ClientSaw, event: Booked) -> list[Finding]:
    wish = client.wish
    if client.ended is Ended.GAVE_UP:
        return [request.found("hung", "the client waited longer than every deadline of the gateway")]
    if client.ended is Ended.DONE and event.outcome not in _ENDED_WHOLE:
        return [request.found("outcome", f"the client has the whole answer, the books say {event.outcome}")]
    if client.ended is Ended.FAULT_SAID and event.outcome not in _CUT_SHORT:
        return [request.found("outcome", f"the client was told of a fault, the books say {event.outcome}")]
    if event.outcome in _ENDED_WHOLE:
        prompt, cached, output = _claim(wish)
        said = (event.input_tokens, event.cached_input_tokens, event.output_tokens)
        if wish.script == "no_usage":
            said, prompt, cached = (None, None, event.output_tokens), None, None
        if said != (prompt, cached, output):
            detail = f"input, cached and output are {said}; the engine counted {(prompt, cached, output)}"
            return [request.found("counts", detail)]
    return []


def _check_flag(request: _Request, client: ClientSaw, event: Booked, saw: EngineSaw | None) -> list[Finding]:
    """`estimated` where tokens are billed by our count, and only there."""
    nothing = not event.output_tokens and not event.input_tokens
    if nothing:
        return []
    ours = event.outcome not in _ENDED_WHOLE or client.wish.script == "no_usage"
    if event.estimated != ours:
        told = "is" if event.estimated else "is not"
        detail = f"event {event.event_id} ({event.outcome}) {told} flagged as an estimate; engine: {saw and saw.ended}"
        return [request.found("flag", detail)]
    return []


def _without_first(engines: tuple[EngineSaw, ...]) -> list[EngineSaw]:
    """Of each attempt's sights, all but the one that sent most."""
    most: dict[tuple[str, str], EngineSaw] = {}
    ordered = sorted(engines, key=lambda one: -one.tokens_sent)
    return [saw for saw in ordered if most.setdefault((saw.request_id, saw.endpoint), saw) is not saw]


def _sight(request: _Request, event: Booked) -> EngineSaw | None:
    """What the engine of this attempt logged."""
    same = [one for one in request.engines if one.request_id == event.request_id and one.endpoint == event.endpoint]
    return max(same, key=lambda one: one.tokens_sent, default=None)


def _claim(wish: Wish) -> tuple[int | None, int | None, int]:
    """Prompt, cached and output tokens by the engine's own count, when it sent everything."""
    if wish.script == "falling_usage":  # says 17 in, 99 of them cached, 1 out: no more can be cached than came in
        return 17, 17, 1
    return wish.prompt, wish.cached, wish.tokens * wish.choices


def _most(wish: Wish, saw: EngineSaw | None) -> int:
    """Output tokens that may be billed. What an engine claims beyond what it sends cannot be seen from outside."""
    if saw is None:
        return 0
    return wish.tokens if wish.script == "falling_usage" else saw.tokens_sent


def _least(client: ClientSaw, event: Booked) -> int:
    """Output tokens that must be billed."""
    if client.wish.script == "falling_usage":
        return 1 if event.outcome in _ENDED_WHOLE else 0
    if event.outcome != "crashed":
        return client.tokens
    by_tokens = client.tokens - CHECKPOINT_TOKENS
    by_time = client.tokens_until(client.ended_s - CHECKPOINT_S - _SCHEDULING_S)
    return max(0, by_tokens, by_time)


def history(evidence: Evidence, tag: str) -> str:
    """All that is known of a request, for a failing test's report."""
    lines = [f"-- {tag}"]
    for client in evidence.clients:
        if client.wish.tag == tag:
            last = client.reads[-3:]
            lines.append(
                f"   wish   {client.wish}\n   client status={client.status} id={client.request_id} "
                f"ended={client.ended} code={client.code} tokens={client.tokens} sent={client.sent_s:.3f} "
                f"ended={client.ended_s:.3f} last reads={last}"
            )
    lines += [f"   engine {saw}" for saw in evidence.engines if saw.tag == tag]
    lines += [f"   event  {event}" for event in evidence.events if event.tag == tag]
    return "\n".join(lines)
