"""The simulated engine as an HTTP server: routes, the life of a request, start and stop.

Owns: which path does what, the exchange between one HTTP request and the engine, and the process's life. Does not own:
bytes of requests and answers (`engine_wire`, `engine_answer`), framing (`engine_http`), time (`engine_clock`).
A request is aborted in the same turn of the event loop in which its client's socket closes, and its blocks are free
then. A client that reads slowly gets fewer, larger events: what waits for it is four bytes a token, not rendered text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from socket import SOCK_STREAM

import orjson
import xxhash

from perfmodel.adapters.engine_answer import AnswerFacts, Delta, Usage, answer_for
from perfmodel.adapters.engine_clock import ClockConfig, EngineClock
from perfmodel.adapters.engine_http import ConnectionSet, EngineConnection, HttpLimits, HttpRequest
from perfmodel.adapters.engine_metrics import EngineMetrics, Gauges, MetricsFacts
from perfmodel.adapters.engine_wire import (
    Generation,
    WireLimits,
    error_body,
    parse_abort,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from perfmodel.adapters.kv_publisher import KvPublisher, PublisherConfig
from perfmodel.errors import ClientError, ConfigError
from perfmodel.scheduler import (
    ChoiceTokens,
    EngineConfig,
    EngineCore,
    Finished,
    FinishReason,
    StepOutcome,
    StepTiming,
    SubmitOutcome,
)
from perfmodel.workload import SimRequest, detokenize, token_bytes

_logger = logging.getLogger(__name__)

# The version whose bytes are imitated; told by /version and in the fingerprint.
ENGINE_VERSION = "0.32.0"
_JSON_ROUTES = frozenset(("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"))
# Longest X-Request-Id taken over as a request's id; a longer one is cut, as it comes back in every chunk.
_MAX_REQUEST_ID_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One engine. `model` is the served name and `root` what is behind it; `kv_events` None publishes none."""

    model: str
    root: str
    host: str
    port: int
    max_model_tokens: int
    engine: EngineConfig
    clock: ClockConfig = field(default_factory=ClockConfig)
    kv_events: PublisherConfig | None = None
    http: HttpLimits = field(default_factory=HttpLimits)
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        usable_tokens = (self.engine.block_count - 1) * self.engine.block_size_tokens
        if not 1 <= self.max_model_tokens <= usable_tokens:
            raise ConfigError(
                f"max_model_len is {self.max_model_tokens}; expected at least 1 and at most the {usable_tokens} tokens "
                f"that the KV cache holds, so that every sequence can finish"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; expected 0 to 65535")


class _StepObserver:
    """Metrics of every step, and its KV events out."""

    def __init__(self, metrics: EngineMetrics, publisher: KvPublisher | None) -> None:
        self._metrics = metrics
        self._publisher = publisher

    def step(self, outcome: StepOutcome, lag_s: float) -> None:
        if not outcome.asleep:
            self._metrics.step(outcome, lag_s)
        if outcome.kv_events and self._publisher is not None:
            self._publisher.publish(outcome.kv_events)

    def finished(self, finished: Finished) -> None:
        self._metrics.finished(finished)


class Exchange:
    """One HTTP request for text and the engine's requests behind it (one per prompt)."""

    def __init__(
        self, server: EngineServer, connection: EngineConnection, call: Generation, facts: AnswerFacts
    ) -> None:
        self.wire_id = facts.wire_id
        self._server = server
        self._connection = connection
        self._call = call
        self._answer = answer_for(call, facts)
        self._first_index: dict[str, int] = {}
        choice_count = call.choice_count * len(call.prompts)
        self._open = set(range(choice_count))
        self._token_counts = [0] * choice_count
        self._opened = False
        self._out: list[bytes] = []
        # Tokens that wait for a slow reader, by choice: (their bytes, why the choice ended).
        self._held: dict[int, tuple[bytearray, str | None]] = {}
        self._cached_tokens: dict[str, int] = {}
        self._created_tokens: int | None = None

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """The ids of the engine's requests."""
        return tuple(self._first_index)

    def own(self, engine_id: str, prompt_index: int) -> None:
        """The choices of `engine_id` are this exchange's from index `prompt_index * n` on."""
        self._first_index[engine_id] = prompt_index * self._call.choice_count

    def begin(self) -> None:
        """The engine has taken it: heads of streams go out at once, as vLLM's do."""
        self._connection.on_lost = self.cancel
        if self._call.stream:
            self._connection.on_writable = self._release
            self._connection.start_stream()

    def take(self, output: ChoiceTokens) -> None:
        """One token (`engine_clock.Sink`)."""
        index = self._first_index[output.request_id] + output.choice_index
        self._token_counts[index] += 1
        reason = None
        if output.choice_index == 0 and output.position == 0:
            self._cached_tokens[output.request_id] = output.cached_tokens
        if output.finished is not None:
            reason = output.finished.reason.value
            if index == 0:
                self._created_tokens = output.finished.created_cache_tokens
        self._give(index, output.text, reason)

    def flush(self) -> None:
        """Send what is due (`engine_clock.Sink`): one write, however many events."""
        done = not self._open and not self._held
        if done:
            self._out.append(self._answer.closing(self._usage()))
        data = b"".join(self._out)
        self._out.clear()
        if self._call.stream:
            if data:
                self._connection.write_chunk(data, last=done)
        elif done:
            self._connection.respond(HTTPStatus.OK, data)
        if done:
            self._server.forget(self)

    def cancel(self) -> None:
        """The client is gone: abort at once."""
        self._server.cancel(self)

    def end_early(self) -> None:
        """Aborted by somebody else than its client: what is there is the answer, and its reason is `abort`."""
        for index in sorted(self._open):
            self._give(index, b"", FinishReason.ABORT.value)
        self.flush()

    def _give(self, index: int, text: bytes, reason: str | None) -> None:
        """One choice got tokens: write them, or hold them while the client does not read."""
        if reason is not None:
            self._open.discard(index)
        if self._connection.paused and self._call.stream:
            held, _ = self._held.setdefault(index, (bytearray(), None))
            held += text
            self._held[index] = (held, reason)
            return
        self._write(Delta(index, text, self._token_counts[index], reason))

    def _write(self, delta: Delta) -> None:
        if not self._opened:
            self._opened = True
            self._out.append(self._answer.opening())
        self._out.append(self._answer.delta(delta))

    def _release(self) -> None:
        """The client reads again: what was held goes out as one event per choice."""
        held, self._held = self._held, {}
        for index, (text, reason) in sorted(held.items()):
            self._write(Delta(index, bytes(text), self._token_counts[index], reason))
        if held:
            self.flush()

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._call.prompt_tokens,
            completion_tokens=sum(self._token_counts),
            cached_tokens=sum(self._cached_tokens.values()),
            created_cache_tokens=self._created_tokens,
        )


