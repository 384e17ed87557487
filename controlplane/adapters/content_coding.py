"""Undoing gzip and deflate on an engine's answer.

Owns: one incremental, bounded decoder. Does not own: the connection the bytes come from (`engine_connection`). We send
`accept-encoding: identity`, so this only runs for an engine, or a proxy before it, that compresses all the same.
"""

from __future__ import annotations

import zlib
from typing import Final

# As much of a compressed answer as is inflated at once.
_INFLATE_BYTES: Final = 256 * 1024
# zlib: 32 added to the window size accepts a gzip or a zlib header, -15 is a bare deflate stream.
_ANY_HEADER_WBITS: Final = 47
_BARE_DEFLATE_WBITS: Final = -15


class Inflater:
    """gzip and deflate, bounded in what it holds. Mutable."""

    def __init__(self, coding: bytes) -> None:
        self._known = coding in (b"gzip", b"x-gzip", b"deflate")
        self._coding = coding
        self._z = zlib.decompressobj(_ANY_HEADER_WBITS)
        self._first = True
        self._rest = b""
        self._full = False
        """The last piece was as long as a piece may be: zlib may hold more."""

    @property
    def complete(self) -> bool:
        """The compressed stream has ended, or never began."""
        return self._z.eof or self._first

    def feed(self, data: bytes) -> None:
        """Compressed bytes; what they give is taken by `more`. Raises ValueError for a coding that we do not know."""
        if not self._known:
            raise ValueError(f"content-encoding {self._coding.decode('latin-1')[:40]} was not asked for")
        if self._first and data:
            self._first = False
            if self._coding == b"deflate" and data[0] & 0x0F != zlib.DEFLATED:
                self._z = zlib.decompressobj(_BARE_DEFLATE_WBITS)  # some servers send it without the zlib header
        self._rest += data

    def more(self) -> bytes:
        """The next inflated bytes, b"" when more compressed ones are needed. Raises zlib.error."""
        while self._rest or self._full:
            if self._z.eof and self._rest:  # a gzip file may be several, one after the other
                self._z = zlib.decompressobj(_ANY_HEADER_WBITS)
            data = self._z.decompress(self._rest, _INFLATE_BYTES)
            self._full = len(data) == _INFLATE_BYTES
            self._rest = self._z.unused_data if self._z.eof else self._z.unconsumed_tail
            if data:
                return data
        return b""
