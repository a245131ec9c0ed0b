"""The RNGD engine in card mode, as a command line opens it, on a fake card."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from headrace.backends import rngd
from headrace.backends.null import decoder_like
from headrace.backends.rngd import RngdEngine
from headrace.engine.loading import load_model
from headrace.engine.rngd import probe as probing
from headrace.engine.rngd.probe_steps import Bench
from headrace.errors import BackendUnavailable, Closed, Unquiet
from headrace.messages import Route
from headrace.plan import compile_plan
from headrace.testing.fake_furiosa import open as open_fake
from headrace.testing.rngd_scenes import Bench as Scene
from headrace.testing.sinks import MemorySink, ask
from tests.unit.engine.rngd.small_kernels import write_checkpoint

SDK = "headrace.testing.fake_furiosa:open"
CONTEXT = 64
NUM_TOKENS = 37
ROUTES: tuple[Route, ...] = ("whole", "chunked", "streamed")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rngd") / "llama"
    return write_checkpoint(made, num_hidden_layers=3)


@pytest.fixture
def options(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of an engine whose kernels and records are its own."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return {"model": str(directory), "sdk": SDK, "token_buckets": [8, 16], "max_positions": CONTEXT}


def prefill(engine: RngdEngine, route: Route, tokens: Sequence[int]) -> MemorySink:
    plan = compile_plan(decoder_like(engine.manifest()), "token_major", len(tokens), CONTEXT)
    sink = MemorySink(plan, ask(len(tokens), route, group_layers=2))
    engine.prefill_stream(tokens, sink)
    return sink


def test_a_card_gives_what_the_emulation_gives_on_every_route(options: dict[str, Any]) -> None:
    tokens = [(5 + 3 * at * at) % 50 for at in range(NUM_TOKENS)]
    emulated = rngd.open({**options, "emulate": True})
    card = rngd.open({**options, "unverified": True})
    assert (emulated.facts["emulated"], card.facts["emulated"]) == (True, False)
    assert card.facts["sdk"] == "fake furiosa"
    wanted = prefill(emulated, "whole", tokens)
    for route in ROUTES:
        sink = prefill(card, route, tokens)
        assert (sink.cells(), sink.logits) == (wanted.cells(), wanted.logits)
    counts = card.statistics()
    assert counts["kernels_loaded"] == counts["kernels_compiled"] > 0
    assert counts["attention_ns"] > 0
    card.close()
    card.close()
    with pytest.raises(Closed):
        prefill(card, "whole", tokens)
    again = rngd.open({**options, "unverified": True})
    assert again.statistics()["kernels_compiled"] == 0
    again.close()


def test_the_fakes_numbers_are_a_llamas_but_for_rounding(
    directory: Path, options: dict[str, Any]
) -> None:
    tokens = [(5 + 3 * at * at) % 50 for at in range(NUM_TOKENS)]
    card = rngd.open({**options, "unverified": True})
    sink = prefill(card, "streamed", tokens)
    card.close()
    model = load_model(directory, dtype="float32", threads=1, attention=None, device="cpu")
    cache = DynamicCache(config=model.config)
    wanted = model.forward(torch.tensor([tokens]), cache).view(-1)
    for (layer, part), got in sink.cells().items():
        states = cache.layers[layer].values if part else cache.layers[layer].keys
        assert states is not None
        theirs = states[0].transpose(0, 1)
        mine = torch.frombuffer(bytearray(got), dtype=torch.bfloat16).reshape(theirs.shape)
        assert off_by(mine.float(), theirs) < 0.03, (layer, part)
    assert sink.logits is not None
    assert off_by(torch.frombuffer(bytearray(sink.logits), dtype=torch.float32), wanted) < 0.05


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The rms difference as a share of the rms of what is right."""
    return float((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def test_a_card_without_a_record_is_refused_and_a_probe_makes_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendUnavailable, match="headrace rngd probe") as told:
        rngd.open(options)
    assert told.value.stage == "layout_unverified"
    monkeypatch.setattr(probing, "Bench", partial(Bench, link_nbytes=(1 << 20,)))
    made, _ = probing.probe(open_fake(), 0, 1, say=lambda text: None)
    assert [step for step, finding in made.findings.items() if finding.error] == []
    engine = rngd.open(options)
    sink = prefill(engine, "streamed", [1, 2, 3])
    assert sink.ended
    engine.close()


def test_what_another_process_uses_is_told(options: dict[str, Any]) -> None:
    assert rngd.occupants(options) == []


def test_a_prefill_on_a_card_that_failed_is_unquiet_too(directory: Path) -> None:
    scene = Scene(directory)
    with scene.engine() as (engine, fake):
        fake.card.break_down("it is gone")
        with pytest.raises(Unquiet, match="it is gone"):
            prefill(engine, "whole", [1, 2, 3])
    scene.close()
