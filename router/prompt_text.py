"""A chat template, run as the engines run it: messages to the prompt's text.

Owns: the sandbox (what a template may call, how long and how much it may write), the finding of what kind of content
it expects, and the cut where an image begins. Does not own: reading templates from files (`adapters.tokenizer_folder`),
the messages' tidying (`prompt_messages`), or the clock: the date that a template asks for is handed in.

Templates are the models' own Jinja files. They run as in Hugging Face transformers (`chat_template_utils.py`): Jinja's
immutable sandbox, blocks trimmed, loop controls, a `tojson` that escapes nothing, `raise_exception`, `strftime_now`.
Which content they expect is found as vLLM's `renderers/hf.py` finds it: a loop over a message's content means parts.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from router.prompt_forms import ChatRequest, Message, Unhashed
from router.prompt_messages import conversation

# How often the limits are looked at, in pieces of text that a template writes: a piece is a value or a bit of template.
_PIECES_BETWEEN_LOOKS: Final = 64


class PromptText(NamedTuple):
    """What the engine tokenises. `whole` False: only up to a medium, and what follows is not known."""

    text: str
    whole: bool


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """`expired` is asked now and then while a template runs; True ends it (the caller has the clock)."""

    max_char_count: int
    expired: Callable[[], bool]


class _Generation(jinja2.ext.Extension):
    """The `{% generation %}` block of training templates: its body is written as if the block were not there."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 declares a mutable set and only reads it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled template. Raises ValueError, in one sentence, for text that is no template.

    Mutable: Jinja keeps compiled code in it; rendering changes nothing. `special_tokens` are variables (`bos_token`).
    """

    __slots__ = ("_knows_developer", "_special_tokens", "_template", "content_is_parts", "system_first")

    def __init__(self, source: str, special_tokens: Mapping[str, Any], today: Callable[[str], str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = today
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"The chat template cannot be compiled: {str(error).partition(chr(10))[0]}.") from None
        self._special_tokens = dict(special_tokens)
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self.content_is_parts = _loops_over_content(tree)
        self.system_first = _wants_system_first(source)

    def render(self, request: ChatRequest, limits: RenderLimits) -> PromptText | Unhashed:
        """The prompt of a conversation, up to its first medium."""
        shown = conversation(request, self.content_is_parts, self._knows_developer)
        if isinstance(shown, Unhashed):
            return shown
        text = self._text(shown.messages, request, limits)
        if isinstance(text, Unhashed):
            return text
        if not shown.mark:
            return PromptText(text, True)
        cut = text.find(shown.mark)
        if cut >= 0 and self.content_is_parts:  # some templates write images before a message's text
            other = self._text(_without_media(shown.messages), request, limits)
            if isinstance(other, Unhashed):
                return other
            cut = min(cut, _same_length(text, other))
        return PromptText(text[:cut], False) if cut >= 0 else Unhashed.MEDIA

    def _text(self, messages: list[Message], request: ChatRequest, limits: RenderLimits) -> str | Unhashed:
        variables = {"documents": None, **self._special_tokens, **request.context}
        variables |= {"messages": messages, "tools": request.tools}
        try:
            text = _bounded(self._template.generate(variables), limits)
        except Exception:  # whatever a model's template does to a tenant's values: it failed, and nothing is known
            return Unhashed.TEMPLATE_FAILED
        return Unhashed.TEMPLATE_TOO_LONG if text is None else text


def _without_media(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [part for part in content if part["type"] == "text"]
        found.append({**message, "content": content})
    return found


def _same_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _bounded(pieces: Iterator[str], limits: RenderLimits) -> str | None:
    found: list[str] = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > limits.max_char_count or (len(found) % _PIECES_BETWEEN_LOOKS == 0 and limits.expired()):
            return None
    return "".join(found)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


# -- what content it expects -------------------------------------------------------------------------------------------


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether a loop goes over the content of a message that another loop took from `messages`."""
    loops = list(tree.find_all(jinja2.nodes.For))
    lists = _aliases(tree, "messages")
    if lists is None:
        return False
    messages = [loop.target for loop in loops if any(_is(loop.iter, name) for name in lists)]
    names = [target.name for target in messages if isinstance(target, jinja2.nodes.Name)]
    if len(names) < len(messages):
        return False
    inside = {id(loop) for macro in tree.find_all(jinja2.nodes.Macro) for loop in macro.find_all(jinja2.nodes.For)}
    handed = _handed_content(tree, names)
    for loop in loops:
        bare = loop.iter.name if isinstance(loop.iter, jinja2.nodes.Name) else None
        if any(_is(loop.iter, name, "content") for name in names) or bare in handed.get(id(loop), ()):
            return isinstance(loop.target, jinja2.nodes.Name)
        if bare == "content" and id(loop) not in inside:
            return isinstance(loop.target, jinja2.nodes.Name)
    return False


