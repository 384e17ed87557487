"""Plotly figures as files: one self-contained HTML page, or a PNG that a Chromium on this machine draws of it.

Owns: the two formats, finding the browser, and the sentence when there is none. Does not own: what is drawn; each
command builds its figure. PNG goes through the browser that Debian ships because Plotly's own exporter downloads one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sized
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.errors import ConfigError, PlotError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Commands of Chromium and Chrome, Debian's first.
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The picture in CSS pixels, drawn at twice that for screens and print.
_WIDTH, _HEIGHT, _SCALE = 1000, 600, 2
# A screenshot takes about 2 s; a browser that hangs must not hold up a command for ever.
_BROWSER_WAIT_S = 60.0
# Milliseconds of the page's own clock before the screenshot: Plotly draws after it has loaded.
_DRAW_MS = 5000


def check_plot_path(path: Path) -> None:
    """Raise for a file that cannot be written: called before long work, not after it.

    ConfigError for another suffix or a place where no file can be; PlotError without Plotly, or a browser for a .png.
    """
    if path.suffix not in (".html", ".png"):
        raise ConfigError(f"--plot is {path}; expected a file name that ends in .html or .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot is {path}; expected a folder that exists")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--plot is {path}; expected a file that can be written")
    if find_spec("plotly") is None:
        raise PlotError("--plot needs Plotly, which is not installed; from a checkout `make setup` installs it")
    if path.suffix == ".png":
        _browser()


def write_plot(figure: Figure, path: Path) -> None:
    """Write the figure as .html (works without a network) or .png.

    Raises as `check_plot_path` does, and PlotError for a figure without a point or when the browser draws nothing.
    """
    check_plot_path(path)
    if not any(_has_points(trace.x) or _has_points(trace.y) for trace in figure.data):
        raise PlotError(f"nothing to draw, {path} is not written")
    if path.suffix == ".html":
        path.write_text(_page(figure, fills_window=True), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(prefix="inferplane-plot-") as folder:
        page = Path(folder) / "figure.html"
        page.write_text(_page(figure, fills_window=False), encoding="utf-8")
        drawn = Path(folder) / "figure.png"
        _draw(page, drawn)
        shutil.copyfile(drawn, path)


def _has_points(values: Sized | None) -> bool:
    return values is not None and len(values) > 0


def _page(figure: Figure, *, fills_window: bool) -> str:
    size = ("100%", "100vh") if fills_window else (f"{_WIDTH}px", f"{_HEIGHT}px")
    # `include_plotlyjs=True` puts the library into the page: it opens without a network.
    html = figure.to_html(
        include_plotlyjs=True, full_html=True, default_width=size[0], default_height=size[1],
        config={"displaylogo": False, "displayModeBar": fills_window}, div_id="figure",
    )  # fmt: skip
    return str(html).replace("<body>", '<body style="margin:0">', 1)


def _browser() -> str:
    for name in _BROWSERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise PlotError(
        "a PNG needs Chromium and none is on the PATH; install Debian's package chromium, or name a .html file"
    )


def _draw(page: Path, drawn: Path) -> None:
    command = [
        _browser(), "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
        "--disable-dev-shm-usage",  # containers have 64 MiB there
        "--no-sandbox",  # the page is our own, and the sandbox cannot start in a container or as root
        f"--user-data-dir={page.parent / 'profile'}", f"--window-size={_WIDTH},{_HEIGHT}",
        f"--force-device-scale-factor={_SCALE}", f"--virtual-time-budget={_DRAW_MS}",
        f"--screenshot={drawn}", page.as_uri(),
    ]  # fmt: skip
    try:
        ran = subprocess.run(command, capture_output=True, timeout=_BROWSER_WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PlotError(f"{command[0]} drew nothing within {_BROWSER_WAIT_S:.0f} s; name a .html file") from None
    if ran.returncode or not drawn.is_file() or drawn.stat().st_size == 0:
        said = ran.stderr.decode(errors="replace").strip().splitlines()
        raise PlotError(f"{command[0]} drew nothing (exit {ran.returncode}): {said[-1] if said else 'no message'}")
