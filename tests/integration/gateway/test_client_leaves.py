"""A client that leaves, at every stage and on every route: the engine sees it within a second, the event says what was
delivered, and every reservation comes back (reference gateway 5, rows 1, 2, 11, 14). And a client that does not read.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

import pytest

from billing.usage_event import Outcome, UsageEvent
from tests.fakes.engine_scripts import Ask, Script, Send, Truth, choice, chunk
from tests.integration.gateway.client import CHAT, Caller, RawClient, body, head, request
from tests.integration.gateway.conftest import People
from tests.integration.gateway.stack import Engines, Node, Tenant, eventually

# DESIGN 4.1: a client that leaves cancels the engine within a second.
CANCELLED_WITHIN_S = 1.0


class Leaver:
    """Asks, and finds its own request again at the engine and in the spool by the prompt's length."""

    def __init__(self, node: Node, engines: Engines, tenant: Tenant) -> None:
        self.node, self.engines, self.tenant = node, engines, tenant
        self._before = {id(truth) for _, truth in engines.truths()}
        self._known = {event.event_id for event in node.events_of(tenant)}
        self.left_ns = 0

    def leave(self, raw: RawClient, *, reset: bool = False) -> None:
        """Close the connection, noting when."""
        self.left_ns = time.time_ns()
        if reset:
            raw.reset()
        else:
            raw.sock.close()

    def asked(self, within_s: float = 5.0) -> Truth:
        """The engine has the request."""
        return eventually(self._asked, "the request at the engine", within_s)

    def _asked(self) -> Truth | None:
        return next((truth for _, truth in self.engines.truths() if id(truth) not in self._before), None)

    def cancelled(self) -> Truth:
        """The engine saw the close in time."""
        truth = self.asked()
        eventually(lambda: truth.ended, "the close at the engine", 5)
        assert truth.ended == "client_closed"
        assert truth.ended_ns is not None
        assert (truth.ended_ns - self.left_ns) / 1e9 < CANCELLED_WITHIN_S
        return truth

    def event(self) -> UsageEvent:
        """The one event of this tenant that is new."""
        return eventually(self._event, "the event", 5)

    def _event(self) -> UsageEvent | None:
        new = [event for event in self.node.events_of(self.tenant) if event.event_id not in self._known]
        assert len(new) <= 1, new
        return new[0] if new else None

    def no_event(self) -> bool:
        """Nothing was dispatched."""
        time.sleep(0.3)
        return self._event() is None and self._asked() is None


@pytest.fixture
def leaver(node: Node, engines: Engines, people: People) -> Leaver:
    """A tenant that leaves."""
    return Leaver(node, engines, people["other"])


def test_before_the_body_is_complete(leaver: Leaver, node: Node) -> None:
    with RawClient(node) as raw:
        raw.send(head(leaver.tenant, 1_000) + b'{"model"')
        time.sleep(0.05)
        leaver.leave(raw)
    assert leaver.no_event()


def test_at_once_after_the_body(node: Node, engines: Engines, people: People) -> None:
    leaver = Leaver(node, engines, people["inference only"])  # its events may come late: not in another test's way
    for n in range(20):  # some are seen before the dispatch, some after it: never two events, never a stuck engine
        with RawClient(node) as raw:
            raw.send(request(leaver.tenant, body("cut?after=-1&how=stall", stream=bool(n % 2))))
            raw.reset() if n % 3 == 0 else raw.sock.close()
    eventually(
        lambda: all(truth.ended for _, truth in leaver.engines.truths() if id(truth) not in leaver._before),
        "the engines to be free", 5,
    )  # fmt: skip
    sent = [truth for _, truth in leaver.engines.truths() if id(truth) not in leaver._before]
    assert {truth.ended for truth in sent} <= {"client_closed"}

    def events() -> list[UsageEvent]:
        return [event for event in node.events_of(leaver.tenant) if event.event_id not in leaver._known]

    eventually(lambda: len(events()) >= len(sent), "an event for each dispatch", 5)
    assert {event.close.outcome for event in events()} <= {Outcome.CANCELLED}


