"""The endpoints file: what it may say, and the one sentence for each thing it may not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from router.adapters.discovery import dump_endpoints, endpoint_of_url, parse_endpoints, read_endpoints, tls_context
from router.endpoints import Endpoint, EndpointTls, EngineSpeed
from router.errors import EndpointsError

FULL = """
- id: h100-a
  url: https://engine-a.example:8443/v1/
  models: [llama, llama-lora]
  kind: vllm
  role: decode
  pool: big
  zone: z1
  region: r1
  accelerator: H100
  api_key_env: ENGINE_KEY
  tls: {ca: ca.pem, server_name: engine-a}
  kv_events: tcp://engine-a:5557
  drain: true
  speed: {prefill_tok_per_s: 12000, decode_s_per_token: 0.02, kv_capacity_tokens: 500000}
  bootstrap_port: 8998
  kv_bytes_per_token: 327680
  kv_link_bytes_per_s: 1.0e+10
- {id: b, url: "http://10.0.0.1:8000", model: llama}
"""


def parse(text: str) -> tuple[Endpoint, ...]:
    return parse_endpoints(text, "engines.yaml")


def entry(**changes: object) -> str:
    return json.dumps([{"id": "a", "url": "http://a:1", **changes}])


def test_every_field_is_read() -> None:
    first, second = parse(FULL)
    assert first == Endpoint(
        endpoint_id="h100-a",
        url="https://engine-a.example:8443/v1",
        models=frozenset({"llama", "llama-lora"}),
        kind="vllm",
        role="decode",
        pool="big",
        zone="z1",
        region="r1",
        accelerator="H100",
        api_key_env="ENGINE_KEY",
        tls=EndpointTls(True, "ca.pem", "engine-a"),
        kv_events="tcp://engine-a:5557",
        drain=True,
        speed=EngineSpeed(12_000.0, 0.0, 0.02, 500_000),
        incarnation=first.incarnation,
        bootstrap_port=8998,
        kv_bytes_per_token=327_680,
        kv_link_bytes_per_s=1e10,
    )
    assert (second.models, second.kind, second.pool, second.speed) == (frozenset({"llama"}), "openai", "default", None)


def test_json_yaml_and_a_named_list_say_the_same() -> None:
    text = entry(models=["m"], zone="z")
    assert parse(text) == parse("- {id: a, url: 'http://a:1', models: [m], zone: z}")
    assert parse(text) == parse(json.dumps({"endpoints": json.loads(text)}))
    assert parse("[]") == ()


def test_models_may_be_left_out_to_be_asked_from_the_engine() -> None:
    assert parse(entry())[0].models == frozenset()
    assert parse(entry(models=None))[0].models == frozenset()


def test_another_url_or_kind_is_another_incarnation_and_nothing_else_is() -> None:
    (one,) = parse(entry())
    assert parse(entry(drain=True, models=["m"], zone="z"))[0].incarnation == one.incarnation
    assert parse(entry(url="http://a:2"))[0].incarnation != one.incarnation
    assert parse(entry(kind="vllm"))[0].incarnation != one.incarnation


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "engines.yaml is neither YAML nor JSON: "),
        ("[{]", "engines.yaml is neither YAML nor JSON: "),
        ("hello", "engines.yaml holds 'hello'; a list of endpoints was expected."),
        ("", "engines.yaml holds None; a list of endpoints was expected."),
        ("[1]", "engines.yaml, entry 1 is 1; a mapping with "),
        ('[{"url": "http://a"}]', "engines.yaml, entry 1, field id: None is not a name; every endpoint needs one."),
        (entry(id="a b"), "engines.yaml, entry 1, field id: 'a b' is not a name of letters, digits"),
        (entry(url=None), "engines.yaml, entry 1 (a), field url: None is not an http:// or https:// URL"),
        (entry(url="ftp://a"), "field url: 'ftp://a' is not an http:// or https:// URL"),
        (entry(url="http://a:99999"), "field url: 'http://a:99999' is not an http:// or https:// URL"),
        (entry(url="http://a/?x=1"), "field url: 'http://a/?x=1' is not an http:// or https:// URL"),
        (entry(kind="ollama"), "field kind: 'ollama' is not one of vllm, sglang, trtllm, llamacpp, sim, openai."),
        (entry(role="ffn"), "field role: 'ffn' is not one of both, prefill, decode."),
        (entry(drain="yes"), "field drain: 'yes' is not true or false."),
        (entry(models=[]), "field models: [] is not a model name or a list of them."),
        (entry(models=["m", 3]), "field models: ['m', 3] is not a model name or a list of them."),
        (entry(model="m", models=["m"]), "field model: 'm' is not to be given together with models"),
        (entry(zone=7), "field zone: 7 is not a name of letters, digits"),
        (
            entry(kv_events="engine:5557"),
            "field kv_events: 'engine:5557' is not a ZMQ address such as tcp://host:5557.",
        ),
        (entry(kv_events="tcp://h:99999"), "is not tcp://HOST:PORT?replay=PORT&topic=TEXT&ranks=COUNT (kv_events: "),
        (entry(kv_events="tcp://h:1?replai=2"), "has an unknown option 'replai'; the options are replay, topic, ranks"),
        (entry(tls=True), "entry 1, field tls is True; a mapping with ca, server_name, verify was expected."),
        (entry(tls={"cert": "x"}), "field tls has an unknown field 'cert'; the fields are ca, server_name, verify."),
        (entry(tls={"ca": 1}), "field tls, field ca: 1 is not the path of a PEM file."),
        (entry(tls={"ca": "x", "verify": False}), "field tls, field ca: 'x' is not of use with verify: false"),
        (entry(speed={}), "field speed, field prefill_tok_per_s: None is not a number above 0."),
        (
            entry(speed={"prefill_tok_per_s": 1, "decode_s_per_token": 0}),
            "field speed, field decode_s_per_token: 0 is not a number above 0.",
        ),
        (
            entry(speed={"prefill_tok_per_s": True, "decode_s_per_token": 1}),
            "field speed, field prefill_tok_per_s: True is not a number above 0.",
        ),
        (entry(bootstrap_port=70_000), "field bootstrap_port: 70000 is not a whole number from 1 to 65535."),
        (entry(bootstrap_port=True), "field bootstrap_port: True is not a whole number from 1 to 65535."),
        (entry(kv_bytes_per_token=1.5), "field kv_bytes_per_token: 1.5 is not a whole number from 1 to 67108864."),
        (entry(kv_link_bytes_per_s=0), "field kv_link_bytes_per_s: 0 is not a number above 0."),
        (entry(weight=3), "engines.yaml, entry 1 has an unknown field 'weight'; the fields are accelerator, "),
        (
            '[{"id":"a","url":"http://a"},{"id":"a","url":"http://b"}]',
            "entry 2, field id: 'a' names another entry already.",
        ),
        (
            "- {id: a, url: 'http://a', speed: {prefill_tok_per_s: .inf, decode_s_per_token: 1}}",
            "inf is not a number above 0.",
        ),
    ],
)
def test_a_wrong_file_is_one_sentence_with_file_entry_field_value_and_expectation(text: str, sentence: str) -> None:
    with pytest.raises(EndpointsError, match=re.escape(sentence)) as caught:
        parse(text)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("engines.yaml")


def test_a_number_with_an_exponent_is_one() -> None:
    (read,) = parse_endpoints("- {id: a, url: 'http://a', kv_link_bytes_per_s: 11.1e9}", "engines.yaml")
    assert read.kv_link_bytes_per_s == 11.1e9


@pytest.mark.parametrize("url", ["http://user:hunter2@a:1", "http://:hunter2@a", "https://hunter2@a"])
def test_a_secret_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(EndpointsError, match="holds a user or password") as caught:
        parse(entry(url=url))
    assert "hunter2" not in str(caught.value)


def test_one_url_is_enough_for_an_endpoint() -> None:
    endpoint = endpoint_of_url("http://127.0.0.1:8000/", kind="llamacpp")
    assert (endpoint.endpoint_id, endpoint.url, endpoint.kind) == ("engine", "http://127.0.0.1:8000", "llamacpp")
    with pytest.raises(EndpointsError, match=r"^--engine \(engine\), field url: 'localhost' is not "):
        endpoint_of_url("localhost")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(EndpointsError, match=r"none\.yaml cannot be read: No such file or directory\.$"):
        read_endpoints(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"- {id: \xe9}")
    with pytest.raises(EndpointsError, match=r"latin\.yaml cannot be read: it is not UTF-8\.$"):
        read_endpoints(tmp_path / "latin.yaml")
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(9 * 1024 * 1024)
    with pytest.raises(EndpointsError, match="has 9437184 bytes; at most"):
        read_endpoints(tmp_path / "huge.yaml")


def test_a_ca_file_that_is_missing_is_one_sentence() -> None:
    with pytest.raises(EndpointsError, match=r"^The TLS authority file /none\.pem cannot be used: "):
        tls_context(EndpointTls(ca="/none.pem"))
    assert tls_context(EndpointTls(verify=False)) is False


def test_the_dump_has_no_key_material() -> None:
    rows = dump_endpoints(parse(FULL))
    assert rows[0]["id"] == "h100-a" and "ENGINE_KEY" not in json.dumps(rows)
