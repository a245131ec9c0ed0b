"""Whether a config can be served on this host, said before anything is started.

What cannot be is refused in one sentence; what is odd and may be meant comes back as a warning.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from headrace.engine.capacity import MEMORY_MARGIN_NBYTES, available_nbytes, total_nbytes
from headrace.engine.environments import RNGD
from headrace.engine.models import resolve
from headrace.engine.text import max_positions_of
from headrace.errors import Refused
from headrace.runtime.config import SourceConfig, names_of
from headrace.runtime.pairs import ATOM, LANES, is_emulated, is_fake
from headrace.server.config import DecoderTable, HttpConfig, ServeConfig, TelemetryConfig
from headrace.server.config_file import decoder_names
from headrace.server.config_warnings import many, warnings_of
from headrace.server.descriptors import check_descriptors
from headrace.server.hosts import HOST, check_own, is_loopback
from headrace.server.keys import KEY_VARIABLE, read_keys
from headrace.server.option_checks import CUDA
from headrace.server.owner_configs import OwnerStart, owner_config, request_options
from headrace.server.sizes import Sizes, can_measure, measured
from headrace.server.spans import check_installed

_ARGUMENT_NBYTES = (1 << 17) - 64  # 32 pages, with the option's name
_CONTROL_NBYTES = 107  # what the kernel takes of a socket's path


class CheckedDecoder(NamedTuple):
    """A decoder that can be served. sizes: None where they are not known.

    unchecked: what only a start can tell.
    """

    name: str
    table: DecoderTable
    lanes: int
    start: OwnerStart
    sizes: Sizes | None
    unchecked: tuple[str, ...] = ()


class Checked(NamedTuple):
    """What a config comes to. warnings: one sentence each."""

    decoders: tuple[CheckedDecoder, ...]
    warnings: tuple[str, ...]


def check_config(config: ServeConfig, keys: Sequence[str] | None = None) -> Checked:
    """Look at all that a server is started with, and start nothing.

    keys: those that it asks for; None to read them.

    Raises:
        Refused: something makes no sense, is missing, or does not fit this host.
        BackendUnavailable: a vendor's environment is not there.
    """
    _check_http(config.http, read_keys(config.http) if keys is None else keys)
    _check_telemetry(config.telemetry)
    _check_requests(config)
    names = decoder_names(config.decoders)
    _check_sources(config.decoders)
    directories = _directories(config.decoders)
    _check_served(config.decoders, directories)
    starts = [
        owner_config(table, config, directory, place=f"decoders[{index}]")
        for index, (table, directory) in enumerate(zip(config.decoders, directories, strict=True))
    ]
    _check_controls(config.decoders)
    lanes = [_lanes(start) for start in starts]
    _check_arguments(starts)
    sizes = measured(list(zip(config.decoders, directories, starts, strict=True)), lanes)
    unchecked = [_unchecked(*each) for each in zip(config.decoders, starts, strict=True)]
    warnings = [
        *_memory_warnings(config.decoders, lanes, sizes),
        *warnings_of(config, lanes),
    ]
    found = zip(names, config.decoders, lanes, starts, sizes, unchecked, strict=True)
    return Checked(tuple(CheckedDecoder(*each) for each in found), tuple(warnings))


def _check_http(http: HttpConfig, keys: Sequence[str]) -> None:
    check_descriptors(http.max_connections)
    if not HOST.fullmatch(http.host):
        raise Refused(
            f"http.host is {http.host!r}; give an address or a name, without a scheme "
            "and without a port",
            field="host",
        )
    if not keys and not is_loopback(http.host) and not http.allow_open:
        raise Refused(
            f"http.host is {http.host} and nobody would be asked for a key; give "
            f"http.api_key_file or {KEY_VARIABLE}, or say that it may be open with "
            f"http.allow_open",
            field="host",
        )
    check_own(http.host)


def _check_telemetry(telemetry: TelemetryConfig) -> None:
    if telemetry.otlp_endpoint is None:
        return
    try:
        parts = urlsplit(telemetry.otlp_endpoint)
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise Refused("telemetry.otlp_endpoint is no http or https address", field="otlp_endpoint")
    check_installed()


def _check_requests(config: ServeConfig) -> None:
    try:
        request_options(config.requests).check_values()
    except Refused as exc:
        place = f"requests.{exc.field}"
        raise Refused(f"{place}: {exc}", field=exc.field) from exc


def _check_sources(tables: Sequence[DecoderTable]) -> None:
    for index, table in enumerate(tables):
        named = (SourceConfig(each.source, {}, name=each.name or "") for each in table.sources)
        try:
            names_of(tuple(named))
        except Refused as exc:
            raise Refused(f"decoders[{index}]: {exc}", field=exc.field) from exc


def _directories(tables: Sequence[DecoderTable]) -> list[Path]:
    """Of each decoder's model, which must be here and hold the context."""
    found = []
    for index, table in enumerate(tables):
        place = f"decoders[{index}].model"
        try:
            directory = resolve(table.model)
            most = max_positions_of(directory)
        except Refused as exc:
            raise Refused(f"{place}: {exc}", field="model") from exc
        except (OSError, AttributeError, TypeError, ValueError) as exc:
            raise Refused(
                f"{place}: {directory / 'config.json'} cannot be used ({exc}); save the model "
                "there again",
                field="model",
            ) from exc
        if table.context > most:
            raise Refused(
                f"decoders[{index}].context is {table.context}, and {table.model} "
                f"holds {most} positions; give at most those",
                field="context",
            )
        found.append(directory)
    return found


