"""Kernels that are compiled before a model is served: all that a source loads, and each once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends import rngd
from headrace.engine.rngd import compile_ahead as ahead
from headrace.engine.rngd.buckets import Buckets
from headrace.engine.rngd.compile_ahead import compile_ahead, main
from headrace.engine.rngd.model import Model, read_model
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Tensor, read_signature
from headrace.errors import BackendUnavailable, LocalProtocolError
from headrace.testing.fake_furiosa import FakeFuriosa
from headrace.testing.fake_furiosa.vendor import Compiler
from tests.unit.engine.rngd.small_kernels import write_checkpoint
from tests.unit.engine.rngd.test_compiled import kernel_of
from tests.unit.engine.rngd.test_model import EXAONE

SDK = "headrace.testing.fake_furiosa:open"
MAX_POSITIONS = 64
BUCKETS = (8, 16)
NUM_KERNELS = 2 * 3 + 4 + 3
"""Of each bucket first, mid and last; attention over 8 to 64 positions, and over 16 to 64."""

SIZES = [f"--max-positions={MAX_POSITIONS}", "--token-buckets", *map(str, BUCKETS)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("rngd") / "llama", num_hidden_layers=3)


@pytest.fixture
def model(directory: Path) -> Model:
    return read_model(directory, max_positions=MAX_POSITIONS, token_buckets=BUCKETS)


def compiled(model: Model, said: list[str], sdk: Sdk | None = None, **more: Any) -> dict[str, int]:
    asked = {"cache": None, **more}
    return dict(compile_ahead(sdk or FakeFuriosa().sdk(), model, say=said.append, **asked))


def kept(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*.kernel"))


def progress(said: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in said if line.startswith("kernel ")]


def test_every_kernel_is_compiled_once_and_counted(model: Model, cache: Path) -> None:
    said: list[str] = []
    fake = FakeFuriosa()
    counts = compiled(model, said, fake.sdk())
    assert counts == {
        "kernels_compiled": NUM_KERNELS,
        "kernels_found": 0,
        "kernels_broken": 0,
    }
    assert fake.torch.compiler.num_compiled == len(kept(cache)) == NUM_KERNELS
    assert fake.torch.get_fusion().num_fusion == 8
    assert progress(said) == [f"kernel {at} of {NUM_KERNELS}" for at in range(1, NUM_KERNELS + 1)]
    assert said[-1].startswith(f"{NUM_KERNELS} kernels: {NUM_KERNELS} compiled, 0 were there, ")


def test_each_kernel_is_named_before_it_is_compiled(model: Model) -> None:
    """It takes minutes, and who waits wants to know for what."""
    said: list[str] = []
    compiled(model, said)
    begun = [at for at, line in enumerate(said) if line.startswith("kernel ")]
    assert all(said[at + 1].startswith("compiling ") for at in begun)
    for at in begun:
        name = said[at].rpartition(": ")[2]
        assert said[at + 1].startswith(f"compiling {name} ")


def test_a_source_that_starts_later_compiles_nothing(model: Model, directory: Path) -> None:
    compiled(model, [])
    sizes = {"token_buckets": list(BUCKETS), "max_positions": MAX_POSITIONS}
    engine = rngd.open({"model": str(directory), "sdk": SDK, "unverified": True, **sizes})
    counts = engine.statistics()
    engine.close()
    assert (counts["kernels_compiled"], counts["kernels_found"]) == (0, NUM_KERNELS)


@pytest.fixture
def _fails_after_five(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The toolchain is gone once five kernels of a process are compiled."""
    compile_one = Compiler.compile

    def failing(self: Compiler, *given: Any) -> Any:
        self.toolchain = self.num_compiled < 5
        return compile_one(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Compiler, "compile", failing)
        yield


@pytest.mark.usefixtures("_fails_after_five")
def test_what_was_compiled_before_a_failure_is_kept_and_gone_on_with(
    model: Model, cache: Path
) -> None:
    for found in (0, 5, 10):
        said: list[str] = []
        if found == 10:
            counts = compiled(model, said)
            assert (counts["kernels_compiled"], counts["kernels_found"]) == (3, found)
        else:
            with pytest.raises(BackendUnavailable) as told:
                compiled(model, said)
            assert told.value.stage == "toolchain_missing"
            assert progress(said)[-1] == f"kernel {found + 6} of {NUM_KERNELS}"
        assert len(kept(cache)) == min(found + 5, NUM_KERNELS)