def _handed_content(tree: jinja2.nodes.Template, messages: list[str]) -> dict[int, set[str]]:
    """For each loop in a macro (by identity) the macro's parameters that are called with a message's content."""
    found: dict[int, set[str]] = {}
    calls = list(tree.find_all(jinja2.nodes.Call))
    for macro in tree.find_all(jinja2.nodes.Macro):
        names = [argument.name for argument in macro.args]
        handed: set[str] = set()
        for call in calls:
            if not isinstance(call.node, jinja2.nodes.Name) or call.node.name != macro.name:
                continue
            given = [*zip(names, call.args, strict=False), *((each.key, each.value) for each in call.kwargs)]
            handed |= {
                name for name, value in given if name in names and any(_is(value, m, "content") for m in messages)
            }
        for loop in macro.find_all(jinja2.nodes.For):
            if handed:
                found[id(loop)] = handed
    return found


def _wants_system_first(source: str) -> bool:
    """Whether it refuses a system message further down, found as vLLM finds it: by trying, in a plain sandbox."""
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    said = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        plain.from_string(source).render(messages=said, add_generation_prompt=False)
    except jinja2.TemplateError:
        return True
    except Exception:  # whatever else a template does to this: vLLM would not start
        return True
    return False


def _aliases(tree: jinja2.nodes.Template, name: str) -> list[str] | None:
    """`name` and every variable that it, a slice of it or what a filter makes of it is assigned to. None: it goes into
    something else than a variable, where vLLM's search gives up, as over loops with two targets, and takes text.
    """
    found = [name]
    waiting = deque([name])
    assignments = list(tree.find_all(jinja2.nodes.Assign))
    while waiting:
        known = waiting.popleft()
        for each in assignments:
            if not _is(each.node, known):
                continue
            if not isinstance(each.target, jinja2.nodes.Name):
                return None
            if each.target.name not in found:
                found.append(each.target.name)
                waiting.append(each.target.name)
    return found


def _is(node: jinja2.nodes.Node | None, name: str, member: str | None = None) -> bool:
    """Whether the expression is the variable (or its member), filtered, tested or sliced."""
    while node is not None:
        if isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test) or (
            isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice)
        ):
            node = node.node
        else:
            break
    if member is not None:
        if isinstance(node, jinja2.nodes.Getattr):
            taken = node.attr == member
        else:
            taken = isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const)
            taken = taken and node.arg.value == member  # type: ignore[union-attr]  # the line above says what it is
        if not taken:
            return False
        node = node.node  # type: ignore[union-attr]  # both kinds have it
    return isinstance(node, jinja2.nodes.Name) and node.ctx == "load" and node.name == name


def special_variables(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens of a `tokenizer_config.json` as template variables: their text, or lists of it."""
    found: dict[str, Any] = {}
    for name, token in tokens.items():
        value = _content(token)
        if value is not None and (name.endswith("_token") or name == "additional_special_tokens"):
            found[name] = value
    return found


def _content(token: Any) -> Any:
    if isinstance(token, Mapping):
        token = token.get("content")
    if isinstance(token, Sequence) and not isinstance(token, str):
        texts = [_content(each) for each in token]
        return texts if all(isinstance(text, str) for text in texts) else None
    return token if isinstance(token, str) else None
