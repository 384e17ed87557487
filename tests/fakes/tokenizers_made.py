"""Small tokenizers of the kinds that models have, trained here, and model folders made of them.

Owns: a byte-level BPE (GPT, Llama 3, Qwen), a SentencePiece-like one that marks only the start of a text (Llama 2,
Mistral), each with special tokens that are easy and hard to cut at, and writing them as a model's folder. Does not own:
reading such a folder (`router.adapters.tokenizer_folder`).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

# Enough text for a few hundred merges: words, numbers, code, spaces, another script.
CORPUS = (
    "hello world the quick brown fox jumps over the lazy dog, and the engine holds the blocks of the prompt. ",
    "def route(request: bytes) -> int:\n    return len(request) // 4  # bytes a token\n\n\nclass Router:\n    pass\n",
    '{"name": "read_file", "arguments": {"path": "/etc/hosts", "lines": [1, 2, 34, 567]}}\n\n  indented\n\tand tabbed ',
    "naïve café über straße 你好世界模型 данные модели 🙂🙂 ",
)

# The split of Llama 3 and its kin, from their public tokenizer.json.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"  # contractions, words, digits by three
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # marks, line ends, spaces
)

SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>")

# Added tokens at which no text may be cut: white space around them, words, parts of one another, found after
# normalising.
AWKWARD = (
    AddedToken("<mask>", lstrip=True, normalized=False),
    AddedToken("<tail>", rstrip=True, normalized=False),
    AddedToken("fox", single_word=True, normalized=False),
    AddedToken("<a><b>", normalized=False),
    AddedToken("<b>", normalized=False),
    AddedToken("><c", normalized=False),
    AddedToken("<c>", normalized=False),
    AddedToken("lazy", normalized=True),
    AddedToken("\n\n", normalized=False),
)

CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif -%}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}"
    "{{- '<|im_end|>\\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)


@cache
def byte_level(*, bos: bool = False, awkward: bool = False) -> str:
    """The `tokenizer.json` of a byte-level BPE; `bos`: it puts <|bos|> before a plain prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _trained(tokenizer, pre_tokenizers.ByteLevel.alphabet(), bos, awkward)


@cache
def sentence_piece(*, bos: bool = False, awkward: bool = False) -> str:
    """The `tokenizer.json` of a BPE with spaces as ▁, and one more put before a text, not before its parts."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _trained(tokenizer, sorted({character for text in CORPUS for character in text}), bos, awkward)


def _trained(tokenizer: Tokenizer, alphabet: list[str], bos: bool, awkward: bool) -> str:
    specials = [AddedToken(name, normalized=False, special=True) for name in (*SPECIALS, "<unk>")]
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=alphabet, special_tokens=specials
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if awkward:
        tokenizer.add_tokens(list(AWKWARD))
    if bos:
        number = tokenizer.token_to_id(SPECIALS[0])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], number)]
        )
    return tokenizer.to_str()


def write_folder(folder: Path, tokenizer: str, template: str | None = CHATML, **config: Any) -> Path:
    """A model's folder with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    bos = {"__type": "AddedToken", "content": "<|bos|>", "normalized": False, "special": True}
    tokens = {"bos_token": bos, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, **config}), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
