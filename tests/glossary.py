"""Writes the second part of docs/glossary.md: every public class of the cores with the first sentence of its docstring.

Owns: that part, from its marker to the end of the file. Does not own: the terms above it, which people write.
Run it with `make glossary`; `test_tidy.py` fails when a class is in neither part.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tidy_rules import PACKAGES, Source

# Everything below this line is generated.
MARKER = "<!-- Below: written by `make glossary`. -->"


def public_classes(source: Source) -> list[ast.ClassDef]:
    """The classes of a core that other modules may use."""
    if not source.is_core:
        return []
    return [node for node in source.tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def first_sentence(docstring: str) -> str:
    """Up to the first full stop that ends a sentence, on one line."""
    paragraph = " ".join(docstring.split("\n\n", maxsplit=1)[0].split())
    ended = re.search(r"(?<=[\w)`\]])[.:;](?=\s+[A-Z`]|$)", paragraph)
    return (paragraph[: ended.start()] if ended else paragraph) + "."


def class_list(sources: list[Source]) -> str:
    """Markdown: a heading for each package and a line for each class."""
    lines = [MARKER, "", "# Classes of the cores"]
    for package in PACKAGES:
        found = [
            f"- **{node.name}** (`{'.'.join(source.parts[1:])}`): {first_sentence(ast.get_docstring(node) or '')}"
            for source in sorted(sources, key=lambda source: source.path)
            if source.parts[0] == package
            for node in public_classes(source)
        ]
        if found:
            lines += ["", f"## {package}", "", *found]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the file."""
    from tests.test_tidy import ROOT, SOURCES

    glossary: Path = ROOT / "docs/glossary.md"
    written = glossary.read_text().split(MARKER)[0].rstrip() + "\n\n"
    glossary.write_text(written + class_list(SOURCES))


if __name__ == "__main__":
    main()
