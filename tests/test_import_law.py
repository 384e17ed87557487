"""The import law of pyproject.toml, shown to bite: one planted violation for each thing it forbids.

Owns: proof that import-linter's contracts say what docs/architecture.md says. `make lint` runs them over the real tree;
here they run over a copy of it, first clean and then with one forbidden import each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy_rules import PACKAGES

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The five packages and the contracts, in a folder of their own."""
    folder = tmp_path_factory.mktemp("house")
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.sql", "*.json", "*.yaml", "*.html")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture
def planted(copy: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The copy with one line added to one module, for the length of a test."""
    path, line = request.param
    module = copy / path
    before = module.read_text() if module.exists() else None
    module.write_text(f"{before or ''}\n{line}\n")
    yield copy
    if before is None:
        module.unlink()
    else:
        module.write_text(before)


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"NO_COLOR": "1"}
    program = "import sys; from importlinter.cli import lint_imports_command as lint; sys.path.insert(0, '.'); lint()"
    command = [sys.executable, "-c", program, "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_the_tree_keeps_the_import_law(copy: Path) -> None:
    checked = _lint(copy)
    assert checked.returncode == 0, checked.stdout + checked.stderr


CASES = {
    "a library imports its sibling": ("billing/money.py", "import router.blocks", "no siblings meet"),
    "a library imports a process": ("router/blocks.py", "import controlplane.errors", "no siblings meet"),
    "a process imports the other": ("operators/errors.py", "import controlplane.errors", "no siblings meet"),
    "a lower layer imports a higher one": ("billing/errors.py", "import billing.ledger", "Billing BROKEN"),
    "a core imports an adapter": ("router/endpoints.py", "import router.adapters", "Router BROKEN"),
    "values import the request path": ("controlplane/tenancy.py", "import controlplane.serve", "Request path BROKEN"),
    "neighbours of one layer meet": ("billing/money.py", "import billing.metering", "Billing BROKEN"),
    "the model's facts import its search": (
        "perfmodel/hardware.py",
        "import perfmodel.memory",
        "Performance model BROKEN",
    ),
    "a module is in no layer": ("router/extra.py", "X = 1", "not listed as layers"),
    "the request path knows the model": (
        "controlplane/serve.py",
        "import perfmodel.hardware",
        "hands the request path",
    ),
    "a core reads the clock": ("billing/ledger.py", "import time", "Cores: no I/O"),
    "a core rolls dice": ("router/endpoints.py", "import random", "Cores: no I/O"),
    "a core logs": ("perfmodel/memory.py", "import logging", "Cores: no I/O"),
    "a core awaits": ("router/endpoints.py", "import asyncio", "Cores: no I/O"),
    "a core knows the wire's validation": ("controlplane/tenancy.py", "import pydantic", "Cores: no I/O"),
    "a core knows its database": ("controlplane/rate_limit.py", "import redis", "Cores: no I/O"),
    "a core opens paths": ("perfmodel/hardware.py", "from pathlib import Path", "Cores: no I/O"),
}


@pytest.mark.parametrize(
    ("planted", "broken"),
    [pytest.param((path, line), broken, id=case) for case, (path, line, broken) in CASES.items()],
    indirect=["planted"],
)
def test_a_planted_import_is_refused(planted: Path, broken: str) -> None:
    checked = _lint(planted)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert broken in " ".join(checked.stdout.split())
