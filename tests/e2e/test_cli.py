"""`headrace run` as a user meets it: real processes, a tiny model, right and wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders

from headrace.cli import run_command
from headrace.process import ChildProcess
from headrace.runtime.router import OwnerClient
from tests.e2e.families import VOCAB, directory_of

REPLAY = ["run", "--source", "replay", "--decoder", "null"]
ONE = ["--prompt", "abc", "--max-tokens", "1"]
PROMPT = "it is a truth universally acknowledged " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


def model_in(directory: Path) -> Path:
    """A tiny hybrid model with a tokenizer of one token per byte below 128."""
    for path in directory_of("gemma3").iterdir():
        (directory / path.name).symlink_to(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 1]
    vocabulary = {letter: index for index, letter in enumerate(["<unk>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = token_decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def headrace(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run(model: Path, *arguments: str, text: str | None = None) -> Any:
    """The JSON object of a run that must succeed."""
    done = headrace("run", "--model", str(model), "--json", *arguments, text=text)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compare_gives_one_object_with_stable_keys(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    report = run(
        model,
        *("--prompt", PROMPT, "--route", "compare", "--max-tokens", "6", "--ignore-eos"),
        *("--trace", str(trace), "--group-layers", "2", "--chunk", "16", "--digest"),
    )
    for key in (
        *("model", "route", "prompt_tokens", "tokens", "text", "ttft_s", "prefill_s"),
        *("transfer_tail_s", "kv_bytes", "spans", "bytes_imported_before_prefill_end"),
        *("identical", "routes"),
    ):
        assert key in report
    assert report["identical"] is True
    assert report["identical_parts"] == {"tokens": True, "logits": True, "kv": True}
    assert set(report["routes"]) == {"whole", "chunked", "streamed"}
    assert report["prompt_tokens"] == len(PROMPT)
    assert report["routes"]["whole"]["bytes_imported_before_prefill_end"] == 0
    assert len(report["tokens"]) == 6
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "i"}


def test_routes_and_seeds_agree_across_runs(model: Path) -> None:
    sampled = ("--temperature", "0.9", "--top-p", "0.95", "--top-k", "50", "--seed", "7")
    asked = ("--prompt", PROMPT, "--max-tokens", "8", "--ignore-eos", *sampled)
    whole = run(model, *asked)
    streamed = run(model, *asked, "--route", "streamed", "--emit", "cache_groups")
    assert whole["route"] == "whole"
    assert whole["tokens"] == streamed["tokens"]


def test_text_goes_to_stdout_and_figures_to_stderr(model: Path) -> None:
    done = headrace(
        *("run", "--model", str(model), "-", "--max-tokens", "5", "--ignore-eos"), text=PROMPT
    )
    assert done.returncode == 0
    assert "TTFT" in done.stderr
    assert "TTFT" not in done.stdout


def test_a_stop_string_ends_the_text_before_it(model: Path) -> None:
    asked = ("--prompt", PROMPT, "--max-tokens", "12", "--ignore-eos")
    text = run(model, *asked)["text"]
    stopped = run(model, *asked, "--stop", text[4])
    assert stopped["text"] == text[: text.index(text[4])]
    assert len(stopped["tokens"]) < 12
    assert (stopped["outcome"], stopped["finish_reason"]) == ("finished", "stop")


def test_sampled_routes_are_compared_to_the_end(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["--route", "compare", "--temperature", "0.9", "--max-tokens", "12", "--ignore-eos"]
    stops = [word for letter in "etaoinETAOIN" for word in ("--stop", letter)]
    begin = ["run", "--model", str(model), "--prompt", PROMPT, "--json"]
    assert run_command([*begin, *asked, *stops]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["identical_parts"] == {"tokens": True, "logits": True, "kv": True}
    assert report["seed"] is not None


def test_nothing_need_be_decoded(capfd: pytest.CaptureFixture[str]) -> None:
    none = ["--prompt", "abc", "--max-tokens", "0", "--json", "--route", "compare"]
    assert run_command([*REPLAY, *none]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["tokens"], report["ttft_s"], report["identical"]) == ([], None, True)


def test_the_first_token_may_be_the_last(model: Path) -> None:
    first = run(model, "--prompt", PROMPT, "--max-tokens", "1")
    assert len(first["tokens"]) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", ""], "prompt is empty"),
        ([], "give the prompt once"),
        (["--prompt", "a", "--prompt-file", "b"], "give the prompt once"),
        (["--prompt-file", "/nowhere/prompt.txt"], "cannot be read"),
        (["--prompt", "a", "--route", "fast"], "unknown route 'fast'"),
        (["--prompt", "a", "--lanes", "0"], "--lanes is 0"),
        (["--prompt", "a", "--slots", "0"], "--slots is 0"),
        (["--prompt", "a", "--chunk", "-1"], "--chunk is -1"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature"),
        (["--prompt", "a", "--log-level", "loud"], "unknown log level"),
        (["--prompt", "a", "--source-options", "[1]"], "not a JSON object"),
        (["--prompt", "a", "--source-options", '{"laers": 3}'], "laers"),
        (["--prompt", "a", "--trace", "/nowhere/t.json"], "not a directory"),
        (["--prompt", "a", "--bogus"], "--bogus"),
        (["--prompt", "a", "--max-tokens", "many"], "many"),
        (["--prompt", "a" * 99, "--context", "64"], "--context is 64"),
        (["--prompt", "a", "--max-tokens", "2"], "max_tokens is 2 and this decoder cannot decode"),
        (["--prompt", "a", "--max-tokens", "-1"], "--max-tokens is -1"),
        (["--prompt", "a", "--source-python", "/nowhere/python"], "missing or not executable"),
        (["--prompt", "a", "--source-python", "/bin/true"], "not a Python that has headrace"),
    ],
)
def test_a_mistake_gets_one_sentence_and_status_2(
    arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    last = [] if "--max-tokens" in arguments else ["--max-tokens", "1"]
    assert run_command([*REPLAY, *arguments, *last]) == 2
    complaint = capfd.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1


def test_too_much_memory_is_refused_before_it_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    huge = [*ONE, "--context", str(1 << 20), "--lanes", "64"]
    assert run_command([*REPLAY, *huge]) == 2
    assert "bytes available" in capfd.readouterr().err


def test_no_memfd_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert run_command([*REPLAY, *ONE]) == 2
    assert "memfd" in capfd.readouterr().err


@pytest.mark.parametrize("role", ["source", "decoder"])
def test_an_unknown_backend_is_refused(role: str, capfd: pytest.CaptureFixture[str]) -> None:
    names = {"source": "replay", "decoder": "null", role: "abacus"}
    arguments = ["--source", names["source"], "--decoder", names["decoder"], *ONE]
    assert run_command(["run", *arguments]) == 2
    assert f"unknown {role} 'abacus'" in capfd.readouterr().err


def test_models_are_refused_by_name(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--model", "smollm3", "--prompt", "a"]) == 2
    assert "smollm2-135m" in capfd.readouterr().err
    long = ["run", "--model", str(model), "--prompt", "a" * 600]
    assert run_command(long) == 2
    assert "the model holds 512" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("family", "dtype", "field"),
    [("gemma3", "bfloat16", "dtype"), ("llama", "float32", "layers[")],
)
def test_source_and_owner_must_agree(
    model: Path, family: str, dtype: str, field: str, capfd: pytest.CaptureFixture[str]
) -> None:
    other = json.dumps({"model": str(directory_of(family)), "dtype": dtype})
    arguments = ["run", "--model", str(model), "--prompt", "abc", "--source-options", other]
    assert run_command(arguments) == 2
    assert field in capfd.readouterr().err


def test_an_engine_that_fails_ends_with_status_1(capfd: pytest.CaptureFixture[str]) -> None:
    failing = [*ONE, "--source-options", '{"fail_at_layer": 3}']
    assert run_command([*REPLAY, *failing]) == 1
    assert "told to fail at layer 3" in capfd.readouterr().err


def test_ctrl_c_while_loading_waits_for_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graces: list[float] = []
    close = ChildProcess.close

    def interrupted(self: OwnerClient) -> NoReturn:
        raise KeyboardInterrupt

    def noted(self: ChildProcess, grace_s: float = 0.0) -> None:
        graces.append(grace_s)
        close(self, grace_s)

    monkeypatch.setattr(OwnerClient, "_next", interrupted)
    monkeypatch.setattr(ChildProcess, "close", noted)
    assert run_command([*REPLAY, *ONE]) == 130
    assert graces == [0.0]
    assert "interrupted" in capfd.readouterr().err


def test_a_closed_standard_input_is_no_channel() -> None:
    command = [sys.executable, "-m", "headrace", *REPLAY, *ONE]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_cancels_in_good_order() -> None:
    slow = ["--source-options", json.dumps({"layer_ms": 60_000}), "--log-level", "debug"]
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", *REPLAY, *ONE, *slow],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "prefill granted" in line:
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    complaint = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 130
    assert "interrupted" in complaint
    assert "Traceback" not in complaint
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
