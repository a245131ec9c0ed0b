"""Whole, chunked and streamed must give the same tokens, logits and cells, to the last bit.

With the same prefill chunk every route is compared with the whole one: by the tokens, by digests of
all rows of logits, and by digests of all cells as they landed in device memory. The source is the
GPU, in bfloat16, and the CPU in float32, which gives other numbers and is compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.bench.device.models import window_of
from headrace.bench.device.place import Place, PlaceRows
from headrace.bench.families import random_prompt
from headrace.bench.rows import RowFile
from headrace.bench.stand import Stand
from headrace.engine.models import resolve
from headrace.errors import Refused
from headrace.messages import AskedRoute
from headrace.runtime.requests import Request, RequestOptions

TOKENS: Final = 6
CHUNK: Final = 7  # positions: it divides no prompt, and no window
PREFILL_CHUNK: Final = 40


class Cut(NamedTuple):
    """A route and how it is cut."""

    route: AskedRoute
    group_layers: int = 1
    chunk: int = 0


class Subject(NamedTuple):
    """A model, where its prefill is computed, and the prompts."""

    name: str
    directory: Path
    source: str | None
    dtype: str
    prompts: tuple[int, ...]


WHOLE: Final = Cut("whole")
OTHERS: Final = (Cut("chunked", chunk=CHUNK), Cut("streamed"), Cut("streamed", 3))


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """A row for each model, source, prompt, prefill chunk and route."""
    file = place.rows(step)
    for subject in subjects(place, file, say):
        context = max(subject.prompts) + TOKENS
        with place.stand(
            subject.directory, context, source=subject.source, dtype=subject.dtype
        ) as stand:
            for row in _rows(stand, subject):
                file.append(row)
                if not row["identical"]:
                    say(f"DIFFERENT: {row}")
        say(f"{subject.name} from {subject.source or 'cuda'} in {subject.dtype}: done")


def subjects(place: Place, file: RowFile | PlaceRows, say: Callable[[str], None]) -> list[Subject]:
    """What can be had, the models of full size first; what cannot is told, in a row too."""
    sizes, found = place.sizes, []
    for name in sizes.exact_models:
        directory = place.model(name)
        if not directory.is_dir():
            file.append({"measure": "exactness", "model": name, "skipped": "it was not made"})
            say(f"{name}: it was not made")
            continue
        longer = window_of(name, full_size=sizes.full_size) + sizes.beyond_window
        prompts = (sizes.exact_prompt, longer)
        found.append(Subject(name, directory, None, sizes.dtype, prompts))
        if name in sizes.cpu_models:
            found.append(Subject(name, directory, "torch", "float32", (sizes.cpu_prompt,)))
    for name in sizes.small_models:
        try:
            directory = resolve(name)
        except Refused as exc:
            file.append({"measure": "exactness", "model": name, "skipped": str(exc)})
            say(f"{name}: {exc}")
            continue
        prompts = (sizes.exact_prompt, 4 * sizes.exact_prompt)
        found.append(Subject(name, directory, None, sizes.dtype, prompts))
        if name in sizes.cpu_models:
            found.append(Subject(name, directory, "torch", "float32", prompts[:1]))
    # What runs on the device alone first: it matters most, and is the quickest.
    return sorted(found, key=lambda subject: subject.source is not None)


def _rows(stand: Stand, subject: Subject) -> Iterator[dict[str, Any]]:
    vocab_size = stand.decoder.manifest().vocab_size
    for num_tokens in subject.prompts:
        prompt = random_prompt(num_tokens, vocab_size)
        for prefill_chunk in (0, PREFILL_CHUNK) if num_tokens > PREFILL_CHUNK else (0,):
            first = stand.serve(prompt, _options(WHOLE, prefill_chunk))
            for cut in OTHERS:
                other = stand.serve(prompt, _options(cut, prefill_chunk))
                yield {
                    "measure": "exactness",
                    "model": subject.name,
                    "source": subject.source or "cuda",
                    "dtype": subject.dtype,
                    "prompt_tokens": num_tokens,
                    "prefill_chunk": prefill_chunk,
                    **cut._asdict(),
                    **compare(first, other),
                    "pairing": stand.facts,
                }


def compare(whole: Request, other: Request) -> dict[str, Any]:
    """What is the same in two requests, and whether all of it is."""
    same = {
        "same_tokens": whole.tokens == other.tokens,
        "same_logits": whole.logits_digest == other.logits_digest,
        "same_cells": whole.kv_digests == other.kv_digests,
    }
    told = bool(whole.tokens and whole.logits_digest and whole.kv_digests)
    return {**same, "identical": told and all(same.values()), "tokens": whole.tokens}


def _options(cut: Cut, prefill_chunk: int) -> RequestOptions:
    return RequestOptions(
        route=cut.route,
        group_layers=cut.group_layers,
        chunk=cut.chunk,
        prefill_chunk=prefill_chunk,
        max_tokens=TOKENS,
        audit=True,
    )
