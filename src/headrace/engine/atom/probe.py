"""Find out on a card what is stated nowhere, and write it down: `headrace atom probe`.

It runs in the vendor's environment. Each step is tried on its own; the record is written before and
after each, so that a vendor's library that aborts leaves a record that names the step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.engine import records
from headrace.engine.atom import cards, prompts, record
from headrace.engine.atom.artifact import digest_of, read_geometry
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.environment import SETUP
from headrace.engine.atom.probe_bench import Bench, by_geometry, label
from headrace.engine.atom.probe_steps import LOADS, STEPS
from headrace.engine.atom.prompts import Reference
from headrace.engine.atom.rebellions import sdk_named
from headrace.engine.atom.record import Record
from headrace.engine.atom.sdk import VENDOR, Sdk
from headrace.engine.faults import raised_as
from headrace.errors import BackendUnavailable, HeadraceError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 the decoder can use what was found, 1 it cannot, 2 nothing could be probed."""
    parser = argparse.ArgumentParser(prog="headrace.engine.atom.probe")
    parser.add_argument("--compiled", type=Path, required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sdk", help="module:factory of a fake, for tests")
    asked = parser.parse_args(arguments)
    try:
        reference = None
        if asked.reference is not None:
            reference = prompts.read(asked.reference, read_geometry(asked.compiled).caches)
        with raised_as(lambda why: BackendUnavailable(VENDOR, "sdk_missing", "import", why, SETUP)):
            sdk = sdk_named(asked.sdk)
        made, path = probe(sdk, asked.device, asked.compiled, reference, out=asked.out)
    except HeadraceError as exc:
        print(f"headrace: {exc}", file=sys.stderr)
        return 2
    print(path)
    try:
        record.usable(made, path, record.how_to_make(asked.compiled, asked.device))
    except HeadraceError as exc:
        print(f"headrace: {exc}", file=sys.stderr)
        return 1
    return 0


def probe(
    sdk: Sdk,
    device: int,
    directory: Path,
    reference: Reference | None,
    *,
    out: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Record, Path]:
    """Take every step and write the record after each; returns it and where it lies.

    Raises:
        BackendUnavailable: there is no such card.
        Refused: the directory holds no compiled model that can be used, or the record cannot be
            written.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    card = cards.describe(sdk, device)
    read_geometry(directory)  # which refuses by name what cannot be probed
    digest = digest_of(directory)
    own = record.path_of(sdk, card, digest)
    path = out or own
    made = _begun(sdk, card, directory, digest, reference)
    say(f"probe: the record is {path}")
    bench = Bench(sdk, directory, device, reference)
    made = records.take_all(made, [(LOADS.name, partial(LOADS.take, bench))], path, say)
    if bench.refused is not None:
        raise bench.refused  # the record has it, and no other card would do better
    if bench.compiled is not None:
        caches = _told(bench.compiled.caches)
        made = replace(made, compiled={**made.compiled, "caches": caches})
        steps = ((step.name, partial(step.take, bench)) for step in STEPS)
        made = records.take_all(made, steps, path, say)
    if path != own:
        records.write(made, own)  # where the decoder looks
    return made, path


def _begun(
    sdk: Sdk, card: dict[str, Any], directory: Path, digest: str, reference: Reference | None
) -> Record:
    """A record without findings."""
    return Record(
        sdk=sdk.name,
        packages=dict(sdk.versions),
        driver=sdk.driver,
        card=card,
        compiled={"directory": directory.absolute().name, "digest": digest, "caches": []},
        checkpoint="" if reference is None else reference.checkpoint,
        made=records.now(),
    )


def _told(caches: Iterable[Cache]) -> list[dict[str, Any]]:
    """The caches of a model by geometry."""
    every = tuple(caches)
    return [
        {
            "geometry": name,
            "kind": first.kind,
            "rows": first.rows,
            "names": [each.name for each in every if label(each) == name],
        }
        for name, first in by_geometry(every).items()
    ]


if __name__ == "__main__":
    sys.exit(main())
