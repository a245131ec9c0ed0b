"""Reading the options of an engine or decoder: no default hides a missing one, none is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from headrace.errors import Refused

T = TypeVar("T")


def read_options(options: Mapping[str, Any], kind: type[T], name: str) -> T:
    """`options` as the msgspec struct `kind`, which must forbid unknown fields.

    Raises:
        Refused: an option is unknown, missing or of the wrong type; the text names it.
    """
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as exc:
        text = f"options of {name}: {exc}"
        if str(exc).startswith("Object contains unknown field") and " - at " not in str(exc):
            known = [each.encode_name for each in msgspec.structs.fields(kind)]  # type: ignore[arg-type]
            text += f"; its options are {', '.join(known)}"
        raise Refused(text, field="options") from exc
