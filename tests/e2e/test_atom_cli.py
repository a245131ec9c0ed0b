"""`headrace run` and `headrace check` with the ATOM decoder on a fake card, as a user has them.

The record that the decoder asks for is made by the probe, on the fake. Nothing here has met a card.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from headrace.cli import run_command
from headrace.testing.atom_records import OPEN, recorded
from headrace.testing.fake_rebellions import compile_fake
from headrace.testing.pair.runner import case_names
from tests.e2e.families import VOCAB, directory_of

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT: Final = 128
FEW: Final = ("decoder-alone", "exactness", "exactness-with-digests", "two-at-once")
"""For which one source is enough."""

LOSSY: Final = ("exactness-with-digests", "spans-not-as-told")
MORE: Final = (*LOSSY, "decoder-alone", "exactness", "parked-import", "source-death")


class Site:
    """A checkpoint with a tokenizer, what was compiled of it, and a cache with a probe's record."""

    def __init__(self, root: Path, family: str, dtype: str = "float32") -> None:
        self.model = root / "model"
        self.compiled = root / "compiled"
        shutil.copytree(directory_of(family), self.model)
        tokenizer = Tokenizer(WordLevel({chr(at): at for at in range(VOCAB)}, unk_token="a"))
        tokenizer.pre_tokenizer = Split("", "isolated")
        tokenizer.save(str(self.model / "tokenizer.json"))
        compile_fake(
            self.model,
            self.compiled,
            max_seq_len=CONTEXT,
            attn_impl="flash_attn",
            partition_len=16,
            dtype=dtype,
        )

    def words(self, *more: str, source: str = "torch", **options: Any) -> list[str]:
        """A command line; `more` begins with the command, `options` are of the decoder."""
        return [
            *[more[0], "--source", source, "--decoder", "atom", "--model", str(self.model)],
            *["--compiled", str(self.compiled)],
            *["--decoder-options", json.dumps({"sdk": OPEN, **options}), *more[1:]],
        ]


def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def test_a_prompt_by_all_three_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path, "gemma4")
    recorded(site.compiled)
    asked = ["--route", "compare", "--json", "--prompt", "past the window and a block"]
    trace = tmp_path / "trace.json"
    asked += ["--max-tokens", "4", "--ignore-eos", "--trace", str(trace)]
    assert run_command(site.words("run", *asked)) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["identical"], told["fake"]) == (True, True)
    assert set(told["identical_parts"].values()) == {True}
    assert len(told["tokens"]) == 4
    assert len(told["kv_digests"]) == 6
    groups = {name: route["groups"] for name, route in told["routes"].items()}
    assert groups == {"whole": 1, "chunked": 1, "streamed": 6}
    assert "torch -> atom (fake)" in trace.read_text()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.full_matrix
def test_a_check_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """All of it runs there: the decoder is opened in that process, and what is there is told."""
    site = Site(tmp_path, "gemma3")
    recorded(site.compiled)
    seen = tmp_path / "seen"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {seen}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    how = ["--quick", "--report", str(tmp_path), "--decoder-python", str(python), *only(*FEW)]
    done = run(site.words("check", *how))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch -> atom (fake): all {len(FEW)} cases hold" in done.stdout
    calls = seen.read_text().splitlines()
    assert any("-m headrace.runtime.elsewhere" in call for call in calls), calls
    assert not any("source_main" in call for call in calls), "the source is not of that environment"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["decoder"]["facts"]["sdk"] == "fake rebellions"
    assert report["decoder"]["caps"]["max_lanes"] == 1
    notes = {case["case"]: case["note"] for case in report["cases"]}
    assert (
        "without neighbours do not touch each other: the decoder has one lane"
        in (notes["decoder-alone"])
    )


@pytest.mark.usefixtures("nothing_left")
def test_a_check_of_a_lossy_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused without a record, and unless it is asked for. What compares bytes as landed does not
    apply, and the report says the cast.
    """
    site = Site(tmp_path, "gemma3", dtype="float16")
    how = ["--quick", "--report", str(tmp_path), *only(*MORE)]
    assert run_command(site.words("check", *how, source="replay")) == 2
    probe = f"headrace atom probe --model CHECKPOINT --compiled {site.compiled}"
    assert probe in capsys.readouterr().err
    recorded(site.compiled)
    assert run_command(site.words("check", *how, source="replay")) == 2
    refused = capsys.readouterr().err
    assert "float32 to float16: lossy: a value may change as it is imported" in refused
    assert run_command(site.words("check", *how, source="replay", lossy=True)) == 0
    shown = capsys.readouterr().out
    assert "replay -> atom (fake): all 4 cases hold, 2 do not apply" in shown
    text = (tmp_path / "report.md").read_text()
    assert "cast float32 to float16: lossy" in text
    for name in LOSSY:
        assert f"| {name} | skipped |" in text


@pytest.mark.full_matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", ["torch", "replay"])
def test_a_whole_check(tmp_path: Path, source: str) -> None:
    site = Site(tmp_path, "gemma4")
    recorded(site.compiled)
    done = run(site.words("check", "--quick", "--report", str(tmp_path), source=source))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [case["case"] for case in report["cases"]] == case_names()
    assert {case["result"] for case in report["cases"]} == {"ok"}
    shown = f"{source} -> atom (fake): all {len(case_names())} cases hold"
    assert shown in done.stdout
