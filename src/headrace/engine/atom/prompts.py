"""The prompts of a probe, and the keys and values that a checkpoint gives for them.

All prompts are the first tokens of one sequence, so what was computed for the longest one holds for
each: a position's keys and values depend on none after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
"""Positions of a block up to which torch computes a prompt that reaches into the next one."""

LONGEST_PROMPT: Final = 1 << 15
"""Most tokens that a card is had to compute at once."""

IDS: Final = 60
"""Tokens are of the first so many ids, which every vocabulary has."""

PAST_THE_WINDOW: Final = 9
INTO_A_BLOCK: Final = 3
PAST_THE_MIDDLE: Final = 5
_EIGHTHS: Final = 8

_LOGITS: Final = "logits."

States: TypeAlias = Mapping[tuple[int, int], np.ndarray]
"""By layer and part, float32 [heads, positions, head_dim]. All caches have the positions of the
short prompt, and those of some layers have all.
"""


@dataclass(frozen=True)
class Reference:
    """What a checkpoint gives. checkpoint: its fingerprint. tokens: of the longest prompt.

    logits: by the tokens of a prompt, its last row, float32 [vocabulary].
    """

    checkpoint: str
    tokens: tuple[int, ...]
    states: States
    logits: Mapping[int, np.ndarray] = field(default_factory=dict)

    def has(self, cache: Cache, num_tokens: int) -> bool:
        """Whether it has a cache's states of so many positions."""
        states = self.states.get((cache.layer, cache.part))
        return states is not None and states.shape[1] >= num_tokens


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
    """Tokens of the prompts that a checkpoint computes, as far as the lane has room.

    A short one; one for each side of a window's end, and one past twice a window; one that ends
    behind the middle of a block, and one that reaches into the second.
    """
    wanted = {short_prompt(caches, positions)}
    for each in caches:
        if each.kind == "sliding":
            wanted |= {each.rows, past_window(each.rows), each.rows + past_window(each.rows)}
            continue
        wanted.add(min(each.rows, LONGEST_BLOCK) // 2 + PAST_THE_MIDDLE)
        if each.rows <= LONGEST_BLOCK:
            wanted.add(each.rows + min(INTO_A_BLOCK, each.rows))
    return tuple(sorted(count for count in wanted if count <= positions))


def imported(caches: Sequence[Cache], positions: int) -> tuple[int, ...]:
    """Tokens of the prompts that are imported and decoded: a short one, those past a window, and
    those into the second block and into the last one, however long a block is and whether a
    checkpoint computes them or not. Where there is one block, one that ends behind its middle.
    """
    room = positions - STEPS
    wanted = {short_prompt(caches, positions)}
    for each in caches:
        rows, last = each.rows, (positions - 1) // each.rows * each.rows
        if each.kind == "sliding":
            wanted |= {past_window(rows), rows + past_window(rows)}
        elif last == 0:
            wanted.add(rows // 2 + PAST_THE_MIDDLE)
        else:
            into = min(INTO_A_BLOCK, rows)
            wanted |= {rows + into, last + into if last + into <= room else room}
    return tuple(sorted(count for count in wanted if count <= room))


def decoded(caches: Sequence[Cache], positions: int) -> tuple[int, ...]:
    """Positions at which a single step is decoded: in every block of the lane one, in the first one
    some of each eighth of it, around the end of each window and past it and twice it, and the last.
    """
    wanted = {positions - 1}
    for kind, rows in {(each.kind, each.rows) for each in caches}:
        if kind == "sliding":
            wanted |= {rows - 1, rows, past_window(rows), rows + past_window(rows)}
            continue
        wanted |= {rows * part // _EIGHTHS + min(part, rows // 16) for part in range(_EIGHTHS)}
        wanted.add(rows - 1)
        inside = min(rows // 2 + PAST_THE_MIDDLE, rows - 1)
        wanted |= set(range(inside, positions, rows))
    return tuple(sorted(position for position in wanted if position < positions))


def compared(caches: Sequence[Cache]) -> tuple[int, ...]:
    """The layers that are compared with a reference also of long prompts: the first, middle and
    last of each kind. The short one's is compared in all.
    """
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
        **{f"{_LOGITS}{count}": row for count, row in reference.logits.items()},
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
            logits = {
                int(name.removeprefix(_LOGITS)): arrays[name]
                for name in arrays.files
                if name.startswith(_LOGITS)
            }
            return Reference(str(arrays["checkpoint"]), tokens, states, logits)
    except OSError as exc:
        raise Refused(f"{path} cannot be read: {exc.strerror or exc}", field="reference") from exc
    except (ValueError, KeyError, TypeError, BadZipFile, EOFError) as exc:
        raise Refused(f"{path} is no reference of a probe: {exc}", field="reference") from exc


def _name(layer: int, part: int) -> str:
    return f"layers.{layer}.{part}"