def test_while_the_engine_is_being_connected(leaver: Leaver, node: Node) -> None:
    with RawClient(node) as raw:
        raw.send(request(leaver.tenant, body(model="hole")))
        time.sleep(0.2)
        leaver.leave(raw)
    close = leaver.event().close
    assert close.outcome is Outcome.CANCELLED
    assert (close.ended_ns - leaver.left_ns) / 1e9 < CANCELLED_WITHIN_S


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("size", [10, 100_000, 1_000_000])
def test_a_whole_answer_that_is_awaited(size: int, reset: bool, leaver: Leaver, node: Node) -> None:
    """Large bodies too: the gateway must go on reading the socket to see that its client is gone."""
    with RawClient(node) as raw:
        prompt = [{"role": "user", "content": "x" * size}]
        raw.send(request(leaver.tenant, body("normal?delay_ms=20000", messages=prompt)))
        leaver.asked()
        leaver.leave(raw, reset=reset)
    leaver.cancelled()
    event = leaver.event()
    assert (event.close.outcome, event.close.estimated, event.close.status) == (Outcome.CANCELLED, True, 499)
    # a non-streamed request is billed by its input (DESIGN 4.3)
    assert event.close.uncached_input_tokens == event.open.reserved_input_tokens
    assert event.close.output_tokens is None


@pytest.mark.parametrize("script", ["cut?after=-1&how=stall", "cut?after=0&how=stall"])
def test_a_stream_before_its_first_token(script: str, leaver: Leaver, node: Node) -> None:
    with RawClient(node) as raw:
        raw.send(request(leaver.tenant, body(script, stream=True)))
        leaver.asked()
        time.sleep(0.1)
        leaver.leave(raw)
    leaver.cancelled()
    close = leaver.event().close
    assert (close.outcome, close.estimated, close.first_token_ns) == (Outcome.CANCELLED, True, None)
    assert not close.output_tokens


@pytest.mark.parametrize("reset", [False, True])
def test_in_the_middle_of_a_stream(reset: bool, leaver: Leaver, node: Node) -> None:
    with RawClient(node) as raw:
        raw.send(request(leaver.tenant, body("normal?tokens=200&gap_ms=50", stream=True)))
        got = raw.read_until(b"tok10 ")
        leaver.leave(raw, reset=reset)
    leaver.cancelled()
    close = leaver.event().close
    assert (close.outcome, close.estimated, close.uncached_input_tokens) == (Outcome.CANCELLED, True, 17)
    assert close.output_tokens is not None
    seen = got.count(b'"content":"tok')
    assert seen <= close.output_tokens <= seen + 2


def test_after_the_last_byte(leaver: Leaver, node: Node) -> None:
    with RawClient(node) as raw:
        raw.send(request(leaver.tenant, body("normal", stream=True)))
        raw.read_until(b"[DONE]")
        leaver.leave(raw)
    close = leaver.event().close
    assert (close.outcome, close.estimated, close.output_tokens) == (Outcome.COMPLETED, False, 5)


def test_the_sdk_that_stops_reading_a_stream(leaver: Leaver, node: Node) -> None:
    import openai

    with openai.OpenAI(base_url=node.url + "/v1", api_key=leaver.tenant.secret, max_retries=0) as client:
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True,
            user="script:normal?tokens=500&gap_ms=20",
        )  # fmt: skip
        for _, _ in zip(range(5), stream, strict=False):
            pass
        leaver.left_ns = time.time_ns()
        stream.close()
    leaver.cancelled()
    assert leaver.event().close.outcome is Outcome.CANCELLED


LEAVING: dict[str, Callable[[Node, Tenant, Engines], None]] = {}


