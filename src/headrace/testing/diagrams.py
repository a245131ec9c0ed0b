"""The state diagrams of the docs, made from the machines' tables and never drawn by hand.

`python -m headrace.testing.diagrams` prints them; `--write` puts each between its markers in a
Markdown file, `--check` exits 1 if the file does not hold them as they are now. The markers are
`<!-- diagram: NAME -->` and `<!-- /diagram -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from headrace.errors import Refused
from headrace.protocol.handoff import Handoff
from headrace.protocol.slots import Slot
from headrace.protocol.source import SourceAttempt

Table = Mapping[Enum, Mapping[Enum, Enum]]

DEFAULT_FILE: Final = Path("docs/lifecycle.md")
TABLES: Final[dict[str, Table]] = {
    "slot": Slot.TABLE,
    "hand-off": Handoff.TABLE,
    "source attempt": SourceAttempt.TABLE,
}

_BLOCK: Final = re.compile(
    r"(?P<begin><!-- diagram: (?P<name>[^>]*?) -->\n).*?(?P<end><!-- /diagram -->)", re.DOTALL
)


class Arrow(NamedTuple):
    """All events that move one state to one other, or leave it where it is."""

    before: Enum
    after: Enum
    events: tuple[Enum, ...]


def arrows(table: Table) -> list[Arrow]:
    """The table's transitions in its own order, those between the same two states joined."""
    out = []
    for before, transitions in table.items():
        for after in dict.fromkeys(transitions.values()):
            events = tuple(event for event, target in transitions.items() if target is after)
            out.append(Arrow(before, after, events))
    return out


def diagram(table: Table) -> str:
    """The table as a Mermaid state diagram.

    The first state is where the machine begins; a state that no event leaves is where it ends.
    """
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table)).name}"]
    for before, after, events in arrows(table):
        names = ", ".join(event.name for event in events)
        lines.append(f"    {before.name} --> {after.name} : {names}")
    for state, transitions in table.items():
        if all(after is state for after in transitions.values()):
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)


def filled(text: str) -> str:
    """`text` with every diagram between its markers as it is now.

    Raises:
        Refused: a diagram has no markers, has them twice, or markers name no machine.
    """
    names = [match["name"] for match in _BLOCK.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise Refused(f"the file has markers for {names}, expected one each of {list(TABLES)}")
    return _BLOCK.sub(lambda match: f"{match['begin']}{_fenced(match['name'])}{match['end']}", text)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 as it should be, 1 the file is out of date, 2 its markers are wrong."""
    parser = argparse.ArgumentParser(prog="headrace.testing.diagrams", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="exit 1 if the file is out of date")
    mode.add_argument("--write", action="store_true", help="bring the file up to date")
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE)
    parsed = parser.parse_args(arguments)
    if not (parsed.check or parsed.write):
        print("\n".join(f"{name}\n{_fenced(name)}" for name in TABLES), end="")
        return 0
    try:
        text = parsed.file.read_text(encoding="utf-8")
        wanted = filled(text)
    except (OSError, Refused) as exc:
        print(f"{parsed.file}: {exc}", file=sys.stderr)
        return 2
    if parsed.write:
        parsed.file.write_text(wanted, encoding="utf-8")
    elif text != wanted:
        print(
            f"{parsed.file} is out of date: run python -m headrace.testing.diagrams --write",
            file=sys.stderr,
        )
        return 1
    return 0


def _fenced(name: str) -> str:
    return f"```mermaid\n{diagram(TABLES[name])}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
