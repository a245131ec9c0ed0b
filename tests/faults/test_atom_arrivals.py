"""Random arrivals at an ATOM decoder on a fake card: with and without prefetch, the same tokens.

The fake card counts it as a misuse if anything is flushed into the blocks of an entry between two
of its decode steps, and any call from a second thread. Nothing here has met a card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.backends.base import Decoder, Entry
from headrace.runtime.owner import DecoderOwner
from headrace.testing.arrivals import Make, Subject, run_patterns
from headrace.testing.pair import imitation
from tests.conformance.atom_on_fake import Site
from tests.e2e.families import directory_of, make_prompt
from tests.faults.test_arrivals import NUM_PATTERNS, check_seen, made

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 48
PROMPTS = [make_prompt(num_tokens, seed) for seed, num_tokens in enumerate((5, 12, 21, 30))]


class Watched:
    """A decoder, and how many of its steps were taken while a request was parked."""

    def __init__(self, decoder: Decoder) -> None:
        self.owner: DecoderOwner | None = None
        self.steps_beside_parked = 0
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        if self.owner is not None and self.owner.statistics()["handoffs"].get("parked"):
            self.steps_beside_parked += 1
        return self._decoder.decode_step(active)


class Atom:
    """Makes owners of a decoder on a fake card, and keeps what was seen of each."""

    def __init__(self, source: str, **site: Any) -> None:
        self._source = source
        self._site = {"context": CONTEXT, "partition": 16, **site}
        self.sites: dict[int, Site] = {}
        self.watched: dict[int, Watched] = {}

    def make(self, depth: int) -> Any:
        site = self.sites[depth] = Site(**self._site)
        decoder = self.watched[depth] = Watched(site.open())
        engine, asked = self._source, {"model": str(directory_of(site.family))}
        if self._source == imitation.FACTORY:
            manifest = decoder.manifest()
            told = replace(manifest, layouts=manifest.layouts[:1])
            asked = {"decoder": msgspec.to_builtins(told)}
        return self._opened(engine, asked, decoder, depth)

    @contextmanager
    def _opened(
        self, engine: str, asked: dict[str, Any], decoder: Any, depth: int
    ) -> Iterator[Subject]:
        with made(engine, asked, decoder, CONTEXT, depth) as subject:
            decoder.owner = subject.owner
            yield subject

    def check(self, seen: dict[int, Counter[str]]) -> None:
        """Requests were parked while another decoded, and nothing was flushed meanwhile."""
        check_seen(seen, NUM_PATTERNS)
        assert self.watched[0].steps_beside_parked == 0
        assert self.watched[1].steps_beside_parked > NUM_PATTERNS // 4
        for site in self.sites.values():
            card = site.fake.card
            assert card.faults == []
            assert card.counts["decodes"] > NUM_PATTERNS


def run(atom: Atom) -> None:
    make: Make = atom.make
    atom.check(run_patterns(make, PROMPTS, range(NUM_PATTERNS), (0, 1)))


def test_patterns_on_a_fake_card() -> None:
    """Cancelled, failed by their source or past their deadline as well, at any moment."""
    run(Atom(imitation.FACTORY, family="llama"))


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    ("family", "site"),
    [
        ("gemma3", {"partition": None}),
        ("gemma4", {"clears": True, "leaks": True}),
        ("gemma4", {"declared": "float16", "number_format": "custom_float16"}),
    ],
)
def test_patterns_of_a_model_on_a_fake_card(family: str, site: dict[str, Any]) -> None:
    run(Atom("torch", family=family, **site))
