"""What clients ask for: the bodies of /v1/completions, /v1/chat/completions and /tokenize.

A body is refused as `Ending(Terminal.INVALID)` with the field at fault; none of its fields is
ignored. As OpenAI's and vLLM's servers do, a request that names no temperature samples at 1.0.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.errors import Refused
from headrace.geometry import MAX_POSITIONS
from headrace.messages import MAX_LOGPROBS, AskedRoute, OnFailure, PrefixAsked, Sampling
from headrace.runtime.requests import RequestOptions
from headrace.server.config import RequestConfig
from headrace.server.fields import (
    NEUTRAL_OF_CHAT,
    NEUTRAL_OF_COMPLETIONS,
    NEUTRAL_OF_MESSAGES,
    converted,
    invalid,
    object_of,
    struct_of,
)
from headrace.server.terminals import Ending

MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 256
MAX_MESSAGES: Final = 4096
MAX_SEED: Final = (1 << 63) - 1
_MAX_CHOICES: Final = 128  # of any configuration

_Tokens: TypeAlias = Annotated[int, Meta(ge=1, lt=MAX_POSITIONS)]
_Stop: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
_TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Ids: TypeAlias = Annotated[list[_TokenId], Meta(min_length=1)]
_Label: TypeAlias = Annotated[str, Meta(max_length=512)]
Prompt: TypeAlias = "str | array[int]"


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage; continuous_usage_stats: with each chunk too."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class _Asked(Struct, frozen=True, kw_only=True):
    """What completions and chats have in common; None is what the client left out.

    user, safety_identifier, prompt_cache_key: labels, of no effect. top_k: -1 and 0 cut nothing.
    ignore_eos: go on where the model ends its text. route and what follows: headrace's own.
    """

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    n: Annotated[int, Meta(ge=1, le=_MAX_CHOICES)] = 1
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 32)] = 0
    max_tokens: _Tokens | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: _Label | None = None
    safety_identifier: _Label | None = None
    prompt_cache_key: _Label | None = None
    route: AskedRoute | None = None
    group_layers: _Tokens | None = None
    chunk: Annotated[int, Meta(ge=0, lt=MAX_POSITIONS)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    prefix: PrefixAsked | None = None
    on_failure: OnFailure | None = None
    digest: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def asked_max_tokens(self) -> int | None:
        """How many tokens a choice may have at most, if the client says so."""
        return self.max_tokens

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, but for the seed, which differs between choices."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=max(0, self.top_k))

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def streams_usage_always(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(_Asked, frozen=True, kw_only=True):
    """POST /v1/completions. prompt: a text or its ids, or several of them."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts, each a text or ids; choice i x n + j is the j-th of prompt i."""
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt

    @property
    def num_choices(self) -> int:
        """How many texts are asked for."""
        return len(self.prompts) * self.n

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each, None for no logprobs at all."""
        return self.logprobs


class Message(Struct, frozen=True, kw_only=True):
    """One message of a conversation, as a chat template takes it."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(_Asked, frozen=True, kw_only=True):
    """POST /v1/chat/completions. max_completion_tokens: another name of max_tokens."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def asked_max_tokens(self) -> int | None:
        """How many tokens a choice may have at most, if the client says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_choices(self) -> int:
        """How many texts are asked for."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each, None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /tokenize: a prompt's ids, or those of a conversation. model: None for the only one."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @property
    def adds_special(self) -> bool:
        """Whether ids are added around the text; a chat template writes them itself."""
        if self.add_special_tokens is None:
            return self.prompt is not None
        return self.add_special_tokens


Body: TypeAlias = CompletionBody | ChatBody


def completion_of(raw: bytes) -> CompletionBody:
    """The body of a completion.

    Raises:
        Ending: as INVALID, with the field at fault.
    """
    told = object_of(raw)
    if type(told.get("best_of")) is int and told["best_of"] == told.get("n"):
        del told["best_of"]  # the best n of n are all of them
    body = struct_of(told, CompletionBody, NEUTRAL_OF_COMPLETIONS)
    prompts = _prompts_of(body.prompt)
    _check_stream(body)
    return replace(body, prompt=prompts)


def chat_of(raw: bytes) -> ChatBody:
    """The body of a chat completion.

    Raises:
        Ending: as INVALID, with the field at fault.
    """
    told = object_of(raw)
    _read_messages(told)
    body = struct_of(told, ChatBody, NEUTRAL_OF_CHAT)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", field="top_logprobs")
    if None not in (one := (body.max_tokens, body.max_completion_tokens)) and len(set(one)) > 1:
        raise invalid(
            "max_tokens and max_completion_tokens differ; give one of them", field="max_tokens"
        )
    _check_stream(body)
    return body


def tokenize_of(raw: bytes) -> TokenizeBody:
    """The body of a question for ids.

    Raises:
        Ending: as INVALID, with the field at fault.
    """
    told = object_of(raw)
    _read_messages(told)
    body = struct_of(told, TokenizeBody, {})
    if (body.prompt is None) is (body.messages is None):
        raise invalid("give either prompt or messages", field="prompt")
    return body


def check_choices(body: Body, most: int) -> None:
    """Refuse more texts than the server's configuration has for one request.

    Raises:
        Ending: as INVALID.
    """
    if body.num_choices > most:
        several = isinstance(body, CompletionBody) and len(body.prompts) > most
        raise invalid(
            f"{body.num_choices} choices are asked for; one request may have {most}",
            field="prompt" if several else "n",
        )


def without_prompts(body: Body) -> Body:
    """A body without the texts that ids were made of."""
    return replace(body, messages=()) if isinstance(body, ChatBody) else replace(body, prompt="")


def options_of(
    body: Body,
    defaults: RequestConfig,
    *,
    max_tokens: int,
    seed: int,
    stop_tokens: tuple[int, ...] = (),
    route: AskedRoute | None = None,
) -> RequestOptions:
    """How one choice of a body is served; max_tokens, seed: of this choice.

    route: of a header, which the body's own field outranks.

    Raises:
        Ending: as INVALID, with the field at fault.
    """
    sampling = body.sampling
    chosen = body.route or route or defaults.route
    by_itself = chosen == "auto"  # which sets the next two, so that a default must not
    layers = 1 if by_itself else defaults.group_layers
    chunk = 0 if by_itself else defaults.chunk
    options = RequestOptions(
        route=chosen,
        group_layers=layers if body.group_layers is None else body.group_layers,
        chunk=chunk if body.chunk is None else body.chunk,
        emission=defaults.emission,
        max_tokens=max_tokens,
        stop_tokens=() if body.ignore_eos else stop_tokens,
        sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k, seed),
        digest=defaults.digest if body.digest is None else body.digest,
        on_failure=body.on_failure or defaults.on_failure,
        max_attempts=defaults.max_attempts,
        prefix=body.prefix or defaults.prefix,
    )
    _check_cuts(body, chosen)
    try:
        options.check_values()
    except Refused as exc:
        raise refusal_of(exc, body) from exc
    return options


def _check_cuts(body: Body, route: str) -> None:
    """Refuse cuts that the route does not make."""
    if body.group_layers is not None and route in ("whole", "chunked"):
        raise invalid(f"route {route} has no layer groups; leave it out", field="group_layers")
    if body.chunk and route == "whole":
        raise invalid("route whole moves all at once; leave chunk out", field="chunk")


def refusal_of(refused: Refused, body: Body) -> Ending:
    """What an engine or an option refuses, under the name that the field has in the body."""
    field = refused.field
    if field == "max_tokens" and isinstance(body, ChatBody) and body.max_tokens is None:
        field = "max_completion_tokens"
    known = field in body.__struct_fields__
    return invalid(str(refused), field=field if known else None)


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of a request's choice: the request's own for the first, other ones for the rest."""
    return (seed + choice) % (MAX_SEED + 1)


