"""The prompts of a probe, and the keys and values that a checkpoint gives for them.

All prompts are the first tokens of one sequence, so what was computed for the longest one holds for
each: a position's keys and values depend on none after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias
from zipfile import BadZipFile

import numpy as np

from headrace.engine.atom.caches import Cache
from headrace.errors import Refused

SHORT: Final = 24
STEPS: Final = 4
"""Tokens that are decoded after a prompt."""

LONGEST_BLOCK: Final = 4096
"""Positions of a block up to which a prompt is made that reaches into the next one."""

IDS: Final = 60
"""Tokens are of the first so many ids, which every vocabulary has."""

PAST_THE_WINDOW: Final = 9

States: TypeAlias = Mapping[tuple[int, int], np.ndarray]
"""By layer and part, float32 [heads, positions, head_dim]."""


@dataclass(frozen=True)
class Reference:
    """What a checkpoint gives. checkpoint: its fingerprint. tokens: of the longest prompt."""

    checkpoint: str
    tokens: tuple[int, ...]
    states: States


def tokens_of(count: int) -> tuple[int, ...]:
    """The sequence; the same for all."""
    random = np.random.Generator(np.random.PCG64(7))
    return tuple(int(token) for token in random.integers(1, IDS, count))


def short_prompt(caches: Sequence[Cache], positions: int) -> int:
    """Tokens of a prompt that every window has room for, and some more."""
    windows = [each.rows for each in caches if each.kind == "sliding"]
    return max(1, min(SHORT, positions - STEPS, *(window - 1 for window in windows)))


def past_window(window: int) -> int:
    """Tokens of a prompt that is longer than a window, and not by a multiple of it."""
    return window + max(1, min(PAST_THE_WINDOW, window // 2))


def lengths(caches: Sequence[Cache], positions: int) -> tuple[int, ...]:
    """Tokens of all prompts: a short one, one for each side of a window's end, and one that reaches
    into a second block, as far as the lane has room.
    """
    wanted = {short_prompt(caches, positions)}
    for each in caches:
        if each.kind == "sliding":
            wanted |= {each.rows, past_window(each.rows)}
        elif each.rows <= LONGEST_BLOCK:
            wanted.add(each.rows + min(3, each.rows))
    return tuple(sorted(count for count in wanted if count <= positions))


def compared(caches: Sequence[Cache]) -> tuple[int, ...]:
    """The layers that are compared with a reference: the first, middle and last of each kind."""
    chosen: set[int] = set()
    for kind in ("full", "sliding"):
        layers = sorted({each.layer for each in caches if each.kind == kind})
        if layers:
            chosen |= {layers[0], layers[len(layers) // 2], layers[-1]}
    return tuple(sorted(chosen))


def write(reference: Reference, path: Path) -> None:
    """Keep a reference as plain arrays.

    Raises:
        Refused: it cannot be written.
    """
    arrays: dict[str, Any] = {
        "checkpoint": np.array(reference.checkpoint),
        "tokens": np.array(reference.tokens, np.int64),
        **{_name(layer, part): each for (layer, part), each in reference.states.items()},
    }
    try:
        with path.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as exc:
        raise Refused(f"{path} cannot be written: {exc.strerror}", field="reference") from exc


def read(path: Path, caches: Iterable[Cache]) -> Reference:
    """The reference in a file, as far as it is of these caches.

    Raises:
        Refused: there is none, or it is not of this form.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            states = {
                (each.layer, each.part): arrays[_name(each.layer, each.part)]
                for each in caches
                if _name(each.layer, each.part) in arrays
            }
            tokens = tuple(int(token) for token in arrays["tokens"])
            return Reference(str(arrays["checkpoint"]), tokens, states)
    except OSError as exc:
        raise Refused(f"{path} cannot be read: {exc.strerror or exc}", field="reference") from exc
    except (ValueError, KeyError, TypeError, BadZipFile, EOFError) as exc:
        raise Refused(f"{path} is no reference of a probe: {exc}", field="reference") from exc


def _name(layer: int, part: int) -> str:
    return f"layers.{layer}.{part}"
