"""Compiled kernels on disk: once each, whole or not at all, and no failure is remembered."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.rngd import compiled
from headrace.engine.rngd.compiled import FORMAT, CompiledKernels
from headrace.engine.rngd.labels import PLACED, labelled
from headrace.engine.rngd.signature import read_signature
from headrace.errors import BackendUnavailable, Refused
from headrace.testing.fake_furiosa import FakeFuriosa
from headrace.testing.fake_furiosa.kernels import FakeKernel
from headrace.testing.fake_furiosa.vendor import InnerRunnable

CONFIG = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def kernel_of(fake: FakeFuriosa, name: str = "full_attention", tokens: int = 8) -> Any:
    factory = getattr(fake.sdk().kernels("llama"), f"llama3_1_8b_w16a16_{name}")
    sizes = (1, 16, tokens, 65) if name == "full_attention" else (tokens,)
    return factory(*sizes, hf_config_overrides=CONFIG)


class Opened:
    """A cache of a process of its own, whose compilations are counted."""

    def __init__(self, directory: Path, told: Callable[[str], None] | None = None) -> None:
        self.said: list[str] = []
        self.fake = FakeFuriosa()
        self.fake.torch.set_fusion(8)
        self.cache = CompiledKernels(self.fake.sdk(), told or self.said.append, directory)

    def load(self, name: str = "full_attention", tokens: int = 8, **more: int) -> Any:
        asked = {"fusion": 8, "chips": 1, **more}
        return self.cache.load(kernel_of(self.fake, name, tokens), **asked)[0]

    @property
    def num_compiled(self) -> int:
        return self.fake.torch.compiler.num_compiled


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.kernel"))


def test_a_kernel_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    first = Opened(tmp_path / "kernels")
    loaded = first.load()
    assert loaded._inner.dsl == kernel_of(first.fake).dsl
    assert [line.split(" in ")[0] for line in first.said] == [
        "compiling fake_full_attention 8x32, number 1 of this process; headrace rngd compile does "
        "this ahead",
        "compiled fake_full_attention 8x32",
    ]
    second = Opened(tmp_path / "kernels")
    assert second.load()._inner.serialize() == loaded._inner.serialize()
    assert (first.num_compiled, second.num_compiled, second.said) == (1, 0, [])
    assert second.cache.statistics() == {
        "kernels_compiled": 0,
        "kernels_found": 1,
        "kernels_broken": 0,
    }


def test_what_it_depends_on_makes_another_file(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.load()
    opened.load(tokens=16)
    opened.load("last_tokenwise_with_lm_head")
    other = Opened(tmp_path)
    other.fake.torch._fusion = None
    other.fake.torch.set_fusion(4)
    other.load(fusion=4)
    newer = FakeFuriosa().sdk()
    object.__setattr__(newer, "versions", {"fake-furiosa": "2"})
    newer.torch.set_fusion(8)
    CompiledKernels(newer, directory=tmp_path).load(kernel_of(FakeFuriosa()), fusion=8, chips=1)
    assert len(files(tmp_path)) == 5


def test_a_text_that_is_compiled_in_another_form_is_another_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Opened(tmp_path).load()
    monkeypatch.setattr(compiled, "labelled", lambda dsl: f"{labelled(dsl)}\n")
    again = Opened(tmp_path)
    again.load()
    assert again.num_compiled == 1
    assert len(files(tmp_path)) == 2


def test_a_kernel_of_which_some_arguments_are_placed_is_compiled_with_all_of_them_placed(
    tmp_path: Path,
) -> None:
    inner = Opened(tmp_path).load("last_tokenwise_with_lm_head")._inner
    arguments = read_signature(inner.dsl).arguments
    assert all(each.placed for each in arguments)
    assert arguments[0].name == f"weighted_v{PLACED}"
    assert inner.input_dram_shapes[-1].host_sizes == [1024, 32]


def test_what_lies_in_parts_on_chips_is_compiled_so(tmp_path: Path) -> None:
    fake = FakeFuriosa()
    fake.torch.set_fusion(32)
    parts = "dram([H @ 8 / 2] | [T, H @ 8 % 2, E])/bf16 @ original=[T, H, E]"
    dsl = f"def fake_split<T=4, H=8, E=2>(\n    cache: {parts}\n) -> {parts}:\n    fake\n"
    kernel = FakeKernel("fake_split", dsl)
    cache = CompiledKernels(fake.sdk(), directory=tmp_path)
    runnable, _ = cache.load(kernel, fusion=32, chips=4)
    (shape,) = runnable._inner.input_dram_shapes
    assert (shape.host_sizes, shape.intra_chip_sizes) == ([4, 8, 2], [4, 2, 2])
    assert shape.inter_chip_axes == [(1, 4)]


def spoil_length(body: bytes) -> bytes:
    return body[:-1]


def spoil_head(body: bytes) -> bytes:
    return body[: len(FORMAT)]


def spoil_format(body: bytes) -> bytes:
    return b"X" + body[1:]


def spoil_digest(body: bytes) -> bytes:
    at = len(FORMAT)
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def spoil_body(body: bytes) -> bytes:
    return body[:-9] + bytes([body[-9] ^ 1]) + body[-8:]


def spoil_all(body: bytes) -> bytes:
    return b""


@pytest.mark.parametrize(
    "spoil", [spoil_length, spoil_head, spoil_format, spoil_digest, spoil_body, spoil_all]
)
def test_a_file_that_is_not_as_written_is_made_again(
    tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    Opened(tmp_path).load()
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(spoil(whole))
    again = Opened(tmp_path)
    again.load()
    assert (again.num_compiled, again.cache.statistics()["kernels_broken"]) == (1, 1)
    assert "is not as it was written" in again.said[0]
    assert path.read_bytes() == whole
    assert Opened(tmp_path).load()
    assert files(tmp_path) == [path]


def as_written(body: bytes) -> bytes:
    return FORMAT + hashlib.sha256(body).digest() + len(body).to_bytes(8, "little") + body


def test_a_whole_file_that_holds_no_program_is_made_again(tmp_path: Path) -> None:
    Opened(tmp_path).load()
    (file,) = files(tmp_path)
    file.write_bytes(as_written(b"no program"))
    opened = Opened(tmp_path)
    opened.load()
    assert opened.num_compiled == 1
    assert opened.said[0].startswith(f"{file} cannot be used, so it is made again")
    again = Opened(tmp_path)
    again.load()
    assert again.num_compiled == 0


@pytest.mark.parametrize("place", ["a file", "a directory in the file's place"])
def test_a_directory_that_cannot_be_used_is_told(tmp_path: Path, place: str) -> None:
    if place == "a file":
        directory = tmp_path / "file" / "kernels"
        directory.parent.write_text("")
    else:
        directory = tmp_path
        Opened(directory).load()
        (file,) = files(directory)
        file.unlink()
        file.mkdir()
    with pytest.raises(Refused, match="compiled kernels cannot be kept in") as told:
        Opened(directory).load()
    assert told.value.field == "compile_cache"


def test_what_cannot_be_kept_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = Opened(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    opened.load()
    assert opened.said[-1] == "fake_full_attention is not kept: No space left on device"
    assert list(tmp_path.glob("*.part")) == []
    assert files(tmp_path) == []


def test_a_long_compilation_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "SIGN_EVERY_S", 0.001)
    heard = threading.Event()
    opened = Opened(tmp_path, lambda text: heard.set() if "still compiling" in text else None)
    made = opened.fake.torch.CompileModule.from_module

    def slow(*arguments: Any, **more: Any) -> Any:
        assert heard.wait(60)
        return made(*arguments, **more)

    monkeypatch.setattr(opened.fake.torch.CompileModule, "from_module", slow)
    opened.load()
    assert threading.active_count() == 1


def test_what_another_process_compiles_is_waited_for(tmp_path: Path) -> None:
    Opened(tmp_path).load()
    (path,) = files(tmp_path)
    theirs, body = path.with_suffix(".lock").open("ab"), path.read_bytes()
    fcntl.flock(theirs, fcntl.LOCK_EX)
    path.unlink()
    said: list[str] = []

    def told(text: str) -> None:
        said.append(text)
        path.write_bytes(body)  # what the other process does before it lets go of the lock
        theirs.close()

    mine = Opened(tmp_path, told)
    mine.load()
    assert said == ["waiting for another process that compiles fake_full_attention"]
    assert mine.num_compiled == 0
    assert mine.cache.statistics()["kernels_found"] == 1


def test_a_process_that_died_while_it_compiled_leaves_no_lock_behind(tmp_path: Path) -> None:
    Opened(tmp_path).load()
    (path,) = files(tmp_path)
    path.unlink()
    with path.with_suffix(".lock").open("ab") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
    mine = Opened(tmp_path)
    mine.load()
    assert mine.num_compiled == 1
    assert not any("waiting" in line for line in mine.said)


def test_an_interrupted_write_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*names: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Opened(tmp_path).load()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock"]
    again = Opened(tmp_path)
    again.load()
    assert again.num_compiled == 1
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".kernel", ".lock"]


def test_what_an_ended_process_left_of_a_compilation_is_thrown_away(tmp_path: Path) -> None:
    """A failure could be remembered there."""
    Opened(tmp_path).load()
    (path,) = files(tmp_path)
    path.unlink()
    fake = FakeFuriosa()
    fake.torch.compiler.toolchain = False
    with (
        fake.torch.config.cache_context(str(path.with_suffix(".compiler"))),
        pytest.raises(Exception, match="os error 2"),
    ):
        fake.torch.compiler.compile(kernel_of(fake).dsl, fake.torch.get_fusion())
    Opened(tmp_path).load()
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".kernel", ".lock"]


def test_a_failure_is_typed_and_not_remembered(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.fake.torch.compiler.toolchain = False
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="gcc-aarch64-linux-gnu") as told:
            opened.load()
        assert told.value.stage == "toolchain_missing"
        assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    opened.fake.torch.compiler.toolchain = True
    assert opened.load() is not None


def test_the_vendors_own_cache_remembers_a_failure(tmp_path: Path) -> None:
    """Why it is given a directory of its own: so does the fake, as the vendor's compiler does."""
    fake = FakeFuriosa()
    kernel = kernel_of(fake, "last_tokenwise_with_lm_head")
    dsl = labelled(kernel.dsl)
    for toolchain in (False, True):
        fake.torch.compiler.toolchain = toolchain
        with (
            fake.torch.config.cache_context(str(tmp_path)),
            pytest.raises(Exception, match="os error 2"),
        ):
            fake.torch.compiler.compile(dsl, fake.torch.get_fusion())
    shutil.rmtree(tmp_path)
    with fake.torch.config.cache_context(str(tmp_path)):
        assert fake.torch.compiler.compile(dsl, fake.torch.get_fusion()) is not None


