"""Engines behind TLS with a private authority, through the whole gateway: what the endpoints file says is what holds.

Owns: `tls` of an endpoint on its way to the model probe and to the data path, and what a certificate that must not be
trusted looks like to the client, in the access log and in the operator's log. Does not own: the handshake itself
(engine_http). One node, one engine with one certificate; what differs is how its endpoints are written.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from billing.usage_event import Outcome
from tests.fakes.scripted_engine import ScriptedEngine
from tests.integration.gateway.client import Caller, assert_error, body, events, text_of
from tests.integration.gateway.conftest import ENV
from tests.integration.gateway.stack import MODELS, Engines, Node, Tenant, Tenants, eventually, running_node
from tests.services import temporary_folder

# The names that the engine's certificate is for.
NAME, ADDRESS = "engine.test", "127.0.0.1"
WRONG = {
    "stranger": "unable to get local issuer certificate",
    "system": "unable to get local issuer certificate",
    "misnamed": "Hostname mismatch, certificate is not valid for 'other.test'.",
    "unreadable": "cannot be used: No such file or directory",
}
RIGHT = ("secure", "named", "unchecked", "asked")


@dataclass
class Authority:
    """A certificate authority of the test."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def made(cls, name: str) -> Authority:
        """A new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return cls(key, _builder(subject, subject, key, ca=True).sign(key, hashes.SHA256()))

    def write(self, path: Path) -> str:
        """Its certificate as a PEM file."""
        path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        return str(path)

    def issue(self, folder: Path) -> tuple[Path, Path]:
        """(certificate, key) files of an engine."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
        names = [x509.DNSName(NAME), x509.IPAddress(ipaddress.ip_address(ADDRESS))]
        made = (
            _builder(subject, self.certificate.subject, key, ca=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        certificate, secret = folder / "engine.pem", folder / "engine.key"
        certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return certificate, secret


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )


@dataclass
class House:
    """The node, its tenant, its one engine and its access log."""

    node: Node
    caller: Caller
    engine: ScriptedEngine
    access_log: Path

    def logged(self, request_id: str) -> dict[str, Any]:
        """The access line of a request."""

        def found() -> dict[str, Any] | None:
            lines = [json.loads(line) for line in self.access_log.read_text().splitlines()]
            return next((line for line in lines if line["request_id"] == request_id), None)

        return eventually(found, f"the access line of {request_id}", 5.0)

    def asked_count(self) -> int:
        """Inference requests that reached the engine."""
        return sum(truth.method == "POST" for truth in self.engine.truths)


@pytest.fixture(scope="module")
def house(engines: Engines) -> Iterator[House]:
    """A node whose endpoints all name the same engine, each with a model of its own."""
    with temporary_folder() as folder:
        ours, theirs = Authority.made("ours"), Authority.made("theirs")
        served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        served.load_cert_chain(*ours.issue(folder))
        engine = ScriptedEngine(models=["asked"], tls=served)
        engines.call(engine.start())
        ca, other_ca = ours.write(folder / "ca.pem"), theirs.write(folder / "other.pem")
        tls: dict[str, dict[str, Any]] = {
            "secure": {"ca": ca},
            "named": {"ca": ca, "server_name": NAME},
            "unchecked": {"verify": False},
            "asked": {"ca": ca},
            "stranger": {"ca": other_ca},
            "system": {},
            "misnamed": {"ca": ca, "server_name": "other.test"},
            "unreadable": {"ca": str(folder / "none.pem")},
        }
        rows = [
            {
                "id": name,
                "url": f"https://{ADDRESS}:{engine.port}",
                "kind": "vllm",
                "tls": how,
                **({} if name == "asked" else {"models": [name]}),
            }
            for name, how in tls.items()
        ]
        made: list[Tenant] = []

        def prepare(tenants: Tenants) -> None:
            made.append(tenants.tenant())

        access_log = folder / "access.log"
        env = {**ENV, "INFERPLANE_ACCESS_LOG": str(access_log)}
        try:
            with running_node(folder / "node", rows, env, prepare=prepare) as node:
                yield House(node, Caller(node, made[0]), engine, access_log)
        finally:
            engines.call(engine.stop())


@pytest.mark.parametrize("endpoint", RIGHT)
def test_an_engine_whose_certificate_is_right_answers_whole_and_streamed(endpoint: str, house: House) -> None:
    assert endpoint not in MODELS
    # The models of `asked` are learned by the probe, which has to get through TLS by itself.
    eventually(lambda: endpoint in [one["id"] for one in house.caller.get("/v1/models").json()["data"]], "its model")
    whole = house.caller.post(body("normal", model=endpoint))
    assert whole.status_code == 200, whole.text
    with house.caller.stream(body("normal", model=endpoint, stream=True)) as answer:
        got = b"".join(answer.iter_raw())
    assert answer.status_code == 200
    assert text_of(got) == "tok1 tok2 tok3 tok4 tok5 "
    assert events(got)[-1] == b"[DONE]"
    for request_id in (whole.headers["x-request-id"], answer.headers["x-request-id"]):
        event = house.node.event(request_id)
        assert (event.open.endpoint, event.close.outcome) == (endpoint, Outcome.COMPLETED)
        assert event.close.output_tokens == 5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", WRONG)
def test_a_certificate_that_must_not_be_trusted_is_an_engine_that_cannot_be_reached(
    endpoint: str, stream: bool, house: House
) -> None:
    before = house.asked_count()
    answer = house.caller.post(body("normal", model=endpoint, stream=stream))
    error = assert_error(answer, 502, "engine_unreachable", "server_error")
    assert "could not be reached" in error["message"]
    assert house.asked_count() == before, "not one byte of the prompt went to it"
    request_id = answer.headers["x-request-id"]
    close = house.node.event(request_id).close
    assert (close.error_code, close.status, close.output_tokens) == ("engine_unreachable", 502, None)
    line = house.logged(request_id)
    assert (line["status"], line["reason"], line["endpoint"]) == (502, "engine_unreachable", endpoint)


@pytest.mark.parametrize("endpoint", WRONG)
def test_the_operators_log_says_why_once_and_the_client_is_not_told(endpoint: str, house: House) -> None:
    answers = [house.caller.post(body("normal", model=endpoint)) for _ in range(3)]
    for answer in answers:
        assert WRONG[endpoint] not in answer.text
    eventually(lambda: WRONG[endpoint] in house.node.log_text(), "the reason in the log", 5.0)
    said = [line for line in house.node.log_text().splitlines() if f" {endpoint} " in line]
    assert 1 <= len(said) <= len(house.node.workers()), "each process says it when it begins, not at every request"
    assert all(WRONG[endpoint] in line for line in said)


def test_an_engine_that_is_refused_again_and_again_leaves_the_choice(house: House) -> None:
    def refused() -> Any:
        answer = house.caller.post(body("normal", model="stranger"))
        return answer if answer.status_code == 503 else None

    answer = eventually(refused, "an open breaker", 10.0)
    assert_error(answer, 503, "no_engine_available")
    assert int(answer.headers["retry-after-ms"]) > 0
    assert house.logged(answer.headers["x-request-id"])["reason"] == "no_engine_available"
