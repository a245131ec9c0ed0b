"""What a source and a decoder decide of their other options, in the words of whoever gave them.

That flags are refused as flags is tested with the commands (tests/unit/cli/test_decoders.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import BackendUnavailable, Refused
from headrace.runtime.pairs import (
    FLAGS,
    Spelling,
    check_decoder,
    check_source,
    dtype_for,
    interpreter_for,
    interpreter_for_decoder,
    options_for,
)

KEYS = Spelling(lambda option: f"the.{option}", lambda option: option)


def said(check: object, *arguments: object, spelling: Spelling, **options: object) -> str:
    assert callable(check)
    with pytest.raises(Refused) as caught:
        check(*arguments, spelling=spelling, **options)
    return str(caught.value)


def test_a_source_is_refused_in_the_users_words() -> None:
    options: dict[str, object] = {"dtype": None, "emulate": True}
    assert said(check_source, "torch", spelling=FLAGS, **options) == (
        "--emulate is for --source rngd, and it is torch; leave --emulate out"
    )
    assert said(check_source, "torch", spelling=KEYS, **options) == (
        "the.emulate is for source rngd, and it is torch; leave emulate out"
    )
    options = {"dtype": "float16", "emulate": False}
    assert said(check_source, "rngd", spelling=FLAGS, **options) == (
        "--dtype is float16 and --source rngd computes in bfloat16; leave --dtype out"
    )
    check_source("rngd", dtype="bfloat16", emulate=True)
    check_source("torch", dtype="float16", emulate=False)


@pytest.mark.parametrize(
    ("decoder", "options", "flags", "keys"),
    [
        (
            "null",
            {"decode_batch": 2},
            "--decode-batch is for a decoder that decodes, and null does not",
            "the.decode_batch is for a decoder that decodes, and null does not",
        ),
        (
            "cpu",
            {"compiled": Path(".")},
            "--compiled is for --decoder atom, and it is cpu; leave --compiled out",
            "the.compiled is for decoder atom, and it is cpu; leave compiled out",
        ),
        (
            "atom",
            {"compiled": Path("."), "given": {"compiled": "."}},
            "--compiled is given and compiled in --decoder-options; leave one out",
            "the.compiled is given and compiled in decoder_options; leave one out",
        ),
        (
            "atom",
            {"compiled": Path("."), "lanes": 4},
            "--lanes is 4 and --decoder atom has one lane; leave --lanes out",
            "the.lanes is 4 and decoder atom has one lane; leave lanes out",
        ),
    ],
)
def test_a_decoder_is_refused_in_the_users_words(
    decoder: str, options: dict[str, object], flags: str, keys: str
) -> None:
    options = {"compiled": None, "given": {}, **options}
    assert said(check_decoder, decoder, spelling=FLAGS, **options) == flags
    assert said(check_decoder, decoder, spelling=KEYS, **options) == keys


def test_a_missing_environment_is_told_in_the_users_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.delenv("HEADRACE_RNGD_PYTHON", raising=False)
    monkeypatch.setattr("headrace.runtime.pairs.environment.find", missing)
    for spelling, name in ((FLAGS, "--source-python"), (KEYS, "the.source_python")):
        with pytest.raises(BackendUnavailable, match=f"with {name}$") as caught:
            interpreter_for("rngd", None, spelling=spelling)
        assert (caught.value.vendor, caught.value.stage) == ("furiosa", "sdk_missing")
    for spelling, name in ((FLAGS, "--decoder-python"), (KEYS, "the.decoder_python")):
        with pytest.raises(BackendUnavailable, match=f"^v: s: p: d. name it with {name}$"):
            interpreter_for_decoder("atom", None, {}, spelling=spelling)


def missing() -> str:
    raise BackendUnavailable("v", "s", "p", "d", "name it with --decoder-python")


def test_an_interpreter_that_is_none_is_told_in_the_users_words() -> None:
    for spelling, name in ((FLAGS, "--source-python"), (KEYS, "the.source_python")):
        with pytest.raises(Refused, match=f"; give {name} the path of a Python"):
            interpreter_for("torch", "/nope", spelling=spelling)
    assert interpreter_for("torch", None) is None


def test_what_a_source_is_given() -> None:
    assert dtype_for("torch", None) == "float32"
    assert dtype_for("rngd", None) == "bfloat16"
    assert dtype_for("torch", "float16") == "float16"
    model = {"model": "m"}
    assert options_for("replay", model) == {}
    assert options_for("torch", model, emulate=True, share_device=True) == model
    given = {**model, "emulate": True, "share_device": True}
    assert options_for("rngd", model, emulate=True, share_device=True) == given
