"""From an endpoints file, and from the engines themselves, to the `Endpoint` list of a router.

Owns: the file format (YAML or JSON), its strict validation, re-reading it when its content changes, asking an engine
which models it serves, and the health probe of broken endpoints. Does not own: what a router does with endpoints
(`route`), or secrets: a key is looked up by the function that the process gives, when a request needs it, and never
kept.

A new file that cannot be used changes nothing: the last good one stays, and `fault` says why. An incarnation is the
content that makes an engine another one (its url and kind): when it changes, everything believed of its cache is
dropped. A restart at the same url is seen by the router through failures (`route.Router.finished`) or the first
`cached_tokens` that disagree.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from ssl import CERT_NONE, SSLContext, create_default_context
from typing import Any, NoReturn, cast, get_args
from urllib.parse import urlsplit

import httpx
import yaml

from router.adapters.kv_sources import configured_sources
from router.endpoints import Endpoint, EndpointRole, EndpointTls, EngineKind, EngineSpeed
from router.errors import EndpointsError

Secrets = Callable[[str], str | None]
"""The value of an environment variable, or None; the process passes its own reader."""

Report = Callable[[str], None]
"""Takes one sentence for the log."""

# Names go into headers, metrics and file names, so they are plain: letters, digits and . _ : @ / - .
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}\Z")

# An endpoints file beyond this is a mistake: 10,000 engines take about 3 MB.
_EXPONENT = re.compile(r"[0-9]+(\.[0-9]*)?[eE]\+?[0-9]+\Z")
_FILE_MAX_BYTES = 8 * 1024 * 1024

_FIELDS = frozenset(
    "id url models model kind role pool zone region accelerator api_key_env tls kv_events drain speed bootstrap_port "
    "kv_bytes_per_token kv_link_bytes_per_s".split()
)
# The largest KV caches have some MB per token (multi-head attention of 175 B parameters: 4.7 MB in 16 bits).
_KV_MAX_BYTES_PER_TOKEN = 64 * 1024 * 1024
_TLS_FIELDS = frozenset({"ca", "verify", "server_name"})
_SPEED_FIELDS = frozenset(
    {
        "prefill_tok_per_s",
        "prefill_overhead_s",
        "decode_s_per_token",
        "kv_capacity_tokens",
        "prefill_s_per_token2",
        "decode_s_per_running",
    }
)


class _Entry:
    """One mapping of the file, read field by field; every complaint names the file, the entry, the field and the
    value.
    """

    def __init__(self, where: str, content: object, fields: frozenset[str]) -> None:
        self._where = where
        if not isinstance(content, dict):
            expected = f"a mapping with {', '.join(sorted(fields))} was expected"
            raise EndpointsError(f"{where} is {_show(content)}; {expected}.")
        self._content: dict[object, object] = content
        for name in content:
            if name not in fields:
                known = ", ".join(sorted(fields))
                raise EndpointsError(f"{where} has an unknown field {_show(name)}; the fields are {known}.")

    def bad(self, name: str, expected: str) -> NoReturn:
        """Complain about a field."""
        raise EndpointsError(f"{self._where}, field {name}: {_show(self._content.get(name))} is not {expected}.")

    def has(self, name: str) -> bool:
        """Is it named, and not null?"""
        return self._content.get(name) is not None

    def raw(self, name: str) -> object:
        """As the parser gave it."""
        return self._content.get(name)

    def text(self, name: str, default: str = "") -> str:
        """A plain name."""
        if not self.has(name):
            return default
        value = self._content[name]
        if not isinstance(value, str) or not _NAME.match(value):
            self.bad(name, "a name of letters, digits and . _ : @ / - (at most 128)")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """One of a few words."""
        value = self._content.get(name, default) if self.has(name) else default
        if value not in choices:
            self.bad(name, f"one of {', '.join(choices)}")
        return str(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._content[name] if self.has(name) else default
        if not isinstance(value, bool):
            self.bad(name, "true or false")
        return value

    def number(self, name: str, default: float | None = None, *, above_zero: bool = False) -> float:
        """A finite number >= 0 (or > 0)."""
        value = self._content[name] if self.has(name) else default
        expected = "a number above 0" if above_zero else "a number of at least 0"
        if isinstance(value, str) and _EXPONENT.match(value):
            value = float(value)  # YAML 1.1 takes 11.1e9 for a text
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.bad(name, expected)
        if value < 0 or (above_zero and value == 0):
            self.bad(name, expected)
        return float(value)

    def whole(self, name: str, most: int) -> int | None:
        """A whole number from 1 to `most`; None where it is not named."""
        if not self.has(name):
            return None
        value = self._content[name]
        if type(value) is not int or not 1 <= value <= most:
            self.bad(name, f"a whole number from 1 to {most}")
        return value


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_endpoints(text: str, name: str) -> tuple[Endpoint, ...]:
    """The endpoints of a file's text; `name` is the file's name for messages.

    Raises EndpointsError with one sentence. Relative `tls.ca` paths are kept as written.
    """
    try:
        content = json.loads(text) if text.lstrip().startswith(("[", "{")) else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise EndpointsError(f"{name} is neither YAML nor JSON: {reason}") from error
    if isinstance(content, dict) and set(content) == {"endpoints"}:
        content = content["endpoints"]
    if not isinstance(content, list):
        raise EndpointsError(f"{name} holds {_show(content)}; a list of endpoints was expected.")
    endpoints = tuple(_endpoint(f"{name}, entry {number}", item) for number, item in enumerate(content, start=1))
    seen: set[str] = set()
    for number, endpoint in enumerate(endpoints, start=1):
        if endpoint.endpoint_id in seen:
            raise EndpointsError(
                f"{name}, entry {number}, field id: {endpoint.endpoint_id!r} names another entry already."
            )
        seen.add(endpoint.endpoint_id)
    return endpoints


def endpoint_of_url(url: str, *, kind: EngineKind = "openai", endpoint_id: str = "engine") -> Endpoint:
    """One endpoint from a url, for `serve --engine URL`. Raises EndpointsError."""
    return _endpoint("--engine", {"id": endpoint_id, "url": url, "kind": kind})


def _endpoint(where: str, content: object) -> Endpoint:
    entry = _Entry(where, content, _FIELDS)
    endpoint_id = entry.text("id")
    if not endpoint_id:
        entry.bad("id", "a name; every endpoint needs one")
    named = _Entry(f"{where} ({endpoint_id})", content, _FIELDS)
    url = _url(named)
    kind = cast("EngineKind", named.choice("kind", get_args(EngineKind), "openai"))
    return Endpoint(
        endpoint_id=endpoint_id,
        url=url,
        models=_models(named),
        kind=kind,
        role=cast("EndpointRole", named.choice("role", get_args(EndpointRole), "both")),
        pool=named.text("pool", "default"),
        zone=named.text("zone"),
        region=named.text("region"),
        accelerator=named.text("accelerator"),
        api_key_env=named.text("api_key_env") or None,
        tls=_tls(named, where),
        kv_events=_kv_events(named),
        drain=named.flag("drain", default=False),
        speed=_speed(named, where),
        incarnation=blake2b(f"{url}\n{kind}".encode(), digest_size=8).hexdigest(),
        bootstrap_port=named.whole("bootstrap_port", 65_535),
        kv_bytes_per_token=named.whole("kv_bytes_per_token", _KV_MAX_BYTES_PER_TOKEN),
        kv_link_bytes_per_s=(
            named.number("kv_link_bytes_per_s", above_zero=True) if named.has("kv_link_bytes_per_s") else None
        ),
    )


def _url(entry: _Entry) -> str:
    value = entry.raw("url")
    expected = "an http:// or https:// URL with a host, without user, query or fragment"
    if not isinstance(value, str):
        entry.bad("url", expected)
    parts = urlsplit(value)
    if parts.username is not None or parts.password is not None:
        # Not shown: it holds a secret.
        raise EndpointsError(
            f"{entry._where}, field url: it holds a user or password; give the key's variable in api_key_env instead."
        )
    try:
        port_known = parts.port is None or parts.port > 0
    except ValueError:
        port_known = False
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or not port_known:
        entry.bad("url", expected)
    return value.rstrip("/")


def _models(entry: _Entry) -> frozenset[str]:
    if entry.has("model") and entry.has("models"):
        entry.bad("model", "to be given together with models; name one of the two")
    value = entry.raw("models") if entry.has("models") else entry.raw("model")
    if value is None:
        return frozenset()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(each, str) and each.strip() for each in names):
        entry.bad("models" if entry.has("models") else "model", "a model name or a list of them")
    return frozenset(names)


def _tls(entry: _Entry, where: str) -> EndpointTls:
    if not entry.has("tls"):
        return EndpointTls()
    tls = _Entry(f"{where}, field tls", entry.raw("tls"), _TLS_FIELDS)
    path = tls.raw("ca")
    if path is not None and (not isinstance(path, str) or not path):
        tls.bad("ca", "the path of a PEM file")
    verify = tls.flag("verify", default=True)
    if path is not None and not verify:
        tls.bad("ca", "of use with verify: false; leave one of the two out")
    return EndpointTls(verify, path, tls.text("server_name") or None)


def _kv_events(entry: _Entry) -> str | None:
    value = entry.raw("kv_events")
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"(tcp|ipc)://\S+", value):
        entry.bad("kv_events", "a ZMQ address such as tcp://host:5557")
    found = configured_sources(value, str(entry.raw("url")))
    if isinstance(found, str):
        entry.bad("kv_events", f"tcp://HOST:PORT?replay=PORT&topic=TEXT&ranks=COUNT ({found})")
    return value


def _speed(entry: _Entry, where: str) -> EngineSpeed | None:
    if not entry.has("speed"):
        return None
    speed = _Entry(f"{where}, field speed", entry.raw("speed"), _SPEED_FIELDS)
    capacity = speed.number("kv_capacity_tokens", above_zero=True) if speed.has("kv_capacity_tokens") else None
    return EngineSpeed(
        prefill_tok_per_s=speed.number("prefill_tok_per_s", above_zero=True),
        prefill_overhead_s=speed.number("prefill_overhead_s", 0.0),
        decode_s_per_token=speed.number("decode_s_per_token", above_zero=True),
        kv_capacity_tokens=None if capacity is None else int(capacity),
        prefill_s_per_token2=speed.number("prefill_s_per_token2", 0.0),
        decode_s_per_running=speed.number("decode_s_per_running", 0.0),
    )


def read_endpoints(path: Path) -> tuple[Endpoint, ...]:
    """The endpoints of a file. Raises EndpointsError."""
    return parse_endpoints(_read(path), str(path))


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _FILE_MAX_BYTES:
            raise EndpointsError(f"{path} has {size} bytes; at most {_FILE_MAX_BYTES} were expected.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise EndpointsError(f"{path} cannot be read: {reason}.") from error


def tls_context(tls: EndpointTls) -> SSLContext | bool:
    """What httpx takes as `verify`. Raises EndpointsError where the authority file cannot be used."""
    return ssl_context(tls) if tls.verify else False


def ssl_context(tls: EndpointTls) -> SSLContext:
    """How an endpoint's certificate is checked. Raises EndpointsError where the authority file cannot be used."""
    try:
        context = create_default_context(cafile=tls.ca)
    except OSError as error:
        raise EndpointsError(f"The TLS authority file {tls.ca} cannot be used: {error.strerror or error}.") from error
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = CERT_NONE
    return context


