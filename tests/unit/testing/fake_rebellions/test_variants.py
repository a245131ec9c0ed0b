"""What the option `sdk` can name: each says that it is fake, and is otherwise in one thing."""

from __future__ import annotations

import pytest

from headrace.engine.atom.rebellions import sdk_named
from headrace.testing import fake_rebellions
from headrace.testing.fake_rebellions import variants
from tests.unit.testing.fake_rebellions import driving

NAMES = [name for name in fake_rebellions.__all__ if name.startswith("open")]


@pytest.mark.parametrize("name", NAMES)
def test_each_says_that_it_is_fake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variants.UPDATE_NBYTES_PER_S, "1e6")
    monkeypatch.setenv(variants.STEP_S, "0.001")
    sdk = sdk_named(f"headrace.testing.fake_rebellions:{name}")
    assert (sdk.name, sdk.driver) == ("fake rebellions", "fake")
    assert sdk.versions == {"fake-rebellions": "1"}
    flat = sdk.aligned(5)
    assert flat.data_ptr() % 4096 == 0
    assert (flat.numel(), str(flat.dtype)) == (5, "torch.float16")


def test_every_variant_can_be_named() -> None:
    assert {name for name in vars(variants) if name.startswith("open")} == set(NAMES)


def test_cards_are_listed() -> None:
    rebel = variants.open().rebel
    assert rebel.device_count() == 1
    assert rebel.npu_is_available(0)
    assert rebel.get_npu_name(0) == "RBLN-CA25"
    assert not rebel.npu_is_available(1)
    assert rebel.get_npu_name(1) is None
    assert variants.open_other_card().rebel.get_npu_name(0) == "RBLN-CR03"
    none = variants.open_without_card().rebel
    assert (none.device_count(), none.npu_is_available(0)) == (0, False)


def test_a_pace_is_given_and_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variants.STEP_S, raising=False)
    monkeypatch.setenv(variants.UPDATE_NBYTES_PER_S, "1e6")
    with pytest.raises(KeyError, match=variants.STEP_S):
        variants.open_paced()


def test_cards_that_fail_work_at_first() -> None:
    for opened, call in ((variants.open_failing_update, "update"), (variants.open_stale, "stale")):
        sdk = opened()
        model = sdk.load(driving.compiled("llama"), 0)
        runtime, meta = model.prefill_decoder.runtime, model.rbln_config.cache_metas[0]
        numel = 1
        for size in meta.shape:
            numel *= size
        mirror = sdk.aligned(2 * numel).view(model.rbln_config.dtype).view(meta.shape).zero_()
        for block in range(variants.FAILS_AFTER):
            runtime._update_kv_cache(mirror, block, 0, meta.shape[2], meta.name)
        if call == "update":
            with pytest.raises(RuntimeError, match="fake driver"):
                runtime._update_kv_cache(mirror, 3, 0, meta.shape[2], meta.name)
            continue
        runtime._update_kv_cache(mirror, 3, 0, meta.shape[2], meta.name)
        runtime._fetch_kv_cache(mirror, 3, 0, meta.shape[2], meta.name)
        assert mirror[3].isnan().all()
