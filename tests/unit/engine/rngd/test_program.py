"""The layer loop on small kernels: its order of work, what they are fed, what lies in caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.rngd import llama
from headrace.engine.rngd.buckets import choose
from headrace.engine.rngd.emulated import EmulatedExecutor, Held
from headrace.engine.rngd.executor import bind
from headrace.engine.rngd.family import FULL, Family, Geometry, TensorsByName
from headrace.engine.rngd.program import STAGES, LayerProgram
from headrace.engine.rngd.signature import Signature, Tensor
from headrace.engine.rngd.weights import Weights
from headrace.errors import BackendUnavailable
from tests.unit.engine.rngd.small_kernels import CONFIG, HYBRID, WINDOW, Library, write_checkpoint

MAX_POSITIONS = 96
LAYERS = CONFIG["num_hidden_layers"]
VOCAB = CONFIG["vocab_size"]
HEADS, HEAD_DIM = 2, 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("small") / "llama")


class Running:
    """A program on a library of its own, and the events of its last run in order."""

    def __init__(
        self, directory: Path, family: Family = llama.FAMILY, buckets: Sequence[int] = (16, 32),
        chips: int = 1, config: Mapping[str, Any] = CONFIG,
    ) -> None:  # fmt: skip
        self.library = Library(family, chips)
        sdk = self.library.sdk()
        self.executor = EmulatedExecutor(sdk)
        self.program = LayerProgram(
            sdk,
            self.executor,
            family,
            config,
            Weights(directory, family.tied),
            choose(buckets, MAX_POSITIONS, WINDOW if family is HYBRID else None),
        )

    def run(self, tokens: Sequence[int], pieces: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The last row of logits."""
        told = self.library.called
        given = self.program.run(
            tokens,
            pieces,
            begin=lambda start, stop: told.append(f"begin {start} {stop}"),
            final=lambda layer: told.append(f"final {layer}"),
            end=lambda start, stop: told.append(f"end {start} {stop}"),
        )
        row = torch.empty(1, VOCAB, dtype=torch.bfloat16)
        assert self.program.read_last(given, row).done()
        return row[0]

    def cache(self, layer: int, part: int, start: int, stop: int) -> torch.Tensor:
        target = torch.empty(stop - start, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        assert self.program.read(layer, part, start, stop, target).done()
        return target


def prompt(num_tokens: int) -> list[int]:
    return [(3 + 7 * at * at) % VOCAB for at in range(num_tokens)]


def test_each_layer_is_final_before_its_attention(directory: Path) -> None:
    running = Running(directory)
    running.run(prompt(20), [(0, 20)])
    short = [name.removeprefix("llama3_1_8b_w16a16_") for name in running.library.called]
    wanted = ["begin 0 20"]
    for layer in range(LAYERS):
        wanted += ["mid_tokenwise" if layer else "first_tokenwise", f"final {layer}"]
        wanted += ["full_attention"]
    assert short == [*wanted, "end 0 20", "last_tokenwise_with_lm_head"]


def test_a_chunk_before_the_last_ends_with_the_last_layers_cells(directory: Path) -> None:
    running = Running(directory)
    running.run(prompt(40), [(0, 40)])
    called = running.library.called
    assert [each for each in called if each.startswith(("begin", "end"))] == [
        "begin 0 32",
        "end 0 32",
        "begin 32 40",
        "end 32 40",
    ]
    assert called[called.index("end 0 32") - 1] == f"final {LAYERS - 1}"
    assert called.count(llama.FAMILY.last) == 1
    assert called.count(llama.FAMILY.attention[FULL]) == 2 * LAYERS - 1


@pytest.mark.parametrize("family", [llama.FAMILY, HYBRID], ids=["llama", "hybrid"])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33, 80])
def test_a_prompt_in_chunks_is_the_prompt_at_once(
    directory: Path, family: Family, num_tokens: int
) -> None:
    """But for the order of additions; a wrong slot, mask or rope would be far off."""
    tokens = prompt(num_tokens)
    whole = Running(directory, family, (16, 96))
    parts = Running(directory, family, (4, 8))
    logits = whole.run(tokens, [(0, num_tokens)]).float()
    torch.testing.assert_close(
        parts.run(tokens, [(0, num_tokens)]).float(), logits, rtol=0.05, atol=0.1
    )
    for layer in range(LAYERS):
        for part in (0, 1):
            mine = parts.cache(layer, part, 0, num_tokens).float()
            theirs = whole.cache(layer, part, 0, num_tokens).float()
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.1)


def test_a_cache_that_is_split_over_chips_holds_the_same(directory: Path) -> None:
    one, two = Running(directory), Running(directory, chips=2)
    tokens = prompt(40)
    assert torch.equal(one.run(tokens, [(0, 40)]), two.run(tokens, [(0, 40)]))
    for layer in range(LAYERS):
        for part in (0, 1):
            assert torch.equal(one.cache(layer, part, 3, 39), two.cache(layer, part, 3, 39))


def test_a_read_is_of_the_positions_asked_for(directory: Path) -> None:
    running = Running(directory)
    running.run(prompt(40), [(0, 40)])
    whole = running.cache(2, 1, 0, 40)
    assert len({tuple(row.flatten().tolist()) for row in whole}) == 40
    assert torch.equal(running.cache(2, 1, 7, 31), whole[7:31])
    assert not torch.equal(running.cache(2, 0, 0, 40), whole)
    assert not torch.equal(running.cache(3, 1, 0, 40), whole)


