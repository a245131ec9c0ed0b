"""GGUF file -> directory of `config.json`, tokenizer and fp32 safetensors, once.

Reading a GGUF file costs tens of seconds each time, because its token lists are parsed in Python;
the directory made here loads in well under one. The weights are stored as fp32, what the quantised
blocks decode to exactly, so nothing is rounded twice.

The conversion runs in a child process (`python -m headrace.engine.convert GGUF DIRECTORY`): it
needs several gigabytes for a moment, and only the end of a process gives those back. The child
reports on its standard output, one JSON object a line; whatever libraries print goes to the log
that the caller names. It never uses the network.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from headrace.errors import HeadraceError, Refused

Progress = Callable[[str, int, int], None]

CONVERTER_VERSION = 1  # raised whenever the same GGUF file would give another directory

_PACKAGES = ("torch", "transformers", "gguf", "tokenizers", "safetensors")
_STEPS = 4

# Vocabularies whose merges were learned with every digit on its own. llama.cpp splits these before
# anything else; the tokenizer rebuilt from a GGUF file lacks that step and then disagrees on some
# runs of blanks and digits.
_DIGITS_APART = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)

_CHILD_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    # A vendor's torch extension must not claim its device for a conversion on the CPU.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


def convert_gguf(
    gguf_path: Path,
    target_dir: Path,
    progress: Progress,
    *,
    log_path: Path | None = None,
    pass_fds: tuple[int, ...] = (),
) -> None:
    """Convert a GGUF file into the new directory `target_dir`, in a child process.

    Until this returns the directory is unfinished.
    `progress` is called with `("convert", steps done, steps in all)`. The child inherits
    `pass_fds`, so a lock held through one of them outlives a caller that is killed for as long as
    the child still writes.

    Raises:
        Refused: the file cannot be converted, or a package is missing; the text says what to do.
        HeadraceError: the child failed otherwise; the text ends with its last words and names the
        log.
    """
    require_packages()
    log_path = log_path or target_dir.with_name(target_dir.name + ".log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "headrace.engine.convert", str(gguf_path), str(target_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=pass_fds,
            env={**os.environ, **_CHILD_ENVIRONMENT},
        ) as child,
    ):
        try:
            refusal = _follow(child.stdout or (), progress)
            status = child.wait()
        finally:
            child.kill()  # without effect once the child has ended; else the caller was interrupted
    if refusal is not None:
        raise Refused(refusal, field="model")
    if status != 0:
        raise HeadraceError(
            f"converting {gguf_path} failed with exit status {status}: {last_line(log_path)} "
            f"(all of its output: {log_path})"
        )


def require_packages() -> None:
    """Check that what the child imports is installed.

    Raises:
        Refused: names what is missing.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise Refused(
            f"converting a GGUF file needs {', '.join(missing)}: run pip install 'headrace[cpu]'",
            field="model",
        )


def read_metadata(path: Path) -> dict[str, object]:
    """Read a GGUF file's numbers and strings; its arrays (token lists) are stepped over.

    Raises:
        Refused: the file is no GGUF file of version 2 or 3, or is cut short.
    """
    try:
        with path.open("rb") as stream:
            magic, version = stream.read(4), _number(stream, "I")
            if magic != b"GGUF" or version not in (2, 3):
                raise Refused(
                    f"{path} is not a little-endian GGUF file of version 2 or 3 "
                    f"(it begins with {magic!r}, version {version})",
                    field="model",
                )
            _number(stream, "Q")  # the number of tensors
            found = {}
            for _ in range(int(_number(stream, "Q"))):
                key = _text(stream)
                value = _value(stream, int(_number(stream, "I")))
                if value is not None:
                    found[key] = value
    except (struct.error, UnicodeDecodeError, _UnknownType) as exc:
        raise Refused(f"{path} is not a readable GGUF file: {exc}", field="model") from exc
    return found


def last_line(log_path: Path) -> str:
    """Return the last non-blank line of a log, which for a Python program is its error."""
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")


