"""Where a session's KV cache waits between turns, and whether bringing it back beats computing it again.

Owns: tiers with capacity and bandwidth, restore against recompute time, break-even bandwidth and prefix length, and
where the sessions of an agent load fit. Does not own: bytes per token (`memory`), prefill speed (`step_time`) or which
block is in which tier at run time (`kv_cache`, the simulation). A restore is bytes over bandwidth plus the tier's
latency; recomputing is tokens over prefill speed: they break even at bytes per token times prefill tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from perfmodel.errors import ConfigError


class TierKind(StrEnum):
    """Where KV blocks are kept, nearest first."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of an engine: `capacity_bytes` for KV, `read_bytes_per_s` towards the device, `latency_s` to first byte.

    HBM is where attention reads: nothing is moved, whatever its bandwidth. Bandwidths are an engine's, over all its
    devices: eight PCIe links of 64 GB/s restore a sequence at 512 GB/s when each device holds its part.
    """

    kind: TierKind
    capacity_bytes: float
    read_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.capacity_bytes >= 0:
            raise ConfigError(f"tier {self.kind}: capacity_bytes is {self.capacity_bytes}; expected 0 or more")
        if not self.read_bytes_per_s > 0:
            raise ConfigError(f"tier {self.kind}: read_bytes_per_s is {self.read_bytes_per_s}; expected above 0")
        if not self.latency_s >= 0:
            raise ConfigError(f"tier {self.kind}: latency_s is {self.latency_s}; expected 0 or more")

    def restore_s(self, kv_bytes: float) -> float:
        """Seconds until this many bytes are where attention can read them."""
        if self.kind is TierKind.HBM or kv_bytes == 0:
            return 0.0
        return self.latency_s + kv_bytes / self.read_bytes_per_s


@dataclass(frozen=True, slots=True)
class Reuse:
    """A prefix that could be restored: its bytes per token, and how fast the engine would compute it again."""

    kv_bytes_per_token: float
    prefill_tok_per_s: float

    def __post_init__(self) -> None:
        for name in ("kv_bytes_per_token", "prefill_tok_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"reuse: {name} is {getattr(self, name)}; expected above 0")

    @property
    def break_even_bytes_per_s(self) -> float:
        """Bandwidth at which restoring takes as long as recomputing, latency left out (70B, 10k tok/s: 3.3 GB/s)."""
        return self.kv_bytes_per_token * self.prefill_tok_per_s

    def recompute_s(self, token_count: float) -> float:
        """Seconds of prefill for this many tokens."""
        return token_count / self.prefill_tok_per_s

    def restore_s(self, tier: Tier, token_count: float) -> float:
        """Seconds to bring this many tokens from a tier."""
        return tier.restore_s(token_count * self.kv_bytes_per_token)

    def restore_wins(self, tier: Tier, token_count: float) -> bool:
        """Whether restoring this prefix is faster than computing it."""
        return self.restore_s(tier, token_count) < self.recompute_s(token_count)

    def break_even_tokens(self, tier: Tier) -> float | None:
        """Prefix length above which restoring wins; None when the tier is too slow for any length.

        latency + n b / w = n / p  =>  n = latency / (1/p - b/w).
        """
        if tier.kind is TierKind.HBM:
            return 0.0
        gained_s = 1 / self.prefill_tok_per_s - self.kv_bytes_per_token / tier.read_bytes_per_s
        return tier.latency_s / gained_s if gained_s > 0 else None


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Agent sessions that wait: each holds `kv_bytes` for `idle_s` between turns, `turns_per_s` begin in all.

    By Little's law `turns_per_s * idle_s` sessions wait at a time.
    """

    kv_bytes: float
    token_count: float
    idle_s: float
    turns_per_s: float

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "token_count", "idle_s", "turns_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"session load: {name} is {getattr(self, name)}; expected above 0")

    @property
    def waiting_bytes(self) -> float:
        """Bytes held by sessions that wait."""
        return self.turns_per_s * self.idle_s * self.kv_bytes

    @property
    def byte_minutes(self) -> float:
        """What one turn occupies: bytes times the minutes they are held."""
        return self.kv_bytes * self.idle_s / 60


@dataclass(frozen=True, slots=True)
class TierShare:
    """A share of the sessions, the tier it waits in (None: dropped and recomputed) and what its next turn pays."""

    tier: TierKind | None
    session_ratio: float
    held_bytes: float
    resume_s: float


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Where waiting sessions are kept. `recompute_saved_s_per_s`: engine seconds of prefill saved in a second."""

    shares: tuple[TierShare, ...]
    mean_resume_s: float
    recompute_saved_s_per_s: float

    @property
    def kept_ratio(self) -> float:
        """Share of the sessions that need not be computed again."""
        return sum(share.session_ratio for share in self.shares if share.tier is not None)


def plan_tiers(tiers: Sequence[Tier], load: SessionLoad, prefill_tok_per_s: float) -> TierPlan:
    """Fill the tiers in the order of their restore time; a tier that is slower than recomputing is left out.

    What fits nowhere is dropped. Sessions are alike, so which one waits where does not matter.
    """
    recompute_s = load.token_count / prefill_tok_per_s
    useful = sorted(
        (tier for tier in tiers if tier.restore_s(load.kv_bytes) < recompute_s),
        key=lambda tier: tier.restore_s(load.kv_bytes),
    )
    left = load.waiting_bytes
    shares: list[TierShare] = []
    for tier in useful:
        held = min(left, tier.capacity_bytes)
        if held > 0:
            shares.append(TierShare(tier.kind, held / load.waiting_bytes, held, tier.restore_s(load.kv_bytes)))
            left -= held
    if left > 0:
        shares.append(TierShare(None, left / load.waiting_bytes, 0.0, recompute_s))
    mean_s = sum(share.session_ratio * share.resume_s for share in shares)
    return TierPlan(tuple(shares), mean_s, load.turns_per_s * (recompute_s - mean_s))
