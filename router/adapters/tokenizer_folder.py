"""A model's tokenizer and chat template out of its folder, and the check that texts may be cut at its special tokens.

Owns: reading `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` or `.json` and `config.json`, which of
several templates a request gets, the ids that go around a plain prompt, and the anchors. Does not own: how texts are
cut (`prompt_chains`), what a template may do (`prompt_text`), or which model has which folder.

The `tokenizers` library works outside Python's lock, so another thread may do it; several texts at once it spreads over
the cores, unless TOKENIZERS_PARALLELISM=false in the environment says otherwise. Its cache of words is switched off:
it would keep pieces of prompts after the answer. Measured on one core (Python 3.11, tokenizers 0.23, a vocabulary of
32,000): 112,000 tokens of source code take 0.23 s with a warm cache, 0.49 s with a cold one and 0.32 s without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from router.errors import EndpointsError
from router.prompt_text import ChatTemplate, special_variables

# Engines that render chats by code of their own for these models (vLLM's renderers and `gpt_oss`'s Harmony), 2026.
_RENDERED_BY_CODE: Final = frozenset(
    {"gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling", "cohere2", "grok2"}
)
# Files that make vLLM use Mistral's own tokenizer instead of `tokenizer.json`.
_OTHER_TOKENIZERS: Final = ("tekken.json",)
# A text that no tokenizer joins over a special token, for the check of anchors.
_PROBE: Final = ("ab c", " d\n e")


class ModelTokenizer:
    """A tokenizer as `prompt_chains.TextTokenizer`. Frozen after its making, but for what the library keeps."""

    __slots__ = ("_tokenizer", "anchor", "anchors", "around", "fingerprint", "special_tokens_sure")

    def __init__(self, data: bytes, config: Mapping[str, Any]) -> None:
        """`data` is a `tokenizer.json`. Raises ValueError, in one sentence, for what is none."""
        try:
            tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer.json cannot be read: {str(error).partition(chr(10))[0]}.") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if hasattr(tokenizer.model, "_resize_cache"):
            tokenizer.model._resize_cache(0)
        self._tokenizer = tokenizer
        _check_added(tokenizer, config)
        self.fingerprint = blake2b(data, digest_size=16).digest()
        names = [name for name in anchors_of(tokenizer.get_added_tokens_decoder().values()) if self._cuts_at(name)]
        self.anchor = names[0] if names else ""
        longest_first = sorted((name.encode() for name in names), key=len, reverse=True)
        self.anchors = re.compile(b"|".join(map(re.escape, longest_first))) if names else None
        around = self._around()
        bos = config.get("add_bos_token")
        self.special_tokens_sure = around is not None and (bos is None or bool(bos) is bool(around[0]))
        """Whether it is known what goes around a plain prompt: the library and the config must agree."""
        self.around: tuple[list[int], list[int]] = around or ([], [])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, nothing added around them."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _cuts_at(self, name: str) -> bool:
        """Whether a text with this token tokenises as its two halves do."""
        left, right, both = self.encode([_PROBE[0], name + _PROBE[1], name.join(_PROBE)])
        return both == left + right and right[:1] == [self._tokenizer.token_to_id(name)]

    def _around(self) -> tuple[list[int], list[int]] | None:
        bare = self.encode([_PROBE[0]])[0]
        full = self._tokenizer.encode(_PROBE[0], add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return None


def anchors_of(added: Iterable[AddedToken]) -> list[str]:
    """The added tokens at whose start any text may be cut: taken out of the raw text before all else, wherever they
    stand, and neither part of another one nor overlapped by one.
    """
    raw = [token for token in added if not token.normalized and token.content]
    plain = [token for token in raw if not (token.lstrip or token.rstrip or token.single_word)]
    names = {token.content for token in raw}
    tails: set[str] = set()
    for name in names:
        tails.update(name[start:] for start in range(1, len(name)))
    found = []
    for token in plain:
        name = token.content
        overlapped = any(name[:end] in tails for end in range(1, len(name) + 1))
        extended = any(name in other for other in names if len(other) > len(name))
        if name == name.strip() and not overlapped and not extended:
            found.append(name)
    return found


def _check_added(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only the config adds would be added by the engine when it loads the folder."""
    listed = config.get("added_tokens_decoder")
    for key, token in (listed if isinstance(listed, dict) else {}).items():
        content = token.get("content") if isinstance(token, dict) else None
        if isinstance(content, str) and str(tokenizer.token_to_id(content)) != str(key):
            raise ValueError(f"tokenizer_config.json gives {content!r} the id {key}, tokenizer.json another or none.")


@dataclass(frozen=True, slots=True)
class ModelPrompts:
    """All that turns a model's requests into tokens. A template None: there is none, or the engine uses code."""

    tokenizer: ModelTokenizer
    template: ChatTemplate | None
    tool_template: ChatTemplate | None
    """For requests with tools."""

    @property
    def system_first(self) -> bool:
        """Whether system messages further down are moved to the beginning (in Anthropic requests)."""
        templates = (self.template, self.tool_template)
        return any(template is None or template.system_first for template in templates)


def local_date(form: str) -> str:
    """What a template's `strftime_now` gets: the local time, as in transformers. Engines mostly run in UTC."""
    return datetime.now().strftime(form)


def load_folder(folder: Path, today: Callable[[str], str] = local_date) -> ModelPrompts:
    """The tokenizer and templates in a model's folder. Raises EndpointsError that names the folder and what is wrong.

    Reads files and compiles: half a second for a vocabulary of 128,000, so not on the event loop.
    """
    try:
        _check_files(folder)
        config = _json(folder / "tokenizer_config.json")
        tokenizer = ModelTokenizer((folder / "tokenizer.json").read_bytes(), config)
        if _json(folder / "config.json").get("model_type") in _RENDERED_BY_CODE:
            return ModelPrompts(tokenizer, None, None)
        variables = special_variables({**_json(folder / "special_tokens_map.json"), **config})
        template, with_tools = (
            None if source is None else ChatTemplate(source, variables, today) for source in _sources(folder, config)
        )
    except OSError as error:
        raise EndpointsError(f"tokenizer folder {folder}: {error.filename}: {error.strerror}.") from None
    except ValueError as error:
        raise EndpointsError(f"tokenizer folder {folder}: {error}") from None
    return ModelPrompts(tokenizer, template, with_tools or template)


def _check_files(folder: Path) -> None:
    for name in _OTHER_TOKENIZERS:
        if (folder / name).exists():
            raise ValueError(f"it has {name}, which the engine uses instead of tokenizer.json.")


def _sources(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The template's text, and another one for requests with tools."""
    beside = folder / "chat_template.jinja"
    if beside.exists():
        tools = folder / "additional_chat_templates" / "tool_use.jinja"
        return beside.read_text(encoding="utf-8"), tools.read_text(encoding="utf-8") if tools.exists() else None
    found = config.get("chat_template")
    if found is None:
        found = _json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        return named.get("default"), named.get("tool_use")
    return (found if isinstance(found, str) else None), None


def _json(path: Path) -> dict[str, Any]:
    """An object in a file; a file that is not there is an empty one."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}.") from None
    return found if isinstance(found, dict) else {}
