"""What the books are compared with from outside: spool folders and engine counters.

Owns: reading a spool without disturbing it (no lock, no deletion, nothing is settled), reading an engine's counters
from a file or a URL, and which counters each kind of engine has. Does not own: the comparison (`billing.reconcile`) or
the spool's format (`spool_format`, `spool_files`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from billing.adapters.spool_files import segments, spool_folders
from billing.errors import ReconcileInputError
from billing.reconcile import EngineTokens
from billing.spool_format import Damage, Fold, Scanner
from billing.usage_event import UsageEvent

# Bytes of a segment read at once.
_READ_BYTES = 1024 * 1024
# An engine that does not answer its metrics page within this is not there.
_ENGINE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class CounterNames:
    """The counters of one kind of engine, as Prometheus names without `_total`."""

    input_tokens: str
    output_tokens: str
    input_is_uncached: bool


# Read from the engines' own metrics pages (recorded fixtures of vLLM 0.32.0 and llama.cpp; SGLang's documentation).
ENGINE_COUNTERS = (
    CounterNames("vllm:prompt_tokens", "vllm:generation_tokens", input_is_uncached=False),
    CounterNames("sglang:prompt_tokens", "sglang:generation_tokens", input_is_uncached=False),
    CounterNames("llamacpp:prompt_tokens", "llamacpp:tokens_predicted", input_is_uncached=True),
)


@dataclass(frozen=True, slots=True)
class EngineSource:
    """Where the counters of an engine are read: `endpoint` as in the events, all its incarnations or one."""

    endpoint: str
    incarnation: str | None
    where: str
    """A file or an http(s) URL."""

    @property
    def name(self) -> str:
        """endpoint, or endpoint@incarnation."""
        return self.endpoint if self.incarnation is None else f"{self.endpoint}@{self.incarnation}"


def engine_source(text: str) -> EngineSource:
    """The source named by ENDPOINT[@INCARNATION]=FILE_OR_URL. Raises ReconcileInputError."""
    name, sign, where = text.partition("=")
    endpoint, at, incarnation = name.partition("@")
    if not sign or not endpoint or not where or (at and not incarnation):
        raise ReconcileInputError(f"{text!r} names no counters; ENDPOINT[@INCARNATION]=FILE_OR_URL was expected.")
    return EngineSource(endpoint, incarnation or None, where)


def engine_tokens(source: EngineSource) -> EngineTokens:
    """The engine's counters, summed over its models and ranks. Raises ReconcileInputError."""
    return parse_counters(_metrics_page(source), source.name)


def parse_counters(page: str, name: str) -> EngineTokens:
    """The token counters of a Prometheus page. Raises ReconcileInputError when it holds none that we know."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, int] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    counter = sample.name.removesuffix("_total")
                    sums[counter] = sums.get(counter, 0) + int(sample.value)
    except ValueError as fault:
        raise ReconcileInputError(f"The counters of {name} are no Prometheus page: {fault}.") from None
    for names in ENGINE_COUNTERS:
        if names.input_tokens in sums and names.output_tokens in sums:
            return EngineTokens(sums[names.input_tokens], sums[names.output_tokens], names.input_is_uncached)
    known = ", ".join(f"{names.input_tokens}_total" for names in ENGINE_COUNTERS)
    raise ReconcileInputError(f"The counters of {name} hold none of {known}.")


def _metrics_page(source: EngineSource) -> str:
    if source.where.startswith(("http://", "https://")):
        import httpx

        try:
            answer = httpx.get(source.where, timeout=_ENGINE_TIMEOUT_S)
            answer.raise_for_status()
        except httpx.HTTPError as fault:
            raise ReconcileInputError(
                f"The counters of {source.name} cannot be read: {type(fault).__name__}."
            ) from None
        return answer.text
    try:
        return Path(source.where).read_text()
    except (OSError, UnicodeDecodeError) as fault:
        raise ReconcileInputError(f"The counters of {source.name} cannot be read: {fault}.") from None


def spooled_events(spool_dir: Path) -> Iterator[UsageEvent | Damage]:
    """Every closed event that the spool still holds, and every stretch of it that cannot be read.

    Read while the writers run; attempts that are open are left alone. Raises ReconcileInputError when there is no
    such folder.
    """
    if not spool_dir.is_dir():
        raise ReconcileInputError(f"The spool folder {spool_dir} does not exist.")
    for folder in spool_folders(spool_dir):
        fold = Fold()
        numbers = segments(folder)
        for number in numbers:
            yield from _segment_events(folder / f"{number:08d}.seg", fold, last=number == numbers[-1])


def _segment_events(path: Path, fold: Fold, *, last: bool) -> Iterator[UsageEvent | Damage]:
    scanner = Scanner()
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return  # Shipped and deleted since we looked.
    with file:
        while True:
            file.seek(scanner.offset_bytes)
            data = file.read(_READ_BYTES)
            ends = len(data) < _READ_BYTES
            before = scanner.offset_bytes
            for item in scanner.feed(data, final=ends and not last):
                made = item if isinstance(item, Damage) else fold.add(item.value)
                if isinstance(made, UsageEvent | Damage):
                    yield made
            if ends or scanner.offset_bytes == before:
                return
