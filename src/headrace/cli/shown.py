"""The text of a request as a user sees it: printed as it comes, ended before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.engine.streamed_text import TextStream
from headrace.engine.text import TextCodec
from headrace.runtime.router import RouteResult

FinishReason: TypeAlias = Literal["stop", "length", "eos"]


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
    stream = TextStream(codec, stops)
    text = ""
    for count, token in enumerate(tokens, start=1):
        text += stream.push(token)
        if stream.stopped:
            return Shown(tokens[:count], text, "stop")
    reason: FinishReason | None = None
    if result.ended.outcome == "finished":
        reason = "eos" if tokens and tokens[-1] in stop_tokens else "length"
    return Shown(tokens, text + stream.finish(), reason)


class Printer:
    """Takes tokens as they come: prints their text, and ends the request at a stop string.

    Text that could still turn out to begin a stop string, or to be part of a character, is held
    back until it is known not to be, at the latest until `end`.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str], *, echo: bool) -> None:
        self._stream = TextStream(codec, stops)
        self._echo = echo
        self._any = False

    def __call__(self, token: int) -> bool:
        self._any = True
        self._print(self._stream.push(token))
        return self._stream.stopped

    def end(self) -> None:
        """Print what was held back, and end the line."""
        self._print(self._stream.finish())
        if self._echo and self._any:
            print()

    def _print(self, text: str) -> None:
        if self._echo and text:
            print(text, end="", flush=True)
