"""Plots as files: a page that needs no network, a picture where a browser is, and one sentence where not.

Owns: the two formats. Does not own: what commands draw.
"""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import pytest

from perfmodel.adapters import plots
from perfmodel.adapters.plots import check_plot_path, write_plot
from perfmodel.errors import ConfigError, PlotError

# A browser's stand-in where none is installed: it writes what it is told to, as Chromium's command line does.
FAKE_BROWSER = """#!/bin/sh
for argument in "$@"; do
  case "$argument" in --screenshot=*) printf '\\211PNG drawn' > "${argument#--screenshot=}";; esac
done
"""


@pytest.fixture
def figure() -> go.Figure:
    return go.Figure(go.Scatter(x=[1, 2, 3], y=[4, 1, 6], name="TTFT"))


def browser(folder: Path, text: str) -> None:
    path = folder / "chromium"
    path.write_text(text)
    path.chmod(0o755)


def test_a_page_is_self_contained(figure: go.Figure, tmp_path: Path) -> None:
    write_plot(figure, tmp_path / "plot.html")
    text = (tmp_path / "plot.html").read_text()
    assert "TTFT" in text and len(text) > 1_000_000, "the library is in the page"
    assert 'src="http' not in text


def test_a_picture_is_drawn_by_a_browser_on_the_path(
    figure: go.Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser(tmp_path, FAKE_BROWSER)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    write_plot(figure, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_browser_the_package_is_named(
    figure: go.Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlotError, match=r"install Debian's package chromium, or name a \.html file"):
        write_plot(figure, tmp_path / "plot.png")
    with pytest.raises(PlotError):
        check_plot_path(tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("#!/bin/sh\necho broken >&2\nexit 3\n", r"drew nothing \(exit 3\): broken"),
        ("#!/bin/sh\nexit 0\n", r"drew nothing \(exit 0\): no message"),
        ("#!/bin/sh\nexec sleep 60\n", "drew nothing within 0 s"),
    ],
)
def test_a_browser_that_draws_nothing_is_one_sentence(
    script: str, sentence: str, figure: go.Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if "sleep" in script:
        monkeypatch.setattr(plots, "_BROWSER_WAIT_S", 0.3)
    with pytest.raises(PlotError, match=sentence):
        write_plot(figure, tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("name", "sentence"), [("plot.svg", r"ends in \.html or \.png"), ("none/plot.html", "a folder that exists")]
)
def test_another_name_is_one_sentence(name: str, sentence: str, figure: go.Figure, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        write_plot(figure, tmp_path / name)


def test_what_is_no_file_that_can_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    folder = tmp_path / "folder.html"
    folder.mkdir()
    with pytest.raises(ConfigError, match="expected a file that can be written"):
        check_plot_path(folder)


def test_without_plotly_the_way_to_get_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(PlotError, match="from a checkout `make setup` installs it"):
        check_plot_path(tmp_path / "plot.html")


@pytest.mark.parametrize("drawn", [go.Figure(), go.Figure(go.Scatter(x=[], y=[], name="TTFT")), go.Figure(go.Box())])
def test_a_figure_without_a_point_leaves_no_file(drawn: go.Figure, tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"nothing to draw, .*plot\.html is not written"):
        write_plot(drawn, tmp_path / "plot.html")
    assert not (tmp_path / "plot.html").exists()


def test_a_figure_of_values_alone_is_drawn(tmp_path: Path) -> None:
    write_plot(go.Figure(go.Box(y=[1, 2, 3])), tmp_path / "plot.html")
    assert (tmp_path / "plot.html").exists()