class EngineServer:
    """The engine behind one port. Build it inside the event loop, `start` it, `drain` and `close` it."""

    def __init__(self, config: ServerConfig, timing: StepTiming) -> None:
        self._config = config
        self._limits = WireLimits((config.model,), config.max_model_tokens)
        self._started_s = time.time()
        self._metrics = EngineMetrics(
            MetricsFacts(
                config.model,
                config.max_model_tokens,
                config.engine.block_count,
                config.engine.block_size_tokens,
                self._started_s,
                config.clock.speed,
            )
        )
        self.publisher = None if config.kv_events is None else KvPublisher(config.kv_events, time.time)
        observer = _StepObserver(self._metrics, self.publisher)
        self.core = EngineCore(config.engine, timing)
        self._clock = EngineClock(self.core, config.clock, observer, time.monotonic)
        self._connections = ConnectionSet(self, config.http, time.time)
        self._exchanges: dict[Exchange, None] = {}
        self._request_count = 0
        self._fingerprint = f"vllm-{ENGINE_VERSION}-{self._digest('fingerprint')[:8]}"
        self._server: asyncio.Server | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._routes: dict[str, dict[str, Callable[[EngineConnection, HttpRequest], None]]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics_page},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/kv_event_sources": {"GET": self._kv_event_sources},
            "/abort_requests": {"POST": self._abort_requests},
        }

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None, "start() first"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def metrics(self) -> EngineMetrics:
        """What was counted so far."""
        return self._metrics

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken or the host is none of this machine's."""
        loop = asyncio.get_running_loop()
        # One address only: with port 0 a name of two addresses would get two ports.
        (_, _, _, _, address), *_ = await loop.getaddrinfo(self._config.host, self._config.port, type=SOCK_STREAM)
        self._server = await loop.create_server(
            lambda: EngineConnection(self._connections), str(address[0]), self._config.port, backlog=1024
        )

    async def drain(self) -> None:
        """Take no new connections and let what runs finish, for at most `drain_s`."""
        if self._server is not None:
            self._server.close()
        self._connections.drain()
        try:
            async with asyncio.timeout(self._config.drain_s):
                await self._idle.wait()
        except TimeoutError:
            _logger.warning(
                "%d requests were cut off after %.1f s of drain", len(self._exchanges), self._config.drain_s
            )

    def close(self) -> None:
        """Cut what is left and release the sockets."""
        if self._server is not None:
            self._server.close()
        self._connections.abort()
        for exchange in tuple(self._exchanges):
            self.cancel(exchange)
        self._clock.stop()
        if self.publisher is not None:
            self.publisher.close()

    # engine_http.HttpApp

    def handle_request(self, connection: EngineConnection, request: HttpRequest) -> None:
        """Answer one request, now or as the engine gets to it."""
        methods = self._routes.get(request.path)
        route = None if methods is None else methods.get(request.method)
        if route is None:
            self._not_found(connection, methods)
            return
        try:
            _check_media_type(request)
            route(connection, request)
        except ClientError as fault:
            headers = b"retry-after: 1\r\n" if fault.status == HTTPStatus.SERVICE_UNAVAILABLE else b""
            connection.respond(HTTPStatus(fault.status), error_body(fault), headers=headers)
        except Exception:
            _logger.exception("%s %s failed", request.method, request.path)
            told = ClientError("Internal server error", status=500, kind="InternalServerError")
            connection.respond(HTTPStatus.INTERNAL_SERVER_ERROR, error_body(told))

    def _not_found(
        self,
        connection: EngineConnection,
        methods: dict[str, Callable[[EngineConnection, HttpRequest], None]] | None,
    ) -> None:
        if methods is None:
            connection.respond(HTTPStatus.NOT_FOUND, b'{"detail":"Not Found"}')
            return
        allowed = b"allow: %s\r\n" % ", ".join(methods).encode()
        connection.respond(HTTPStatus.METHOD_NOT_ALLOWED, b'{"detail":"Method Not Allowed"}', headers=allowed)

    # Generation

    def _chat(self, connection: EngineConnection, request: HttpRequest) -> None:
        self._generate(connection, request, parse_chat(request.body, self._limits))

    def _completion(self, connection: EngineConnection, request: HttpRequest) -> None:
        self._generate(connection, request, parse_completion(request.body, self._limits))

    def _generate(self, connection: EngineConnection, request: HttpRequest, call: Generation) -> None:
        self._request_count += 1
        number = self._request_count
        name = request.request_id or call.request_id or self._digest(f"request/{number}")
        wire_id = ("chatcmpl-" if call.is_chat else "cmpl-") + name[:_MAX_REQUEST_ID_CHARACTERS]
        facts = AnswerFacts(wire_id, int(time.time()), self._config.model, self._fingerprint)
        exchange = Exchange(self, connection, call, facts)
        for index, prompt in enumerate(call.prompts):
            engine_id = f"{number}-{index}"
            sim_request = SimRequest(
                request_id=engine_id,
                prompt_token_ids=prompt,
                max_tokens=call.max_tokens[index],
                choice_count=call.choice_count,
                cache_salt=call.cache_salt,
                ignore_eos=call.ignore_eos,
                min_tokens=call.min_tokens,
                output_key=_output_key(call, index),
            )
            exchange.own(engine_id, index)
            outcome = self._clock.submit(sim_request, exchange)
            if outcome is not SubmitOutcome.ACCEPTED:
                self._withdraw(exchange)
                raise self._refused(outcome)
        self._exchanges[exchange] = None
        self._idle.clear()
        self._metrics.asked(call)
        exchange.begin()

    def _refused(self, outcome: SubmitOutcome) -> ClientError:
        if outcome is SubmitOutcome.QUEUE_FULL:
            self._metrics.rejected()
            told = f"The engine's queue is full ({self._config.engine.max_waiting_count} sequences are waiting)."
            return ClientError(told, status=503, kind="ServiceUnavailableError")
        return ClientError("The request needs more KV cache blocks than the engine has.", param="max_tokens")

    def _withdraw(self, exchange: Exchange) -> None:
        for engine_id in exchange.engine_ids:
            self._clock.abort(engine_id)

    def cancel(self, exchange: Exchange) -> None:
        """Abort what the exchange still has in the engine and forget it."""
        self._withdraw(exchange)
        self.forget(exchange)

    def forget(self, exchange: Exchange) -> None:
        """The exchange is over."""
        self._exchanges.pop(exchange, None)
        if not self._exchanges:
            self._idle.set()

    def _digest(self, what: str) -> str:
        return blake2b(f"{self._config.engine.seed}/{what}".encode(), digest_size=8).hexdigest()

    # Everything else

    def _models(self, connection: EngineConnection, _request: HttpRequest) -> None:
        created_s = int(self._started_s)
        permission = {
            "id": f"modelperm-{self._digest('modelperm')}",
            "object": "model_permission",
            "created": created_s,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self._config.model,
            "object": "model",
            "created": created_s,
            "owned_by": "vllm",
            "root": self._config.root,
            "parent": None,
            "max_model_len": self._config.max_model_tokens,
            "permission": [permission],
        }
        connection.respond(HTTPStatus.OK, orjson.dumps({"object": "list", "data": [card]}))

    def _tokenize(self, connection: EngineConnection, request: HttpRequest) -> None:
        call = parse_tokenize(request.body, self._limits)
        texts = None
        if call.with_texts:
            raw = token_bytes(call.tokens)
            texts = [raw[at : at + 4].rstrip(b"\x00").decode("utf-8", "replace") for at in range(0, len(raw), 4)]
        answer = {
            "count": len(call.tokens),
            "max_model_len": self._config.max_model_tokens,
            "tokens": call.tokens.tolist(),
            "token_strs": texts,
        }
        connection.respond(HTTPStatus.OK, orjson.dumps(answer))

    def _detokenize(self, connection: EngineConnection, request: HttpRequest) -> None:
        text = detokenize(parse_detokenize(request.body, self._limits)).decode("utf-8", "replace")
        connection.respond(HTTPStatus.OK, orjson.dumps({"prompt": text}))

    def _health(self, connection: EngineConnection, _request: HttpRequest) -> None:
        draining = self._connections.draining
        connection.respond(HTTPStatus.SERVICE_UNAVAILABLE if draining else HTTPStatus.OK)

    def _version(self, connection: EngineConnection, _request: HttpRequest) -> None:
        connection.respond(HTTPStatus.OK, orjson.dumps({"version": ENGINE_VERSION}))

    def _load(self, connection: EngineConnection, _request: HttpRequest) -> None:
        connection.respond(HTTPStatus.OK, orjson.dumps({"server_load": len(self._exchanges)}))

    def _metrics_page(self, connection: EngineConnection, _request: HttpRequest) -> None:
        gauges = Gauges(
            stats=self._clock.stats(),
            ending_count=self._clock.ending_count(),
            lag_s=self._clock.lag_s,
            open_connection_count=len(self._connections.open),
            slow_reader_count=self._connections.slow_reader_count,
        )
        connection.respond(HTTPStatus.OK, self._metrics.render(gauges), b"text/plain; version=0.0.4; charset=utf-8")

    def _reset_prefix_cache(self, connection: EngineConnection, _request: HttpRequest) -> None:
        connection.respond(HTTPStatus.OK, orjson.dumps({"success": self.core.reset_prefix_cache()}))

    def _kv_event_sources(self, connection: EngineConnection, _request: HttpRequest) -> None:
        sources = {} if self.publisher is None else self.publisher.sources()
        connection.respond(HTTPStatus.OK, orjson.dumps(sources))

    def _abort_requests(self, connection: EngineConnection, request: HttpRequest) -> None:
        wanted = parse_abort(request.body)
        for exchange in tuple(self._exchanges):
            if wanted is None or exchange.wire_id in wanted:
                self._withdraw(exchange)
                exchange.end_early()
        connection.respond(HTTPStatus.OK, orjson.dumps({"status": "aborted"}))


def _check_media_type(request: HttpRequest) -> None:
    if request.path in _JSON_ROUTES and request.content_type not in ("application/json", ""):
        told = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ClientError(told, kind="Bad Request")


def _output_key(call: Generation, index: int) -> str | None:
    """What decides the answer: the prompt at temperature 0 or with a seed, else the request's own number."""
    if not call.greedy and call.seed is None:
        return None
    return f"{'' if call.greedy else call.seed}/{xxhash.xxh3_128_hexdigest(call.prompts[index].tobytes())}"
