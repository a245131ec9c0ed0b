from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import convert
from headrace.errors import HeadraceError, Refused

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 64, 2


def byte_alphabet() -> list[str]:
    """The 256 byte tokens of a byte-level vocabulary, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def write_gguf(path: Path, *, pre: str = "smollm", tied: bool = True, drop: str = "") -> Path:
    """Write a llama of two layers with a byte-level vocabulary; leave out the tensor `drop`."""
    numpy: Any = pytest.importorskip("numpy")
    gguf: Any = pytest.importorskip("gguf")
    tokens = ["<|end|>", *byte_alphabet(), "12"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["1 2"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    random = numpy.random.default_rng(7)
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(tokens), HIDDEN)
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (width, HIDDEN),
            "attn_k": (kv_width, HIDDEN),
            "attn_v": (kv_width, HIDDEN),
            "attn_output": (HIDDEN, width),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        if name != drop:
            writer.add_tensor(f"{name}.weight", random.standard_normal(shape, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(gguf: Path, target: Path) -> tuple[Any, Any]:
    """Convert in this process and load what came out: (model, tokenizer)."""
    transformers: Any = pytest.importorskip("transformers")
    steps: list[int] = []
    convert._convert(gguf, target, steps.append)
    assert steps == [0, 1, 2, 3, 4]
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True
    )
    assert not any(loading.values())
    return model, transformers.AutoTokenizer.from_pretrained(target)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_weight_arrives_as_fp32_under_its_name(tmp_path: Path, tied: bool) -> None:
    gguf: Any = pytest.importorskip("gguf")
    torch: Any = pytest.importorskip("torch")
    path = write_gguf(tmp_path / "tiny.gguf", tied=tied)
    model, _ = converted(path, tmp_path / "out")
    state = model.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    source = {
        tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(str(path)).tensors
    }
    assert torch.equal(state["model.embed_tokens.weight"], source["token_embd.weight"])
    head = source["token_embd.weight" if tied else "output.weight"]
    assert torch.equal(state["lm_head.weight"], head)
    assert torch.equal(
        state["model.layers.1.mlp.down_proj.weight"], source["blk.1.ffn_down.weight"]
    )
    # llama.cpp interleaves the two rotary halves of each head of q and k.
    rows = source["blk.0.attn_k.weight"].reshape(KV_HEADS, HEAD_DIM // 2, 2, HIDDEN)
    half_split = rows.transpose(1, 2).reshape(KV_HEADS * HEAD_DIM, HIDDEN)
    assert torch.equal(state["model.layers.0.self_attn.k_proj.weight"], half_split)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["1", "2"]), ("default", ["12"])])
def test_digits_stand_alone_only_where_the_vocabulary_was_learned_so(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", pre=pre)
    (tmp_path / "out").mkdir()
    convert._convert_tokenizer(path, tmp_path / "out", pre)
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("12") == pieces
    assert tokenizer.decode(tokenizer("a 12b")["input_ids"]) == "a 12b"
    saved = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & set(saved)


def test_a_split_that_is_not_the_plain_byte_level_one_is_left_alone() -> None:
    pre_tokenizers: Any = pytest.importorskip("tokenizers.pre_tokenizers")

    class Backend:
        pre_tokenizer = pre_tokenizers.Whitespace()

    backend = Backend()
    convert._split_digits(backend)
    assert isinstance(backend.pre_tokenizer, pre_tokenizers.Whitespace)


def test_a_missing_weight_is_not_made_up(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = write_gguf(tmp_path / "tiny.gguf", drop="blk.1.attn_v")
    with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn\.v_proj"):
        convert._convert(path, tmp_path / "out", lambda step: None)


def scalar_pair(key: str, kind: int, raw: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + raw


def gguf_of(*pairs: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pairs)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_metadata_steps_over_arrays(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    nested = struct.pack("<IQ", 9, 2) + 2 * (struct.pack("<IQ", 0, 3) + b"abc")
    path.write_bytes(
        gguf_of(
            scalar_pair("words", 9, struct.pack("<IQ", 8, 2) + text("one") + text("two")),
            scalar_pair("numbers", 9, struct.pack("<IQ", 6, 3) + bytes(12)),
            scalar_pair("nested", 9, nested),
            scalar_pair("general.architecture", 8, text("llama")),
            scalar_pair("flag", 7, b"\x01"),
            scalar_pair("big", 10, struct.pack("<Q", 1 << 40)),
        )
    )
    assert convert.read_metadata(path) == {
        "general.architecture": "llama",
        "flag": True,
        "big": 1 << 40,
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 a zip file is not a model",
        gguf_of(version=1),
        gguf_of(scalar_pair("key", 8, text("value")[:-2])),
        gguf_of(scalar_pair("key", 99, b"")),
        gguf_of(scalar_pair("key", 9, struct.pack("<IQ", 77, 1))),
        gguf_of(scalar_pair("key", 8, struct.pack("<Q", 1) + b"\xff")),
    ],
    ids=["empty", "zip", "version", "short", "type", "item-type", "encoding"],
)
def test_nonsense_is_refused_before_anything_heavy_starts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"m\.gguf is not a") as refusal:
        convert.read_metadata(path)
    assert refusal.value.field == "model"


def test_an_architecture_that_is_not_read_is_refused(tmp_path: Path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "marsupial")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(Refused, match="architecture 'marsupial'"):
        convert._read_config(path, "marsupial")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(Refused, match=r"needs gguf: run pip install 'headrace\[cpu\]'"):
        convert.require_packages()


def test_the_childs_refusal_reaches_the_caller(tmp_path: Path) -> None:
    """The real child: it reads the metadata first, so that this stays fast."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"nonsense")
    with pytest.raises(Refused, match="is not a"):
        convert.convert_gguf(path, tmp_path / "out", lambda *step: None)
    assert not (tmp_path / "out" / "config.json").exists()


