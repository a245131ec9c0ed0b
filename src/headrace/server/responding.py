"""One admitted request's response: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

from msgspec import UNSET, UnsetType

from headrace.server import replies
from headrace.server.bodies import Body
from headrace.server.choices import Choice
from headrace.server.http import Send, send_error, send_json
from headrace.server.models import ServedModel
from headrace.server.saying import Piece, Saying
from headrace.server.terminals import Ending

END_WITHIN_S = 5.0  # how long the end of what was withdrawn is waited for, for its usage

_ToldUsage: TypeAlias = replies.Usage | UnsetType | None


class Responding:
    """Says what the choices of one request come to. started: whether the status line was sent."""

    def __init__(
        self,
        request: int,
        kind: Literal["completions", "chat"],
        body: Body,
        model: ServedModel,
        choices: Sequence[Choice],
        news: asyncio.Event,
        send: Send,
    ) -> None:
        self.request = request
        self.started = False
        self._chat = kind == "chat"
        self._body = body
        self._news = news
        self._send = send
        self._sayings = [Saying(choice, model, body.stops) for choice in choices]
        self._role_told: set[int] = set()
        self._head = replies.heading(
            "chatcmpl" if self._chat else "cmpl", model.name, int(time.time()), model.fingerprint
        )

    async def run(self) -> None:
        """Answer in full.

        Raises:
            Ending: a choice failed.
        """
        if self._body.stream:
            await self._stream()
        else:
            await self._whole()

    async def fail(self, ending: Ending) -> None:
        """Tell why it ended: by a status before the first token, else by an event."""
        if self.started:
            await self._event(replies.event_of(ending.body()), last=True)
        else:
            await send_error(self._send, ending)

    def drop(self) -> None:
        """Nobody wants more of it."""
        for saying in self._sayings:
            saying.choice.drop()

    # A whole response.

    async def _whole(self) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._sayings]
        while not all(saying.finished for saying in self._sayings):
            self._news.clear()
            for saying, told in zip(self._sayings, pieces, strict=True):
                while (piece := saying.more()) is not None:
                    told.append(piece)
            if not all(saying.finished for saying in self._sayings):
                await self._news.wait()
        await self._until_over()
        body = replies.json_of(self._reply(pieces))
        self.started = True
        await send_json(self._send, 200, body)

    def _reply(self, pieces: list[list[Piece]]) -> replies.Completion | replies.Chat:
        joined = [_joined(each) for each in pieces]
        usage = self._usage()
        if not self._chat:
            texts = [self._completion_choice(index, piece) for index, piece in enumerate(joined)]
            return replies.completion(self._head, texts, usage)
        answers = [
            replies.ChatChoice(
                index,
                replies.Answer(piece.text),
                self._chat_logprobs(piece),
                piece.finish_reason,
            )
            for index, piece in enumerate(joined)
        ]
        return replies.chat(self._head, answers, usage)

    # A stream.

    async def _stream(self) -> None:
        await self._until_begun()
        self.started = True
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        headers = [kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while not all(saying.finished for saying in self._sayings):
            self._news.clear()
            told, failure = self._news_told()
            if told:
                await self._event(told)
            if failure is not None:
                raise failure
            if not told and not all(saying.finished for saying in self._sayings):
                await self._news.wait()
        last = b""
        if self._body.streams_usage:
            await self._until_over()
            usage = self._usage()
            make = replies.chat_chunk if self._chat else replies.completion
            last = replies.event_of(make(self._head, (), usage))
        await self._event(last + replies.DONE, last=True)

    def _news_told(self) -> tuple[bytes, Ending | None]:
        """The events of what has come, and what failed after it."""
        told: list[bytes] = []
        try:
            for index, saying in enumerate(self._sayings):
                if (piece := saying.more()) is not None:
                    told.append(replies.event_of(self._chunk(index, piece)))
        except Ending as exc:
            return b"".join(told), exc
        return b"".join(told), None

    async def _until_begun(self) -> None:
        while True:
            self._news.clear()
            failed = next((s.choice.failure for s in self._sayings if s.choice.failure), None)
            if failed is not None:
                raise failed
            if any(saying.begun for saying in self._sayings):
                return
            if not any(saying.begun for saying in self._sayings):
                await self._news.wait()

    async def _until_over(self) -> None:
        """An owner tells what it had kept of a prompt with its end, also of what was withdrawn."""
        with suppress(TimeoutError):  # an owner that is stuck by then holds up no answer
            async with asyncio.timeout(END_WITHIN_S):
                while not all(saying.choice.over for saying in self._sayings):
                    self._news.clear()
                    if not all(saying.choice.over for saying in self._sayings):
                        await self._news.wait()

    def _chunk(self, index: int, piece: Piece) -> replies.Completion | replies.ChatChunk:
        usage: _ToldUsage = UNSET
        if self._body.streams_usage_always:
            usage = self._usage()
        elif self._body.streams_usage:
            usage = None
        if not self._chat:
            choice = self._completion_choice(index, piece)
            return replies.completion(self._head, (choice,), usage)
        first = index not in self._role_told
        self._role_told.add(index)
        said = replies.chat_piece(
            index,
            piece.text,
            first=first,
            logprobs=self._chat_logprobs(piece),
            finish_reason=piece.finish_reason,
        )
        return replies.chat_chunk(self._head, (said,), usage)

    def _completion_choice(self, index: int, piece: Piece) -> replies.CompletionChoice:
        logprobs = None
        if self._body.num_logprobs is not None:
            logprobs = replies.completion_logprobs(piece.scored, piece.offset)
        return replies.CompletionChoice(index, piece.text, logprobs, piece.finish_reason)

    def _chat_logprobs(self, piece: Piece) -> replies.ChatLogprobs | None:
        if self._body.num_logprobs is None:
            return None
        return replies.chat_logprobs(piece.scored)

    def _usage(self) -> replies.Usage:
        """The prompts once, whatever n is; cached and transferred as their first choices tell."""
        firsts = [saying.choice for saying in self._sayings[:: self._body.n]]
        prompt = sum(choice.job.num_prompt_tokens for choice in firsts)
        completion = sum(saying.num_tokens for saying in self._sayings)
        cached = sum(choice.num_cached for choice in firsts)
        transferred = sum(choice.num_transferred for choice in firsts)
        return replies.usage_of(prompt, completion, cached=cached, transferred=transferred)

    async def _event(self, content: bytes, *, last: bool = False) -> None:
        body = {"type": "http.response.body", "body": content, "more_body": not last}
        await self._send(body)


def _joined(pieces: Sequence[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces)
    scored = tuple(each for piece in pieces for each in piece.scored)
    return Piece(text, scored, 0, pieces[-1].finish_reason)
