"""Speculative decoding: tokens per verify step, what the step costs, and the draft depth that a load wants.

Owns: the arithmetic of drafts and acceptance over an engine's step table. Does not own: step times (`step_time`) or
which acceptance a workload has. A verify step computes depth + 1 tokens per sequence, hits more experts for it, reads
the cache once, and is preceded by the drafts; as the batch grows past the ridge, or the experts hit saturate, the extra
tokens stop being free and the best depth falls to none.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.errors import ConfigError
from perfmodel.step_time import StepTable

# Deepest draft that is tried: deployed multi-token heads and EAGLE drafts stay at or below it.
DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft: `acceptance_ratio` of each next draft token given that all before it were accepted, and its cost.

    One draft pass of one depth takes `pass_s` and `pass_sequence_s` per sequence; an MTP head costs about one layer of
    the model, a separate draft model its own step. Raises ConfigError outside of 0..1 or below 0.
    """

    acceptance_ratio: float
    pass_s: float = 0.0
    pass_sequence_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance_ratio <= 1:
            raise ConfigError(f"draft: acceptance_ratio is {self.acceptance_ratio}; expected 0 to 1")
        for name in ("pass_s", "pass_sequence_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"draft: {name} is {getattr(self, name)}; expected 0 or more")


def expected_tokens(acceptance_ratio: float, depth: int) -> float:
    """Tokens that a verify step of this draft depth yields: (1 - a^(g + 1)) / (1 - a), the model's own included.

    Leviathan et al. 2023, equation 1. Raises ConfigError for a negative depth.
    """
    if depth < 0:
        raise ConfigError(f"draft depth is {depth}; expected 0 or more")
    if acceptance_ratio >= 1:
        return float(depth + 1)
    return float((1 - acceptance_ratio ** (depth + 1)) / (1 - acceptance_ratio))


def verify_step_s(table: StepTable, sequence_count: int, context_tokens: int, depth: int) -> float:
    """Seconds of the step that verifies `depth` draft tokens for each of the sequences.

    Raises ConfigError when the table is too short for sequence_count x (depth + 1) tokens.
    """
    tokens = sequence_count * (depth + 1)
    if tokens >= len(table.by_token_s):
        raise ConfigError(f"a verify step has {tokens} tokens; the step table ends at {len(table.by_token_s) - 1}")
    cache_s = table.decode_context_s * sequence_count * context_tokens
    return float(table.by_token_s[tokens]) + table.sequence_s * sequence_count + cache_s


def token_s(table: StepTable, draft: Draft, sequence_count: int, context_tokens: int, depth: int) -> float:
    """Mean seconds per token of one sequence with drafts of this depth (0: without drafts)."""
    drafting_s = depth * (draft.pass_s + draft.pass_sequence_s * sequence_count)
    step_s = verify_step_s(table, sequence_count, context_tokens, depth)
    return (step_s + drafting_s) / expected_tokens(draft.acceptance_ratio, depth)


def best_depth(table: StepTable, draft: Draft, sequence_count: int, context_tokens: int, deepest: int = DEEPEST) -> int:
    """The draft depth with the least time per token at this load; 0 says that drafts do not pay."""
    longest = (len(table.by_token_s) - 1) // max(sequence_count, 1) - 1
    depths = range(max(0, min(deepest, longest)) + 1)
    return min(depths, key=lambda depth: (token_s(table, draft, sequence_count, context_tokens, depth), depth))
