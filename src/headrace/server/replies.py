"""What clients are told: whole replies, the chunks of a stream, and how a stream is framed.

The shapes are OpenAI's. Of ours is only `transferred_tokens`: the prompt's positions whose cells a
source computed and sent, beside `cached_tokens`, which the decoder had kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace.server.terminals import ErrorBody

FinishReason: TypeAlias = Literal["stop", "length"]
IdKind: TypeAlias = Literal["cmpl", "chatcmpl"]

DONE: Final = b"data: [DONE]\n\n"
"""What ends every stream that did not fail."""

_LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"


class PromptDetails(Struct, frozen=True):
    """cached_tokens: positions taken from a kept prompt; transferred_tokens: sent by a source."""

    cached_tokens: int
    transferred_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a request: the prompt once, the choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Scored(Struct, frozen=True):
    """One token with its logprob, and (text, logprob) of the likeliest in its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class CompletionLogprobs(Struct, frozen=True):
    """Of the tokens of one choice or chunk; text_offset: characters before each in the choice."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    """A token that might have been; bytes: None if it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    """A token of a chat's answer; bytes: None if it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Of the tokens of one choice or chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(Struct, frozen=True):
    """One text, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Answer(Struct, frozen=True):
    """What the model said."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    """One answer."""

    index: int
    message: Answer
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class Delta(Struct, frozen=True):
    """A piece of an answer; role: with the first one only."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class Heading(Struct, frozen=True):
    """What all chunks of a reply have in common. created: seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Completion(Struct, frozen=True, kw_only=True):
    """A reply of /v1/completions, whole or a chunk. usage: left out, or null until the last one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Chat(Struct, frozen=True, kw_only=True):
    """A whole reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChoice]
    usage: Usage


class ChatChunk(Struct, frozen=True, kw_only=True):
    """A chunk of a stream of /v1/chat/completions; usage as in `Completion`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True):
    """A model that is served; max_model_len: positions of its context here."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "headrace"


class ModelList(Struct, frozen=True):
    """The reply of /v1/models."""

    data: Sequence[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(Struct, frozen=True):
    """The reply of /tokenize."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | None = None


Reply: TypeAlias = Completion | Chat | ChatChunk | ModelList | ModelCard | Tokenized | ErrorBody


def heading(kind: IdKind, model: str, created: int, fingerprint: str) -> Heading:
    """The heading of a new reply, with an id that nothing can be guessed from."""
    return Heading(f"{kind}-{secrets.token_hex(16)}", created, model, fingerprint)


def usage_of(prompt: int, completion: int, *, cached: int = 0, transferred: int = 0) -> Usage:
    """The usage of a request, all counts in tokens."""
    details = PromptDetails(cached, transferred)
    return Usage(prompt, completion, prompt + completion, details)


def completion(
    head: Heading,
    choices: Sequence[CompletionChoice],
    usage: Usage | UnsetType | None = UNSET,
) -> Completion:
    """A whole completion, or a chunk; no choices: the last chunk, which holds the usage."""
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=usage,
    )


def chat(head: Heading, choices: Sequence[ChatChoice], usage: Usage) -> Chat:
    """A whole chat completion."""
    return Chat(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=usage,
    )


def chat_chunk(
    head: Heading,
    choices: Sequence[ChatChunkChoice],
    usage: Usage | UnsetType | None = UNSET,
) -> ChatChunk:
    """A chunk of a chat completion; no choices: the last one, which holds the usage."""
    return ChatChunk(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=usage,
    )


def chat_piece(
    index: int,
    text: str,
    *,
    first: bool = False,
    logprobs: ChatLogprobs | None = None,
    finish_reason: FinishReason | None = None,
) -> ChatChunkChoice:
    """A piece of an answer: the first tells the role, the last may have no text."""
    delta = Delta(role="assistant" if first else UNSET, content=text if text or first else UNSET)
    return ChatChunkChoice(index, delta, logprobs, finish_reason)


def completion_logprobs(scored: Sequence[Scored], offset: int = 0) -> CompletionLogprobs:
    """Logprobs as completions tell them; offset: characters of the choice's tokens before."""
    offsets = []
    for each in scored:
        offsets.append(offset)
        offset += len(each.text)
    return CompletionLogprobs(
        [each.text for each in scored],
        [_finite(each.logprob) for each in scored],
        [_by_text(each) for each in scored],
        offsets,
    )


def chat_logprobs(scored: Sequence[Scored]) -> ChatLogprobs:
    """Logprobs as chats tell them."""
    return ChatLogprobs(
        [
            TokenLogprob(
                each.text,
                _finite(each.logprob),
                _bytes_of(each.text),
                [TopLogprob(text, _finite(value), _bytes_of(text)) for text, value in each.top],
            )
            for each in scored
        ]
    )


def json_of(reply: Reply) -> bytes:
    """The body of a reply."""
    return msgspec.json.encode(reply)


def event_of(reply: Reply) -> bytes:
    """A reply as one event of a stream; an error event is an `ErrorBody`."""
    return b"data: " + msgspec.json.encode(reply) + b"\n\n"


def _by_text(scored: Scored) -> dict[str, float]:
    """The likeliest and the token itself; of those that read alike, the likeliest or itself."""
    found: dict[str, float] = {}
    for text, value in scored.top:
        found.setdefault(text, _finite(value))
    found[scored.text] = _finite(scored.logprob)
    return found


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _bytes_of(text: str) -> list[int] | None:
    return None if _UNFINISHED in text else list(text.encode())
