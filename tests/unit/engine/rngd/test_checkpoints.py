"""The tiny checkpoints that tests of the kernels are run with: both forms hold the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.rngd_checkpoints import BLOCK, CONFIGS, FP8, checkpoint_of, make_checkpoint


@pytest.mark.parametrize("family", FP8)
def test_an_8_bit_checkpoint_and_its_twin_are_equal_to_the_last_bit(family: str) -> None:
    checkpoint = checkpoint_of(family)
    quantised = load_file(checkpoint.kernels / "model.safetensors")
    plain = load_file(checkpoint.plain / "model.safetensors")
    scales = {name for name in quantised if "weight_scale" in name}
    assert len(scales) == sum(t.dtype == torch.float8_e4m3fn for t in quantised.values()) > 0
    assert len(quantised) - len(scales) == len(plain)
    for name in quantised.keys() - scales:
        held = quantised[name]
        if held.dtype == torch.float8_e4m3fn:
            (scale,) = (scale for scale in scales if scale.startswith(f"{name}_scale"))
            spread = quantised[scale].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            held = (held.float() * spread.float()).to(torch.bfloat16)
        assert torch.equal(held, plain[name.replace("language_model.", "")]), name


@pytest.mark.parametrize("family", CONFIGS)
def test_a_checkpoint_is_the_same_at_every_call(family: str, tmp_path: Path) -> None:
    first, second = checkpoint_of(family), make_checkpoint(family, tmp_path)
    for one, other in ((first.kernels, second.kernels), (first.plain, second.plain)):
        for name in ("config.json", "model.safetensors"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