def test_what_the_compiler_says_is_passed_on_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(tmp_path)

    def compile(dsl: str, fusion: Any) -> InnerRunnable:
        raise RuntimeError(
            "failed to compile\ngraph():\n  x\ncompile error:\n\nno such axis\nplace"
        )

    monkeypatch.setattr(opened.fake.torch.compiler, "compile", compile)
    with pytest.raises(BackendUnavailable, match=r"attention: no such axis\. The") as told:
        opened.load()
    assert told.value.stage == "api_missing"


@pytest.mark.parametrize(("tokens", "fusion"), [(16, 8), (8, 4)])
def test_a_program_that_is_not_what_its_text_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, fusion: int
) -> None:
    opened = Opened(tmp_path)
    other = InnerRunnable(kernel_of(opened.fake, tokens=tokens).dsl, fusion)
    monkeypatch.setattr(opened.fake.torch.compiler, "compile", lambda dsl, fusion: other)
    with pytest.raises(BackendUnavailable, match="api_missing"):
        opened.load()


def test_kernels_lie_in_headraces_own_directory_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    fake = FakeFuriosa()
    fake.torch.set_fusion(8)
    CompiledKernels(fake.sdk()).load(kernel_of(fake), fusion=8, chips=1)
    assert len(files(tmp_path / "rngd" / "kernels")) == 1


@pytest.mark.rngd_emulation
@pytest.mark.timeout(300)
def test_the_installed_compiler_needs_no_card(rngd_python: str, tmp_path: Path) -> None:
    """A failure without a cross compiler is gone with its cause; what was compiled is found."""
    script = ["-m", "tests.unit.engine.rngd.compile_small", str(tmp_path)]
    done = subprocess.run([rngd_python, *script], capture_output=True, check=True, text=True)
    failed, *made = json.loads(done.stdout.splitlines()[-1])
    assert failed["stage"] == "toolchain_missing"
    shapes = [[16, 256], [1, 16], [65, 1, 2, 64], [65, 1, 2, 64], [1, 16, 16]]
    for attempt, (num_compiled, num_found) in zip(made, ((1, 0), (0, 1)), strict=False):
        assert attempt["shapes"] == shapes
        assert attempt["fits"]  # what the card's executor places is laid out as the program asks
        assert (attempt["kernels_compiled"], attempt["kernels_found"]) == (num_compiled, num_found)
