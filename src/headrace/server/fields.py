"""A body's JSON to its struct: every field is understood or refused by its name, none is ignored.

Fields that other servers know and this one cannot serve are taken at the one value that asks for
nothing, since clients send them unasked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, inspect

from headrace.server.terminals import Ending, Terminal

_Body = TypeVar("_Body", bound=Struct)
_MAX_NAME: Final = 64
_MAX_TOLD: Final = 400
_PATH: Final = re.compile(r" - at `(key in )?\$(?P<path>[^`]*)`$")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}
"""Beside null, the values at which a field that both endpoints know asks for nothing."""

NEUTRAL_OF_COMPLETIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    **NEUTRAL,
    "best_of": (1,),
    "suffix": ("",),
    "add_special_tokens": (True,),
}
NEUTRAL_OF_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {
    **NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),  # there are no tools to call
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
NEUTRAL_OF_MESSAGES: Final[Mapping[str, tuple[Any, ...]]] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "tool_calls": ([],),
    "reasoning_content": (),
}
"""What clients send back of an assistant's message that they were given."""


def invalid(text: str, field: str | None = None) -> Ending:
    """A client's mistake, told in one sentence of bounded length."""
    return Ending(Terminal.INVALID, _clipped(text, _MAX_TOLD), field=field)


def object_of(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body is.

    Raises:
        Ending: it is none.
    """
    try:
        told = msgspec.json.decode(raw)
    except RecursionError as exc:
        raise invalid("the body is nested too deeply") from exc
    except ValueError as exc:  # msgspec's own, and Python's for a number of too many digits
        raise invalid(_no_json(str(exc), raw)) from exc
    if not isinstance(told, dict):
        raise invalid("the body must be a JSON object")
    return told


def struct_of(
    told: dict[str, Any],
    kind: type[_Body],
    neutral: Mapping[str, tuple[Any, ...]],
    at: str = "",
) -> _Body:
    """`told` as `kind`: null is an absent field, and neutral fields are dropped.

    at: where `told` is in the body, in OpenAI's way: `messages.0`.

    Raises:
        Ending: naming the field.
    """
    fields = kind.__struct_fields__
    kept = {}
    for name, value in told.items():
        if name in fields:
            if value is not None:
                kept[name] = value
        elif name not in neutral:
            raise _unsupported(name, at)
        elif value is not None and not _is_one_of(value, neutral[name]):
            raise _only_neutral(name, neutral[name], at)
    read: _Body = converted(kept, kind, at)
    return read


def converted(value: Any, kind: Any, at: str) -> Any:
    """`value` as `kind`.

    Raises:
        Ending: naming the field below `at` that is none.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise _one_of_others(value, kind, str(exc), at) or _named(str(exc), at) from exc


def _no_json(text: str, raw: bytes) -> str:
    if _SURROGATE.search(raw):
        text += ", or half of a surrogate pair, which is no text"
    return "the body is not valid JSON in UTF-8: " + _PATH.sub("", text)


def _unsupported(name: str, at: str) -> Ending:
    short = _clipped(name, _MAX_NAME)
    return invalid(f"unsupported field `{short}`", field=_join(at, short))


def _only_neutral(name: str, values: tuple[Any, ...], at: str) -> Ending:
    taken = " or ".join(msgspec.json.encode(value).decode() for value in (*values, None))
    return invalid(
        f"unsupported field `{name}`: it is taken as {taken} only", field=_join(at, name)
    )


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Equal, and not only as Python has it, where True is 1."""
    return any(
        value == each and isinstance(value, bool) is isinstance(each, bool) for each in values
    )


def _one_of_others(value: Any, kind: Any, text: str, at: str) -> Ending | None:
    """The end of a field that has other words than this one; None if that is not what is wrong."""
    path = _PATH.search(text)
    name = _steps(path.group("path")) if path else ""
    if not text.startswith("Invalid enum value") or name not in (words := _words_of(kind)):
        return None
    field = _join(at, name)
    told = _clipped(str(value[name]), _MAX_NAME)
    return invalid(f"field `{field}` is `{told}`; it is one of {words[name]}", field=field)


@lru_cache(maxsize=16)  # of the kinds of bodies
def _words_of(kind: Any) -> Mapping[str, str]:
    """The words that each field of a struct may be, of those that are words."""
    info = inspect.type_info(kind)
    found = {}
    for field in info.fields if isinstance(info, inspect.StructType) else ():
        types = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        for each in types:
            if isinstance(each, inspect.LiteralType):
                found[field.encode_name] = ", ".join(map(str, each.values))
    return found


def _named(text: str, at: str) -> Ending:
    """What msgspec says of a value, with the field as OpenAI's clients know it."""
    path = _PATH.search(text)
    reason = text[: path.start()] if path else text
    where = _steps(path.group("path")) if path else ""
    if found := _MISSING.match(reason):
        where, reason = _join(where, found.group("name")), "it is missing"
    elif found := _UNKNOWN.match(reason):
        return _unsupported(found.group("name"), _join(at, where))
    field = _clipped(_join(at, where), _MAX_NAME) or None
    reason = reason[:1].lower() + reason[1:]
    return invalid(f"field `{field}`: {reason}" if field else reason, field=field)


def _steps(path: str) -> str:
    """`.messages[0].content` as `messages.0.content`."""
    return ".".join(name or index for name, index in _STEP.findall(path))


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at and name else at or name


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
