"""Secrets and the pepper: format, digests, what may be logged, and the file that is made once.

Owns: the shape of a secret, the separation of the pepper's uses, and every way in which the pepper file can be wrong.
Does not own: where digests are stored or compared. Uses a temporary folder and nothing else.
"""

from __future__ import annotations

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controlplane.adapters.key_secret import (
    digest_key,
    load_pepper,
    mint_secret,
    org_salt,
    pepper_mark,
    public_prefix,
)
from controlplane.config import Settings
from controlplane.errors import ConfigError
from controlplane.tenancy import OrgId

PEPPER, OTHER = b"p" * 32, b"q" * 32


def test_a_secret_has_the_published_format() -> None:
    secret = mint_secret()
    assert re.fullmatch(r"ip-[a-z2-9]{8}-[A-Za-z0-9_-]{43}", secret.text)
    assert secret.text.startswith(secret.prefix + "-")
    assert len(secret.prefix) == 11


def test_secrets_do_not_repeat_and_their_public_part_says_nothing_of_the_hidden_one() -> None:
    secrets = [mint_secret() for _ in range(200)]
    assert len({secret.text for secret in secrets}) == len({secret.prefix for secret in secrets}) == 200


def test_a_secret_does_not_show_in_its_repr() -> None:
    secret = mint_secret()
    assert secret.text not in repr(secret)


def test_the_digest_depends_on_secret_and_pepper() -> None:
    digests = {digest_key(secret, pepper) for secret in (b"a", b"b") for pepper in (PEPPER, OTHER)}
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {32}
    assert digest_key(b"a", PEPPER) == digest_key(b"a", PEPPER)


def test_the_uses_of_one_pepper_never_give_the_same_bytes() -> None:
    assert digest_key(b"org_1", PEPPER).hex()[:32] != org_salt(OrgId("org_1"), PEPPER)
    assert digest_key(b"", PEPPER).hex()[:16] != pepper_mark(PEPPER)


def test_only_the_public_part_of_a_presented_secret_may_be_logged() -> None:
    secret = mint_secret()
    assert public_prefix(secret.text) == secret.prefix
    for foreign in ("", "sk-abc-def", "ip-short-x", "ip-ABCDEFGH-" + "x" * 43, secret.text[:-1], "ip-" + "x" * 60):
        assert public_prefix(foreign) == "(not a key)"


def test_the_pepper_is_made_once_and_is_private(tmp_path: Path) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path / "new"})
    first = load_pepper(settings)
    assert load_pepper(settings) == first
    assert stat.S_IMODE((tmp_path / "new" / "pepper").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["pepper"]


def test_many_makers_at_once_agree_on_one_pepper(tmp_path: Path) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path})
    with ThreadPoolExecutor(8) as pool:
        peppers = set(pool.map(lambda _: load_pepper(settings), range(32)))
    assert len(peppers) == 1


def test_a_pepper_of_the_settings_wins_over_the_file(tmp_path: Path) -> None:
    given = Settings.model_validate({"data_dir": tmp_path, "key_pepper": "x" * 32})
    assert load_pepper(given) != load_pepper(Settings.model_validate({"data_dir": tmp_path}))
    assert not any(path.name.startswith(".pepper") for path in tmp_path.iterdir())


def test_a_short_pepper_is_refused_without_repeating_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"INFERPLANE_KEY_PEPPER has 7 characters; at least 32") as fault:
        load_pepper(Settings.model_validate({"data_dir": tmp_path, "key_pepper": "hunter2"}))
    assert "hunter2" not in str(fault.value)


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [("f" * 64, 0o640, "open to others"), ("short", 0o600, "holds 5 characters"), ("é" * 64, 0o600, "cannot be used")],
)
def test_a_pepper_file_that_cannot_be_trusted_is_refused(tmp_path: Path, content: str, mode: int, reason: str) -> None:
    path = tmp_path / "pepper"
    path.write_text(content, encoding="utf-8")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=reason):
        load_pepper(Settings.model_validate({"data_dir": tmp_path}))
