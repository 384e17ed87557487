"""Tests against real engines: `make test-engines` runs them, nothing else does.

Owns: that they are collected only where this folder is named on the command line, and the fixture `vllm`. Does not own:
how vLLM is installed (Makefile) or started (`vllm_process`). They are apart because an engine takes 6 GB and a minute
to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import services
from tests.engines.tiny_model import write_tiny_model
from tests.engines.vllm_process import VllmProcess

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A plain `pytest` or `pytest tests` leaves them out."""
    named = any(Path(argument.split("::")[0]).resolve().is_relative_to(HERE) for argument in config.args)
    return None if named else True


@pytest.fixture(scope="session")
def vllm() -> Iterator[VllmProcess]:
    """The session's vLLM, running. A test that kills it starts it again, or is the last."""
    with services.temporary_folder() as folder:
        model = folder / "model"
        model.mkdir()
        write_tiny_model(model)
        process = VllmProcess(model, folder / "vllm.log")
        try:
            process.start()
            yield process
        finally:
            process.kill()
