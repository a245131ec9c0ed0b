"""`headrace models`: which models there are, getting one, and what its KV cache is made of.

Importing this file needs no torch: `show` imports what reads a model's config when it is called.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final, NamedTuple, Self

from cyclopts import App, Parameter
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from headrace.engine import models as store
from headrace.engine.builtin import BUILTIN_MODELS
from headrace.engine.checkpoint import fingerprint
from headrace.errors import Refused
from headrace.geometry import (
    Kind,
    Layer,
    Manifest,
    Part,
    Shared,
    Sliding,
    check_manifest,
    kind_name,
)
from headrace.plan import live_window, slot_layout

DEFAULT_CONTEXT: Final = 2048

_PIPED_COLUMNS = 100
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_STAGES: Final[dict[str, str]] = {
    "wait": "waiting for another pull",
    "download": "downloading",
    "unpack": "unpacking",
    "convert": "converting",
}

models_app = App(
    name="models",
    help="List and pull built-in models; show any model's KV cache.",
    version_flags=[],
)


class CacheGroup(NamedTuple):
    """The layers that hold cells of one kind and shape."""

    kind: Kind
    parts: tuple[Part, ...]
    layers: tuple[Layer, ...]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one position in all of its layers."""
        return sum(layer.row_nbytes for layer in self.layers)

    def nbytes(self, num_tokens: int) -> int:
        """Bytes that a hand-off of `num_tokens` carries of it."""
        windows = [live_window(layer, num_tokens) for layer in self.layers]
        return sum(
            (hi - lo) * layer.row_nbytes
            for (lo, hi), layer in zip(windows, self.layers, strict=True)
        )


@dataclass(frozen=True)
class ShownModel:
    """What `show` tells of a model; `manifest.model` is empty where its weights are not here.

    max_positions: the most that it was made for, or None where its config does not say.
    """

    name: str
    directory: Path
    family: str
    max_positions: int | None
    manifest: Manifest
    context: int


