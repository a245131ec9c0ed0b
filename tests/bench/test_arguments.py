"""What the benchmarks' commands take alike."""

from __future__ import annotations

import pytest

from headrace.cli.bench.arguments import model_name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("/a/place/gemma3", "gemma3"),
        ("../place/gemma3/", "gemma3"),
        ("/a/place/./gemma3/.", "gemma3"),
        ("place/weights.gguf", "weights.gguf"),
        ("owner/model", "model"),
    ],
)
def test_a_model_goes_by_the_last_part_of_its_path(model: str, name: str) -> None:
    assert model_name(model) == name
