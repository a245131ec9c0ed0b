"""What `kv_connector_extra_config` may say, and what of vLLM's own configuration is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import Refused
from headrace.runtime.config import SourceConfig
from headrace.runtime.supervisor import RestartPolicy
from headrace.vllm.settings import Settings, check_engine, read_settings, route_of, with_model
from tests.unit.engine.vllm.made_up import vllm_config

SOURCE = {"source": "replay", "options": {"layers": 2}}


def test_the_least_that_is_needed() -> None:
    settings = read_settings({"sources": [{"source": "replay"}]})
    assert settings.sources == (SourceConfig("replay", {}, name="replay"),)
    assert (settings.load, settings.route, settings.min_tokens) == ("asked", "whole", 0)
    assert settings.policy == RestartPolicy()
    assert read_settings({"sources": [SOURCE], "restart": False}).policy is None


def test_sources_are_named() -> None:
    settings = read_settings({"sources": [SOURCE, SOURCE, {**SOURCE, "name": "mine"}]})
    assert [each.name for each in settings.sources] == ["replay-1", "replay-2", "mine"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "missing required field `sources`"),
        ({"sources": []}, "an owner with 0 sources"),
        ({"sources": [SOURCE], "rout": "whole"}, "unknown field `rout`; its keys are sources, "),
        ({"sources": [{"source": "replay", "slots": 2}]}, "unknown field `slots`"),
        ({"sources": [{}]}, "missing required field `source`"),
        ({"sources": [SOURCE], "route": "swift"}, "Invalid enum value 'swift'"),
        ({"sources": [SOURCE], "load": "never"}, "Invalid enum value 'never'"),
        ({"sources": [SOURCE], "context": 0}, "Expected `int` >= 1"),
        ({"sources": [SOURCE], "min_tokens": "4"}, "Expected `int`, got `str`"),
        ({"sources": [SOURCE], "idle_wait_ms": 2000}, "<= 1000"),
        ({"sources": [SOURCE], "deadline_s": 0}, "> 0"),
        ({"sources": [SOURCE], "on_failure": "local"}, "Invalid enum value 'local'"),
        ({"sources": [SOURCE], "max_attempts": 99}, "max_attempts is 99"),
        ({"sources": [SOURCE], "trace_dir": "/no/such/place"}, "/no/such/place is not a directory"),
        ({"sources": [{**SOURCE, "name": "a b"}]}, "the source name 'a b' is none"),
    ],
)
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as told:
        read_settings(given)
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_options_of_a_prompt_publish_and_decode_nothing(tmp_path: Path) -> None:
    given = {
        "group_layers": 2,
        "chunk": 64,
        "prefill_chunk": 128,
        "emission": "cache_groups",
        "digest": True,
        "poison": True,
        "deadline_s": 2.5,
        "on_failure": "retry",
    }
    settings = read_settings(
        {"sources": [SOURCE], "max_attempts": 2, "trace_dir": str(tmp_path), **given}
    )
    options = settings.options("streamed")
    assert (options.route, options.max_tokens, options.hold) == ("streamed", 0, False)
    assert {name: getattr(options, name) for name in given} == given
    assert (options.max_attempts, options.trace) == (2, True)
    auto = settings.options("auto")
    assert (auto.route, auto.group_layers, auto.chunk, auto.prefill_chunk) == ("auto", 1, 0, 128)
    auto.check_values()
    assert not read_settings({"sources": [SOURCE]}).options("whole").trace


def test_a_source_takes_vllms_model_and_dtype() -> None:
    def options(source: str, **given: Any) -> dict[str, Any]:
        python = sys.executable if source in ("rngd", "vllm") else None
        made = with_model(SourceConfig(source, given, python), "/models/it", "bfloat16", 256)
        assert made.python == python
        return made.options

    assert options("replay") == {}
    assert options("torch") == {"model": "/models/it", "dtype": "bfloat16"}
    own = {"model": "other", "dtype": "float32", "threads": 2}
    assert options("torch", **own) == own
    assert options("rngd") == {"model": "/models/it"}
    assert options("vllm")["prefill_chunk"] == 256
    assert options("vllm", prefill_chunk=8)["prefill_chunk"] == 8


def test_a_source_without_its_interpreter(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "python")
    with pytest.raises(Refused, match="python"):
        with_model(SourceConfig("vllm", {}, nowhere), "/models/it", "float32", 0)


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_more_than_one_worker(name: str, tmp_path: Path) -> None:
    config = vllm_config(tmp_path, {})
    check_engine(config)
    setattr(config.parallel_config, name, 2)
    with pytest.raises(Refused, match=f"^vLLM runs with {name} 2, .*; run it with 1$") as told:
        check_engine(config)
    assert told.value.field == name


def test_sizes_that_a_version_does_not_know(tmp_path: Path) -> None:
    config = vllm_config(tmp_path, {})
    config.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    check_engine(config)


def test_engines_whose_cache_no_source_fills(tmp_path: Path) -> None:
    config = vllm_config(tmp_path, {})
    config.model_config.is_encoder_decoder = True
    with pytest.raises(Refused, match="encoder-decoder"):
        check_engine(config)
    config.speculative_config = SimpleNamespace(method="ngram")
    with pytest.raises(Refused, match="without speculative decoding") as told:
        check_engine(config)
    assert told.value.field == "speculative_config"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_sleep_mode", True),
        ("hf_overrides", {"rope_theta": 1}),
        ("hf_config_path", "elsewhere"),
        ("quantization", "fp8"),
        ("quantization_config", {"linear": "fp8"}),
    ],
)
def test_engines_that_compute_with_another_model(name: str, value: Any, tmp_path: Path) -> None:
    config = vllm_config(tmp_path, {})
    setattr(config.model_config, name, value)
    with pytest.raises(Refused, match=f"vLLM runs with {name}, ") as told:
        check_engine(config)
    assert told.value.field == name
    if name == "quantization":
        arch = SimpleNamespace(quantization_config={"quant_method": "fp8"})
        config.model_config.model_arch_config = arch
        check_engine(config)


def test_weights_that_are_made_up(tmp_path: Path) -> None:
    config = vllm_config(tmp_path, {})
    config.load_config.load_format = "dummy"
    with pytest.raises(Refused, match="vLLM runs with load_format"):
        check_engine(config)


@pytest.mark.parametrize(
    ("params", "asked", "always"),
    [
        (None, None, "chunked"),
        ({"do_remote_prefill": False}, None, None),
        ({"do_remote_prefill": True}, "chunked", "chunked"),
        ({"do_remote_prefill": True, "headrace_route": "auto"}, "auto", "auto"),
        ({"headrace_route": "whole"}, None, "whole"),
        ({"do_remote_decode": True}, None, "chunked"),
    ],
)
def test_the_route_of_a_prompt(params: Any, asked: str | None, always: str | None) -> None:
    sources = (SourceConfig("replay"),)
    assert route_of(params, Settings(sources=sources, route="chunked")) == asked
    assert route_of(params, Settings(sources=sources, route="chunked", load="always")) == always


def test_parameters_that_make_no_sense() -> None:
    settings = Settings(sources=(SourceConfig("replay"),))
    with pytest.raises(Refused, match="kv_transfer_params is 'yes'; it is an object"):
        route_of("yes", settings)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="do_remote_prefill is 1; it is true or false"):
        route_of({"do_remote_prefill": 1}, settings)
    with pytest.raises(Refused, match=r"headrace_route is None; it is one of whole, .*auto"):
        route_of({"headrace_route": None}, settings)
