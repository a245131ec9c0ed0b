"""A compiled decoder on a fake card: what is called how, and what is refused before."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.atom.compiled import CompiledDecoder, check_calls
from headrace.engine.atom.mirrors import make_mirror
from headrace.errors import BackendUnavailable, DeviceError, LocalProtocolError, Refused
from headrace.testing.fake_rebellions import PRIVATE_CALLS, FakeRebellions, compile_fake
from tests.e2e.families import directory_of, make_prompt

pytestmark = pytest.mark.usefixtures("one_thread")


def compiled(directory: Path, family: str = "llama", **options: Any) -> Path:
    asked = {"max_seq_len": 64, "attn_impl": "flash_attn", "partition_len": 8, **options}
    compile_fake(directory_of(family), directory, **asked)
    return directory


def changed(directory: Path, **told: Any) -> Path:
    """The metadata says something else."""
    path = directory / "rbln_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    return directory


def on_card(directory: Path, **knobs: Any) -> tuple[CompiledDecoder, FakeRebellions]:
    fake = FakeRebellions(**knobs)
    return CompiledDecoder(fake.sdk(), str(directory), 0), fake


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "mistral"])
@pytest.mark.parametrize("attention", ["eager", "flash_attn"])
def test_it_prefills_and_decodes_as_the_vendor_would(
    tmp_path: Path, family: str, attention: str
) -> None:
    """Its own prefill, then steps with tables of its own: as without any, by its own pages."""
    partition = 8 if attention == "flash_attn" else None
    directory = compiled(tmp_path, family, attn_impl=attention, partition_len=partition)
    mine, fake = on_card(directory)
    prompt = make_prompt(21)
    rows = [mine.prefill(prompt), *(mine.decode(token, 21 + token) for token in range(5))]
    model = FakeRebellions().load(str(directory), 0)
    logits = [model.prefill_decoder(torch.tensor([prompt]), batch_idx=0).logits]
    for token in range(5):
        at = torch.tensor([[21 + token]], dtype=torch.int32)
        given = {"position_ids": at} if model.rbln_config.use_position_ids else {}
        logits.append(model.decoders[1](torch.tensor([[token]]), at, **given).logits)
    assert all(torch.equal(*each) for each in zip(rows, (x[0, 0] for x in logits), strict=True))
    assert not fake.card.faults


def test_a_lane_is_as_long_as_its_blocks(tmp_path: Path) -> None:
    mine, _ = on_card(compiled(tmp_path, num_blocks=3))
    assert (mine.positions, mine.max_positions) == (24, 64)


def test_blocks_go_there_and_back(tmp_path: Path) -> None:
    mine, fake = on_card(compiled(tmp_path), sub_blocks=True)
    cache = mine.caches[3]
    sent, got = (make_mirror(fake.sdk(), cache, torch.float32) for _ in range(2))
    sent.rows.copy_(torch.randn(cache.shape))
    mine.update(cache, sent, 2, 5)
    mine.fetch(cache, got, 2, 5)
    assert torch.equal(got.rows[2, :, :5], sent.rows[2, :, :5])
    assert got.rows.count_nonzero() == 5 * cache.heads * cache.head_dim
    assert [tuple(call) for call in fake.card.log] == [
        ("update", cache.name, 2, 0, 5),
        ("fetch", cache.name, 2, 0, 5),
    ]


def test_a_cache_tells_its_size(tmp_path: Path) -> None:
    mine, _ = on_card(compiled(tmp_path))
    assert mine.has_sizes()
    assert mine.nbytes_of(mine.caches[0]) == 4 * mine.caches[0].elements
    mine, _ = on_card(tmp_path, calls=("_update_kv_cache", "_fetch_kv_cache"))
    assert not mine.has_sizes()
    with pytest.raises(DeviceError, match="the size of past_key_values_0 failed: Attribute"):
        mine.nbytes_of(mine.caches[0])


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ((), "it has no _update_kv_cache and no _fetch_kv_cache"),
        (PRIVATE_CALLS[1:], "it has no _update_kv_cache"),
        (PRIVATE_CALLS[:1], "it has no _fetch_kv_cache"),
    ],
)
def test_calls_that_vanished_are_told(tmp_path: Path, calls: tuple[str, ...], text: str) -> None:
    with pytest.raises(BackendUnavailable, match=text) as raised:
        on_card(compiled(tmp_path), calls=calls)
    assert (raised.value.vendor, raised.value.stage) == ("rebellions", "api_missing")
    assert "docs/atom.md" in str(raised.value)


def test_a_name_that_cannot_be_called_is_no_call() -> None:
    class Runtime:
        _update_kv_cache = "gone"

        def _fetch_kv_cache(self) -> None: ...

    with pytest.raises(BackendUnavailable, match="no _update_kv_cache"):
        check_calls(Runtime())


def test_a_directory_that_is_no_compiled_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="holds no compiled model that can be loaded") as raised:
        on_card(tmp_path)
    assert raised.value.field == "compiled"


def test_a_card_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="there is no device 0") as raised:
        on_card(compiled(tmp_path), num_devices=0)
    assert (raised.value.stage, "rbln-smi" in str(raised.value)) == ("no_device", True)


def test_a_model_that_is_not_as_it_was_is_told(tmp_path: Path) -> None:
    sdk = replace(FakeRebellions().sdk(), load=lambda directory, device: object())
    with pytest.raises(BackendUnavailable, match="has no attribute 'rbln_config'") as raised:
        CompiledDecoder(sdk, str(tmp_path), 0)
    assert raised.value.stage == "api_missing"


def test_a_model_for_several_cards_is_refused(tmp_path: Path) -> None:
    fake = FakeRebellions()
    directory = compiled(tmp_path)

    def load(directory: str, device: int) -> Any:
        model = fake.load(directory, device)
        vars(model.rbln_config)["num_devices"] = 4
        return model

    with pytest.raises(Refused, match="compiled for 4 cards") as raised:
        CompiledDecoder(replace(fake.sdk(), load=load), str(directory), 0)
    assert raised.value.field == "compiled"


def test_blocks_are_counted_by_what_was_found_after_the_metadata_was_written(
    tmp_path: Path,
) -> None:
    """Where the compiler was left to choose, the metadata has as many as there could be."""
    directory = compiled(tmp_path, batch_size=2, num_blocks=9)
    path = directory / "rbln_config.json"
    told = json.loads(path.read_text())
    shapes = [meta["shape"] for meta in told["cache_metas"]]
    fake = FakeRebellions()

    def load(directory: str, device: int) -> Any:
        model = fake.load(directory, device)
        for meta in model.rbln_config.cache_metas:
            meta.shape[0] = 16
        return model

    mine = CompiledDecoder(replace(fake.sdk(), load=load), str(directory), 0)
    assert [list(cache.shape) for cache in mine.caches] == shapes
    assert {cache.blocks for cache in mine.caches} == {9}


def test_a_model_without_a_decoder_for_one_is_refused(tmp_path: Path) -> None:
    directory = changed(compiled(tmp_path, batch_size=4), decoder_batch_sizes=[4])
    with pytest.raises(Refused, match="no decoder for one sequence") as raised:
        on_card(directory)
    assert raised.value.field == "compiled"
    assert "rbln_batch_size=1" in str(raised.value)


def test_a_mask_without_position_ids_is_left_to_the_vendor(tmp_path: Path) -> None:
    """It is made anew from the position at each step whose tables come from outside."""
    prompt = make_prompt(21)
    found = []
    for name, told in (("plain", {}), ("masked", {"use_attention_mask": True})):
        mine, fake = on_card(changed(compiled(tmp_path / name), **told))
        first = mine.prefill(prompt)
        found.append([first, *(mine.decode(token, 21 + token) for token in range(5))])
        assert not fake.card.faults
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


def calls_of(mine: CompiledDecoder, fake: FakeRebellions) -> list[Callable[[], object]]:
    cache = mine.caches[0]
    mirror = make_mirror(fake.sdk(), cache, torch.float32)
    return [
        lambda: mine.update(cache, mirror, 0, cache.rows),
        lambda: mine.fetch(cache, mirror, 0, cache.rows),
        lambda: mine.decode(1, 1),
        lambda: mine.prefill([1, 2]),
        lambda: mine.nbytes_of(cache),
    ]


def test_every_call_is_one_threads(tmp_path: Path) -> None:
    mine, fake = on_card(compiled(tmp_path))
    told: list[LocalProtocolError] = []

    def run() -> None:
        for call in calls_of(mine, fake):
            try:
                call()
            except LocalProtocolError as exc:
                told.append(exc)

    other = threading.Thread(target=run)
    other.start()
    other.join()
    assert len(told) == 5
    assert "update of block 0 of past_key_values_0 from a second thread" in str(told[0])
    assert not fake.card.log
    assert not fake.card.faults


def test_no_call_is_made_within_another(tmp_path: Path) -> None:
    """And the one that was interrupted so comes to its end."""
    told: list[LocalProtocolError] = []

    def within(_: float) -> None:
        for call in calls_of(mine, fake):
            with pytest.raises(LocalProtocolError, match="within a decode step at posi") as raised:
                call()
            told.append(raised.value)

    mine, fake = on_card(compiled(tmp_path), step_s=1e9, sleep=within)
    mine.prefill(make_prompt(9))
    row = mine.decode(1, 9)
    assert len(told) == 5
    assert not fake.card.faults
    assert row.shape == (128,)
    mine.update(mine.caches[0], make_mirror(fake.sdk(), mine.caches[0], torch.float32), 0, 8)


def test_what_the_runtime_raises_is_told_with_what_was_asked(tmp_path: Path) -> None:
    mine, fake = on_card(compiled(tmp_path))
    update, fetch, decode, prefill, _ = calls_of(mine, fake)
    fake.card.fail_update()
    with pytest.raises(DeviceError, match="update of block 0 of past_key_values_0 failed: Runt"):
        update()
    fake.card.fail_decode()
    with pytest.raises(DeviceError, match="a decode step at position 1 failed: Runt"):
        decode()
    with pytest.raises(DeviceError, match="a prefill of 65 tokens failed: ValueError"):
        mine.prefill([1] * 65)
    for call in (update, fetch, prefill, decode):  # none of these is the end of it
        call()


def test_a_row_is_not_the_memory_of_the_next(tmp_path: Path) -> None:
    mine, _ = on_card(compiled(tmp_path))
    mine.prefill(make_prompt(9))
    made = torch.ones(1, 1, 128)

    class Output:
        logits = made

    mine._decode = lambda **given: Output
    row = mine.decode(1, 9)
    made.zero_()
    assert bool(row.all())
