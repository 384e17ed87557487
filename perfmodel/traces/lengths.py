"""How long prompts and answers are: the fitted laws of published production traffic, by kind of traffic.

Owns: the laws, their parameters with the source of each, and drawing from them. Does not own: how a prompt grows from
turn to turn (`sessions`). A law is a fit, not the data: where a published fit is poor (Kolmogorov-Smirnov
distance above 0.2) and a better one was published beside it, the better one stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from perfmodel.errors import ConfigError


class LengthKind(StrEnum):
    """The family of a law of lengths."""

    LOGNORMAL = "lognormal"
    WEIBULL = "weibull"
    GAMMA = "gamma"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """A law of lengths in tokens, rounded to whole ones, at least 1 and at most `cap_tokens`.

    `scale_tokens` is the median of a lognormal law and the scale of a Weibull or gamma one; `shape_ratio` is the
    standard deviation of the logarithm, or the shape. Raises ConfigError for a scale or shape that is not positive.
    """

    kind: LengthKind
    scale_tokens: float
    shape_ratio: float = 1.0
    cap_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        for name in ("scale_tokens", "shape_ratio", "cap_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"length law: {name} is {getattr(self, name)}; expected more than 0")

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int32]:
        """`count` independent lengths."""
        drawn = np.full(count, self.scale_tokens)
        if self.kind is LengthKind.LOGNORMAL:
            drawn = lognormal(rng, self.scale_tokens, self.shape_ratio, count)
        elif self.kind is LengthKind.WEIBULL:
            drawn = self.scale_tokens * rng.weibull(self.shape_ratio, count)
        elif self.kind is LengthKind.GAMMA:
            drawn = rng.gamma(self.shape_ratio, self.scale_tokens, count)
        whole: npt.NDArray[np.int32] = np.clip(np.rint(drawn), 1, self.cap_tokens).astype(np.int32)
        return whole


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompts and answers of one kind of traffic; within a kind they are nearly uncorrelated (-0.05 to 0.06)."""

    input: LengthLaw
    output: LengthLaw


def lognormal(rng: np.random.Generator, median: float, sigma: float, count: int) -> npt.NDArray[np.float64]:
    """`count` draws of a lognormal law given by its median and the standard deviation of its logarithm."""
    return median * np.exp(sigma * rng.standard_normal(count))


def _fitted(mu: float, sigma: float, cap_tokens: int) -> LengthLaw:
    """A lognormal law as it is published: mean and standard deviation of ln(tokens)."""
    return LengthLaw(LengthKind.LOGNORMAL, float(np.exp(mu)), sigma, cap_tokens)


# Caps: the longest length seen in the trace, or the context of the model that served it.
# Azure 2023 conversation trace (Splitwise, CC-BY-4.0), 13,860 requests.
CHAT_SHORT = Lengths(_fitted(6.66, 0.99, 14_050), _fitted(4.95, 0.87, 1_000))
# Mooncake conversation trace (FAST'25), 7,851 requests; the output by its Weibull fit (KS 0.15 against 0.22).
CHAT_LONG = Lengths(_fitted(8.77, 1.20, 126_000), LengthLaw(LengthKind.WEIBULL, 364.0, 1.19, 2_000))
# Azure 2023 code trace, 7,015 requests; the prompt by its gamma fit (KS 0.035).
CODE_COMPLETION = Lengths(LengthLaw(LengthKind.GAMMA, 2_173.0, 0.94, 7_437), _fitted(2.78, 0.84, 1_900))
# ServeGen deepseek-r1, one evening hour, 54,126 requests (KS 0.09 both).
API_REASONING = Lengths(_fitted(5.63, 1.65, 65_536), _fitted(6.33, 0.78, 32_768))
# arXiv summarisation set (Microsoft Vidur), 28,257 documents.
BATCH_SUMMARISE = Lengths(LengthLaw(LengthKind.WEIBULL, 2_852.0, 2.85, 4_096), _fitted(5.19, 0.80, 4_096))
# ServeGen offline job d, 160 rows; answers stop at the job's own limit (6 % of them).
BATCH_GENERATE = Lengths(_fitted(4.12, 0.48, 4_096), LengthLaw(LengthKind.WEIBULL, 2_025.0, 1.09, 6_144))
# ServeGen offline job e, 166 rows: prompts of 701 to 717 tokens, answers of exactly 5.
BATCH_CLASSIFY = Lengths(LengthLaw(LengthKind.CONSTANT, 707.0), LengthLaw(LengthKind.CONSTANT, 5.0))
