"""Runs every test of this folder on both event loops.

The gateway runs on uvloop; a platform without it gets asyncio's own loop, whose transports behave differently (what
they buffer, when they report a loss, how they close).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}
