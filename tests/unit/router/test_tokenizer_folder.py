"""A model's folder is read as the engines read it, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from router.adapters.tokenizer_folder import ModelTokenizer, anchors_of, load_folder
from router.errors import EndpointsError
from router.prompt_forms import ChatRequest
from router.prompt_text import PromptText, RenderLimits
from tests.fakes.tokenizers_made import AWKWARD, byte_level, sentence_piece, write_folder

LIMITS = RenderLimits(10_000, lambda: False)
REQUEST = ChatRequest([{"role": "user", "content": "hi"}], None, {"add_generation_prompt": True})


def test_a_folder(tmp_path: Path) -> None:
    model = load_folder(write_folder(tmp_path / "m", byte_level(bos=True), add_bos_token=True))
    assert model.template is model.tool_template
    assert model.template is not None
    wanted = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.template.render(REQUEST, LIMITS) == PromptText(wanted, True)
    assert model.tokenizer.special_tokens_sure
    bos = Tokenizer.from_str(byte_level(bos=True)).token_to_id("<|bos|>")
    assert model.tokenizer.around == ([bos], [])
    assert model.tokenizer.anchors is not None
    assert [each.group() for each in model.tokenizer.anchors.finditer(wanted.encode())] == [
        b"<|im_start|>",
        b"<|im_end|>",
        b"<|im_start|>",
    ]


@pytest.mark.parametrize("made", [byte_level, sentence_piece])
def test_only_tokens_that_always_split_are_anchors(made: object) -> None:
    assert callable(made)
    tokenizer = Tokenizer.from_str(made(awkward=True))
    added = list(tokenizer.get_added_tokens_decoder().values())
    assert {token.content for token in AWKWARD} <= {token.content for token in added}
    assert set(anchors_of(added)) == {"<|bos|>", "<|im_start|>", "<|im_end|>", "<unk>", "<a><b>"}


def test_a_token_that_overlaps_itself_is_no_anchor() -> None:
    names = ["<<", "<|a|>", "|>x", "[A]", "[A]B"]
    assert anchors_of([AddedToken(name, normalized=False) for name in names]) == ["[A]B"]


def test_templates_in_the_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    model = load_folder(write_folder(tmp_path / "m", byte_level(), None, chat_template=named))
    assert model.template is not None
    assert model.tool_template is not None
    assert model.template.render(REQUEST, LIMITS) == PromptText("plain", True)
    assert model.tool_template.render(REQUEST, LIMITS) == PromptText("tools", True)
    one = load_folder(write_folder(tmp_path / "n", byte_level(), None, chat_template="{{ bos_token }}"))
    assert one.template is not None
    assert one.template.render(REQUEST, LIMITS) == PromptText("<|bos|>", True)
    beside = write_folder(tmp_path / "o", byte_level(), None)
    (beside / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    third = load_folder(beside)
    assert third.template is not None
    assert third.template.render(REQUEST, LIMITS) == PromptText("json", True)
    assert load_folder(write_folder(tmp_path / "p", byte_level(), None)).template is None


def test_a_model_whose_engine_renders_by_code_has_no_template(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", byte_level())
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert load_folder(folder).template is None


def test_it_is_not_certain_what_goes_around_where_the_files_disagree(tmp_path: Path) -> None:
    assert not load_folder(write_folder(tmp_path / "m", byte_level(), add_bos_token=True)).tokenizer.special_tokens_sure
    assert not load_folder(
        write_folder(tmp_path / "n", byte_level(bos=True), add_bos_token=False)
    ).tokenizer.special_tokens_sure


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer folder .*m: .*tokenizer.json: No such file or directory\."),
        ("tokenizer.json", "{}", r"tokenizer folder .*m: tokenizer.json cannot be read: .*\."),
        ("tokenizer_config.json", "{", r"tokenizer folder .*m: tokenizer_config.json is no JSON: .*\."),
        ("chat_template.jinja", "{% if %}", r"tokenizer folder .*m: The chat template cannot be compiled: .*\."),
        ("tekken.json", "{}", r"tokenizer folder .*m: it has tekken.json, which the engine uses instead of .*\."),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"9": {"content": "<new>"}}}',
            r"tokenizer folder .*m: tokenizer_config.json gives '<new>' the id 9, tokenizer.json another or none\.",
        ),
    ],
)
def test_what_cannot_be_used(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    folder = write_folder(tmp_path / "m", byte_level())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(EndpointsError, match=message):
        load_folder(folder)


def test_another_vocabulary_is_another_fingerprint() -> None:
    one, other = (ModelTokenizer(made.encode(), {}) for made in (byte_level(), sentence_piece()))
    assert one.fingerprint != other.fingerprint
