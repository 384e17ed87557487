"""What a seed means: which process is killed when, how long it stays dead, and what load runs meanwhile.

Owns: the plan of a run, as values. Does not own: killing (`stack`) or sending (`client`). Pure: a seed always gives the
same plan, so that a failing run can be looked at again (`INFERPLANE_FAULT_SEED=17`). What the machine's scheduler adds
to it is not repeatable; the plan only makes the same things happen at about the same moments.

A seed's family (seed modulo 4) says what must be killed in it, so that any four seeds in a row kill everything there
is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum


class Target(StrEnum):
    """What gets SIGKILL. The values are printed."""

    GATEWAY = "gateway"
    """One of the two gateway processes."""
    BOTH_GATEWAYS = "both gateways"
    SHIPPER = "shipper"
    GATEWAY_AND_SHIPPER = "gateway and shipper"
    SUPERVISOR = "supervisor"
    """`serve` alone: its children notice and drain; it is started again by hand."""
    EVERYTHING = "everything"
    """`serve` and all of its children at once."""
    REDIS = "redis"
    POSTGRES = "postgres"
    """The postmaster and every backend."""
    ENGINE = "engine"
    WORKER = "worker"
    """The Celery worker, in the middle of a reconcile."""


# Targets in which two unrelated processes are killed in the same moment.
_DOUBLE = frozenset({Target.BOTH_GATEWAYS, Target.GATEWAY_AND_SHIPPER})
# What each family kills at least once.
_MUST: tuple[tuple[Target, ...], ...] = (
    (Target.GATEWAY, Target.SHIPPER, Target.GATEWAY_AND_SHIPPER, Target.BOTH_GATEWAYS),
    (Target.GATEWAY, Target.SUPERVISOR, Target.EVERYTHING),
    (Target.REDIS, Target.GATEWAY, Target.ENGINE, Target.WORKER),
    (Target.POSTGRES, Target.SHIPPER, Target.ENGINE, Target.POSTGRES),
)
# What else may be killed in it. The last family kills no gateway and no Redis: there, every reservation must be
# settled to the token.
_MAY: tuple[tuple[Target, ...], ...] = (
    (Target.GATEWAY, Target.SHIPPER, Target.ENGINE),
    (Target.GATEWAY, Target.SHIPPER, Target.GATEWAY_AND_SHIPPER),
    (Target.REDIS, Target.BOTH_GATEWAYS, Target.SHIPPER),
    (Target.SHIPPER, Target.POSTGRES, Target.ENGINE),
)
# The first seeds, which run with every `make test`, kill only what must be killed: one of each family.
SHORT_SEEDS = len(_MUST)
# A stack needs about this long to be in full flow, and the load goes on this long after the last restart.
WARM_UP_S = 0.7
TAIL_S = 0.7


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL (two for a double target)."""

    target: Target
    after_s: float
    """Since the one before it, which may not be up again, or since the load's start."""
    down_s: float
    """How long what we start ourselves stays dead."""
    pick: int
    """Which of several like processes."""

    @property
    def count(self) -> int:
        """Kills that this is."""
        return 2 if self.target in _DOUBLE else 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seed: int
    postgres: bool
    kills: tuple[Kill, ...]
    clients: int
    """Requests in flight at once."""

    @property
    def kill_count(self) -> int:
        """Kills in this run."""
        return sum(kill.count for kill in self.kills)

    def kills_any(self, *targets: Target) -> bool:
        """Whether one of these is killed."""
        return any(kill.target in targets for kill in self.kills)

    @property
    def reservations_are_exact(self) -> bool:
        """No kill that may lose what was reserved: all of it must be settled."""
        return {kill.target for kill in self.kills} <= {
            Target.SHIPPER, Target.POSTGRES, Target.ENGINE, Target.WORKER,
        }  # fmt: skip


def plan(seed: int) -> Plan:
    """The plan of a seed."""
    dice = random.Random(f"inferplane faults {seed}")
    family = seed % len(_MUST)
    extra = dice.choice(_MAY[family])
    targets = [*_MUST[family], *([extra] if seed >= SHORT_SEEDS else [])]
    dice.shuffle(targets)
    kills = tuple(
        Kill(target, dice.uniform(0.2, 1.1), dice.choice((0.0, dice.uniform(0.1, 1.2))), dice.randrange(1_000))
        for target in targets
    )
    return Plan(seed, postgres=family == 3, kills=kills, clients=dice.randint(8, 12))


