"""The rules that `conftest.py` puts on the suite, each run for real in a pytest of its own.

Owns: a skip is a failure under INFERPLANE_NO_SKIP=1, no process may be left behind, and only loopback may be reached.
Each rule is shown to fail a test that breaks it, and to leave an honest one alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _run(folder: Path, *bodies: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of pytest with our conftest and settings, on one file for each body."""
    for number, body in enumerate(bodies):
        (folder / f"test_{number}.py").write_text(textwrap.dedent(body))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "INFERPLANE_"))}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), "-q", str(folder)]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return ran.returncode, ran.stdout + ran.stderr


EXPECTED_FAILURE = "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert False"
SKIPS = [
    "import pytest\ndef test_it(): pytest.skip('in the test')",
    "import pytest\n@pytest.fixture\ndef f(): pytest.skip('in the fixture')\ndef test_it(f): ...",
    "import pytest\n@pytest.mark.skip(reason='by the mark')\ndef test_it(): ...",
    "import pytest\npytest.skip('while collecting', allow_module_level=True)",
]


def test_a_skip_passes_on_a_machine_that_lacks_a_part(tmp_path: Path) -> None:
    status, told = _run(tmp_path, EXPECTED_FAILURE, *SKIPS)
    assert status == 0, told
    assert "4 skipped, 1 xfailed" in told


def test_in_ci_every_kind_of_skip_fails_with_its_reason_and_an_expected_failure_does_not(tmp_path: Path) -> None:
    arguments = {"INFERPLANE_NO_SKIP": "1", "PYTEST_ADDOPTS": "--continue-on-collection-errors"}
    status, told = _run(tmp_path, EXPECTED_FAILURE, *SKIPS, **arguments)
    assert status == 1, told
    assert "1 failed, 1 xfailed, 3 errors" in told
    for reason in ("in the test", "in the fixture", "by the mark", "while collecting"):
        assert f"this was skipped: Skipped: {reason}" in told


def test_a_process_left_behind_fails_the_run(tmp_path: Path) -> None:
    body = """
        import subprocess
        LEFT = []
        def test_it(): LEFT.append(subprocess.Popen(["sleep", "2"]))
    """
    status, told = _run(tmp_path, body)
    assert status == 1, told
    assert "left these processes running: ['sleep 2']" in told


def test_only_loopback_and_unix_sockets_may_be_reached(tmp_path: Path) -> None:
    body = """
        import socket
        def test_far():
            with socket.socket() as far: far.connect(("192.0.2.1", 80))
        def test_near(tmp_path):
            with socket.socket() as server, socket.socket() as client:
                server.bind(("127.0.0.1", 0)); server.listen(); client.connect(server.getsockname())
            with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
                path = str(tmp_path / "s"); server.bind(path); server.listen(); client.connect(path)
    """
    status, told = _run(tmp_path, body)
    assert status == 1, told
    assert "1 failed, 1 passed" in told
    assert "SocketConnectBlockedError" in told
