"""What several families read of a config: numbers, an epsilon, kinds of layers."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.rngd.family import FULL, SLIDING
from headrace.engine.rngd.fields import SHAPE, check_parts, epsilon, listed_kinds, told
from headrace.errors import Refused

CONFIG: dict[str, Any] = {**dict.fromkeys(SHAPE, 8), "rms_norm_eps": 1e-6}


def test_kernels_are_told_what_the_config_says() -> None:
    said = told({**CONFIG, "head_dim": 4, "sliding_window": 7, "other": 1}, 99, "sliding_window")
    sizes = {**dict.fromkeys(SHAPE, 8), "head_dim": 4, "sliding_window": 7}
    assert said == {**sizes, "rms_norm_eps": 1e-6, "max_position_embeddings": 99}


@pytest.mark.parametrize("name", [*SHAPE, "sliding_window"])
def test_a_missing_number_is_refused_by_its_name(name: str) -> None:
    config = {**CONFIG, "sliding_window": 7, name: None}
    with pytest.raises(Refused, match=f"{name} is None"):
        told(config, 99, "sliding_window")


@pytest.mark.parametrize("value", [None, 0, 0.0, -1e-6, 1.0, "1e-6", float("nan")])
def test_an_epsilon_is_a_small_number_above_zero(value: object) -> None:
    with pytest.raises(Refused, match="rms_norm_eps is") as caught:
        epsilon({"rms_norm_eps": value})
    assert caught.value.field == "rms_norm_eps"
    assert epsilon({"rms_norm_eps": 1e-5}) == 1e-5


def test_kinds_are_the_configs_own_list() -> None:
    assert listed_kinds({"layer_types": [SLIDING, FULL], "num_hidden_layers": 2}) == (SLIDING, FULL)


@pytest.mark.parametrize("listed", [None, [], [FULL], [FULL, "chunked_attention"]])
def test_a_list_of_other_kinds_or_length_is_refused(listed: list[str] | None) -> None:
    with pytest.raises(Refused, match="layer_types must name"):
        listed_kinds({"layer_types": listed, "num_hidden_layers": 2})


def test_numbers_that_do_not_divide_are_refused_by_name() -> None:
    check_parts({"a": 8, "b": 4}, 4)
    with pytest.raises(Refused, match="b is 6, these kernels take multiples of 4") as caught:
        check_parts({"a": 8, "b": 6}, 4)
    assert caught.value.field == "b"
