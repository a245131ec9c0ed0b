"""Records of fakes of Rebellions' packages, for tests that open a decoder by its options."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

from headrace.engine import records
from headrace.engine.atom import cards
from headrace.engine.atom.artifact import digest_of
from headrace.engine.atom.probe import probe
from headrace.engine.atom.prompts import Reference
from headrace.engine.atom.rebellions import sdk_named
from headrace.engine.atom.record import Record, path_of
from headrace.engine.atom.reference import compute
from headrace.testing.fake_rebellions.compiled import read_compiled

OPEN: Final = "headrace.testing.fake_rebellions:open"


def recorded(directory: Path, factory: str = OPEN, *, device: int = 0) -> Path:
    """Leave the record of what `compile_fake` made where a decoder looks, and return its path.

    `factory`: the fake, as the option `sdk` names it. A process probes it once, and writes what was
    found into the cache of each caller. Fakes that differ in a knob alone have one place for their
    records: the last one counts.
    """
    made = _probed(directory, digest_of(directory), factory, device)
    sdk = sdk_named(factory)
    path = path_of(sdk, cards.describe(sdk, device), made.compiled["digest"])
    records.write(made, path)
    return path


def reference_of(directory: Path) -> Reference:
    """What the checkpoint of a fake compiled model gives; computed once by a process."""
    return _reference(directory, digest_of(directory))


@functools.cache
def _probed(directory: Path, digest: str, factory: str, device: int) -> Record:
    reference = _reference(directory, digest)
    return probe(sdk_named(factory), device, directory, reference, say=_silent)[0]


@functools.cache
def _reference(directory: Path, digest: str) -> Reference:
    return compute(read_compiled(directory)[1], directory)


def _silent(text: str) -> None:
    pass