# A model list or a health page is small and quick; an engine that needs longer for it is treated as not answering.
PROBE_TIMEOUT_S = 2.0

# An engine's answer to a probe beyond this is not read.
_PROBE_MAX_BYTES = 1024 * 1024

# First and longest wait between two attempts to learn an engine's models: it may be loading weights for minutes.
_ASK_FIRST_S = 0.5
_ASK_MAX_S = 15.0


class EngineProbe:
    """Small questions to engines over httpx: which models, are you well. Never raises for what an engine does."""

    def __init__(self, secrets: Secrets, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._secrets = secrets
        self._timeout_s = timeout_s

    async def models(self, endpoint: Endpoint) -> frozenset[str] | str:
        """The names that GET /v1/models lists, or one sentence on why they are not known."""
        answer = await self.get(endpoint, "/v1/models")
        if isinstance(answer, str):
            return answer
        status, body = answer
        if status != 200:
            return f"{endpoint.endpoint_id} answered {status} to GET /v1/models."
        try:
            names = frozenset(str(row["id"]) for row in json.loads(body)["data"])
        except (ValueError, KeyError, TypeError):
            return f"{endpoint.endpoint_id} answered GET /v1/models with something that is no model list."
        return names or f"{endpoint.endpoint_id} serves no model yet."

    async def healthy(self, endpoint: Endpoint) -> bool:
        """Does GET /health answer with something other than a server error? (404: there is no such page, but it
        answers.)
        """
        answer = await self.get(endpoint, "/health")
        return not isinstance(answer, str) and answer[0] < 500

    async def get(self, endpoint: Endpoint, path: str) -> tuple[int, bytes] | str:
        headers = {"accept": "application/json"}
        key = self._secrets(endpoint.api_key_env) if endpoint.api_key_env else None
        if key:
            headers["authorization"] = f"Bearer {key}"
        extensions = {"sni_hostname": endpoint.tls.server_name} if endpoint.tls.server_name else {}
        try:
            async with asyncio.timeout(self._timeout_s):
                context = await asyncio.to_thread(tls_context, endpoint.tls) if _is_tls(endpoint) else True
                # httpx's own timeouts are per read; the one that bounds the whole question is asyncio's above.
                async with (
                    httpx.AsyncClient(verify=context, trust_env=False, timeout=2 * self._timeout_s) as client,
                    client.stream(
                        "GET", f"{endpoint.url.removesuffix('/v1')}{path}", headers=headers, extensions=extensions
                    ) as answer,
                ):
                    body = b""
                    async for chunk in answer.aiter_bytes():
                        body += chunk
                        if len(body) > _PROBE_MAX_BYTES:
                            return f"{endpoint.endpoint_id} answered GET {path} with over {_PROBE_MAX_BYTES} bytes."
                    return answer.status_code, body
        except TimeoutError:
            return f"{endpoint.endpoint_id} did not answer GET {path} within {self._timeout_s:g} s."
        except (httpx.HTTPError, OSError, EndpointsError) as error:
            return f"{endpoint.endpoint_id} cannot be asked for {path}: {type(error).__name__}: {error}"
        except (httpx.InvalidURL, ValueError) as error:
            # A key that fits no header, say; not shown, since the message may quote it.
            return f"{endpoint.endpoint_id} cannot be asked for {path}: {type(error).__name__}"


def _is_tls(endpoint: Endpoint) -> bool:
    return endpoint.url.startswith("https:")


# How often broken endpoints are asked for their health: a recovery is seen well within the first back-off (5 s).
PROBE_EVERY_S = 2.0

# Broken endpoints that are probed at once; more wait for the next round.
_PROBES_MAX_COUNT = 64


class Discovery:
    """Keeps a router's endpoints current. `start()` first reads the file, so that a bad one stops the process.

    `source` is a file, looked at every `poll_s`, or a fixed list. `sink` gets every new list, including those whose
    models just became known. Nothing else is called back.
    """

    def __init__(
        self,
        source: Path | Sequence[Endpoint],
        sink: Callable[[tuple[Endpoint, ...]], None],
        probe: EngineProbe,
        *,
        poll_s: float = 1.0,
        report: Report = lambda _: None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._probe = probe
        self._poll_s = poll_s
        self._report = report
        self._listed: tuple[Endpoint, ...] = ()
        self._digest = b""
        self._asked: dict[tuple[str, str], frozenset[str]] = {}
        self._askers: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._poller: asyncio.Task[None] | None = None
        self.fault: str | None = None
        """Why the newest content of the file is not in use; None: it is."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The list in use, with the models that are known by now."""
        return tuple(
            replace(each, models=self._asked.get(_life(each), frozenset())) if not each.models else each
            for each in self._listed
        )

    async def start(self) -> None:
        """Read the file (raises EndpointsError), publish it, and watch from here on."""
        if isinstance(self._source, Path):
            text = await asyncio.to_thread(_read, self._source)
            self._digest = _digest(text)
            self._listed = parse_endpoints(text, str(self._source))
        else:
            self._listed = tuple(self._source)
        self._publish()
        if isinstance(self._source, Path):
            self._poller = asyncio.create_task(self._poll(self._source), name="endpoints file")

    async def stop(self) -> None:
        """Stop watching and asking."""
        tasks = [*self._askers.values(), *([self._poller] if self._poller else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._askers.clear()
        self._poller = None

    async def check(self) -> bool:
        """Look at the file once. True where a new list came into use."""
        if not isinstance(self._source, Path):
            return False
        try:
            text = await asyncio.to_thread(_read, self._source)
            digest = _digest(text)
            if digest == self._digest:
                self._complain(None)
                return False
            listed = parse_endpoints(text, str(self._source))
        except EndpointsError as error:
            self._complain(str(error))
            return False
        self._digest, self._listed = digest, listed
        self._complain(None)
        self._publish()
        return True

    def _complain(self, problem: str | None) -> None:
        if problem is not None and problem != self.fault:
            self._report(f"{problem} The endpoints read before stay in use.")
        self.fault = problem

    def _publish(self) -> None:
        """Hand out the list, and see to it that every engine whose models are not listed is being asked."""
        lives = {_life(each): each for each in self._listed if not each.models}
        for life in self._askers.keys() - lives.keys():
            self._askers.pop(life).cancel()
        self._asked = {life: models for life, models in self._asked.items() if life in lives}
        for life, endpoint in lives.items():
            if life not in self._askers and life not in self._asked:
                self._askers[life] = asyncio.create_task(self._ask(endpoint), name=f"models of {endpoint.endpoint_id}")
        self._sink(self.endpoints)

    async def _ask(self, endpoint: Endpoint) -> None:
        wait_s, told = _ASK_FIRST_S, ""
        while True:
            answer = await self._probe.models(endpoint)
            if not isinstance(answer, str):
                self._asked[_life(endpoint)] = answer
                self._askers.pop(_life(endpoint), None)
                self._sink(self.endpoints)
                return
            if answer != told:
                sentence = answer.rstrip(".")
                self._report(f"{sentence}. Its models are asked for again until they are known.")
                told = answer
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, _ASK_MAX_S)

    async def _poll(self, path: Path) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.check()
            except Exception as error:
                # Whatever goes wrong with one reading, watching goes on.
                self._complain(f"{path} could not be looked at: {type(error).__name__}.")


def _life(endpoint: Endpoint) -> tuple[str, str]:
    return endpoint.endpoint_id, endpoint.incarnation


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


class HealthWatch:
    """Asks broken endpoints whether they are well again and tells the router, which only then may try them sooner.

    `broken()` names them and `told(endpoint_id, healthy, now_s)` takes the answers: `Router.broken` and
    `Router.health`.
    """

    def __init__(
        self,
        broken: Callable[[], Sequence[Endpoint]],
        told: Callable[[str, bool, float], None],
        probe: EngineProbe,
        *,
        every_s: float = PROBE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broken = broken
        self._told = told
        self._probe = probe
        self._every_s = every_s
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Probe from here on."""
        self._task = asyncio.create_task(self._run(), name="health of broken endpoints")

    async def stop(self) -> None:
        """Probe no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def check(self) -> Mapping[str, bool]:
        """Probe every broken endpoint once."""
        endpoints = list(self._broken())[:_PROBES_MAX_COUNT]
        answers = await asyncio.gather(*(self._probe.healthy(each) for each in endpoints))
        found = {each.endpoint_id: healthy for each, healthy in zip(endpoints, answers, strict=True)}
        for endpoint_id, healthy in found.items():
            self._told(endpoint_id, healthy, self._clock())
        return found

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.check()


def dump_endpoints(endpoints: Sequence[Endpoint]) -> list[dict[str, Any]]:
    """The list as JSON-able rows, for `--json` output; names of key variables but no secrets."""
    return [
        {
            "id": each.endpoint_id,
            "url": each.url,
            "models": sorted(each.models),
            "kind": each.kind,
            "role": each.role,
            "pool": each.pool,
            "zone": each.zone,
            "region": each.region,
            "accelerator": each.accelerator,
            "drain": each.drain,
        }
        for each in endpoints
    ]
