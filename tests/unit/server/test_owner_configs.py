"""What the owner of a decoder's table is started with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.run import _config
from headrace.cli.run_options import RunOptions
from headrace.errors import Refused
from headrace.messages import PrefixAsked
from headrace.runtime.config import SourceConfig
from headrace.runtime.pairs import LANES
from headrace.runtime.supervisor import RestartPolicy
from headrace.server.config import (
    DecoderTable,
    RequestConfig,
    RestartTable,
    ServeConfig,
    SourceTable,
    TelemetryConfig,
)
from headrace.server.owner_configs import (
    OwnerStart,
    dtype_of,
    owner_config,
    request_options,
    restart_policy,
)

MODEL = Path("/model")
RNGD = SourceTable(source="rngd", emulate=True, python=sys.executable)


def started(table: DecoderTable, **more: Any) -> OwnerStart:
    return owner_config(table, ServeConfig(decoders=(table,), **more), MODEL)


def test_one_source_gives_what_headrace_run_gives() -> None:
    """The same pair by flags and by a table: two ways to one owner."""
    table = DecoderTable(
        model="m", context=64, threads=2, decode_batch=4, sources=(SourceTable(threads=2),)
    )
    run = _config(RunOptions(context=64, threads=2, decode_batch=4), MODEL, 100, 4)
    served, interpreter, pair = started(table)
    assert (interpreter, pair) == (None, "torch -> cpu")
    assert served.decoder_options == run.decoder_options
    assert served.sources == run.sources
    assert (served.decoder, served.context) == (run.decoder, run.context)


def test_every_source_has_its_own_settings(other_python: str) -> None:
    table = DecoderTable(
        model="m",
        sources=(
            SourceTable(name="first", slots=3, threads=2, options={"attn": "eager"}),
            SourceTable(python=other_python),
            SourceTable(source="replay", options={"layers": 2}),
        ),
    )
    model = {"model": "/model", "dtype": "float32"}
    own, _, pair = started(table)
    assert own.sources == (
        SourceConfig("torch", {**model, "threads": 2, "attn": "eager"}, None, 3, "first"),
        SourceConfig("torch", {**model, "threads": 1}, other_python, 2, ""),
        SourceConfig("replay", {"vocab_size": 256, "layers": 2}, None, 2, ""),
    )
    assert own.decoder_options["lanes"] == LANES
    assert pair == "2 x torch, replay -> cpu"


def test_an_rngd_source_decides_the_dtype_of_all() -> None:
    table = DecoderTable(model="m", sources=(SourceTable(), RNGD))
    assert dtype_of(table) == "bfloat16"
    own, _, pair = started(table)
    assert own.decoder_options["dtype"] == own.sources[0].options["dtype"] == "bfloat16"
    assert own.sources[1].options["emulate"] is True
    assert pair == "torch, rngd (emulated) -> cpu"
    assert dtype_of(DecoderTable(model="m", dtype="float16")) == "float16"


def test_a_decoder_of_another_environment(other_python: str, tmp_path: Path) -> None:
    table = DecoderTable(
        model="m",
        decoder="atom",
        python=other_python,
        compiled=str(tmp_path),
        options={"sdk": "fake:module"},
    )
    own, interpreter, pair = started(table)
    assert interpreter == other_python
    assert pair == "torch -> atom (fake)"
    assert own.decoder_options["compiled"] == str(tmp_path)
    assert "lanes" not in own.decoder_options
    here = DecoderTable(model="m", python=sys.executable)
    assert started(here).interpreter is None


def test_an_interpreter_that_cannot_run_headrace_is_refused_by_its_key() -> None:
    table = DecoderTable(model="m", python="/nope")
    with pytest.raises(Refused, match=r"give decoders\[3\]\.python the path of a Python"):
        owner_config(table, ServeConfig(decoders=(table,)), MODEL, place="decoders[3]")


def test_limits_logs_and_restarts_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = DecoderTable(
        model="m",
        control="s.sock",
        prefetch_depth=3,
        start_timeout_s=1.0,
        progress_timeout_s=2.0,
        drain_timeout_s=3.0,
        tune_copies=True,
    )
    restart = RestartTable(
        first_delay_s=1, factor=3, longest_delay_s=9, max_failures=2, healthy_after_s=5
    )
    own = started(
        table,
        restart=restart,
        requests=RequestConfig(on_failure="local"),
        telemetry=TelemetryConfig(log_level="debug", log_json=True),
    ).config
    assert own.control == str(tmp_path / "s.sock")
    assert own.prefetch_depth == 3
    assert (own.start_timeout_s, own.progress_timeout_s, own.drain_timeout_s) == (1, 2, 3)
    assert own.restart == restart_policy(restart) == RestartPolicy(1, 3, 9, 2, 5)
    assert own.local
    assert own.tune_copies
    assert (own.log_level, own.log_json) == ("debug", True)
    plain = started(DecoderTable(model="m")).config
    assert (plain.local, plain.control) == (False, None)
    assert plain.restart == RestartPolicy()
    assert "decode_batch" not in plain.decoder_options  # a decoder that has no such option takes it


@pytest.mark.parametrize("prefix", ["off", "identical", "shared"])
def test_what_a_request_gets_by_default(prefix: PrefixAsked) -> None:
    table = RequestConfig(
        route="streamed",
        group_layers=3,
        chunk=5,
        emission="cache_groups",
        digest=True,
        on_failure="retry",
        max_attempts=7,
        prefix=prefix,
        max_tokens=9,
    )
    options = request_options(table)
    options.check_values()
    for name in ("route", "group_layers", "chunk", "emission", "digest", "on_failure"):
        assert getattr(options, name) == getattr(table, name)
    assert (options.max_attempts, options.prefix, options.max_tokens) == (7, prefix, 9)


def test_the_tables_defaults_are_those_of_what_they_become() -> None:
    assert restart_policy(RestartTable()) == RestartPolicy()
    request_options(RequestConfig()).check_values()


def test_kept_prompts_have_their_option() -> None:
    own, _, _ = started(DecoderTable(model="m", keep_bytes=4096))
    assert own.decoder_options["keep_nbytes"] == 4096
    own, _, _ = started(DecoderTable(model="m"))
    assert "keep_nbytes" not in own.decoder_options