def leaving(function: Callable[[Node, Tenant, Engines], None]) -> Callable[[Node, Tenant, Engines], None]:
    """One way to give up a request that holds a slot."""
    LEAVING[function.__name__] = function
    return function


@leaving
def stalled_stream(node: Node, tenant: Tenant, engines: Engines) -> None:
    with RawClient(node) as raw:
        raw.send(request(tenant, body("cut?after=-1&how=stall", stream=True)))
        time.sleep(0.1)


@leaving
def half_a_stream(node: Node, tenant: Tenant, engines: Engines) -> None:
    with RawClient(node) as raw:
        raw.send(request(tenant, body("normal?tokens=500&gap_ms=20", stream=True)))
        raw.read_until(b"tok2 ")


@leaving
def whole_answer(node: Node, tenant: Tenant, engines: Engines) -> None:
    with RawClient(node) as raw:
        raw.send(request(tenant, body("normal?delay_ms=20000")))
        time.sleep(0.1)


@leaving
def first_byte_timeout(node: Node, tenant: Tenant, engines: Engines) -> None:
    assert Caller(node, tenant).post(body("cut?after=-1&how=stall", stream=True)).status_code == 504


@leaving
def lost_engine(node: Node, tenant: Tenant, engines: Engines) -> None:
    with Caller(node, tenant).stream(body("cut?after=2&how=reset&gap_ms=10", stream=True)) as answer:
        answer.read()


@leaving
def engine_error(node: Node, tenant: Tenant, engines: Engines) -> None:
    assert Caller(node, tenant).post(body("status?code=400")).status_code == 400


@leaving
def no_engine(node: Node, tenant: Tenant, engines: Engines) -> None:
    assert Caller(node, tenant).post(body(model="dead")).status_code in (502, 503)


def test_no_way_of_ending_keeps_a_concurrency_slot(node: Node, people: People, engines: Engines) -> None:
    """Row 14: cap 2; each way twice, and the third call passes."""
    tenant = people["cap 2"]
    caller = Caller(node, tenant)
    for name, leave in LEAVING.items():
        for _ in range(1 if leave is first_byte_timeout else 2):
            leave(node, tenant, engines)
        # settlements reach the store within two report intervals (100 ms); the slot is a lease of one process
        eventually(lambda: caller.post(body()).status_code == 200, f"a free slot after {name}", 2)
    for event in node.events_of(tenant):
        assert event.close.outcome is not Outcome.CRASHED


