"""LiteLLM's custom_auth for the benchmark: a fixed list of keys, each with limits, so that its in-memory limiter runs.

Copied beside LiteLLM's configuration and imported there, in LiteLLM's own environment. It is the nearest to our tenants
that LiteLLM does without its database.
"""
# litellm is only in its own environment (peers.py), never in the project's.
# mypy: ignore-errors

import os
from pathlib import Path

from litellm.proxy._types import UserAPIKeyAuth

KEYS = frozenset(Path(os.environ["BENCH_KEYS_FILE"]).read_text().split())


async def check_key(request, api_key):
    """Let the listed keys in."""
    if api_key not in KEYS:
        raise ValueError("unknown key")
    return UserAPIKeyAuth(
        api_key=api_key, user_id=api_key[:11], rpm_limit=5_000_000, tpm_limit=5_000_000_000, max_parallel_requests=5_000
    )
