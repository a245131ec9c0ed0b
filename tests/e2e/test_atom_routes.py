"""Every source to the ATOM decoder on a fake card: the route changes only when bytes move.

Nothing here has met a card. Sources are processes of their own. The decoder is in this process, so
that what its fake card counts as a misuse can be looked at. A source serves several decoders of
one manifest in turn: they differ in how their model is compiled and in what numbers a card keeps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec
import pytest

from headrace.backends.atom import AtomDecoder, Options, decoder_on
from headrace.backends.base import Decoder
from headrace.engine.atom.record import verified
from headrace.errors import Refused
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle
from headrace.testing.atom_records import recorded
from headrace.testing.fake_rebellions import FakeRebellions, compile_fake
from headrace.testing.pair import imitation
from tests.conformance.atom_on_fake import Site
from tests.e2e.families import (
    WINDOW,
    decoder_of,
    directory_of,
    greedy,
    hand_off,
    make_prompt,
    options,
    source_of,
)
from tests.unit.engine.rngd.small_kernels import write_checkpoint

pytestmark = pytest.mark.usefixtures("nothing_left", "one_thread")

CONTEXT: Final = 72
BLOCK: Final = 24
STEPS: Final = 6
"""Tokens that are decoded: from 15 over a window's edge, from 23 over a block's."""

FEW_LENGTHS: Final = (WINDOW - 1, WINDOW, BLOCK + 1)
LENGTHS: Final = (1, WINDOW - 1, WINDOW, WINDOW + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
ROUTES: Final[tuple[dict[str, Any], ...]] = (
    {"route": "whole"},
    {"route": "chunked", "chunk": 7},
    {"route": "streamed", "group_layers": 1},
    {"route": "streamed", "group_layers": 2, "chunk": 5},
    {"route": "streamed", "emission": "cache_groups", "group_layers": 1},
    {"route": "streamed", "emission": "cache_groups", "group_layers": 99, "chunk": 9},
)
MORE_ROUTES: Final[tuple[dict[str, Any], ...]] = (
    *({"route": "chunked", "chunk": chunk} for chunk in (0, 1, BLOCK)),
    *(
        {"route": "streamed", "emission": emission, "group_layers": group_layers, "chunk": chunk}
        for emission, group_layers, chunk in product(
            ("layers", "cache_groups"), (1, 3, 99), (0, 1, 7, BLOCK)
        )
    ),
)

SITES: Final[Mapping[str, Mapping[str, Any]]] = {
    "flash": {},
    "eager": {"partition": None},
    "sub-blocks": {"sub_blocks": True, "clears": True, "leaks": True},
    "float16": {"declared": "float16"},
    "custom_float16": {"declared": "float16", "number_format": "custom_float16"},
    "converted": {"declared": "float16", "number_format": "converted", "partition": None},
}
"""Ways to compile, and cards. The last three keep other numbers than are sent."""

LOSSY: Final = ("float16", "custom_float16", "converted")


class Switched:
    """Stands for one of several decoders of one manifest; changed while nothing is held."""

    def __init__(self, first: Decoder) -> None:
        self.now = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now, name)


class Came(NamedTuple):
    """What two hand-offs of one prompt must have in common; digests stand for bytes."""

    tokens: tuple[int, ...]
    logits: str
    kv: tuple[str, ...]


@dataclass(frozen=True)
class Opened:
    """A decoder and the fake card that it is on."""

    site: Site
    decoder: AtomDecoder

    def check_card(self) -> None:
        """Nothing was flushed while an entry decoded, and nobody called from another thread."""
        card = self.site.fake.card
        assert card.faults == []
        assert card.counts["decodes"] > 0
        assert card.counts["updates"] > 0


def opened(family: str, **site: Any) -> Opened:
    made = Site(**{"family": family, "context": CONTEXT, "partition": BLOCK, **site})
    return Opened(made, made.open())


class Served:
    """An owner with one source, whose decoder can be changed."""

    def __init__(self, owner: DecoderOwner, switched: Switched) -> None:
        self._owner = owner
        self._switched = switched

    def use(self, decoder: Decoder) -> None:
        assert self._owner.idle
        assert decoder.manifest() == self._switched.now.manifest()
        self._switched.now = decoder

    def came(self, prompt: list[int], **asked: Any) -> tuple[Came, Request]:
        wanted = RequestOptions(max_tokens=STEPS, audit=True, **asked)
        request = self._owner.submit(prompt, wanted)
        self._owner.run_until_done(request)
        assert request.outcome == "finished", request.reason
        assert len(request.tokens) == STEPS
        came = Came(tuple(request.tokens), request.logits_digest, request.kv_digests)
        return came, request

    def check_routes(self, prompts: Sequence[list[int]], routes: Sequence[dict[str, Any]]) -> None:
        """Each prompt gives the same by every route."""
        for prompt in prompts:
            came: dict[Came, list[Any]] = {}
            spans = set()
            for asked in routes:
                what, request = self.came(prompt, **asked)
                came.setdefault(what, []).append(asked)
                assert request.measured is not None
                spans.add(request.measured.spans)
            assert len(came) == 1, (len(prompt), came)
            assert len(spans) > 1, "all routes told the same spans"

    def refused(self, prompt: list[int], **asked: Any) -> str:
        """The sentence that refuses a request."""
        with pytest.raises(Refused) as caught:
            self._owner.submit(prompt, RequestOptions(max_tokens=STEPS, **asked))
        return str(caught.value)


@contextmanager
def served(engine: str, source_options: dict[str, Any], decoder: Decoder) -> Iterator[Served]:
    """An owner on `decoder` first, with a source process."""
    switched = Switched(decoder)
    with ExitStack() as stack:
        handle = SourceHandle(engine, source_options, num_slots=2, start_timeout_s=60.0)
        stack.callback(handle.close)
        handle.start()
        owner = DecoderOwner(cast(Decoder, switched), context=CONTEXT)
        stack.callback(owner.close)
        owner.attach(handle)
        yield Served(owner, switched)
        assert owner.drain()
        owner.check_integrity()


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [make_prompt(num_tokens) for num_tokens in lengths]


def torch_options(family: str) -> dict[str, Any]:
    return {"model": str(directory_of(family)), "dtype": "float32", "threads": 1}


def on_a_cpu(family: str, prompt: list[int]) -> tuple[tuple[int, ...], str]:
    """Tokens of torch -> cpu, and the digest of all its rows of logits."""
    decoder = decoder_of(family)
    asked = options("whole", len(prompt))
    sink, entry = hand_off(source_of(family), decoder, prompt, asked)
    rows = [bytes(sink.logits or b"")]
    for _ in range(STEPS - 1):
        rows.append(bytes(decoder.decode_step([(entry, greedy(rows[-1]))])[0]))
    decoder.free(entry)
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(row)
    return tuple(greedy(row) for row in rows), digest.hexdigest()


@pytest.mark.parametrize(
    ("family", "sites"),
    [
        pytest.param("llama", ("flash", "eager"), marks=pytest.mark.full_matrix),
        ("gemma3", tuple(SITES)),
        ("gemma4", ("flash", "eager")),
    ],
)
def test_every_route_from_torch_is_equal(family: str, sites: tuple[str, ...]) -> None:
    """And where a card keeps the numbers that are sent, equal to a CPU's to the last bit."""
    made = {name: opened(family, **SITES[name]) for name in sites}
    with served("torch", torch_options(family), made["flash"].decoder) as on:
        for name, each in made.items():
            on.use(each.decoder)
            exact = name not in LOSSY
            on.check_routes(prompts(FEW_LENGTHS), ROUTES if name == "flash" else ROUTES[::2])
            for num_tokens in LENGTHS if name == "flash" else FEW_LENGTHS[-1:]:
                prompt = make_prompt(num_tokens)
                came, _ = on.came(prompt, route="streamed", digest=exact, poison=exact)
                same = came[:2] == on_a_cpu(family, prompt)
                assert same == exact, (name, num_tokens)
            each.check_card()


