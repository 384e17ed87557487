"""The script's rule of lives is `store_life.next_life`: the same store, caller and clean stop give the same life.

And after a clean stop the script goes on deciding as `Buckets` does that nothing has happened to.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from controlplane.adapters import limits_redis
from controlplane.adapters.clean_stop import FOLLOWS_KEY
from controlplane.adapters.embedded import EmbeddedRedis
from controlplane.adapters.limits_redis import LimitsOptions, RedisLimits
from controlplane.rate_limit import Ask, Attempt, Buckets
from controlplane.store_life import NOT_CLEAN, Caller, CleanStop, Clock, Life, next_life
from controlplane.tenancy import Dimension, Limit
from tests.services import temporary_folder

OPENING_S = 0.25
SCRIPT = Path(limits_redis.__file__).with_suffix(".lua").read_text()
STORE, PROCESSES = "{inferplane-limits}:store", "{inferplane-limits}:processes"


@pytest.fixture
def client(any_redis_url: str) -> Iterator[redis.Redis]:
    """Lives are written with it into the server, which is empty."""
    with redis.Redis.from_url(any_redis_url, decode_responses=True) as made:
        yield made
        made.flushdb()


def put(client: redis.Redis, kept: Life | None, follows: tuple[str, CleanStop] | None, seen_us: list[int]) -> None:
    client.delete(STORE, PROCESSES, FOLLOWS_KEY)
    if kept is not None:
        times: list[str | int] = ["empty_until", kept.empty_until_us, "opened", kept.opened_us]
        client.hset(STORE, items=["run", kept.run_id, "era", kept.era, *times])
    if follows is not None:
        run, stop = follows
        times = ["stopped_us", stop.stopped_us, "doubt", int(stop.doubt)]
        client.hset(FOLLOWS_KEY, items=["run", run, "after", stop.run_id, *times])
    for number, seen in enumerate(seen_us):
        client.zadd(PROCESSES, {f"p{number}": seen})


def drawn(dice: random.Random, now_us: int) -> tuple[Life | None, Caller, tuple[str, CleanStop] | None, list[int]]:
    runs = ["a", "b", "c"]
    empty_us = dice.choice([0, 0, now_us - 50_000_000, now_us + 1_000_000])
    kept = Life(dice.choice(runs), dice.choice(runs), empty_us, now_us - dice.randrange(9_000_000))
    caller = Caller(dice.choice(runs), dice.random() < 0.3, dice.random() < 0.3, dice.choice([0, 1, 2, 3, 60]))
    stop = CleanStop(dice.choice([kept.run_id, *runs]), now_us - dice.choice([0, 400_000, 90_000_000]))
    stop = dataclasses.replace(stop, doubt=dice.random() < 0.2)
    stop = NOT_CLEAN if dice.random() < 0.1 else stop
    follows = (dice.choice([caller.run_id, caller.run_id, "a"]), stop)
    seen = [stop.stopped_us + dice.choice([-600_000_000, -6_000_000, -5_000_000, -4_999_999, 1]) for _ in "12"]
    seen = [max(1, one) for one in seen]
    return (
        kept if dice.random() < 0.8 else None,
        caller,
        follows if dice.random() < 0.8 else None,
        seen[: dice.choice([0, 1, 1, 2])],
    )


def read(client: redis.Redis) -> Life:
    fields = client.hgetall(STORE)
    return Life(str(fields["run"]), str(fields["era"]), int(fields["empty_until"]), int(fields["opened"]))


def arguments_of(port: RedisLimits, caller: Caller) -> list[str | int | bytes]:
    port._run, port._met_before, port._met_other = caller.run_id, caller.met_before, caller.met_other
    port._uptime_s = caller.uptime_s
    return port._arguments(Attempt("caller", 0, ()), just_read=True)


async def test_the_script_finds_the_life_that_the_rule_finds(any_redis_url: str, client: redis.Redis) -> None:
    dice = random.Random(7)
    port = RedisLimits(any_redis_url, "caller", options=LimitsOptions(opening_s=OPENING_S))
    trusted = 0
    for _ in range(600):
        kept, caller, follows, seen_us = drawn(dice, int(time.time() * 1e6))
        put(client, kept, follows, seen_us)
        keys = port._keys(())
        raw = client.eval(SCRIPT, len(keys), *keys, *arguments_of(port, caller))
        stop = follows[1] if follows is not None and follows[0] == caller.run_id else None
        expected = next_life(kept, caller, stop, seen_us, Clock(raw[1], int(OPENING_S * 1e6)))
        assert read(client) == expected, (kept, caller, follows, seen_us)
        assert raw[0] == (2 if expected.empty_until_us == 0 and raw[1] < expected.opened_us + OPENING_S * 1e6 else 0)
        trusted += kept is not None and expected.run_id != kept.run_id and expected.era == kept.era != expected.run_id
    assert trusted > 20, "the interesting case is among them"
    await port.aclose()


async def test_a_store_of_an_older_version_names_no_era_and_is_in_the_one_of_its_run(
    any_redis_url: str, client: redis.Redis
) -> None:
    port = RedisLimits(any_redis_url, "caller", options=LimitsOptions(opening_s=OPENING_S))
    now_us = int(time.time() * 1e6)
    put(client, Life("a", "a", 0, 1), ("b", CleanStop("a", now_us)), [])
    client.hdel(STORE, "era")
    keys = port._keys(())
    arguments = arguments_of(port, Caller("b", met_before=False, met_other=False, uptime_s=0))
    client.eval(SCRIPT, len(keys), *keys, *arguments)
    assert read(client) == Life("b", "a", 0, 1)
    await port.aclose()


async def test_after_a_clean_stop_the_script_goes_on_as_the_reference_does() -> None:
    """Leases, pools, debts, fractions and report numbers included."""
    limits = [
        Limit("requests", "org", "o", None, Dimension.REQUESTS, 700, 7, 500),
        Limit("tokens", "org", "o", None, Dimension.OUTPUT_TOKENS, 999_983, 61, 70_000),
        Limit("slots", "org", "o", None, Dimension.CONCURRENCY, 40, 1, 0),
    ]
    dice, reference, sequence, generations = random.Random(3), Buckets(), 0, [0]
    with temporary_folder() as folder:
        for life in range(3):
            with EmbeddedRedis(folder / "redis") as server:
                port = RedisLimits(server.url, f"life-{life}", options=LimitsOptions(opening_s=0.0))
                await port._heartbeat()
                for _ in range(80):
                    sequence += 1
                    asks = tuple(
                        Ask(one, f"lease-{dice.randrange(3)}", need=dice.randrange(one.amount // 60 + 2),
                            want=dice.randrange(9), spent=dice.randrange(one.amount // 60 + 2),
                            returned=dice.randrange(3), debt=dice.choice([0, 0, 5]),
                            credits=((dice.choice(generations[-4:]), dice.randrange(50)),), held=dice.randrange(2))
                        for one in limits
                    )  # fmt: skip
                    attempt = Attempt("teller", sequence, asks)
                    raw = await port._run_script(attempt)
                    expected = reference.attempt(attempt, raw[1])
                    decided = port._decoded(raw)
                    assert decided.buckets == expected.buckets
                    assert decided.admitted == expected.admitted
                    generations += [bucket.generation for bucket in expected.buckets if bucket.generation]
                await port.aclose()
                with redis.Redis.from_url(server.url) as client:
                    client.zrem(PROCESSES, "teller")  # it leaves too
