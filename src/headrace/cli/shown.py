"""The text of a request as a user sees it: printed as it comes, ended before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.engine.text import TextCodec
from headrace.runtime.router import RouteResult

FinishReason: TypeAlias = Literal["stop", "length", "eos"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a codec makes of the first bytes of a character


@dataclass(frozen=True, slots=True)
class Shown:
    """What is told of one request: tokens up to the stop string's last, text up to its beginning.

    finish_reason is None for a request that neither finished nor met a stop string.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason | None

    @property
    def outcome(self) -> str:
        """An end at a stop string is a finish, though the owner was told to cancel the rest."""
        return "cancelled" if self.finish_reason is None else "finished"


def shown_of(
    result: RouteResult, codec: TextCodec, stops: Sequence[str], stop_tokens: Sequence[int]
) -> Shown:
    """Cut a request's tokens and text at the first stop string, and say why it ended."""
    tokens = result.tokens
    for count in range(1, len(tokens) + 1) if stops else ():
        text, stopped = cut_at_stop(codec.decode(tokens[:count]), stops)
        if stopped:
            return Shown(tokens[:count], text, "stop")
    reason: FinishReason | None = None
    if result.ended.outcome == "finished":
        reason = "eos" if tokens and tokens[-1] in stop_tokens else "length"
    return Shown(tokens, codec.decode(tokens) if tokens else "", reason)


class Printer:
    """Takes tokens as they come: prints their text, and ends the request at a stop string.

    Text that could still turn out to begin a stop string, or to be part of a character, is held
    back until it is known not to be, at the latest until `end`.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str], *, echo: bool) -> None:
        self._codec = codec
        self._stops = stops
        self._echo = echo
        self._tokens: list[int] = []
        self._text = ""
        self._printed = 0

    def __call__(self, token: int) -> bool:
        self._tokens.append(token)
        self._text, stopped = cut_at_stop(self._codec.decode(self._tokens), self._stops)
        self._print(len(self._text) if stopped else settled(self._text, self._stops))
        return stopped

    def end(self) -> None:
        """Print what was held back, and end the line."""
        self._print(len(self._text))
        if self._echo and self._tokens:
            print()

    def _print(self, until: int) -> None:
        if self._echo and until > self._printed:
            print(self._text[self._printed : until], end="", flush=True)
            self._printed = until


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """`text` up to the first stop string in it, and whether there was one."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def settled(text: str, stops: Sequence[str]) -> int:
    """How many characters of `text`, which holds no stop string, the next token cannot touch."""
    whole = text.rstrip(_UNFINISHED)
    return min(len(known) - _begun(known, stops) for known in (text, whole))


def _begun(text: str, stops: Sequence[str]) -> int:
    """The length of the longest suffix of `text` that begins a stop string."""
    return max(
        (
            count
            for stop in stops
            for count in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:count])
        ),
        default=0,
    )
