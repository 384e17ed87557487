"""The documentation against the product: what exists is documented, what is documented exists.

Owns: the checks that settings (with their defaults), commands, admin routes, metrics, fields of `/readyz` and of the
endpoints file, error codes, runtime dependencies and links stay in step. Does not own: whether a sentence is true. Each
check reads names from the code, so a new one fails here until somebody describes it.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from typer.main import get_command

from billing.adapters.shipper_status import ShipperStatus
from controlplane.__main__ import build_app, command_plugins
from controlplane.adapters.admin_catalog import catalog_routes
from controlplane.adapters.admin_prices import price_routes
from controlplane.adapters.admin_reconcile import ReconcileResult
from controlplane.adapters.admin_reconcile import families as reconcile_families
from controlplane.adapters.admin_reports import report_routes
from controlplane.adapters.admin_tenancy import tenancy_routes
from controlplane.adapters.key_feed import FeedState
from controlplane.adapters.spool import SpoolState
from controlplane.adapters.telemetry import Metrics
from controlplane.config import Settings
from controlplane.rate_limit import StoreState
from router.adapters import discovery

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")])
OPERATIONS = (DOCS / "operations.md").read_text()
API = (DOCS / "api.md").read_text()
PACKAGES = ("controlplane", "router", "billing", "perfmodel", "operators")

Command = tuple[tuple[str, ...], set[str]]
"""The words of a command, and its options."""

# What a shell does to a line of an example that the command parser must not see.
_SHELL = re.compile(r"\s*(\||>|2>|&&|;|#).*$")


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(INFERPLANE_[A-Z_]+)` \| (.*?) \|", OPERATIONS, re.MULTILINE))
    expected = {}
    for name, field in Settings.model_fields.items():
        default = field.default
        text = default.get_secret_value() if hasattr(default, "get_secret_value") else default
        expected[f"INFERPLANE_{name.upper()}"] = "empty" if text in ("", None) else f"`{text}`"
    assert rows == expected


def test_every_environment_variable_that_the_code_names_is_documented() -> None:
    named = set(re.findall(r"INFERPLANE_[A-Z][A-Z_]*[A-Z]", "\n".join(_sources(*PACKAGES, "tests", "Makefile"))))
    assert sorted(name for name in named if f"`{name}`" not in OPERATIONS) == []


def test_every_command_is_documented() -> None:
    table = OPERATIONS.partition("| command | does |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`inferplane ([a-z -]+)`", table)) == {" ".join(path) for path, _ in _commands()}


def test_every_example_command_can_be_parsed() -> None:
    known = dict(_commands())
    problems = [problem for page in PAGES for line in _examples(page) for problem in _misused(page, line, known)]
    assert problems == []


@pytest.mark.parametrize("line", ["inferplane orgz list", "inferplane orgs list --no-such-option", "inferplane orgs"])
def test_a_wrong_example_is_found(line: str) -> None:
    assert list(_misused(ROOT / "README.md", line, dict(_commands())))


def test_every_admin_route_is_documented() -> None:
    app = FastAPI()
    for routes in (tenancy_routes(), catalog_routes(), price_routes(), report_routes()):
        app.include_router(routes)
    made = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    documented = set(re.findall(r"`((?:GET|POST|PATCH|PUT|DELETE) /(?:admin/v1|v1/organization)/[^`]+)`", API))
    assert documented - {"GET /admin/v1/openapi.json"} == made


def test_every_metric_is_documented_with_its_labels() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    rows = dict(re.findall(r"^\| `(inferplane_[a-z_]+)` \| (.*?) \|", OPERATIONS, re.MULTILINE))
    made = {}
    for family in reconcile_families(ReconcileResult(1, 1.0, True, 1, 0, (), 0), now_ns=2):
        made[family.name] = ", ".join(family._labelnames) or "-"
    for metric in vars(metrics).values():
        described = metric.describe()[0]
        labels = [*metric._labelnames]
        if described.name == "inferplane_store_answering":
            labels.append("pid")  # added when the files of several processes are read
        name = described.name + ("_total" if described.type == "counter" else "")
        made[name] = ", ".join(labels) or "-"
    assert rows == made


def test_every_named_state_is_documented() -> None:
    tree = ast.parse((ROOT / "controlplane/app.py").read_text())
    ticks = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".tick")]
    names = {
        key.value
        for tick in ticks
        for argument in tick.args[1:]
        if isinstance(argument, ast.Dict)
        for key in argument.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    assert names, "no call of telemetry.tick with a dict of gauges was found in app.py"
    row = next(line for line in OPERATIONS.splitlines() if line.startswith("| `inferplane_state`"))
    assert sorted(names) == sorted(re.findall(r"`([a-z_]+)`", row)[1:])


@pytest.mark.parametrize(
    ("part", "state"),
    [("keys", FeedState), ("limits", StoreState), ("spool", SpoolState), ("shipper", ShipperStatus)],
)
def test_every_field_of_readyz_is_documented(part: str, state: type) -> None:
    row = next(line for line in OPERATIONS.splitlines() if line.startswith(f"| `{part}` |"))
    documented = set(re.findall(r"`([a-z_]+)`", row)) - {part, "alive"}
    assert documented == {field.name for field in fields(state)}


def test_every_field_of_the_endpoints_file_is_documented() -> None:
    table = OPERATIONS.partition("| field | default | is |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)} == discovery._FIELDS
    assert all(f"`{name}`" in table for name in discovery._SPEED_FIELDS | discovery._TLS_FIELDS)


def test_every_error_code_is_documented() -> None:
    codes = set()
    for source in _sources("controlplane"):
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            codes |= {
                word.value.value
                for word in call.keywords
                if word.arg == "code" and isinstance(word.value, ast.Constant) and isinstance(word.value.value, str)
            }
    assert codes
    assert sorted(code for code in codes if f"`{code}`" not in API) == []


def test_every_core_module_stands_in_the_architecture() -> None:
    text = (DOCS / "architecture.md").read_text()
    modules = [path for package in PACKAGES for path in sorted((ROOT / package).glob("[a-z]*.py"))]
    assert [str(path.relative_to(ROOT)) for path in modules if not re.search(rf"\b{path.name}\b", text)] == []


def test_every_runtime_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (DOCS / "design/0010-libraries.md").read_text()
    names = [name for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for name in row.split(",")]
    listed = {_bare(name) for name in names}
    wanted = {_bare(dependency) for dependency in project["dependencies"]}
    assert listed - {"library", "---"} == wanted


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = page if not path else (page.parent / path).resolve()
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = sorted(_nav_files(config["nav"]))
    pages = sorted(
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] != "changes"
    )
    assert listed == pages


def _bare(requirement: str) -> str:
    """The name of a requirement, without extras and versions."""
    return re.split(r"[\[<>=;~ ]", requirement.strip())[0]


def _nav_files(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from _nav_files(value)
    elif isinstance(nav, list):
        for item in nav:
            yield from _nav_files(item)


def _sources(*places: str) -> list[str]:
    paths = [ROOT / place for place in places]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return [file.read_text() for file in files]


def _commands() -> list[Command]:
    """Every visible command that does something."""
    return list(_leaves(get_command(build_app(command_plugins(), pytest.fail)), ()))


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[Command]:
    """Duck-typed: typer brings a click of its own."""
    if command.hidden:
        return
    children = getattr(command, "commands", None)
    if children is None:
        yield path, {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
        return
    for name, child in children.items():
        yield from _leaves(child, (*path, name))


def _examples(page: Path) -> Iterable[str]:
    """The lines of a page's fenced blocks that call the command."""
    for block in re.findall(r"^```(?:sh|console|bash)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ )?(?:\S+=\S+ )*(?:\.venv/bin/)?(inferplane .*)", line)
            if found:
                yield found.group(1)


def _misused(page: Path, line: str, known: dict[tuple[str, ...], set[str]]) -> Iterator[str]:
    words = shlex.split(_SHELL.sub("", line))[1:]
    if not words or words[0].startswith("-"):
        return
    path = next((tuple(words[:size]) for size in (2, 1) if tuple(words[:size]) in known), None)
    where = f"{page.relative_to(ROOT)}: {line}"
    if path is None:
        yield f"{where}: no such command"
        return
    for word in words[len(path) :]:
        if word.startswith("--") and word.partition("=")[0] not in known[path]:
            yield f"{where}: no option {word}"


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}
