"""Where an engine publishes its KV events: the addresses of each data-parallel rank.

Owns: the body of `GET /kv_event_sources` (vLLM 0.32), the endpoints file's field `kv_events`, and turning an address
that was written for the engine's own machine into one that is reached from here. Does not own: asking over HTTP
(`discovery.EngineProbe`) or the sockets (`kv_subscriber`).

`kv_events` is a ZMQ address with options after a question mark, for engines that cannot be asked:
`tcp://host:5557?replay=5558&topic=kv-events&ranks=2`. `replay` is a port of the same host or a whole address; with
several ranks, rank r is at both ports + r, as vLLM and SGLang number them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

# Hosts that mean "every address of this machine" in the address that an engine binds.
_ANY_HOSTS = frozenset({"*", "0.0.0.0", "::", "[::]"})  # noqa: S104 - they are read, not bound
_LOOPBACK = re.compile(r"127\.\d+\.\d+\.\d+\Z|localhost\Z|\[?::1\]?\Z")

# An engine with more ranks than this does not exist; the answer of one is not to open thousands of sockets.
_RANKS_MAX_COUNT = 256

_OPTIONS = ("replay", "topic", "ranks")


@dataclass(frozen=True, slots=True)
class KvSource:
    """The event sockets of one data-parallel rank, as they are reached from here."""

    rank_index: int
    endpoint: str
    replay_endpoint: str | None
    """None: it cannot replay; a gap clears what is known."""
    topic: str = ""
    """Beginning of the topics that are wanted; empty: all."""


def sources_of_engine(body: bytes, engine_url: str) -> tuple[KvSource, ...] | str:
    """The sources that `GET /kv_event_sources` lists (none: events are off), or one sentence on why it is unusable."""
    try:
        ranks = sorted((int(rank), entry) for rank, entry in json.loads(body).items())
        engine_host = urlsplit(engine_url).hostname or ""
        on = [(rank, entry) for rank, entry in ranks if _publishes(entry)]
        return tuple(_source(rank, entry, engine_host) for rank, entry in on[:_RANKS_MAX_COUNT])
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its answer to GET /kv_event_sources is no list of event sources"


def _publishes(entry: dict[str, Any]) -> bool:
    return bool(entry.get("enable_kv_cache_events", True)) and entry.get("publisher", "zmq") == "zmq"


def _source(rank: int, entry: dict[str, Any], engine_host: str) -> KvSource:
    replay, topic = entry.get("replay_endpoint"), entry.get("topic", "")
    if rank < 0 or not isinstance(topic, str) or not topic.isascii():
        raise ValueError(topic)
    endpoint = reached_from_here(entry["endpoint"], engine_host)
    return KvSource(rank, endpoint, reached_from_here(replay, engine_host) if replay else None, topic)


def reached_from_here(address: str, engine_host: str, *, near: bool = False) -> str:
    """An address as the engine binds it, with the engine's host where it names all addresses, or (not `near`) loopback
    on a machine that is not this one: another engine may listen at the same port here. Raises ValueError.
    """
    scheme, separator, rest = address.partition("://")
    if not address.isascii() or not address.isprintable():
        raise ValueError(address)
    if not separator or scheme not in ("tcp", "ipc"):
        raise ValueError(address)
    if scheme == "ipc":
        return address
    host, separator, port = rest.rpartition(":")
    if not separator or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(address)
    foreign = not near and _LOOPBACK.match(host) is not None and _LOOPBACK.match(engine_host) is None
    if host in _ANY_HOSTS or foreign:
        host = f"[{engine_host}]" if ":" in engine_host else engine_host
    return f"tcp://{host}:{port}"


def configured_sources(address: str, engine_url: str) -> tuple[KvSource, ...] | str:
    """The sources that the field `kv_events` names, or one sentence on why it cannot be used."""
    place, _, query = address.partition("?")
    host = urlsplit(engine_url).hostname or ""
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        return f"kv_events has an unknown option {unknown[0]!r}; the options are {', '.join(_OPTIONS)}"
    count_text = options.get("ranks", "1")
    if not count_text.isdecimal() or not 1 <= int(count_text) <= _RANKS_MAX_COUNT:
        return f"kv_events, option ranks: {count_text!r} is not a number from 1 to {_RANKS_MAX_COUNT}"
    replay = options.get("replay")
    if replay and replay.isdecimal():
        replay = f"{place.rpartition(':')[0]}:{replay}"
    try:
        return tuple(
            KvSource(
                rank,
                _moved(reached_from_here(place, host, near=True), rank),
                _moved(reached_from_here(replay, host, near=True), rank) if replay else None,
                options.get("topic", ""),
            )
            for rank in range(int(count_text))
        )
    except ValueError:
        return f"kv_events: {address!r} is no ZMQ address such as tcp://host:5557?replay=5558"


def _moved(address: str, rank: int) -> str:
    """The address of another rank."""
    if not rank:
        return address
    if address.startswith("ipc:"):
        raise ValueError(address)
    place, _, port = address.rpartition(":")
    return f"{place}:{int(port) + rank}"
