"""A kernel's text as the vendor's compiler takes it: all of its arguments say where they lie.

Of some kernels a few arguments say it and the others do not. The vendor's executor on the CPU takes
these; `CompileModule` of 2026.4.0 does not, for it then asks of the first that they have an axis of
chips and of no argument that it be placed. Where all of them are placed it compiles them. So those
that are not are placed here, each whole on every chip, and the body begins with taking them as they
were; nothing else of the text changes.
"""

from __future__ import annotations

import re
from typing import Final

PLACED: Final = "_placed"
"""What is added to the name of an argument that was not placed before."""

_LAST: Final = re.compile(r"^def \w+<[^>]*>\(\n", re.MULTILINE)
_PLAIN: Final = re.compile(r"(\s+)(\w+): (\[[^\]]*\])/(\w+)(,?)")
_FACT: Final = re.compile(r"\s+(assert |\w+: Axis = )")
"""A line that only says how long an axis is. What comes after may use that."""


def is_mixed(dsl: str) -> bool:
    """Whether some arguments of the last definition are placed and others are not."""
    _, arguments, _ = _parts(dsl)
    plain = sum(_PLAIN.fullmatch(line) is not None for line in arguments)
    return 0 < plain < plain + sum(": dram(" in line for line in arguments)


def labelled(dsl: str) -> str:
    """The text with all arguments of its last definition placed, if some of them are."""
    if not is_mixed(dsl):
        return dsl
    before, arguments, rest = _parts(dsl)
    taken = [_PLAIN.sub(_placed, line) if _PLAIN.fullmatch(line) else line for line in arguments]
    plain = [match for line in arguments if (match := _PLAIN.fullmatch(line))]
    result, begun, body = rest.partition(":\n")
    lines = body.split("\n")
    facts = next((at for at, line in enumerate(lines) if not _FACT.match(line)), len(lines))
    again = [
        f"    {name}: {axes}/{kind} = as_logical({name}{PLACED})"
        for _, name, axes, kind, _ in (match.groups() for match in plain)
    ]
    begin = "\n".join(taken)
    return f"{before}{begin}{result}{begun}" + "\n".join([*lines[:facts], *again, *lines[facts:]])


def _placed(match: re.Match[str]) -> str:
    indent, name, axes, kind, comma = match.groups()
    return f"{indent}{name}{PLACED}: dram([Broadcast] | {axes})/{kind} @ original={axes}{comma}"


def _parts(dsl: str) -> tuple[str, list[str], str]:
    """What is before the arguments of the last definition, these line by line, and the rest."""
    heads = list(_LAST.finditer(dsl))
    if not heads:
        return dsl, [], ""
    begin = heads[-1].end()
    arguments, _, _ = dsl[begin:].partition("\n) -> ")
    return dsl[:begin], arguments.split("\n"), dsl[begin + len(arguments) :]
