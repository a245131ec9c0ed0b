"""Names of engines and decoders: a closed list, or `module:factory`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec import Struct

from headrace.backends import load
from headrace.backends.legacy import LegacyEngine, WholePrefill
from headrace.backends.load import DECODERS, SOURCES, check_name, open_decoder, open_source
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.options import read_options
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.errors import BackendUnavailable, Refused
from headrace.geometry import Manifest

HERE = "tests.unit.backends.test_load"


class Old:
    """An engine that knows only `prefill`."""

    def manifest(self) -> Manifest:
        return open_replay({"layers": 1}).manifest()

    def prefill(self, tokens: Sequence[int]) -> WholePrefill:
        return WholePrefill([], None, 1)

    def close(self) -> None:
        pass


def open_old(options: Mapping[str, Any]) -> Old:
    return Old()


not_callable = 3


def test_known_names() -> None:
    assert isinstance(open_source("replay", {"layers": 2}), ReplayEngine)
    manifest = decoder_like(open_replay({"layers": 2}).manifest())
    decoder = open_decoder("null", {"manifest": manifest, "context": 16, "lanes": 1})
    assert isinstance(decoder, NullDecoder)


def test_a_factory_by_its_module() -> None:
    assert isinstance(open_source("headrace.backends.replay:open", {}), ReplayEngine)


def test_a_legacy_engine_is_wrapped() -> None:
    engine = open_source(f"{HERE}:open_old", {})
    assert isinstance(engine, LegacyEngine)
    assert engine.manifest().emits == ()


@pytest.mark.parametrize(("role", "known"), [("source", SOURCES), ("decoder", DECODERS)])
def test_an_unknown_name_lists_the_known_ones(role: str, known: dict[str, str]) -> None:
    with pytest.raises(Refused) as caught:
        check_name(role, "nowhere")
    assert caught.value.field == role
    assert str(caught.value) == (
        f"unknown {role} 'nowhere'; known are {', '.join(known)}, or give module:factory"
    )
    for name in (*known, "module:factory"):
        check_name(role, name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("headrace.nothing:open", "cannot import it: No module named 'headrace.nothing'"),
        (f"{HERE}:nothing", "has no factory 'nothing'"),
        (f"{HERE}:not_callable", "has no factory 'not_callable'"),
        (f"{HERE}:", "has no factory ''"),
    ],
)
def test_what_is_not_there_is_refused(name: str, text: str) -> None:
    with pytest.raises(Refused, match="source") as caught:
        open_source(name, {})
    assert text in str(caught.value)
    assert caught.value.field == "source"


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(load.SOURCES, "torch", "headrace.backends.nothing:open")
    with pytest.raises(BackendUnavailable) as caught:
        open_source("torch", {})
    assert (caught.value.vendor, caught.value.stage) == ("torch", "sdk_missing")
    assert "Install headrace[cpu]" in str(caught.value)


def test_rngd_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(load.SOURCES, "rngd", "headrace.backends.nothing:open")
    with pytest.raises(BackendUnavailable, match="run headrace rngd setup") as caught:
        open_source("rngd", {})
    assert (caught.value.vendor, caught.value.stage) == ("rngd", "sdk_missing")


def test_only_what_is_asked_for_is_imported() -> None:
    """A vendor's SDK is never touched by a process that does not use it."""
    code = (
        "import sys; from headrace.backends.load import open_source, check_name;"
        "open_source('replay', {}); check_name('decoder', 'cpu');"
        "bad = {'torch', 'numpy', 'transformers'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    lanes: int = 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "missing required field `path`"),
        ({"path": "x", "lairs": 2}, "unknown field `lairs`"),
        ({"path": 3}, "Expected `str`, got `int`"),
        ({"path": "x", "lanes": "many"}, "Expected `int`, got `str`"),
    ],
)
def test_options_are_read_without_guessing(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match="options of thing: ") as caught:
        read_options(options, Options, "thing")
    assert text in str(caught.value)
    assert caught.value.field == "options"


def test_good_options() -> None:
    assert read_options({"path": "x"}, Options, "thing") == Options("x")