@pytest.mark.full_matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama", "exaone4", "gemma2", "gemma3", "gemma4", "mistral"])
def test_every_cut_from_torch_is_equal(family: str) -> None:
    made = {name: opened(family, **site) for name, site in SITES.items()}
    with served("torch", torch_options(family), made["flash"].decoder) as on:
        for each in made.values():
            on.use(each.decoder)
            on.check_routes(prompts(LENGTHS), ROUTES + MORE_ROUTES)
            each.check_card()


def test_every_route_from_rngd_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine on a fake card of its own; what it sends is kept, or cast to a wider dtype."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    model = write_checkpoint(tmp_path / "llama", num_hidden_layers=3)
    made = {name: compiled_for_rngd(model, tmp_path, name) for name in ("bfloat16", "float32")}
    asked = {"token_buckets": [8, 16], "max_positions": CONTEXT, "unverified": True}
    source = {"model": str(model), "sdk": "headrace.testing.fake_furiosa:open", **asked}
    with served("rngd", source, made["bfloat16"][1]) as on:
        for fake, decoder in made.values():
            assert decoder.caps.reads_back
            on.use(decoder)
            for prompt in prompts(FEW_LENGTHS):
                known = [token % 50 for token in prompt]
                on.check_routes([known], ROUTES)
                on.came(known, route="streamed", digest=True, poison=True)
            assert fake.card.faults == []


