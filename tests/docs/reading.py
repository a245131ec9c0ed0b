"""What the tests of the docs read in them: blocks of code, links, and references to code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headrace"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *[page for page in [ROOT / "README.md"] if page.exists()]]

NOT_RUN = "<!-- not run -->"

_FILE_MARK = re.compile(r"<!-- file: (?P<name>[\w.]+) -->")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of Python: its code, the line it begins on, and the file it is, if it is one."""

    code: str
    line: int
    file: str | None


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page that are run, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    begun: int | None = None
    for number, text in enumerate(lines):
        if begun is None and text.startswith("```python"):
            begun = number
        elif begun is not None and text == "```":
            before = lines[begun - 1] if begun else ""
            mark = _FILE_MARK.fullmatch(before)
            if before != NOT_RUN:
                code = "\n".join(lines[begun + 1 : number]) + "\n"
                found.append(Block(code, begun + 1, mark and mark["name"]))
            begun = None
    assert begun is None, f"{page.name}:{begun} is a block without an end"
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def section(page: Path, heading: str) -> str:
    """The prose under a second-level heading, up to the next one."""
    _, _, rest = prose(page).partition(f"\n## {heading}\n")
    assert rest, f"{page.name} has no section {heading}"
    return rest.partition("\n## ")[0]


def links(page: Path) -> list[str]:
    """The targets of a page's links that are no URL."""
    targets = [match["target"] for match in _LINK.finditer(prose(page))]
    return [target for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    """What `page.md#anchor` may name, by GitHub's rule."""
    headings = [match["text"].lower() for match in _HEADING.finditer(prose(page))]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in headings}


def code_spans(page: Path) -> list[str]:
    """What stands between single backticks in a page's prose."""
    return _CODE_SPAN.findall(prose(page))


def unresolved(reference: str) -> str | None:
    """Why a code span names nothing that is there; None if it does, or is no reference.

    References are `FILE` and `FILE:NAME` under src/headrace or the root, `headrace.MODULE.NAME`,
    `CLASS.ATTRIBUTE` of any class of the package, and `CLASS` or `CONSTANT`.
    """
    path, _, name = reference.partition(":")
    if re.fullmatch(r"[\w./-]+\.(py|md|toml|txt|jsonl)|[\w./-]+/", path):
        return _unresolved_path(path, name)
    dotted = reference.split("(")[0]
    if not re.fullmatch(r"\w+(\.\w+)*", dotted):
        return None
    first, *rest = dotted.split(".")
    if first == "headrace" and rest:
        return _unresolved_module(rest)
    if first[:1].isupper() and len(first) > 1 and not _is_defined(first, rest):
        return f"no class or constant {dotted} in src/headrace"
    return None


def _unresolved_path(path: str, name: str) -> str | None:
    candidates = [PACKAGE / path, ROOT / path, ROOT / "docs" / path]
    file = next((candidate for candidate in candidates if candidate.exists()), None)
    if file is None:
        return f"no file {path}"
    if name and name not in _names(file):
        return f"{path} has no {name}"
    return None


def _unresolved_module(parts: list[str]) -> str | None:
    if parts[0] in _names(PACKAGE / "__init__.py") | _exported():
        return None
    for cut in range(len(parts), 0, -1):
        stem = PACKAGE.joinpath(*parts[:cut])
        file = stem.with_suffix(".py") if stem.with_suffix(".py").exists() else stem / "__init__.py"
        if file.exists():
            name = ".".join(parts[cut:])
            return None if not name or name in _names(file) else f"{file.name} has no {name}"
    return f"no module headrace.{'.'.join(parts)}"


def _exported() -> set[str]:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    lists = [node for node in tree.body if isinstance(node, ast.Assign)]
    names = next(node.value for node in lists if ast.unparse(node.targets[0]) == "__all__")
    return set(ast.literal_eval(names))


def _is_defined(first: str, rest: list[str]) -> bool:
    return ".".join([first, *rest]) in _all_names()


@cache
def _all_names() -> frozenset[str]:
    """`NAME` and `CLASS.ATTRIBUTE` of every module, inherited attributes included."""
    names: set[str] = set()
    bases: dict[str, set[str]] = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        names |= _names(file)
        for node in _tree(file).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
    inherited = {
        f"{name}.{attribute.partition('.')[2]}"
        for name, parents in bases.items()
        for attribute in names
        if attribute.partition(".")[0] in parents and "." in attribute
    }
    members = {name.partition(".")[2] for name in names if name.partition(".")[2].isupper()}
    return frozenset(names | inherited | members)


@cache
def _names(file: Path) -> frozenset[str]:
    """What a module defines: `NAME`, and `CLASS.ATTRIBUTE` for methods, fields and members."""
    found: set[str] = set()
    for node in _tree(file).body:
        for name in _bound(node):
            found.add(name)
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                found.update(f"{node.name}.{name}" for name in _bound(inner))
    return frozenset(found)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement gives a meaning to; `self.NAME = ...` gives one to NAME."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id
            elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr
