"""The secret of an API key: how it is made, how it is hashed, and the pepper it is hashed with.

Owns: the format `ip-<8 public>-<43 secret>`, the keyed digest, the salt of an org, and the pepper (from the settings,
or made once in the data folder). Does not own: where digests are kept (`keys_sql`) or compared (`tenancy.authorize`).

A presented secret is hashed and its digest is looked up in a dict. That comparison is not constant in time, and need
not be: what a lookup's timing could tell is how much of a digest matches, and a caller who does not know the pepper
can neither choose nor predict the digest of what it sends. The secret itself is never compared with anything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from billing.adapters.disk import flush
from controlplane.config import Settings
from controlplane.errors import ConfigError
from controlplane.tenancy import KeyDigest, OrgId

# Lower case and digits without the look-alikes 0/o and 1/l (Crockford's idea): a prefix is read aloud and typed.
_PUBLIC_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
# 32^8 = 1.1e12 prefixes; a collision is refused by the unique column and another is drawn.
_PUBLIC_LENGTH = 8
# 256 bits (reference gateway 3.12): out of reach of guessing, online or off.
_SECRET_BYTES = 32
# What base64url makes of 32 bytes, without padding.
_SECRET_LENGTH = 43
# A pepper from the settings shorter than this could be guessed from its mark in the database.
_MIN_PEPPER_CHARS = 32
# blake2b's personalisation keeps the uses of one pepper apart: none of these outputs can stand in for another.
_FOR_PEPPER, _FOR_KEY, _FOR_SALT, _FOR_MARK = b"ip pepper", b"ip api key", b"ip org salt", b"ip mark"


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A new secret, in clear: shown once, then forgotten."""

    text: str
    prefix: str
    """`ip-` and the public part: what is stored, shown and logged."""


def digest_key(secret: bytes, pepper: bytes) -> KeyDigest:
    """The keyed hash of a presented secret (32 bytes). One native call: it runs for every request."""
    return KeyDigest(blake2b(secret, digest_size=32, key=pepper, person=_FOR_KEY).digest())


def mint_secret() -> Secret:
    """A new secret of 256 random bits with a public prefix that is independent of them."""
    public = "".join(secrets.choice(_PUBLIC_ALPHABET) for _ in range(_PUBLIC_LENGTH))
    hidden = urlsafe_b64encode(secrets.token_bytes(_SECRET_BYTES)).rstrip(b"=").decode()
    return Secret(f"ip-{public}-{hidden}", f"ip-{public}")


def public_prefix(secret: str) -> str:
    """What of a presented secret may be logged: its public part when it has our shape, else `(not a key)`."""
    parts = secret.split("-", 2)
    ours = len(parts) == 3 and parts[0] == "ip" and len(parts[1]) == _PUBLIC_LENGTH and len(parts[2]) == _SECRET_LENGTH
    return f"ip-{parts[1]}" if ours and all(letter in _PUBLIC_ALPHABET for letter in parts[1]) else "(not a key)"


def org_salt(org_id: OrgId, pepper: bytes) -> str:
    """The org's `cache_salt`: the same on every node, and no tenant can compute another's."""
    return blake2b(org_id.encode(), digest_size=16, key=pepper, person=_FOR_SALT).hexdigest()


def pepper_mark(pepper: bytes) -> str:
    """A one-way mark of the pepper for the database, so that a node with another pepper is told at once."""
    return blake2b(b"", digest_size=8, key=pepper, person=_FOR_MARK).hexdigest()


def load_pepper(settings: Settings) -> bytes:
    """The 32-byte pepper of this cluster.

    From `key_pepper` when set; else from `data_dir/pepper`, which is made when missing. Raises ConfigError when the
    setting is too short or the file cannot be read, is open to others, or holds something else.
    """
    given = settings.key_pepper.get_secret_value()
    if given:
        if len(given) < _MIN_PEPPER_CHARS:
            raise ConfigError(
                f"INFERPLANE_KEY_PEPPER has {len(given)} characters; at least {_MIN_PEPPER_CHARS} are needed "
                "(for example the output of `openssl rand -hex 32`)."
            )
        return _stretch(given)
    return _stretch(_pepper_file(settings.data_dir / "pepper"))


def _stretch(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=32, person=_FOR_PEPPER).digest()


def _pepper_file(path: Path) -> str:
    try:
        if not path.exists():
            _make_pepper_file(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"The pepper file {path} cannot be used: {type(fault).__name__}.") from fault
    if mode & 0o077:
        raise ConfigError(f"The pepper file {path} has mode {mode:04o}, open to others; run `chmod 600 {path}`.")
    if len(text) < _MIN_PEPPER_CHARS:
        raise ConfigError(f"The pepper file {path} holds {len(text)} characters; expected {2 * _SECRET_BYTES}.")
    return text


def _make_pepper_file(path: Path) -> None:
    """Write a whole file aside, then link it to its name: of several makers the first wins, and none sees half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".pepper-{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
        flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)