def test_a_second_prompt_is_what_it_is_alone(directory: Path) -> None:
    running, alone = Running(directory), Running(directory)
    running.run(prompt(80)[::-1], [(0, 80)])
    tokens = prompt(37)
    assert torch.equal(running.run(tokens, [(0, 37)]), alone.run(tokens, [(0, 37)]))
    for layer in range(LAYERS):
        assert torch.equal(running.cache(layer, 0, 0, 37), alone.cache(layer, 0, 0, 37))


def test_weights_and_inputs_are_placed_once(directory: Path) -> None:
    running = Running(directory)
    placed: list[str] = []
    place = running.executor.place

    def counting(tensor: Tensor, host: torch.Tensor) -> Held:
        placed.append(tensor.name)
        return place(tensor, host)

    running.executor.place = counting  # type: ignore[method-assign]
    running.run(prompt(20), [(0, 20)])
    by_name = {name: placed.count(name) for name in placed}
    per_layer = dict.fromkeys(llama.LAYER_WEIGHTS, LAYERS)
    once = [*llama.MODEL_WEIGHTS, "rope_table", "input_ids", "position_ids", "kv_scatter_index"]
    once += ["kv_gather_index", "attention_mask"]
    assert by_name == per_layer | dict.fromkeys(once, 1)
    placed.clear()
    running.run(prompt(20), [(0, 20)])
    assert not set(placed) & ({"rope_table"} | llama.FAMILY.weights.keys())


def test_what_is_prepared_is_not_loaded_again(directory: Path) -> None:
    running = Running(directory)
    running.program.prepare(choose((16, 32), MAX_POSITIONS, None).shapes())
    made, loaded = len(running.library.made), running.executor.statistics()
    for num_tokens in (5, 16, 17, 32, 33, 64, 65, MAX_POSITIONS):
        running.run(prompt(num_tokens), [(0, num_tokens)])
        running.run(prompt(num_tokens), [(0, 3), (3, num_tokens)])
    assert len(running.library.made) == made
    assert running.executor.statistics() == loaded == {"kernels_loaded": made}


def test_time_is_told_by_stage(directory: Path) -> None:
    running = Running(directory)
    assert running.program.stage_ns == dict.fromkeys(STAGES, 0)
    running.run(prompt(5), [(0, 5)])
    assert all(took > 0 for took in running.program.stage_ns.values())


@pytest.mark.parametrize("chips", [1, 2])
def test_a_prompt_of_no_number_is_none_of_the_next_ones(tmp_path: Path, chips: int) -> None:
    """Also where the next one writes no padding, but gathers some."""
    directory = write_checkpoint(tmp_path / "poisoned", poison=7)
    running, alone = Running(directory, chips=chips), Running(directory, chips=chips)
    assert not bool(running.run([1, 7, 3], [(0, 3)]).isfinite().any())
    tokens = [1 + at % 5 for at in range(48)]
    assert torch.equal(running.run(tokens, [(0, 48)]), alone.run(tokens, [(0, 48)]))


def test_a_family_may_look_embeddings_up_itself(directory: Path) -> None:
    """Its first kernel then takes the rows under their own name."""
    looked_up: list[torch.Tensor] = []

    def embed(config: Mapping[str, Any], weights: TensorsByName, ids: torch.Tensor) -> torch.Tensor:
        looked_up.append(ids)
        shape = config["vocab_size"], config["hidden_size"]
        return weights.tensor("model.embed_tokens.weight", shape, "bfloat16")[ids.long()]

    running = Running(directory, replace(llama.FAMILY, embed=embed))
    with pytest.raises(BackendUnavailable, match="it takes input_ids, which"):
        running.run(prompt(20), [(0, 20)])
    assert looked_up[0].shape == (32,)
    assert looked_up[0][:20].tolist() == prompt(20)


def test_an_argument_that_nobody_has_is_refused_by_name() -> None:
    tensors = tuple(Tensor(name, (1,), (1,), "int32") for name in ("a", "b", "c"))
    signature = Signature("mid", tensors, ())
    assert bind(signature, {"c": 3, "a": 1, "b": 2, "d": 4}) == [1, 2, 3]
    with pytest.raises(BackendUnavailable, match="kernel mid: it takes a, c, which"):
        bind(signature, {"b": 2})


def test_a_cache_of_another_shape_than_the_geometry_is_refused(directory: Path) -> None:
    wrong = replace(llama.FAMILY, geometry=lambda config: {FULL: Geometry(4, 8)})
    with pytest.raises(BackendUnavailable, match=r"of a cache: it is \(97, 1, 2, 8\), expected"):
        Running(directory, wrong).run(prompt(3), [(0, 3)])


def test_caches_that_two_kernels_store_otherwise_are_refused(directory: Path) -> None:
    running = Running(directory)
    running.run(prompt(3), [(0, 3)])
    running.library.chips = 2
    with pytest.raises(BackendUnavailable, match="of a cache: one takes"):
        running.run(prompt(20), [(0, 20)])


def test_a_rope_table_of_another_length_is_refused(directory: Path) -> None:
    told = dict(llama.overrides(CONFIG, MAX_POSITIONS))
    wrong = replace(
        llama.FAMILY, overrides=lambda config, longest: {**told, "max_position_embeddings": 64}
    )
    with pytest.raises(BackendUnavailable, match=r"of a rope table: it is \(64, 4, 2, 2\)"):
        Running(directory, wrong).run(prompt(3), [(0, 3)])