def _prompts_of(prompt: str | list[Any]) -> str | list[Prompt]:
    """One text, or several prompts of one kind; an id takes four bytes from here on, as it does in
    the queue.
    """
    if isinstance(prompt, str):
        return prompt
    if not prompt or not isinstance(prompt[0], str | list):
        return [array("I", converted(prompt, _Ids, "prompt"))]
    if len(prompt) > _MAX_CHOICES:
        raise invalid(f"over {_MAX_CHOICES} prompts in one request", field="prompt")
    if isinstance(prompt[0], str):
        return list(converted(prompt, list[str], "prompt"))
    return [array("I", ids) for ids in converted(prompt, list[_Ids], "prompt")]


def _check_stream(body: Body) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream to be true", field="stream_options")


class _Told(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[dict[str, Any]]


_ROLES: Final = {
    "system": "system",
    "developer": "system",  # its newer name, which chat templates do not know
    "user": "user",
    "assistant": "assistant",
}


def _read_messages(told: dict[str, Any]) -> None:
    """Put each message's role and text in place of what the client wrote."""
    messages = told.get("messages")
    if isinstance(messages, list):
        if len(messages) > MAX_MESSAGES:
            raise invalid(f"over {MAX_MESSAGES} messages in one request", field="messages")
        told["messages"] = [_message_of(one, f"messages.{at}") for at, one in enumerate(messages)]


def _message_of(told: Any, at: str) -> dict[str, str]:
    if not isinstance(told, dict):
        raise invalid(f"field `{at}`: a message is an object", field=at)
    role = told.get("role")
    if isinstance(role, str) and role not in _ROLES:  # before the fields that only such a one has
        known = ", ".join(_ROLES)
        raise invalid(f"unsupported role `{role[:64]}`; it is one of {known}", field=f"{at}.role")
    read = struct_of(told, _Told, NEUTRAL_OF_MESSAGES, at)
    return {"role": _ROLES[read.role], "content": _text_of(read.content, f"{at}.content")}


def _text_of(content: str | list[dict[str, Any]], at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise invalid(f"unsupported content part `{kind!s:.64}`", field=f"{at}.{number}.type")
        if not isinstance(text, str):
            raise invalid("a text part needs its text", field=f"{at}.{number}.text")
        for name in part.keys() - {"type", "text"}:
            raise invalid(f"unsupported field `{name[:64]}`", field=f"{at}.{number}.{name[:64]}")
        texts.append(text)
    return "".join(texts)
