"""The command line as a person and a script see it: output, exit codes, the embedded database, no secret twice.

Owns: what `--json` prints and where, the table, exit codes, and that nothing needs to run beside it. Does not own: the
rules behind the commands (test_doors.py). SQLite in a temporary folder, except where PostgreSQL is the point.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from billing.adapters import sql
from controlplane.adapters import cli


class Shell:
    """Runs commands on one data folder."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._app = typer.Typer()
        cli.register(self._app)

    def __call__(self, *words: str, exit_code: int = 0, env: dict[str, str] | None = None) -> Result:
        result = CliRunner().invoke(self._app, [*words, "--data-dir", str(self.data_dir)], env=env)
        assert result.exit_code == exit_code, result.output
        return result


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Commands on a new data folder."""
    return Shell(tmp_path / "data")


@pytest.fixture
def used(shell: Shell) -> Shell:
    """Commands on a data folder that something was made in."""
    shell("orgs", "create", "first")
    return shell


# What can be the first thing that is done: it makes the data folder.
BEGINS = {
    ("orgs", "create"): ("acme",),
    ("keys", "bootstrap-admin"): (),
    ("limits", "set-class"): ("gold", "--outage-policy", "allow"),
    ("models", "set"): ("m", "--served", "big"),
}


def every_other_command() -> Iterator[tuple[str, ...]]:
    """Each command of the groups, with a value for all that it requires."""
    app = typer.Typer()
    cli.register(app)
    for name, group in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined] # a click group
        for command, found in getattr(group, "commands", {}).items():
            if (name, command) in BEGINS:
                continue
            words = [name, command]
            for parameter in found.params:
                if parameter.required:
                    options = parameter.opts[:1] if parameter.param_type_name == "option" else []
                    words += [*options, "1"]
            yield tuple(words)


@pytest.mark.parametrize("words", list(every_other_command()), ids=" ".join)
def test_a_mistyped_data_folder_is_told_and_nothing_is_made(words: tuple[str, ...], shell: Shell) -> None:
    result = shell(*words, exit_code=1)
    assert result.stdout == ""
    assert result.stderr.startswith(f"There is no Inferplane data in {shell.data_dir}; expected the data folder of an")
    assert result.stderr.count("\n") == 1
    assert not shell.data_dir.exists()


def test_a_mistyped_sqlite_url_is_told_and_nothing_is_made(shell: Shell) -> None:
    file = shell.data_dir / "no.db"
    result = shell("orgs", "list", "--database-url", f"sqlite:///{file}", exit_code=1)
    assert result.stderr.startswith(f"There is no Inferplane data in {file}; expected")
    assert not shell.data_dir.exists()


@pytest.mark.parametrize("words", [("orgs", "list"), ("orgs", "create", "a"), ("worker",)], ids=" ".join)
@pytest.mark.parametrize("url", ["foo", "postgresql://me:hush@h:port/x", "mysql://me:hush@h/x", "sqlite:///TEXT"])
def test_a_database_that_cannot_be_used_is_one_sentence(words: tuple[str, ...], url: str, shell: Shell) -> None:
    text = shell.data_dir.with_name("text.db")
    text.write_text("this is no database" * 100)
    url = url.replace("TEXT", str(text))
    env = {"INFERPLANE_REDIS_URL": "redis://127.0.0.1:1/0"}
    typed = shell(*words, "--database-url", url, exit_code=1, env=env)
    assert typed.stderr.startswith("--database-url cannot be used: ")
    named = shell(*words, exit_code=1, env={**env, "INFERPLANE_DATABASE_URL": url})
    assert named.stderr.startswith("INFERPLANE_DATABASE_URL cannot be used: ")
    for result in (typed, named):
        assert result.stderr.count("\n") == 1
        assert "hush" not in result.output


def test_a_database_elsewhere_needs_its_pepper_and_gets_no_new_one(shell: Shell, postgres_url: str) -> None:
    sql.upgrade(postgres_url)
    result = shell("orgs", "list", "--database-url", postgres_url, exit_code=1)
    assert result.stderr.startswith(f"There is no Inferplane data in {shell.data_dir}; expected the file pepper")
    assert not shell.data_dir.exists()
    shell("orgs", "create", "acme", "--database-url", postgres_url)
    assert "acme" in shell("orgs", "list", "--database-url", postgres_url).stdout


@pytest.mark.parametrize(("words", "more"), BEGINS.items(), ids=" ".join)
def test_what_begins_a_house_makes_its_folder(words: tuple[str, ...], more: tuple[str, ...], shell: Shell) -> None:
    shell(*words, *more)
    assert (shell.data_dir / "inferplane.db").exists()


def test_the_first_command_makes_the_embedded_database_and_the_pepper(shell: Shell) -> None:
    result = shell("keys", "bootstrap-admin", "--json")
    made = json.loads(result.stdout)
    assert made["secret"].startswith(made["prefix"] + "-")
    assert made["scopes"] == ["admin", "explain", "usage:read"]
    assert {path.name for path in shell.data_dir.iterdir()} >= {"inferplane.db", "pepper"}
    again = shell("keys", "bootstrap-admin", exit_code=1)
    assert again.stdout == ""
    assert again.stderr.count("\n") == 1
    assert shell("keys", "bootstrap-admin", "--force", "--json").exit_code == 0


def test_a_secret_is_printed_once_and_the_warning_goes_to_stderr(shell: Shell) -> None:
    result = shell("keys", "bootstrap-admin")
    secret = next(line.split()[1] for line in result.stdout.splitlines() if line.startswith("secret"))
    assert "keep it now" in result.stderr
    for words in (("keys", "list"), ("keys", "list", "--json"), ("keys", "show", secret[:11])):
        assert secret not in shell(*words).output
        assert secret[:11] in shell(*words).output


def test_a_list_is_one_line_a_record_and_its_json_has_stable_keys(shell: Shell) -> None:
    for name in ("acme", "rival"):
        shell("orgs", "create", name)
    lines = shell("orgs", "list").stdout.splitlines()
    assert lines[0].split() == ["org_id", "name", "tenant_class", "created_at_s", "revoked_at_s"]
    assert [line.split()[1] for line in lines[1:]] == ["acme", "rival"]
    page = json.loads(shell("orgs", "list", "--json", "--limit", "1").stdout)
    assert set(page) == {"data", "next_after"}
    assert set(page["data"][0]) == {"org_id", "name", "tenant_class", "created_at_s", "revoked_at_s"}
    assert page["next_after"] == page["data"][0]["org_id"]


@pytest.mark.parametrize(
    ("words", "exit_code", "reason"),
    [
        (("orgs", "show", "none"), 1, "No org 'none'; expected the id or name of one (see `inferplane orgs list`)."),
        (("projects", "show", "web"), 1, "No project 'web'; expected its id, or ORG/PROJECT."),
        (("keys", "create", "--project", "first"), 1, "No project 'first'; expected its id, or ORG/PROJECT."),
        (("keys", "show", "ip-x"), 1, "No key 'ip-x'; expected its id or public prefix (see `inferplane keys list`)."),
        (("orgs", "set-class", "first", "nope"), 1, "tenant_class is 'nope'; no such class (see `inferplane limits"),
        (("orgs", "create", "b", "--class", "nope"), 1, "--class is 'nope'; no such class (see `inferplane limits"),
        (("keys", "create", "--project", "a/b", "--scope", "x"), 2, "--scope is 'x'; expected one of"),
        (("limits", "set", "--dimension", "x", "--amount", "1", "--org", "first"), 2, "--dimension is 'x'; expected"),
        (("orgs", "create", "a/b"), 2, "name is 'a/b'"),
        (("limits", "set", "--dimension", "requests", "--amount", "1"), 2, "0 owners were given"),
        (("keys", "rotate", "ip-aaaaaaaa", "--overlap", "soon"), 2, "--overlap is 'soon'"),
        (("orgs", "list", "--limit", "0"), 2, "--limit is 0; expected a whole number from 1 to 1000."),
        (("orgs", "create"), 2, "Missing argument"),
    ],
)
def test_exit_codes_and_one_line_reasons(used: Shell, words: tuple[str, ...], exit_code: int, reason: str) -> None:
    result = used(*words, exit_code=exit_code)
    assert reason in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_postgresql_is_not_migrated_behind_its_owners_back(shell: Shell, postgres_url: str) -> None:
    result = shell("orgs", "list", "--database-url", postgres_url, exit_code=1)
    assert "inferplane db upgrade" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_pepper_that_is_open_to_others_is_refused(shell: Shell) -> None:
    shell("orgs", "create", "acme")
    (shell.data_dir / "pepper").chmod(0o644)
    assert "chmod 600" in shell("orgs", "list", exit_code=1).stderr


def test_the_help_imports_no_database(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys, typer\nfrom controlplane.adapters import cli\ncli.register(typer.Typer())\n"
        "assert 'sqlalchemy' not in sys.modules and 'fastapi' not in sys.modules, 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=60)
