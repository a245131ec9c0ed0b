from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError
from huggingface_hub.errors import HFValidationError
from rich.console import Console

from headrace.cli import models as cli
from headrace.cli.models import CacheGroup, PullProgress, cache_groups, compact, models_app
from headrace.engine import models as store
from headrace.engine.builtin import BUILTIN_MODELS
from headrace.engine.checkpoint import fingerprint
from headrace.errors import Refused
from headrace.geometry import Full, Layer, Part, Shared, Sliding

Write = Callable[..., Path]

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
LLAMA = {"model_type": "llama", **TINY}
GEMMA = {
    "model_type": "gemma4_text",
    **TINY,
    "sliding_window": 16,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "global_head_dim": 32,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
MAMBA = {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 128}
ENCODER = {"model_type": "vit", "hidden_size": 48, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Makes a model directory, with or without a file of weights."""

    def write_model(config: dict[str, Any], *, weights: bool = False) -> Path:
        directory = tmp_path / "model"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        if weights:
            table = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
            header = json.dumps(table).encode()
            content = len(header).to_bytes(8, "little") + header + bytes(8)
            (directory / "model.safetensors").write_bytes(content)
        return directory

    return write_model


def call(*arguments: str) -> object:
    return models_app(
        arguments, exit_on_error=False, print_error=False, result_action="return_value"
    )


def rows(text: str) -> dict[str, str]:
    """The lines of a report by their first word, blanks squeezed."""
    lines = (line.split() for line in text.splitlines())
    return {words[0]: " ".join(words[1:]) for words in lines if words}


def test_list_tells_names_licences_sizes_and_what_is_not_pulled(
    capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    call("list")
    shown = rows(capsys.readouterr().out)
    assert shown["smollm2-135m"] == "llama 135 M Apache-2.0 541.6 MB no"
    assert shown["gemma3-270m"].endswith("1.1 GB no")
    assert shown["cache:"] == str(cache)


def test_list_tells_what_is_pulled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BUILTIN_MODELS["smollm2-135m"]
    status = store.ModelStatus(model, True, Path("/somewhere"), 123_000_000)
    monkeypatch.setattr(store, "list_models", lambda: [status])
    call("list")
    assert rows(capsys.readouterr().out)["smollm2-135m"].endswith("123.0 MB yes")


@pytest.mark.parametrize(
    "arguments",
    [
        ["pull"],
        ["pull", "smollm2-135m", "--no-accept-license"],
        ["show"],
        ["show", "x", "--context", "many"],
        ["show", "x", "y"],
        ["remove", "x"],
        ["list", "x"],
    ],
)
def test_wrong_arguments_are_the_parsers_errors(arguments: list[str]) -> None:
    with pytest.raises(CycloptsError):
        call(*arguments)


def test_pull_prints_where_the_model_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pull(name: str, *, accept_license: object, progress: Any) -> Path:
        assert (name, accept_license) == ("smollm2-135m", False)
        progress("wait", 0, 0)
        progress("download", 1_000_000, 92_000_000)
        progress("download", 92_000_000, 92_000_000)
        progress("convert", 1, 4)
        return tmp_path

    monkeypatch.setattr(store, "pull", pull)
    call("pull", "smollm2-135m")
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}\n"
    assert said.err.splitlines() == [
        "waiting for another pull ...",
        "downloading 92.0 MB ...",
        "converting 4 steps ...",
        "smollm2-135m (Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0) is in",
    ]


def test_pull_hands_on_that_the_terms_are_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accepted: list[object] = []

    def pull(name: str, *, accept_license: object, progress: object) -> Path:
        accepted.append(accept_license)
        return tmp_path

    monkeypatch.setattr(store, "pull", pull)
    call("pull", "gemma3-270m", "--accept-license")
    assert accepted == [True]


def test_pull_refuses_a_gated_model_without_a_terminal() -> None:
    with pytest.raises(Refused, match="headrace models pull gemma3-270m --accept-license"):
        call("pull", "gemma3-270m")


def test_pull_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(Refused, match="no built-in model 'gpt'"):
        call("pull", "gpt")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "accepted"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", 0)]
)
def test_pull_on_a_terminal_shows_the_terms_and_asks_once(
    answer: str, accepted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers: list[bool] = []

    def pull(name: str, *, accept_license: Any, progress: Any) -> Path:
        progress("wait", 0, 0)
        progress("download", 5, 10)
        answers.append(accept_license("The [terms]"))
        progress("convert", 4, 4)
        return tmp_path

    screen = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(store, "pull", pull)
    call("pull", "gemma3-270m")
    assert answers == [accepted]
    assert "The [terms]" in screen.getvalue()


def test_an_interrupted_pull_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull(name: str, *, accept_license: object, progress: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "pull", pull)
    with pytest.raises(KeyboardInterrupt):
        cli.pull("smollm2-135m")
    assert "the same command goes on" in capsys.readouterr().err


def test_a_wait_ends_with_the_next_stage() -> None:
    shown = PullProgress(Console(file=Terminal(), force_terminal=True))
    with shown:
        shown("wait", 0, 0)
        shown("unpack", 1, 2)
        bars = {task.description: task for task in shown._bars.tasks}
    assert bars["waiting for another pull"].finished
    assert bars["unpacking"].fields["amount"] == "1 byte of 2 bytes"


def test_show_tells_a_dense_model(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write(LLAMA, weights=True)
    call("show", str(directory), "--context", "100", "--dtype", "bfloat16")
    shown = rows(capsys.readouterr().out)
    # 6 layers x 2 parts x 2 heads x 16 elements x 2 bytes.
    assert shown["full"] == "0-5 2 x 16 k, v bfloat16 768 76,800"
    assert shown["per"] == "token 768 bytes: 768 full, 0 sliding"
    assert shown["transfer"].startswith("set 76,800 bytes")
    assert shown["fingerprint"] == fingerprint(directory)
    # Prompt and logits take a page each, the KV area is rounded up to pages.
    assert shown["slot"].startswith(f"{4096 + 4096 + 77_824:,} bytes")


def test_show_tells_windows_shared_layers_and_differing_heads(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    call("show", str(write(GEMMA)))
    text = capsys.readouterr().out
    shown = rows(text)
    assert shown["sliding"] == "16 0-1 2 x 16 k, v float32 512 7,680"
    assert shown["full"] == "2 2 x 32 k, v float32 512 262,144"
    assert "layers 3-4 hold none: they read the KV of layer 1 (sliding 16)" in text
    assert "layers 5 hold none: they read the KV of layer 2 (full)" in text
    assert shown["per"] == "token 1,024 bytes: 512 full, 512 sliding"
    assert shown["positions"].startswith("512 at most;")
    assert shown["fingerprint"].startswith("none:")


def test_show_fits_the_columns_it_is_told(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    call("show", str(write(LLAMA)))
    assert "bytes at 512" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MAMBA, r"\(mamba\): layers.0 is state \(a linear_attention layer\), which is not support"),
        (ENCODER, r"\(vit\): manifest field vocab_size is 0"),
        ({"model_type": "no-such-model"}, "has no usable config.json"),
    ],
)
def test_show_refuses_with_the_reason(write: Write, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        call("show", str(write(config)))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--context", "0"], "context"),
        (["--context", "513"], "context"),
        (["--dtype", "int3"], "dtype"),
    ],
)
def test_show_refuses_what_the_model_cannot_have(
    write: Write, options: list[str], field: str
) -> None:
    with pytest.raises(Refused) as caught:
        call("show", str(write(LLAMA)), *options)
    assert caught.value.field == field


def test_a_model_without_a_maximum_takes_any_context(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    bloom = {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": 128}
    call("show", str(write(bloom)), "--context", "9999999")
    assert "no maximum told" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smollm2-135m", "is not pulled: run: headrace models pull smollm2-135m"),
        ("smollm2", "did you mean smollm2-135m"),
        ("/no/such/place", "no model '/no/such/place'"),
        ("some.one/else", "could not be had from the Hugging Face hub: no network"),
        ("not--a/name", "could not be had from the Hugging Face hub: no such name"),
    ],
)
def test_show_of_what_is_not_here_is_refused(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(repository: str, file: str) -> str:
        if "--" in repository:
            raise HFValidationError("no such name")
        raise OSError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    with pytest.raises(Refused, match=reason):
        call("show", name)


def test_show_takes_only_the_config_from_the_hub(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write(LLAMA)

    def fetch(repository: str, file: str) -> str:
        assert (repository, file) == ("some.one/model", "config.json")
        return str(directory / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    call("show", "some.one/model")
    assert rows(capsys.readouterr().out)["directory"] == str(directory)


@pytest.mark.parametrize(
    ("module", "name"), [("torch", "model"), ("huggingface_hub", "some.one/model")]
)
def test_show_says_what_to_install(
    write: Write, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    write(LLAMA)
    for loaded in [n for n in sys.modules if n.startswith("headrace.engine.")]:
        if loaded.endswith((".layers", ".loading", ".tensors")) and module == "torch":
            monkeypatch.delitem(sys.modules, loaded)
    real = builtins.__import__

    def import_without(wanted: str, *arguments: Any, **options: Any) -> Any:
        if wanted.partition(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return real(wanted, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", import_without)
    with pytest.raises(Refused, match=rf"{module}.*pip install 'headrace\[cpu\]'"):
        call("show", name)


def test_compact_runs() -> None:
    assert compact([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    assert compact([]) == ""


def test_cache_groups_keep_kinds_and_shapes_apart() -> None:
    k, v, wide = Part("k", 2, 8, "float16"), Part("v", 2, 4, "float16"), Part("k", 4, 8, "float16")
    layers = [
        Layer(0, "a", Full(), (k, v)),
        Layer(1, "b", Sliding(8, 7), (k, v)),
        Layer(2, "c", Full(), (wide, v)),
        Layer(3, "d", Full(), (k, v)),
        Layer(4, "e", Shared("a"), ()),
    ]
    groups = cache_groups(layers)
    assert [[layer.index for layer in group.layers] for group in groups] == [[0, 3], [1], [2]]
    assert [group.row_nbytes for group in groups] == [96, 48, 80]
    assert [group.nbytes(10) for group in groups] == [960, 7 * 48, 800]


def test_parts_that_differ_are_told_apart() -> None:
    parts = (Part("k", 2, 192, "float16"), Part("v", 2, 128, "float16"))
    table = cli._table([CacheGroup(Full(), parts, (Layer(0, "a", Full(), parts),))], 1)
    assert list(table.columns[2].cells) == ["k 2 x 192, v 2 x 128"]


@pytest.mark.real_model
def test_show_of_a_pulled_model_agrees_with_its_manifest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # the user's own cache
    pulled = [status for status in store.list_models() if status.pulled]
    if not pulled:
        pytest.skip(f"no built-in model is pulled in {store.cache_root()}")
    from headrace.engine.layers import manifest
    from headrace.engine.loading import load_config

    for status in pulled:
        shown = cli.read_model(status.model.name, context=None, dtype="float32")
        config = load_config(status.path)
        assert shown.manifest == manifest(config, status.path, "decoder", "float32", 2048)
        call("show", status.model.name)
        assert shown.manifest.model in capsys.readouterr().out
