"""Cards that are otherwise, and cards that fail, by the names that the option `sdk` takes.

They are for processes that are started by a name; a test of one process turns the knobs itself.
"""

from __future__ import annotations

import os
from typing import Final

from headrace.engine.atom.sdk import Sdk
from headrace.testing.fake_rebellions.packages import FakeRebellions

UPDATE_NBYTES_PER_S: Final = "FAKE_UPDATE_NBYTES_PER_S"
STEP_S: Final = "FAKE_STEP_S"
FAILS_AFTER: Final = 3
"""Calls that work on the cards that fail."""


def open() -> Sdk:
    """The mirrors have the declared dtype, and only whole blocks are moved."""
    return FakeRebellions().sdk()


def open_custom_float16() -> Sdk:
    """Mirrors and memory are in the private 16-bit float."""
    return FakeRebellions(number_format="custom_float16").sdk()


def open_converted() -> Sdk:
    """Memory is in the private 16-bit float, and mirrors are not."""
    return FakeRebellions(number_format="converted").sdk()


def open_sub_blocks() -> Sdk:
    """Parts of a block can be moved."""
    return FakeRebellions(sub_blocks=True).sdk()


def open_needs_warm_up() -> Sdk:
    """Nothing can be moved before anything was computed."""
    return FakeRebellions(needs_warm_up="raises").sdk()


def open_loses_first() -> Sdk:
    """What is moved before anything was computed is lost, and nothing says so."""
    return FakeRebellions(needs_warm_up="loses").sdk()


def open_leaky() -> Sdk:
    """A step sees one row too many."""
    return FakeRebellions(leaks=True).sdk()


def open_ring() -> Sdk:
    """A sliding window is kept as a ring."""
    return FakeRebellions(sliding="ring").sdk()


def open_without_private_calls() -> Sdk:
    """Nothing can be imported."""
    return FakeRebellions(calls=()).sdk()


def open_without_card() -> Sdk:
    """The packages are there and no card is."""
    return FakeRebellions(num_devices=0).sdk()


def open_other_card() -> Sdk:
    """The card is none of ATOM's."""
    return FakeRebellions(npu_name="RBLN-CR03").sdk()


def open_failing_update() -> Sdk:
    """The fourth update raises what a driver would."""
    fake = FakeRebellions()
    fake.card.fail_update(FAILS_AFTER)
    return fake.sdk()


def open_failing_decode() -> Sdk:
    """The fourth decode step raises what a driver would."""
    fake = FakeRebellions()
    fake.card.fail_decode(FAILS_AFTER)
    return fake.sdk()


def open_stale() -> Sdk:
    """From the fourth update on, updates change nothing."""
    fake = FakeRebellions()
    fake.card.go_stale(FAILS_AFTER)
    return fake.sdk()


def open_paced() -> Sdk:
    """A paced card: FAKE_UPDATE_NBYTES_PER_S and FAKE_STEP_S in the environment say how fast.

    Raises:
        KeyError: one of them is not set.
    """
    return FakeRebellions(
        update_nbytes_per_s=float(os.environ[UPDATE_NBYTES_PER_S]),
        step_s=float(os.environ[STEP_S]),
    ).sdk()
