"""The root command: how plug-ins are loaded, and what happens when one is broken.

Owns: `controlplane.__main__`. Does not own: any sub-command.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

from controlplane.__main__ import COMMAND_GROUP, build_app, command_plugins


def _greet(app: typer.Typer) -> None:
    @app.command()
    def greet() -> None:
        typer.echo("hello")


def _raises(app: typer.Typer) -> None:
    raise RuntimeError("bad plug-in")


def _plugin(name: str, function: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{function}", COMMAND_GROUP)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (_plugin("broken", "_raises"), "RuntimeError: bad plug-in"),
        (_plugin("broken", "_absent"), "AttributeError"),
        (EntryPoint("broken", "xml.no_such:f", COMMAND_GROUP), "ModuleNotFoundError"),
    ],
    ids=["raises", "no such function", "no such module"],
)
def test_a_broken_plugin_costs_one_line_and_none_of_the_others(broken: EntryPoint, told: str) -> None:
    complaints: list[str] = []
    app = build_app([broken, _plugin("greeter", "_greet")], complaints.append)
    assert len(complaints) == 1
    assert complaints[0].count("\n") == 0
    assert "'broken'" in complaints[0]
    assert told in complaints[0]
    assert CliRunner().invoke(app, ["greet"]).output == "hello\n"


def test_the_version_is_told_and_nothing_else_runs() -> None:
    result = CliRunner().invoke(build_app([], print), ["--version"])
    assert (result.exit_code, result.output) == (0, "inferplane 0.1.0\n")


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(build_app([_plugin("greeter", "_greet")], print), ["no-such-command"])
    assert result.exit_code == 2


def test_plugins_come_in_the_order_of_their_names() -> None:
    names = [plugin.name for plugin in command_plugins()]
    assert names == sorted(names)
    assert {"controlplane", "billing", "router", "perfmodel"} <= set(names)


def test_the_module_is_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "controlplane", "--version"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "inferplane 0.1.0\n")
