"""What a choice says: from its tokens to pieces of text, with logprobs and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.engine.streamed_text import TextStream
from headrace.messages import Token
from headrace.server.choices import Choice
from headrace.server.models import ServedModel
from headrace.server.replies import FinishReason, Scored


class Piece(NamedTuple):
    """More of a choice. offset: characters of its tokens before these; finish_reason: its last."""

    text: str
    scored: tuple[Scored, ...]
    offset: int
    finish_reason: FinishReason | None


class Saying:
    """The text of one choice as its tokens come, up to a stop string."""

    def __init__(self, choice: Choice, model: ServedModel, stops: Sequence[str]) -> None:
        self.choice = choice
        self.num_tokens = 0
        self.finished = False
        self._codec = model.codec
        self._text = TextStream(model.codec, stops)
        self._last = -1
        self._offset = 0

    def more(self) -> Piece | None:
        """What has come since the last call; None if nothing is to be told yet.

        Raises:
            Ending: the choice failed, and all that came before was told.
        """
        if self.finished:
            return None
        text, scored, offset = "", list[Scored](), self._offset
        while not self._text.stopped and (token := self.choice.take()) is not None:
            self.num_tokens += 1
            self._last = token.token
            text += self._text.push(token.token)
            if token.logprob is not None:
                scored.append(self._scored(token, token.logprob))
        if self._text.stopped:
            self.choice.drop()  # the rest is wanted by nobody
            return self._finish(text, scored, offset, "stop")
        if self.choice.over:
            if self.choice.failure is None:
                reason: FinishReason = "stop" if self._ended_itself() else "length"
                return self._finish(text + self._text.finish(), scored, offset, reason)
            if not text and not scored:
                raise self.choice.failure
        return Piece(text, tuple(scored), offset, None) if text or scored else None

    @property
    def begun(self) -> bool:
        """Whether there is a first token, or an end without one."""
        return self.choice.begun or (self.choice.over and self.choice.failure is None)

    def _ended_itself(self) -> bool:
        return self._last in self.choice.options.stop_tokens

    def _finish(self, text: str, scored: list[Scored], offset: int, reason: FinishReason) -> Piece:
        self.finished = True
        return Piece(text, tuple(scored), offset, reason)

    def _scored(self, token: Token, logprob: float) -> Scored:
        said = self._codec.text_of(token.token)
        self._offset += len(said)
        top = tuple((self._codec.text_of(other), value) for other, value in token.top)
        return Scored(said, logprob, top)
