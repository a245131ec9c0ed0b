"""What all messages are made of: their form, their bounds, and the words that several share."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct

MAX_SPANS: Final = 64
MAX_PROGRESS: Final = 128
MAX_TEXT: Final = 4096
MAX_INTERVALS: Final = 256
MAX_STOP_TOKENS: Final = 256
MAX_CUTS: Final = 64
MAX_LOGPROBS: Final = 20
MAX_ATTEMPTS: Final = 16
MAX_CHOICE_TEXT: Final = 400
MAX_ATTEMPT_TEXT: Final = 400  # of each failed attempt's reason, so that an end fits its message
MAX_HELD_TEXT: Final = 400  # of what is said of one source or lane that is held

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Route: TypeAlias = Literal["whole", "chunked", "streamed"]
AskedRoute: TypeAlias = Literal["whole", "chunked", "streamed", "auto"]
Lane: TypeAlias = Literal["source", "owner"]
OnFailure: TypeAlias = Literal["fail", "retry", "local"]
PrefixAsked: TypeAlias = Literal["off", "identical", "shared"]
Remainder: TypeAlias = Literal["none", "source", "owner"]


class WireMessage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    """An array whose first element is its tag."""


class WireStruct(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array that is part of a message."""