@models_app.command(name="list")
def list_models() -> None:
    """List the models that headrace knows by name."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "family", "parameters", "licence", "size", "pulled"):
        table.add_column(heading, justify="right" if heading in ("parameters", "size") else "left")
    for status in store.list_models():
        model = status.model
        table.add_row(
            model.name,
            model.family,
            f"{model.parameters / 1e6:.0f} M",
            model.licence,
            decimal(status.nbytes or model.nbytes),
            "yes" if status.pulled else "no",
        )
    _stdout().print(table)
    print(f"cache: {store.cache_root()}")


@models_app.command
def pull(
    name: str,
    /,
    *,
    accept_license: Annotated[
        bool, Parameter(negative="", help="Accept the model's terms without being asked.")
    ] = False,
) -> None:
    """Download and convert a built-in model, and print its directory."""
    console = Console(stderr=True)
    shown = PullProgress(console)
    can_ask = console.is_terminal and sys.stdin.isatty()
    try:
        with shown:
            directory = store.pull(
                name,
                accept_license=accept_license or (shown.ask if can_ask else False),
                progress=shown,
            )
    except KeyboardInterrupt:
        console.print("interrupted: what is complete is kept, and the same command goes on from it")
        raise
    model = BUILTIN_MODELS[name]
    terms = f"{model.licence}, {model.licence_url}"
    console.print(f"{name} ({terms}) is in", highlight=False, soft_wrap=True)
    print(directory)


@models_app.command
def show(
    name_or_path: Annotated[
        str, Parameter(help="A built-in name, a directory, a .gguf file or organisation/name.")
    ],
    /,
    *,
    context: Annotated[
        int | None,
        Parameter(help=f"Positions of a slot; by default {DEFAULT_CONTEXT} or the model's most."),
    ] = None,
    dtype: Annotated[str, Parameter(help="What the model would be loaded in.")] = "float32",
) -> None:
    """Show what a model's KV cache is made of, and what a hand-off of it carries."""
    model = read_model(name_or_path, context=context, dtype=dtype)
    console = _stdout()
    for line in _heading(model):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    groups = cache_groups(model.manifest.layers)
    console.print(_table(groups, model.context))
    for line in (*_sharing(model.manifest.layers), *_totals(model, groups)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


class PullProgress:
    """Shows a pull's stages: bars on a terminal, elsewhere one line a stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._begin(stage, total)
        self._bars.update(
            self._tasks[stage],
            completed=done,
            total=total or None,
            amount=f"{_amount(stage, done)} of {_amount(stage, total)}" if total else "",
        )

    def ask(self, terms: str) -> bool:
        """Show the terms and ask once; whatever is not a yes is a no."""
        self._bars.stop()
        self._console.print(terms, markup=False, highlight=False)
        try:
            answer = self._console.input(Text("Do you accept these terms? (y/N) "))
        except EOFError:
            return False
        self._bars.start()
        return answer.strip().lower() in ("y", "yes")

    def _begin(self, stage: str, total: int) -> None:
        if "wait" in self._tasks:  # it counts nothing, so that only the next stage ends its bar
            self._bars.update(self._tasks["wait"], completed=1, total=1)
        text = _STAGES.get(stage, stage)
        self._tasks[stage] = self._bars.add_task(text, total=None, amount="")
        if not self._console.is_terminal:
            size = f" {_amount(stage, total)}" if total else ""
            self._console.print(f"{text}{size} ...", highlight=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()


def read_model(name_or_path: str, *, context: int | None, dtype: str) -> ShownModel:
    """Read a model's config.json, and its fingerprint where its weights are here.

    Raises:
        Refused: there is no such model, its cache is not supported, or the context or dtype is
            none that it can have.
    """
    # As in every process of ours: a vendor's plug-in must not claim its device for reading a file.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        from headrace.engine.layers import LAYOUTS, geometry
        from headrace.engine.loading import load_config
        from headrace.engine.tensors import DTYPES
    except ModuleNotFoundError as exc:
        raise Refused(
            f"models show reads a config with transformers, and {exc.name} is not installed here: "
            "run pip install 'headrace[cpu]'",
            field="model",
        ) from exc
    if dtype not in DTYPES:
        raise Refused(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}", field="dtype")
    directory = _locate(name_or_path)
    config = load_config(directory)
    most = getattr(config, "max_position_embeddings", None)
    positions = _context(context, most)
    try:
        manifest = Manifest(
            role="decoder",
            model=fingerprint(directory) if any(directory.glob("*.safetensors")) else "",
            layers=geometry(config, "decoder", dtype, positions),
            layouts=LAYOUTS["decoder"],
            vocab_size=getattr(config, "vocab_size", None) or 0,  # 0 is refused by name
            logits_dtype="float32",
            max_positions=positions,
        )
        check_manifest(manifest, "decoder")
    except Refused as exc:
        raise Refused(f"{name_or_path} ({config.model_type}): {exc}", field=exc.field) from exc
    return ShownModel(name_or_path, directory, config.model_type, most, manifest, positions)


def cache_groups(layers: Iterable[Layer]) -> list[CacheGroup]:
    """The cache groups of a model in the order of their first layers, without layers that share."""
    members: dict[tuple[Kind, tuple[Part, ...]], list[Layer]] = {}
    for layer in layers:
        if not isinstance(layer.kind, Shared):
            members.setdefault((layer.kind, layer.parts), []).append(layer)
    return [CacheGroup(kind, parts, tuple(group)) for (kind, parts), group in members.items()]


def compact(numbers: Iterable[int]) -> str:
    """Rising numbers as runs: `0-4, 6, 8-10`, both ends included."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _locate(name_or_path: str) -> Path:
    """The directory of a config.json; unlike for a run, the weights need not be beside it."""
    path = Path(name_or_path).expanduser()
    if name_or_path not in BUILTIN_MODELS:
        if (path / "config.json").is_file():
            return path.absolute()
        if not path.exists() and _HUB_NAME.fullmatch(name_or_path):
            return _config_from_hub(name_or_path)
    with PullProgress(Console(stderr=True)) as shown:
        return store.resolve(name_or_path, progress=shown)


def _config_from_hub(repository: str) -> Path:
    """Fetch config.json alone: the weights may be hundreds of gigabytes."""
    try:
        from huggingface_hub import errors, hf_hub_download
    except ModuleNotFoundError:
        return store.resolve(repository)  # says what to install
    try:
        return Path(hf_hub_download(repository, "config.json")).parent
    except (errors.HFValidationError, OSError) as exc:
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        raise Refused(
            f"{repository} is no directory here, and its config.json could not be had from the "
            f"Hugging Face hub: {reason}",
            field="model",
        ) from exc


def _context(context: int | None, most: int | None) -> int:
    if context is None:
        return min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
    if context < 1:
        raise Refused(f"context is {context}; give at least 1", field="context")
    if most is not None and context > most:
        raise Refused(
            f"context {context} is more than the model's {most} positions; lower --context",
            field="context",
        )
    return context


def _heading(model: ShownModel) -> Iterator[str]:
    manifest = model.manifest
    most = "no maximum told" if model.max_positions is None else f"{model.max_positions:,} at most"
    yield f"{model.name}: {model.family}, {len(manifest.layers)} layers"
    yield f"positions    {most}; shown for a context of {model.context:,}"
    yield f"vocabulary   {manifest.vocab_size:,}"
    yield f"fingerprint  {manifest.model or 'none: there are no weights beside its config.json'}"
    yield f"directory    {model.directory}"


def _table(groups: Iterable[CacheGroup], context: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("kind", "layers", "heads x dim", "parts", "dtype"):
        table.add_column(heading, no_wrap=heading != "layers")
    table.add_column("bytes/token", justify="right")
    table.add_column(f"bytes at {context:,}", justify="right")
    for group in groups:
        table.add_row(
            _kind(group.kind),
            compact(layer.index for layer in group.layers),
            _per_part({part.name: f"{part.heads} x {part.head_dim}" for part in group.parts}),
            ", ".join(part.name for part in group.parts),
            _per_part({part.name: part.dtype for part in group.parts}),
            f"{group.row_nbytes:,}",
            f"{group.nbytes(context):,}",
        )
    return table


def _kind(kind: Kind) -> str:
    return f"sliding {kind.window}" if isinstance(kind, Sliding) else kind_name(kind)


def _per_part(words: dict[str, str]) -> str:
    """One word where all parts agree; K and V may differ in size."""
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{name} {word}" for name, word in words.items())


def _sharing(layers: Iterable[Layer]) -> Iterator[str]:
    by_name = {layer.name: layer for layer in layers}
    readers: dict[str, list[int]] = {}
    for layer in by_name.values():
        if isinstance(layer.kind, Shared):
            readers.setdefault(layer.kind.owner, []).append(layer.index)
    for name, numbers in readers.items():
        owner = by_name[name]
        yield (
            f"layers {compact(numbers)} hold none: they read the KV of layer {owner.index} "
            f"({_kind(owner.kind)})"
        )


def _totals(model: ShownModel, groups: Sequence[CacheGroup]) -> Iterator[str]:
    sliding = sum(group.row_nbytes for group in groups if isinstance(group.kind, Sliding))
    total = sum(group.row_nbytes for group in groups)
    carried = sum(group.nbytes(model.context) for group in groups)
    slot = slot_layout(model.manifest, model.context)
    yield f"per token     {total:,} bytes: {total - sliding:,} full, {sliding:,} sliding"
    yield f"transfer set  {carried:,} bytes ({decimal(carried)}) for a prompt of {model.context:,}"
    yield (
        f"slot          {slot.nbytes:,} bytes ({decimal(slot.nbytes)}): prompt, "
        f"{slot.logits_nbytes:,} of logits, KV"
    )


def _amount(stage: str, count: int) -> str:
    return f"{count} steps" if stage == "convert" else decimal(count)


def _stdout() -> Console:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_COLUMNS  # the default of 80 would break the tables into pieces
    return console