def fake_python(tmp_path: Path, body: str) -> str:
    """An interpreter in name: whatever it is asked to run, it runs `body`."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable} -S\nimport os, sys\n{body}\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def no_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "require_packages", lambda: None)


@pytest.mark.usefixtures("no_requirements")
def test_progress_and_a_quiet_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        'print(\'{"done": 1, "total": 4}\', flush=True)\n'
        "sys.stderr.write(' '.join(sys.argv[1:]) + '|' + os.environ['HF_HUB_OFFLINE'])\n"
        "sys.stderr.write('|' + os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    )
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))
    seen: list[tuple[str, int, int]] = []
    convert.convert_gguf(
        tmp_path / "a.gguf",
        tmp_path / "out",
        lambda *step: seen.append(step),
        log_path=tmp_path / "logs" / "c.log",
    )
    assert seen == [("convert", 1, 4)]
    said = (tmp_path / "logs" / "c.log").read_text()
    assert said == f"-m headrace.engine.convert {tmp_path / 'a.gguf'} {tmp_path / 'out'}|1|0"


@pytest.mark.usefixtures("no_requirements")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit('MemoryError: too big')", "status 1: MemoryError: too big"),
        ("os.kill(os.getpid(), 9)", "status -9: it printed nothing"),
    ],
)
def test_a_dead_child_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))
    with pytest.raises(HeadraceError, match=said) as failure:
        convert.convert_gguf(tmp_path / "a.gguf", tmp_path / "out", lambda *step: None)
    assert not isinstance(failure.value, Refused)
    assert str(tmp_path / "out.log") in str(failure.value)


@pytest.mark.usefixtures("no_requirements")
def test_an_interrupted_caller_leaves_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'print(\'{"done": 0, "total": 4}\', flush=True)\nimport time; time.sleep(60)'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))
    children: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen.__init__

    def remembering(self: subprocess.Popen[bytes], *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        children.append(self)

    def interrupt(*step: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "__init__", remembering)
    with pytest.raises(KeyboardInterrupt):
        convert.convert_gguf(tmp_path / "a.gguf", tmp_path / "out", interrupt)
    assert [child.returncode for child in children] == [-9]


def test_only_reports_reach_the_childs_output() -> None:
    program = (
        "import os, sys; import headrace.engine.convert as convert\n"
        "def noisy(source, target, step): print('library'); os.write(1, b'kernel'); step(3)\n"
        "convert._convert = noisy\n"
        "sys.exit(convert.main(['a.gguf', 'out']))"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(child.stdout) == {"done": 3, "total": 4}
    assert b"library" in child.stderr
    assert b"kernel" in child.stderr


@pytest.mark.parametrize(
    ("refused", "status", "report"),
    [(False, 0, {"done": 3, "total": 4}), (True, 2, {"refused": "not this one"})],
)
def test_the_child_reports_and_exits(
    monkeypatch: pytest.MonkeyPatch, refused: bool, status: int, report: dict[str, object]
) -> None:
    def scripted(gguf: Path, target: Path, step: Any) -> None:
        assert (gguf, target) == (Path("a.gguf"), Path("out"))
        if refused:
            raise Refused("not this one")
        step(3)

    monkeypatch.setattr(convert, "_convert", scripted)
    reader, writer = os.pipe()
    # The test's own descriptors stay as they are; the test above is the one that checks them.
    monkeypatch.setattr(os, "dup", lambda descriptor: writer)
    monkeypatch.setattr(os, "dup2", lambda source, target: target)
    assert convert.main(["a.gguf", "out"]) == status
    with os.fdopen(reader) as lines:
        assert json.loads(lines.readline()) == report
