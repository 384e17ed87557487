"""The rules that `conftest.py` puts on the suite, each run for real in a pytest of its own.

Owns: a skip is a failure under INFERPLANE_NO_SKIP=1, no process may be left behind, only loopback may be reached, and
Hypothesis draws the same examples every time unless it is told to explore. Each rule is shown to fail a test that
breaks it, and to leave an honest one alone.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _run(folder: Path, *bodies: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of pytest with our conftest and settings, on one file for each body."""
    for number, body in enumerate(bodies):
        (folder / f"test_{number}.py").write_text(textwrap.dedent(body))
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "INFERPLANE_", "HYPOTHESIS_"))
    }
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


PROPERTY = """
    import os
    from hypothesis import given, settings, strategies as st
    from tests.exploring import examples
    @settings(max_examples=examples(20))
    @given(st.integers())
    def test_it(number):
        with open(os.environ["DRAWN"], "a") as file: file.write(f"{number}\\n")
"""


def _drawn(folder: Path, run: str, **environment: str) -> list[str]:
    """What a property drew in one run of pytest."""
    file = folder / run
    status, told = _run(folder, PROPERTY, DRAWN=str(file), **environment)
    assert status == 0, told
    return file.read_text().splitlines()


def test_hypothesis_draws_the_same_in_every_run_and_explores_only_where_it_is_told_to(tmp_path: Path) -> None:
    first, second = _drawn(tmp_path, "first"), _drawn(tmp_path, "second")
    assert first == second
    assert 20 <= len(first) < 40
    explored = [_drawn(tmp_path, run, HYPOTHESIS_PROFILE="explore") for run in ("third", "fourth")]
    assert explored[0] != explored[1]
    assert all(len(found) >= 10 * 20 for found in explored)


def rigid_settings(text: str) -> Iterator[str]:
    """Calls of `settings` with a number that `explore` cannot raise. A planted fault's are derandomized instead."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "settings"):
            continue
        named = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if named.get("derandomize") == "True":
            continue
        count = named.get("max_examples", "examples()")
        if not count.startswith("examples("):
            yield f"line {node.lineno}: max_examples is {count}; expected examples({count})"
        if "database" in named:
            yield f"line {node.lineno}: the database is the profile's"


def test_every_property_draws_more_when_it_explores() -> None:
    found = [
        f"{path.relative_to(ROOT)} {told}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for told in rigid_settings(path.read_text())
    ]
    assert found == []


def test_rigid_settings_are_reported() -> None:
    assert list(rigid_settings("@settings(max_examples=5)\ndef test_it(): ..."))
    assert list(rigid_settings("A = hypothesis.settings(B, max_examples=5, deadline=None)"))
    assert list(rigid_settings("A = settings(database=None)"))
    assert not list(rigid_settings("A = settings(max_examples=5, derandomize=True, database=None)"))
    assert not list(rigid_settings("A = settings(max_examples=examples(5)); B = settings(deadline=None)"))