def test_the_command_compiles_and_says_how_far_it_is(
    directory: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(directory), "--sdk", SDK, *SIZES]
    elsewhere = tmp_path / "elsewhere"
    for more, compiled in (([], NUM_KERNELS), ([], 0), ([f"--cache={elsewhere}"], NUM_KERNELS)):
        assert main([*arguments, *more]) == 0
        printed, said = capsys.readouterr()
        assert printed == ""
        assert f"kernel {NUM_KERNELS} of {NUM_KERNELS}: " in said
        found = NUM_KERNELS - compiled
        assert f"{NUM_KERNELS} kernels: {compiled} compiled, {found} were there" in said
    assert kept(elsewhere) == kept(cache)


def test_the_command_compiles_a_sources_default_sizes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a source that is started without options would find half of what it loads."""
    asked: list[Buckets] = []
    monkeypatch.setattr(
        ahead, "compile_ahead", lambda sdk, model, **more: asked.append(model.buckets)
    )
    assert main(["--model", str(directory), "--sdk", SDK]) == 0
    options = rngd.Options(str(directory))
    by_a_source = read_model(
        directory, max_positions=options.max_positions, token_buckets=options.token_buckets
    )
    assert asked == [by_a_source.buckets]


@pytest.mark.usefixtures("_fails_after_five")
def test_the_command_tells_a_failure_in_a_sentence(
    directory: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(directory), "--sdk", SDK, *SIZES]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("headrace: furiosa: toolchain_missing: compiling fake_")
    assert "Install the cross compiler" in last
    assert len(kept(cache)) == 5


def test_kernels_that_the_compiler_refuses_are_not_begun_with(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXAONE))
    arguments = ["--model", str(tmp_path), "--sdk", "nowhere:open", "--token-buckets", "16"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headrace: furiosa: api_missing: kernels for exaone4: ")
    assert not cache.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model=/nowhere"], "/nowhere holds no config.json"),
        (["--max-positions=0"], "max_positions is 0, the model was made for 256"),
        (["--max-positions=300"], "max_positions is 300, the model was made for 256"),
        (["--token-buckets", "8", "8"], "token_buckets [8, 8] must be positive and differ"),
        (["--token-buckets=0"], "token_buckets [0] must be positive and differ"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    directory: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--model={directory}", "--sdk", SDK, *arguments]) == 2
    assert capsys.readouterr() == ("", f"headrace: {said}\n")


def test_kernels_are_compiled_for_as_many_chips_as_their_family_spans(
    model: Model, cache: Path
) -> None:
    """What was compiled for one chip is none of them."""
    compiled(model, [])
    fake = FakeFuriosa()
    spanning = model._replace(family=replace(model.family, chips=4))
    assert compiled(spanning, [], fake.sdk())["kernels_found"] == 0
    assert fake.torch.get_fusion().num_fusion == 32
    assert len(kept(cache)) == 2 * NUM_KERNELS


def test_a_process_that_has_a_device_of_its_own_is_refused(model: Model) -> None:
    fake = FakeFuriosa()
    fake.torch.set_fusion(32)
    with pytest.raises(BackendUnavailable, match="device_busy"):
        compiled(model, [], fake.sdk())


def test_nothing_is_placed_read_or_run() -> None:
    """What only loads holds no memory, and says so to whoever asks for more."""
    loader = ahead._Texts()
    tensor = Tensor("rows", (2, 3), (2, 3), "bfloat16")
    host = torch.zeros(2, 3, dtype=torch.bfloat16)
    kernel = kernel_of(FakeFuriosa())
    program = loader.load(kernel)
    assert (loader.num_loaded, program.signature) == (1, read_signature(kernel.dsl))
    for ask in (
        lambda: loader.place(tensor, host),
        lambda: loader.zeros(tensor),
        lambda: program([]),
    ):
        with pytest.raises(LocalProtocolError, match="only compiled here"):
            ask()
    assert loader.read(tensor, None, 0, 1, host).done()
    loader.wait()
    loader.close()
    assert dict(loader.statistics()) == {}