class TestSlowReaders:
    """Backpressure: what a client does not read is not read from its engine either, and not for ever."""

    def test_a_reader_that_stalls_holds_its_engine_back_and_is_cut_after_the_idle_time(
        self, leaver: Leaver, node: Node, engines: Engines
    ) -> None:
        def flood(ask: Ask) -> Script:
            one = chunk(ask, [choice(0, {"content": "x" * 60_000})])
            return Script("flood", (Send(one, tokens=1) for _ in range(5_000)))  # 300 MB

        engines.by_name["solo"].enqueue(flood)
        before = max(worker.memory_info().rss for worker in node.workers())
        with RawClient(node, receive_buffer_bytes=4_096) as raw:
            raw.send(request(leaver.tenant, body(model="solo", stream=True)))
            raw.read_until(b"data: ")
            began_s = time.monotonic()
            truth = leaver.asked()
            eventually(lambda: truth.ended, "the engine to be let go", 8)
            took_s = time.monotonic() - began_s
        assert truth.ended == "client_closed"
        assert 2.0 < took_s < 6, "idle time is 2.5 s"
        # what the sockets' buffers on the way take (some MB each) and what the gateway holds (under 1 MB)
        assert len(truth.sent) < 60_000_000
        assert max(worker.memory_info().rss for worker in node.workers()) - before < 50_000_000
        close = leaver.event().close
        assert close.outcome is Outcome.CANCELLED
        assert close.output_tokens is not None
        assert 0 <= close.output_tokens <= truth.tokens_sent

    @pytest.mark.parametrize("token_chars", [100, 1_000])
    def test_a_reader_that_stalls_is_billed_at_least_what_its_socket_took(
        self, leaver: Leaver, node: Node, engines: Engines, token_chars: int
    ) -> None:
        def flood(ask: Ask) -> Script:
            words = (chunk(ask, [choice(0, {"content": "x" * token_chars})]) for _ in range(1_000_000))
            return Script("flood", (Send(word, tokens=1) for word in words))

        engines.by_name["solo"].enqueue(flood)
        with RawClient(node, receive_buffer_bytes=4_096) as raw:
            raw.send(request(leaver.tenant, body(model="solo", stream=True)))
            truth = leaver.asked()
            eventually(lambda: truth.ended, "the engine to be let go", 8)
            raw.sock.settimeout(1)  # the kernel may give a closed connection up without a word
            received = b""
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                while piece := raw.sock.recv(65_536):  # what the kernel still holds for it
                    received += piece
        close = leaver.event().close
        assert close.outcome is Outcome.CANCELLED
        assert close.output_tokens is not None
        assert received.count(b'"content":"x') <= close.output_tokens <= truth.tokens_sent

    def test_a_reader_that_is_slow_gets_everything(self, leaver: Leaver, node: Node) -> None:
        with RawClient(node, receive_buffer_bytes=4_096) as raw:
            raw.send(request(leaver.tenant, body("normal?tokens=3000", stream=True), "connection: close"))
            data = b""
            while piece := raw.sock.recv(8_192):
                data += piece
                time.sleep(0.005)
        assert b"tok3000 " in data
        assert b"[DONE]" in data
        assert leaver.event().close.output_tokens == 3_000


def test_checkpoints_run_at_most_64_tokens_behind(leaver: Leaver, node: Node) -> None:
    """What a crash would be billed by; read from the spool while the stream runs."""
    from billing.adapters.spool_files import segments, spool_folders
    from billing.spool_format import Damage, Scanner
    from billing.usage_event import UsageCheckpoint

    with RawClient(node) as raw:
        raw.send(request(leaver.tenant, body("normal?tokens=400&gap_ms=3", stream=True)))
        raw.read_until(b"tok200 ")
        noted = []
        for folder in spool_folders(node.settings.spool_dir):
            for number in segments(folder):
                data = (folder / f"{number:08d}.seg").read_bytes()
                found = [item.value for item in Scanner().feed(data) if not isinstance(item, Damage)]
                noted += [value for value in found if isinstance(value, UsageCheckpoint)]
        latest = max(noted, key=lambda value: value.at_ns)
        assert latest.output_tokens is not None
        assert 200 - 64 - 5 <= latest.output_tokens <= 400
        leaver.leave(raw)
    leaver.cancelled()
    assert json.loads(leaver.asked().body)["model"] == "m"
    assert CHAT in leaver.asked().target


@pytest.mark.parametrize("piece_first", [True, False])
def test_an_end_of_sending_that_meets_a_piece_bills_what_the_client_got(
    node: Node, engines: Engines, people: People, piece_first: bool
) -> None:
    """Both are found in one turn of the gateway's loop: the piece is sent and billed, or neither."""
    leaver = Leaver(node, engines, people["other"])
    with RawClient(node) as raw:
        raw.send(request(leaver.tenant, body("normal?tokens=200&gap_ms=50", stream=True)))
        got = raw.read_until(b"tok5 ")
        workers = node.workers()
        for worker in workers:
            worker.suspend()
        for step in (time.sleep, raw.sock.shutdown) if piece_first else (raw.sock.shutdown, time.sleep):
            step(1)  # seconds, or SHUT_WR
        for worker in workers:
            worker.resume()
        raw.sock.settimeout(5)
        with contextlib.suppress(OSError):
            while more := raw.sock.recv(65_536):
                got += more
    assert leaver.event().close.output_tokens == got.count(b'"content":"tok')