def _check_served(tables: Sequence[DecoderTable], directories: Sequence[Path]) -> None:
    """One name may stand for several decoders, and for one model."""
    by_name: dict[str, tuple[int, Path]] = {}
    for index, (table, directory) in enumerate(zip(tables, directories, strict=True)):
        served = table.served_as or (table.model,)
        again = [name for name, count in Counter(served).items() if count > 1]
        if again:
            raise Refused(
                f"decoders[{index}].served_as has {again[0]} twice; leave one out",
                field="served_as",
            )
        for name in served:
            first, other = by_name.setdefault(name, (index, directory))
            if other.resolve() != directory.resolve():
                raise Refused(
                    f"decoders[{first}] and decoders[{index}] are both served as {name} and have "
                    "different models; give one another name in served_as",
                    field="served_as",
                )


def _check_controls(tables: Sequence[DecoderTable]) -> None:
    seen: dict[Path, int] = {}
    for index, table in enumerate(tables):
        if table.control is None:
            continue
        name, path = f"decoders[{index}].control", Path(table.control).absolute()
        if seen.setdefault(path, index) != index:
            raise Refused(
                f"{name} is that of decoders[{seen[path]}] too; give each its own", field="control"
            )
        _check_control(name, path)


def _check_control(name: str, path: Path) -> None:
    if len(os.fsencode(path)) > _CONTROL_NBYTES:
        raise Refused(
            f"{name} has more than {_CONTROL_NBYTES} bytes; give a shorter path", field="control"
        )
    try:
        directory, there = _mode(path.parent), _mode(path)
    except (OSError, ValueError) as exc:  # of another user, or no path at all
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise Refused(
            f"{name}: {path} cannot be looked at ({why}); ask as the user that runs the server",
            field="control",
        ) from exc
    if directory is None or not stat.S_ISDIR(directory):
        raise Refused(f"{name}: {path.parent} is not a directory; make it", field="control")
    if there is not None and not stat.S_ISSOCK(there):
        raise Refused(f"{name}: {path} is there and no socket; name another path", field="control")


def _mode(path: Path) -> int | None:
    """None where nothing is."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_arguments(starts: Sequence[OwnerStart]) -> None:
    """An owner's settings are one argument of its process, of which the kernel bounds the size."""
    for index, start in enumerate(starts):
        nbytes = len(msgspec.json.encode(start.config))
        if nbytes > _ARGUMENT_NBYTES:
            raise Refused(
                f"decoders[{index}]: its settings are {nbytes} bytes, and at most "
                f"{_ARGUMENT_NBYTES} reach its process; put long options into a file of their own",
                field="options",
            )


def _unchecked(table: DecoderTable, start: OwnerStart) -> tuple[str, ...]:
    """What only a start can tell of a decoder."""
    names = [table.decoder, *(each.source for each in table.sources)]
    found = [f"the options of {name}" for name in names if ":" in name]
    if not can_measure():
        found.append("options and sizes, which torch and transformers are needed for")
    sources = start.config.sources
    devices = [
        *(each.source for each in sources if each.source == CUDA and each.python is not None),
        *(RNGD.name for each in sources if _on_a_card(each)),
    ]
    if table.decoder == CUDA and start.interpreter is not None:
        devices.append(CUDA)
    if table.decoder == ATOM and not is_fake(ATOM, start.config.decoder_options):
        devices.append(ATOM)
    return tuple(dict.fromkeys([*found, *(f"the device of {name}" for name in devices)]))


def _on_a_card(source: SourceConfig) -> bool:
    return source.source == RNGD.name and not is_emulated(source.source, source.options)


def _lanes(start: OwnerStart) -> int:
    """How many lanes a decoder is made with."""
    lanes = start.config.decoder_options.get("lanes", 1)
    return lanes if type(lanes) is int else LANES


def _memory_warnings(
    tables: Sequence[DecoderTable],
    lanes: Sequence[int],
    sizes: Sequence[Sizes | None],
) -> list[str]:
    """Refuse more lanes and slots than this host has memory for, at any time; warn of now."""
    known = [each for each in sizes if each is not None]
    total, available = total_nbytes(), available_nbytes()
    if sum(each.reserved for each in known) + MEMORY_MARGIN_NBYTES > total:
        places = [at for at, each in enumerate(sizes) if each is not None]
        size, index = max(zip(known, places, strict=True), key=lambda pair: pair[0].reserved)
        text = _too_much(tables[index], lanes[index], size, total)
        raise Refused(f"decoders[{index}]: {text}", field="memory")
    needed = sum(each.reserved + each.weights for each in known) + MEMORY_MARGIN_NBYTES
    if needed > total:
        return [
            f"lanes, slots and weights take up to {_gb(needed)} and this host has {_gb(total)}: "
            "a model may not load"
        ]
    if needed > available:
        return [
            f"lanes, slots and weights take up to {_gb(needed)} and {_gb(available)} are "
            "available now"
        ]
    return []


def _too_much(table: DecoderTable, lanes: int, size: Sizes, total: int) -> str:
    slots = sum(each.slots for each in table.sources)
    kept = f" and {_gb(size.kept)} for kept prompts" if size.kept else ""
    lower = "lanes, slots, context or keep_bytes" if size.kept else "lanes, slots or context"
    return (
        f"{many(lanes, 'lane')} of {_gb(size.lane)} and {many(slots, 'slot')} of "
        f"{_gb(size.slot)} at {table.context} positions{kept} are {_gb(size.reserved)} here, and "
        f"this host has {_gb(total)}; lower {lower}"
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
