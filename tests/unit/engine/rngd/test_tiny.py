"""The tiny model that a card is tried with: the same numbers wherever it is made."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import torch

from headrace.engine.rngd import llama
from headrace.engine.rngd.geometry import family_of
from headrace.engine.rngd.tiny import TINY_LLAMA, RandomWeights

NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight")


def digest() -> str:
    """Of weights by name, their order of making and the global generator being of no matter."""
    weights = RandomWeights()
    made = [weights.tensor(name, (3, 5), "bfloat16") for name in NAMES]
    return hashlib.sha256(
        b"".join(bytes(each.view(torch.uint8).flatten()) for each in made)
    ).hexdigest()


def test_weights_are_the_same_in_each_process() -> None:
    script = f"from {__name__} import digest; print(digest())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, text=True
    )
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert done.stdout.strip() == digest()
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_differ_by_name_and_are_what_they_are_asked_for() -> None:
    weights = RandomWeights()
    a, b = (weights.tensor(name, (64, 128), "float32") for name in NAMES[:2])
    assert (a.shape, a.dtype) == ((64, 128), torch.float32)
    assert not torch.equal(a, b)
    for each in (a, b):
        assert abs(float(each.mean())) < 0.005
        assert abs(float(each.std()) - 0.05) < 0.005
    assert torch.equal(weights.tensor(NAMES[0], (64, 128), "bfloat16"), a.to(torch.bfloat16))
    assert torch.equal(
        weights.tensor("norm", (4,), "bfloat16"), torch.ones(4, dtype=torch.bfloat16)
    )


def test_the_model_is_one_that_the_kernels_compute() -> None:
    assert family_of(TINY_LLAMA) is llama.FAMILY
