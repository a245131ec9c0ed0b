"""What a probe compares a card with: the prompts, and a checkpoint's states for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.engine.atom import prompts, reference
from headrace.engine.atom.artifact import read_geometry
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.prompts import STEPS, Reference, compared, lengths, past_window
from headrace.engine.checkpoint import fingerprint
from headrace.errors import Refused
from headrace.testing.fake_rebellions import compile_fake
from tests.e2e.families import directory_of

pytestmark = pytest.mark.usefixtures("one_thread")


def caches(*layers: tuple[str, int]) -> list[Cache]:
    """Of layers (kind, rows)."""
    made = []
    for layer, (kind, rows) in enumerate(layers):
        for part in (0, 1):
            name = f"past_key_values_{2 * layer + part}"
            made.append(Cache(name, layer, part, kind, 4, 2, rows, 8, "float16"))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("layers", "positions", "want"),
    [
        ([("full", 8192)], 8192, (24, 2053)),
        ([("full", 1024)], 8192, (24, 517, 1027)),
        ([("full", 64), ("sliding", 16)], 256, (15, 16, 24, 37, 40, 67)),
        ([("sliding", 512), ("full", 16384)], 32768, (24, 512, 521, 1033, 2053)),
        ([("sliding", 512)], 600, (24, 512, 521)),
        ([("sliding", 512)], 300, (24,)),
        ([("sliding", 2)], 64, (1, 2, 3, 5)),
        ([("full", 16)], 16, (12, 13)),
        ([("full", 4)], 4, (1,)),
    ],
)
def test_prompts_are_on_each_side_of_a_windows_end_and_of_a_blocks(
    layers: list[tuple[str, int]], positions: int, want: tuple[int, ...]
) -> None:
    found = lengths(caches(*layers), positions)
    assert found == want
    assert found[0] + STEPS <= max(positions, 1 + STEPS)


@pytest.mark.parametrize(
    ("rows", "positions", "want"),
    [
        (16, 64, {19, 51}),
        (1024, 8192, {1027, 7171}),
        (16384, 65536, {16387, 49155}),  # however long a block is
        (8192, 8192, {24, 4101}),
        (16, 54, {19, 50}),  # as far as there is room
    ],
)
def test_prompts_that_are_imported_reach_into_the_last_block(
    rows: int, positions: int, want: set[int]
) -> None:
    found = prompts.imported(caches(("full", rows)), positions)
    assert want <= set(found)
    assert max(found) <= positions - STEPS
    assert 24 in found


@pytest.mark.parametrize(("rows", "positions"), [(16, 64), (1024, 8192), (16384, 40000), (64, 64)])
def test_a_step_is_decoded_in_every_block_and_past_each_window(rows: int, positions: int) -> None:
    found = prompts.decoded(caches(("full", rows), ("sliding", 16)), positions)
    assert {at // rows for at in found} == set(range(-(-positions // rows)))
    assert {15, 16, 24, 40, positions - 1} <= set(found)
    assert len({at for at in found if at < rows}) >= 8
    assert max(found) < positions
    assert 0 in found


@pytest.mark.parametrize("window", [2, 3, 9, 16, 512, 4096])
def test_a_prompt_past_a_window_tells_a_ring_from_an_order_by_position(window: int) -> None:
    assert past_window(window) > window
    assert past_window(window) % window != 0


def test_layers_of_each_kind_are_compared() -> None:
    layers = [("sliding", 16)] * 5 + [("full", 32)] + [("sliding", 16)] * 5 + [("full", 32)] * 3
    assert compared(caches(*layers)) == (0, 5, 6, 10, 12, 13)
    assert compared(caches(("full", 8))) == (0,)


def test_tokens_are_the_same_each_time_and_in_every_vocabulary() -> None:
    tokens = prompts.tokens_of(500)
    assert tokens == prompts.tokens_of(500)
    assert 0 < min(tokens) < max(tokens) < prompts.IDS
    assert len(set(tokens[:24])) > 10


def test_a_reference_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path, some = tmp_path / "r.npz", caches(("full", 8), ("full", 8))
    states = {(0, 0): np.ones((2, 3, 8), np.float32), (1, 1): np.zeros((2, 3, 8), np.float32)}
    logits = {2: np.arange(5, dtype=np.float32), 30: np.ones(5, np.float32)}
    prompts.write(Reference("sha256:1", (1, 2, 3), states, logits), path)
    found = prompts.read(path, some)
    assert (found.checkpoint, found.tokens) == ("sha256:1", (1, 2, 3))
    assert set(found.states) == set(states)
    assert all(np.array_equal(found.states[key], states[key]) for key in states)
    assert set(found.logits) == set(logits)
    assert all(np.array_equal(found.logits[count], logits[count]) for count in logits)
    keys, values = some[0], some[3]
    assert found.has(keys, 3)
    assert not found.has(keys, 4)
    assert not found.has(some[1], 1)
    assert found.has(values, 2)
    with pytest.raises(Refused, match="cannot be written: No such file"):
        prompts.write(found, tmp_path / "no" / "r.npz")


def cut(path: Path) -> None:
    prompts.write(Reference("", (1,), {}), path)
    path.write_bytes(path.read_bytes()[:-30])


def lacking(path: Path) -> None:
    np.savez(path, tokens=np.zeros(1))


def one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(1))


def pickled(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, tokens=np.array([None]), checkpoint=np.array("x"))


@pytest.mark.parametrize(
    "make", [cut, lacking, one_array, pickled, lambda path: path.write_text("no"), Path.touch]
)
def test_what_is_no_reference_is_told(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "r.npz"
    make(path)
    with pytest.raises(Refused, match="is no reference of a probe"):
        prompts.read(path, caches(("full", 8)))


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma4"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compiled") / str(request.param)
    compile_fake(directory_of(request.param), directory, max_seq_len=64, dtype="bfloat16")
    return directory


def test_a_reference_is_what_the_model_computes(family: Path) -> None:
    """By the library's own cache, of a forward over all tokens at once; of a window its rows.

    Every cache has the short prompt's, and the logits are those of each prompt's last position.
    """
    model = directory_of(family.name)
    found = reference.compute(model, family)
    some, _ = read_geometry(family)
    assert found.checkpoint == fingerprint(model)
    assert len(found.tokens) == max(lengths(some, 64))
    chosen = [each for each in some if each.layer in compared(some)]
    assert set(found.states) == {(each.layer, each.part) for each in some}
    short = prompts.short_prompt(some, 64)
    assert all(found.has(each, short) for each in some)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        output = module(input_ids=torch.tensor([found.tokens]), use_cache=True)
    own = output.past_key_values
    assert tuple(found.logits) == lengths(some, 64)
    for count, row in found.logits.items():
        assert np.allclose(row, output.logits[0, count - 1].numpy(), atol=1e-4)
    for each in chosen:
        layer = own.layers[each.layer]
        want = (layer.values if each.part else layer.keys)[0].numpy()
        got = found.states[each.layer, each.part]
        assert got.dtype == np.float32
        assert got.shape == (each.heads, len(found.tokens), each.head_dim)
        assert np.allclose(got[:, -want.shape[1] :], want, atol=1e-4)


def test_a_reference_goes_on_by_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "compiled"
    compile_fake(directory_of("llama"), directory, max_seq_len=64)
    whole = reference.compute(directory_of("llama"), directory)
    monkeypatch.setattr(reference, "CHUNK", 7)
    cut = reference.compute(directory_of("llama"), directory)
    for key, states in whole.states.items():
        assert np.allclose(cut.states[key], states, atol=1e-4)


def test_the_command_leaves_a_file(
    tmp_path: Path, family: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = directory_of(family.name), tmp_path / "r.npz"
    named = [f"--compiled={family}", f"--out={out}", "--threads=1"]
    assert reference.main([f"--model={model}", *named]) == 0
    found = prompts.read(out, read_geometry(family).caches)
    wanted = reference.compute(model, family)
    assert (found.checkpoint, found.tokens) == (wanted.checkpoint, wanted.tokens)
    assert all(np.array_equal(found.states[key], wanted.states[key]) for key in wanted.states)
    assert reference.main([f"--model={tmp_path}", *named]) == 2
    assert "holds no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["gemma3", "gemma4"])
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: str) -> None:
    directory = tmp_path / "compiled"
    compile_fake(directory_of("gemma4_k_eq_v"), directory, max_seq_len=64)
    with pytest.raises(Refused, match=r"was not compiled from .*; name the checkpoint that it was"):
        reference.compute(directory_of(other), directory)