def compiled_for_rngd(
    model: Path, directory: Path, declared: str
) -> tuple[FakeRebellions, AtomDecoder]:
    """A decoder that takes bfloat16, with a record of its fake card."""
    compiled, fake = directory / declared, FakeRebellions()
    block = {"attn_impl": "flash_attn", "partition_len": BLOCK}
    compile_fake(model, compiled, max_seq_len=CONTEXT, dtype=declared, **block)  # type: ignore[arg-type]
    recorded(compiled)
    found = verified(fake.sdk(), 0, compiled)
    asked = Options(model=str(model), compiled=str(compiled), dtype="bfloat16")
    return fake, decoder_on(fake.sdk(), found, asked)


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_every_route_from_replay_is_equal(family: str) -> None:
    """Bytes of no model, in the geometry of one whose decoder really decodes."""
    made = {name: opened(family, **SITES[name]) for name in ("flash", "eager", "custom_float16")}
    manifest = made["flash"].decoder.manifest()
    told = msgspec.to_builtins(msgspec.structs.replace(manifest, layouts=manifest.layouts[:1]))
    with served(imitation.FACTORY, {"decoder": told}, made["flash"].decoder) as on:
        for each in made.values():
            on.use(each.decoder)
            on.check_routes(prompts(FEW_LENGTHS), ROUTES[::2])
            each.check_card()


def test_other_numbers_than_were_sent_are_not_compared_with_them() -> None:
    """Refused before anything moves, each with one sentence that says what to leave out."""
    lossy = opened("gemma3", **SITES["float16"])
    manifest = lossy.decoder.manifest()
    told = msgspec.to_builtins(msgspec.structs.replace(manifest, layouts=manifest.layouts[:1]))
    with served(imitation.FACTORY, {"decoder": told}, lossy.decoder) as on:
        for name in ("digest", "poison"):
            sentence = on.refused(make_prompt(5), **{name: True})
            assert sentence.startswith(f"{name} looks at the bytes as landed")
            assert f"leave {name} out" in sentence
        assert lossy.decoder.statistics()["values_changed"] == 0
        on.came(make_prompt(5))
        assert lossy.decoder.statistics()["values_changed"] > 0
        assert lossy.decoder.facts["cast"] == "float32 to float16: lossy"
