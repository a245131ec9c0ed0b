"""What the benchmarks' commands check alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli.arguments import check_count
from headrace.errors import Refused

MAX_SIZE_MB = 1 << 20


def check_sizes(flag: str, sizes_mb: tuple[int, ...]) -> None:
    """Refuse an empty list of sizes, and sizes that are none, by the flag."""
    if not sizes_mb:
        raise Refused(f"{flag} is empty; give at least one size in MiB")
    for size_mb in sizes_mb:
        check_count(flag, size_mb, limit=MAX_SIZE_MB + 1)


def model_name(model: str) -> str:
    """What rows call a model, as --model names it: of a path its last part."""
    return Path(os.path.abspath(model)).name


def json_object(flag: str, text: str) -> dict[str, Any]:
    """What a flag's JSON text holds. Raises: Refused."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as exc:
        raise Refused(f"{flag} is not a JSON object: {exc}", field=flag) from exc
