"""The five safety rules (DESIGN.md, part 1), and the error that names the one that was broken."""

from __future__ import annotations

from typing import Final

from headrace.testing.facts import Violation

RULES: Final = {
    0: "the machines do what the second statement of their rules says",
    1: "no partial cache is ever visible",
    2: "no byte of one request reaches another",
    3: "storage is reused only on proof of quiescence",
    4: "every hand-off ends exactly once, within a bound, whoever dies",
    5: "what is published does not depend on the route",
}

_COMMANDS: Final = {  # by words of the finding, the first that it has
    "bytes in one chunk": 0,
    "beyond the budget": 0,
    "nearer to publishing": 0,
    "Publish(": 1,
    "StartImport(": 2,
    "CheckDigest(": 1,
    "Reserve(": 3,
    "StartPrefill(": 3,
    "Retry": 3,
    "Free(": 3,
    "Quarantine(": 3,
    "gives storage back": 3,
    "is over and keeps its storage": 3,
    "no KillSource": 4,
    "KillSource(": 4,
    "SendCancel(": 4,
    "no SendCancel": 4,
    "Report": 4,
    "is complete, and no Publish": 4,
    "deadline": 4,
    "is free, and": 4,
    "never": 4,
}


class Broken(Violation):
    """A safety rule was broken: `number` says which, the text with which facts."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"rule {number} ({RULES[number]}): {text}")
        self.number = number
        self.text = text


def require(number: int, holds: bool, text: str) -> None:
    """Raise `Broken` unless rule `number` holds; build costly texts only where it does not."""
    if not holds:
        raise Broken(number, text)


def attributed(exc: Exception) -> Broken:
    """What the ledger, the rules or a machine raised, as the safety rule that it is about."""
    if isinstance(exc, Broken):
        return exc
    text = str(exc)
    if not isinstance(exc, Violation):
        return Broken(0, f"{type(exc).__name__}: {text}")
    return Broken(next((n for word, n in _COMMANDS.items() if word in text), 0), text)
