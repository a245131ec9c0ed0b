"""Commands are plain facts: frozen, comparable, and all of them in the union."""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_args

import pytest

from headrace.ids import AttemptId
from headrace.protocol import commands
from headrace.protocol.commands import (
    OF_THE_SOURCE,
    Cause,
    Command,
    Free,
    Outcome,
    Report,
    Reserve,
)

CLASSES = {c for _, c in inspect.getmembers(commands, dataclasses.is_dataclass)}


def test_the_union_has_every_command() -> None:
    assert set(get_args(Command)) == CLASSES


@pytest.mark.parametrize("kind", sorted(CLASSES, key=str))
def test_a_command_is_frozen_and_names_whom_it_is_about(kind: type) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields & {"attempt", "request", "source"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        Free(AttemptId(1, 2, 3)).attempt = AttemptId(1, 2, 4)  # type: ignore[misc]


def test_equal_facts_are_equal_commands() -> None:
    assert Reserve(AttemptId(1, 2, 3), 4) == Reserve(AttemptId(1, 2, 3), 4)
    assert Free(AttemptId(1, 2, 3)) != Free(AttemptId(1, 2, 4))


def test_a_hand_off_ends_in_one_of_three_ways() -> None:
    assert [outcome.value for outcome in Outcome] == ["published", "failed", "cancelled"]


def test_the_words_for_how_it_ended_are_all_different() -> None:
    words = [cause.value for cause in Cause] + [Outcome.PUBLISHED.value]
    assert len(set(words)) == len(words) == 11
    assert all(word.replace("-", "").islower() for word in words)


def test_another_attempt_can_mend_what_the_source_did_and_nothing_else() -> None:
    assert set(Cause) - OF_THE_SOURCE == {
        Cause.CANCELLED,
        Cause.DEADLINE,
        Cause.DEVICE,
        Cause.NO_STORAGE,
        Cause.NO_SOURCE,
    }


def test_only_what_was_published_has_no_cause() -> None:
    request = AttemptId(1, 2, 3).request
    assert Report(request, Outcome.PUBLISHED, None, "").cause is None