def main(argv: list[str]) -> int:
    """Entry of the child process: convert `argv[0]` into the new directory `argv[1]`."""
    # Libraries print to descriptor 1; from here on that is the log, and only reports go to the
    # caller.
    with os.fdopen(os.dup(1), "w") as reports:
        os.dup2(2, 1)

        def report(**fields: object) -> None:
            print(json.dumps(fields), file=reports, flush=True)

        try:
            _convert(Path(argv[0]), Path(argv[1]), lambda done: report(done=done, total=_STEPS))
        except Refused as exc:
            report(refused=str(exc))
            return 2
    return 0


def _follow(lines: Iterable[bytes], progress: Progress) -> str | None:
    """Pass the child's reports on; return the refusal that it sent, if any."""
    refusal = None
    for line in lines:
        fields = json.loads(line)
        if "refused" in fields:
            refusal = str(fields["refused"])
        else:
            progress("convert", fields["done"], fields["total"])
    return refusal


def _convert(gguf_path: Path, target_dir: Path, step: Callable[[int], None]) -> None:
    target_dir.mkdir(parents=True)
    metadata = read_metadata(gguf_path)
    step(0)
    # The tokenizer goes first: what parsing its lists takes is free again before the weights come.
    _convert_tokenizer(gguf_path, target_dir, str(metadata.get("tokenizer.ggml.pre", "")))
    step(1)
    config = _read_config(gguf_path, str(metadata.get("general.architecture", "unknown")))
    step(2)
    model = _read_model(gguf_path, config)
    step(3)
    model.save_pretrained(target_dir)
    step(4)


def _convert_tokenizer(gguf_path: Path, target_dir: Path, pre_tokenizer: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    if pre_tokenizer in _DIGITS_APART:
        _split_digits(tokenizer.backend_tokenizer)
    for key in ("is_local", "local_files_only"):  # how this file was found, not what it is
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(target_dir)


def _split_digits(backend: Any) -> None:
    """Make every digit a piece of its own before the byte-level split."""
    from tokenizers import pre_tokenizers

    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return  # rebuilt with splits of its own
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def _read_config(gguf_path: Path, architecture: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    except ValueError as exc:
        raise Refused(
            f"{gguf_path} cannot be converted: the installed transformers reads no GGUF files "
            f"of architecture {architecture!r} ({exc})",
            field="model",
        ) from exc


def _read_model(gguf_path: Path, config: Any) -> Any:
    """Build the model on the meta device and give it the decoded tensors: no weight exists twice.

    `AutoModelForCausalLM.from_pretrained(gguf_file=...)` would do, but asks for one more package,
    parses the file twice as often and returns a model that refuses to be saved.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(
        str(gguf_path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )["tensors"]
    # A tied weight is in the file once; strict loading wants it under each of its names.
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for names in groups.values():
        known = next((tensors[name] for name in names if name in tensors), None)
        if known is not None:
            tensors.update({name: known for name in names if name not in tensors})
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    return model


class _UnknownType(Exception):
    """A value type outside the format: the rest of the file cannot be stepped through."""


_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def _number(stream: IO[bytes], code: str) -> Any:
    layout = "<" + code
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))[0]


def _text(stream: IO[bytes]) -> str:
    nbytes = int(_number(stream, "Q"))
    raw = stream.read(nbytes)
    if len(raw) != nbytes:
        raise struct.error(f"a text of {nbytes} bytes ends after {len(raw)}")
    return raw.decode()


def _value(stream: IO[bytes], kind: int) -> object:
    if kind == _STRING:
        return _text(stream)
    if kind in _SCALARS:
        return _number(stream, _SCALARS[kind])
    if kind != _ARRAY:
        raise _UnknownType(f"value type {kind}")
    item_kind, count = int(_number(stream, "I")), int(_number(stream, "Q"))
    if item_kind in _SCALARS:
        stream.seek(struct.calcsize("<" + _SCALARS[item_kind]) * count, os.SEEK_CUR)
    else:
        for _ in range(count):
            if item_kind == _STRING:
                stream.seek(int(_number(stream, "Q")), os.SEEK_CUR)
            else:
                _value(stream, item_kind)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
