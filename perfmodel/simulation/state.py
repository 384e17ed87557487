"""Everything a running simulation of a cluster remembers, as arrays of records that compiled code can read and write.

Owns: the record layouts, what each field means, and making them for a fleet. Does not own: any rule of how they change
(`blocks`, `engine`, `cluster`). Its size depends on the fleet and on how many requests are alive at once,
never on how many there were: blocks, hash slots, sketches and the timeline are made once, and the records of requests
are used again.

Why records of numpy and not objects: the loop over steps is compiled (numba), and a call from Python costs one pointer
an array. All indices are into whole columns (block 7 of engine 3 is `block_first + 7`), and -1 is nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError
from perfmodel.simulation.compiling import columns_of
from perfmodel.simulation.sketch import BUCKET_COUNT

# What an engine does for a request: all of it, only the prompt, or only the answer.
BOTH, PREFILL, DECODE = 0, 1, 2

# What an engine is doing: nothing, nothing until its next wake, or a run of one or more steps.
IDLE, ASLEEP, RUNNING = 0, 1, 2

# Kinds of events that are told to a policy or to a closed-loop source.
FIRST_TOKEN, FINISHED, REFUSED = 0, 1, 2

# What a line of `Cluster.kv_log` says of an engine's blocks, or of its lower tier's.
STORED, REMOVED, TIER_STORED, TIER_REMOVED = 0, 1, 2, 3

# Rows of `Cluster.sketches`.
TTFT, TPOT, END_TO_END = 0, 1, 2

# Columns of `Cluster.timeline`: counts and sums of what happened in one bin of time.
ARRIVED, ENDED, TOKENS, TTFT_SUM, TTFT_COUNT = 0, 1, 2, 3, 4

# Bins of the timeline; a plot is about 1,000 pixels wide and needs no more. Their width doubles when time runs over.
TIMELINE_BINS = 240

# Events kept before they must be told: an engine's step adds at most two for each of its sequences.
_EVENT_SLACK = 1024

# Live requests that there is room for at first; the arrays double when that is not enough.
_FIRST_REQUESTS = 1024

_INT, _REAL = np.int64, np.float64

ENGINE = np.dtype(
    [(name, _REAL) for name in (
        "slow_ratio",  # hidden factor of every step
        "noise_ratio",  # standard deviation of ln(step time)
        "start_s", "first_s", "slope_s",  # the run: its start, its first step's seconds, what each next one adds
        "link_free_s",  # when the link to the lower tier has moved all that was asked
        "restore_s",  # seconds to bring one block back from the lower tier
        "peer_free_s", "peer_block_s",  # of the link to other engines: free again; seconds a block (0: no link)
        "transfer_s", "transfer_block_s",  # of a hand-over to a decode engine: fixed, and for each block
        "layer_share",  # part of a hand-over that cannot overlap the prefill (1: all of it)
        "busy_s",
    )] + [(name, _INT) for name in (
        "kind", "role", "phase", "run_steps", "run_decodes", "batch_limit", "sequence_limit",
        "block_first", "block_count", "slot_first", "slot_mask",
        "free_head", "free_tail", "free_count",
        "tier_first", "tier_count", "tier_used", "tier_head", "tier_tail", "tier_slot_first", "tier_slot_mask",
        "running_count", "waiting_head", "waiting_tail", "waiting_count", "incoming_count",
        "dice_a", "dice_b",
        "step_count", "routed_count", "preempted_count", "prefill_tokens", "decode_tokens", "prompt_tokens",
        "hit_tokens", "restored_tokens", "pulled_tokens",
    )]
)  # fmt: skip
"""One engine."""

REQUEST = np.dtype(
    [(name, _REAL) for name in ("arrival_s", "scheduled_s", "first_s", "ready_s")]
    + [(name, _INT) for name in (
        "serial", "engine", "prompt", "output", "tokens", "computed", "refill", "cached", "stored", "block_count",
        "key_count", "preempted", "queue_next", "watched", "carried", "row", "source",
    )]
)  # fmt: skip
"""One live request. `tokens` are known (prompt and answer so far), `computed` of them have KV; tokens below `refill`
count as prefill; `cached` is -1 until it first runs; `stored` blocks are published; a `carried` prompt's KV comes from
a prefill engine; `source`: an engine to fetch blocks from (-1: none); `watched`: its end is told even to a policy
that does not listen.
"""

BLOCK = np.dtype(
    [
        ("key", _INT), ("ref", np.int32), ("before", np.int32), ("after", np.int32), ("twin", np.int32),
        ("elder", np.int32), ("last", np.int32), ("ready_s", np.float64),
    ]
)  # fmt: skip
"""One KV block: its prefix (0: nameless), holders, place in the free queue, and the next copy of the same prefix, the
one before it and, of the oldest copy, the youngest: a prompt that thousands share has as many copies of its end; and
when its contents have come from the lower tier. A block of that tier has its place in the order of last use instead.
"""

TRANSFER = np.dtype([("at_s", _REAL), ("request", _INT), ("target", _INT)])
"""One hand-over under way: when it lands, whose, and on which engine."""

STEP_KIND = np.dtype(
    [(name, _REAL) for name in ("sequence_s", "decode_context_s", "prefill_pair_s", "prefill_context_s")]
)
"""The coefficients of one kind of engine; the look-up by tokens is `Cluster.by_token_s`."""

PLAN = np.dtype(
    [(name, _INT) for name in (
        "budget", "preempted", "prefill_count", "prefill_tokens", "prefill_context", "prefill_pairs", "decode_count",
        "decode_context", "sleeping",
    )] + [("wake_s", _REAL)]
)  # fmt: skip
"""What one step will compute; used again by every step."""

TOTALS = np.dtype(
    [(name, _INT) for name in (
        "block_tokens", "caching", "hears", "request_free", "live", "transfer_count", "event_count", "watched_ended",
        "tells_blocks", "kv_count", "kv_room", "sampled_tick",
        "decode_blocks_max", "offered", "completed", "refused", "good", "prompt_tokens", "hit_tokens",
        "restored_tokens", "pulled_tokens", "output_tokens", "lost_tokens", "preempted", "transfers", "ttft_count",
        "tpot_count",
    )] + [(name, _REAL) for name in (
        "slo_ttft_s", "slo_tpot_s", "ttft_sum_s", "tpot_sum_s", "end_to_end_sum_s", "bin_s", "last_s",
        "clock_s", "metrics_every_s",
    )]
)  # fmt: skip
"""Settings and sums of the whole cluster. `lost_tokens`: computed, dropped by a preemption and not found again;
`kv_count`: lines of `kv_log` in use, `kv_room`: how many there may be when an engine's turn begins; `clock_s`: the time
of that turn; `sampled_tick`: which of the samples, one every `metrics_every_s`, is in `samples`.
"""

# Columns of `Cluster.samples`: requests that wait and run, share of KV blocks that is held, prompt tokens to compute.
WAITING, RUNNING_COUNT, KV_USAGE, QUEUED_TOKENS = 0, 1, 2, 3

# Lines of `kv_log` that one engine's turn may take for each of its blocks. A turn (a run's end and the next one's
# begin) hands a block out at most twice; each time it may leave the prefix of before (removed; stored in the lower
# tier; the oldest there removed) and get one (stored).
_LINES_PER_BLOCK = 8


class Cluster(NamedTuple):
    """The state, one array a column (`Any`: of records). Compiled code changes it in place; `roomier` replaces some."""

    kinds: Any
    by_token_s: npt.NDArray[np.float64]
    engines: Any
    next_s: npt.NDArray[np.float64]
    running: npt.NDArray[np.int64]
    requests: Any
    keys: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int64]
    blocks: Any
    slots: npt.NDArray[np.int32]
    transfers: Any
    events_s: npt.NDArray[np.float64]
    events: npt.NDArray[np.int64]
    sketches: npt.NDArray[np.int64]
    timeline: npt.NDArray[np.float64]
    plan: Any
    totals: Any
    kv_log: npt.NDArray[np.int64]
    """Blocks stored and removed since the log was taken: 4 * engine + 2 * tier + (1: removed), and the prefix."""
    kv_log_s: npt.NDArray[np.float64]
    samples: npt.NDArray[np.float64]


CLUSTER_COLUMNS = columns_of(
    "Cluster",
    [
        ("kinds", STEP_KIND, 1), ("by_token_s", _REAL, 2), ("engines", ENGINE, 1), ("next_s", _REAL, 1),
        ("running", _INT, 2), ("requests", REQUEST, 1), ("keys", _INT, 2), ("tables", _INT, 2),
        ("blocks", BLOCK, 1), ("slots", np.int32, 1), ("transfers", TRANSFER, 1), ("events_s", _REAL, 1),
        ("events", _INT, 2), ("sketches", _INT, 2), ("timeline", _REAL, 2), ("plan", PLAN, 1), ("totals", TOTALS, 1),
        ("kv_log", _INT, 2), ("kv_log_s", _REAL, 1), ("samples", _REAL, 2),
    ],
)  # fmt: skip
"""In compiled code: the columns of `Cluster` behind their address book."""


class Steps(Protocol):
    """Step times as a table (`step_time.StepTable`)."""

    @property
    def by_token_s(self) -> npt.NDArray[np.float64]: ...
    @property
    def sequence_s(self) -> float: ...
    @property
    def decode_context_s(self) -> float: ...
    @property
    def prefill_pair_s(self) -> float: ...
    @property
    def prefill_context_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine's numbers, as `cluster` needs them. `kind_index` is its row among the step tables."""

    kind_index: int
    role_index: int
    block_count: int
    batch_limit_tokens: int
    sequence_limit_count: int
    slow_ratio: float = 1.0
    noise_ratio: float = 0.0
    tier_block_count: int = 0
    restore_s: float = 0.0
    transfer_s: float = 0.0
    transfer_block_s: float = 0.0
    layer_share_ratio: float = 1.0
    peer_block_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for the whole cluster."""

    block_tokens: int
    caching: bool
    hears: bool
    slo_ttft_s: float
    slo_tpot_s: float
    prompt_blocks: int
    """Most prefix blocks of one prompt."""
    sequence_blocks: int
    """Most blocks of one prompt with its answer."""
    seed: int
    tells_blocks: bool = False
    """Whether stored and removed blocks are written to the log."""
    metrics_every_s: float = 0.0
    """Seconds between two samples of the engines; 0: none."""


def cluster(engines: Sequence[EngineRecord], steps: Sequence[Steps], settings: Settings) -> Cluster:
    """An idle cluster at time 0. Raises ConfigError for no engine and for one without KV room."""
    if not engines:
        raise ConfigError("the cluster has no engine; expected at least one")
    for number, engine in enumerate(engines):
        if engine.block_count < 1:
            raise ConfigError(f"engine {number} has room for {engine.block_count} KV blocks; expected at least 1")
    width = max(engine.batch_limit_tokens for engine in engines) + 1
    sequence_limit = max(engine.sequence_limit_count for engine in engines)
    by_token_s = np.full((len(steps), width), np.inf)
    kinds = _records(len(steps), STEP_KIND)
    for row, table in enumerate(steps):
        known = min(width, len(table.by_token_s))
        by_token_s[row, :known] = table.by_token_s[:known]
        kinds[row] = (table.sequence_s, table.decode_context_s, table.prefill_pair_s, table.prefill_context_s)
    event_count = 2 * sequence_limit + _EVENT_SLACK
    turn_lines = _LINES_PER_BLOCK * max(engine.block_count for engine in engines)
    kv_lines = 2 * turn_lines if settings.tells_blocks else 1
    made = Cluster(
        kinds=kinds,
        by_token_s=by_token_s,
        engines=_records(len(engines), ENGINE),
        next_s=np.full(len(engines), np.inf),
        running=np.full((len(engines), sequence_limit), -1, dtype=np.int64),
        requests=_records(_FIRST_REQUESTS, REQUEST),
        keys=np.empty((_FIRST_REQUESTS, max(1, settings.prompt_blocks)), dtype=np.int64),
        tables=np.empty((_FIRST_REQUESTS, max(1, settings.sequence_blocks)), dtype=np.int64),
        blocks=_records(sum(engine.block_count + engine.tier_block_count for engine in engines), BLOCK),
        slots=np.full(sum(_slot_count(count) for engine in engines for count in _sizes(engine)), -1, dtype=np.int32),
        transfers=_records(_FIRST_REQUESTS, TRANSFER),
        events_s=np.zeros(event_count),
        events=np.zeros((event_count, 6), dtype=np.int64),
        sketches=np.zeros((3, BUCKET_COUNT), dtype=np.int64),
        timeline=np.zeros((TIMELINE_BINS, 5)),
        plan=_records(1, PLAN),
        totals=_records(1, TOTALS),
        kv_log=np.zeros((kv_lines, 2), dtype=np.int64),
        kv_log_s=np.zeros(kv_lines),
        samples=np.zeros((len(engines), 4)),
    )
    _fill_engines(made, engines, settings.seed)
    _fill_totals(made, engines, settings)
    _link_free_requests(made, 0)
    return made


def engine_bytes(engine: EngineRecord) -> int:
    """What one engine takes in the columns that grow with the fleet: blocks, hash slots, places of sequences."""
    blocks = sum(_sizes(engine)) * BLOCK.itemsize
    slots = sum(_slot_count(count) for count in _sizes(engine)) * np.dtype(np.int32).itemsize
    places = engine.sequence_limit_count * np.dtype(_INT).itemsize
    return blocks + slots + places + ENGINE.itemsize


def roomier(old: Cluster, *, requests: int | None = None, prompt_blocks: int = 0, sequence_blocks: int = 0) -> Cluster:
    """The same state with room for more live requests or longer ones."""
    before = len(old.requests)
    count = max(before, requests or 0)
    records = _records(count, REQUEST)
    records[:before] = old.requests
    keys = np.empty((count, max(prompt_blocks, old.keys.shape[1])), dtype=np.int64)
    keys[:before, : old.keys.shape[1]] = old.keys
    tables = np.empty((count, max(sequence_blocks, old.tables.shape[1])), dtype=np.int64)
    tables[:before, : old.tables.shape[1]] = old.tables
    transfers = _records(count, TRANSFER)
    transfers[:before] = old.transfers
    made = old._replace(requests=records, keys=keys, tables=tables, transfers=transfers)
    if count > before:
        _link_free_requests(made, before)
    return made


def _records(count: int, layout: np.dtype[Any]) -> Any:
    return np.zeros(count, dtype=layout).view(np.recarray)


def _slot_count(block_count: int) -> int:
    """Slots of a hash table for so many blocks: a power of two, at most half full."""
    return 1 << max(1, (2 * block_count - 1).bit_length())


def _sizes(engine: EngineRecord) -> tuple[int, int]:
    """Blocks of both memories."""
    return engine.block_count, engine.tier_block_count


def _fill_engines(made: Cluster, engines: Sequence[EngineRecord], seed: int) -> None:
    block_first = slot_first = 0
    # Two generators of one engine need seeds of their own, from 1 to 2^31 - 86.
    dice = np.random.default_rng(seed).integers(1, 2_000_000_000, size=(len(engines), 2))
    made.blocks.twin = -1
    for number, engine in enumerate(engines):
        row = made.engines[number]
        row.kind, row.role = engine.kind_index, engine.role_index
        row.batch_limit, row.sequence_limit = engine.batch_limit_tokens, engine.sequence_limit_count
        row.slow_ratio, row.noise_ratio = engine.slow_ratio, engine.noise_ratio
        row.restore_s, row.transfer_s = engine.restore_s, engine.transfer_s
        row.transfer_block_s, row.layer_share = engine.transfer_block_s, engine.layer_share_ratio
        row.peer_block_s = engine.peer_block_s
        row.dice_a, row.dice_b = int(dice[number, 0]), int(dice[number, 1])
        row.waiting_head = row.waiting_tail = -1
        count = engine.block_count
        row.block_first, row.block_count = block_first, count
        row.slot_first, row.slot_mask = slot_first, _slot_count(count) - 1
        row.free_head, row.free_tail, row.free_count = block_first, block_first + count - 1, count
        blocks = made.blocks[block_first : block_first + count]
        blocks.before = np.arange(block_first - 1, block_first + count - 1)
        blocks.after = np.arange(block_first + 1, block_first + count + 1)
        blocks[0].before = blocks[-1].after = -1
        block_first += count
        slot_first += _slot_count(count)
        row.tier_first, row.tier_count = block_first, engine.tier_block_count
        row.tier_slot_first, row.tier_slot_mask = slot_first, _slot_count(engine.tier_block_count) - 1
        row.tier_head = row.tier_tail = -1
        block_first += engine.tier_block_count
        slot_first += _slot_count(engine.tier_block_count)


def _fill_totals(made: Cluster, engines: Sequence[EngineRecord], settings: Settings) -> None:
    totals = made.totals[0]
    totals.block_tokens, totals.caching, totals.hears = settings.block_tokens, settings.caching, settings.hears
    totals.slo_ttft_s, totals.slo_tpot_s = settings.slo_ttft_s, settings.slo_tpot_s
    totals.tells_blocks, totals.metrics_every_s = settings.tells_blocks, settings.metrics_every_s
    totals.kv_room = max(1, len(made.kv_log_s) // 2)
    totals.sampled_tick = -1
    totals.request_free = -1
    # A second a bin to begin with; the timeline folds itself as time goes on.
    totals.bin_s = 1.0
    decoding = [engine.block_count for engine in engines if engine.role_index == DECODE]
    totals.decode_blocks_max = max(decoding, default=0)


def _link_free_requests(made: Cluster, first: int) -> None:
    """Chain the records from `first` on in front of the free ones, so that the lowest is used first."""
    records = made.requests
    count = len(records)
    records.queue_next[first:] = np.arange(first + 1, count + 1)
    records.queue_next[count - 1] = made.totals[0].request_free
    made.totals[0].request_free = first