# -- the load ----------------------------------------------------------------------------------------------------------


class Leave(StrEnum):
    """When a client goes away by itself."""

    NEVER = "never"
    BEFORE_HEAD = "before the head"
    """A while after it has sent its request, whatever has come by then."""
    AFTER_TOKENS = "after tokens"


@dataclass(frozen=True, slots=True)
class Wish:
    """One request: what the engine is told to do and what the client does."""

    tag: str
    script: str
    options: dict[str, str]
    stream: bool
    choices: int
    tokens: int
    """Per choice, that the engine would send if nothing went wrong."""
    prompt: int
    cached: int
    leave: Leave = Leave.NEVER
    leave_after: float = 0.0
    """Seconds, or tokens."""
    abort: bool = False
    """The client leaves with RST instead of FIN."""
    include_usage: bool = False
    max_tokens: int | None = None

    @property
    def user(self) -> str:
        """What the request's `user` says: the engine's script, and our tag for the books."""
        options = {**self.options, "tokens": self.tokens, "prompt": self.prompt, "cached": self.cached}
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"script:{self.script}?{query}&tag={self.tag}"


def tag_of(user: str | None) -> str:
    """The tag in a `user`; empty when there is none."""
    return user.rpartition("&tag=")[2] if user and "&tag=" in user else ""


_KINDS = (
    ("paced", 34), ("long", 6), ("slow", 8), ("whole", 16), ("choices", 8), ("burst", 4), ("cut", 9),
    ("headless", 2), ("retry", 6), ("error_event", 3), ("no_usage", 4), ("falling_usage", 2),
)  # fmt: skip


def wish(dice: random.Random, tag: str) -> Wish:
    """The next request of a client."""
    kind = dice.choices([name for name, _ in _KINDS], [weight for _, weight in _KINDS])[0]
    prompt = dice.randint(1, 900)
    made = _wish(dice, tag, kind, prompt)
    if kind in {"paced", "long", "slow", "choices", "whole"} and dice.random() < 0.3:
        made = _leaving(dice, made)
    return made


def _wish(dice: random.Random, tag: str, kind: str, prompt: int) -> Wish:
    options: dict[str, str] = {}
    tokens, choices, stream, script = dice.randint(10, 150), 1, True, "normal"
    gap_ms = f"{dice.uniform(2, 6):.1f}"
    cached = dice.choice((0, prompt // 2))
    if kind == "long":
        tokens = dice.randint(250, 350)
    elif kind == "slow":
        tokens, gap_ms = dice.randint(30, 50), f"{dice.uniform(25, 45):.0f}"
    elif kind == "whole":
        stream, options = False, {"delay_ms": str(dice.choice((1, dice.randint(1, 900))))}
    elif kind == "choices":
        choices = 2
    elif kind == "cut":
        script, options = "cut", {"how": dice.choice(("reset", "fin", "stall")), "after": str(dice.randint(0, tokens))}
    elif kind == "headless":
        script, options = "cut", {"how": "reset", "after": "-1"}
    elif kind == "retry":
        options = {"lost_on": dice.choice(("engine-1", "engine-2"))}
        stream = dice.random() < 0.7
    elif kind == "error_event":
        script, options = "error_event", {"after": str(dice.randint(1, tokens))}
    elif kind in {"burst", "no_usage", "falling_usage"}:
        script = kind
    if stream:
        options["gap_ms"] = gap_ms
    return Wish(tag, script, options, stream, choices, tokens, prompt, cached, include_usage=dice.random() < 0.5)


def _leaving(dice: random.Random, wished: Wish) -> Wish:
    by_tokens = wished.stream and dice.random() < 0.7
    return replace(
        wished,
        leave=Leave.AFTER_TOKENS if by_tokens else Leave.BEFORE_HEAD,
        leave_after=dice.randint(1, wished.tokens * wished.choices) if by_tokens else dice.uniform(0.0, 0.3),
        abort=dice.random() < 0.5,
    )
