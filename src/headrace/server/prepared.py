"""What a config comes to before anything is started: models, keys, and each owner's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.engine.models import resolve
from headrace.runtime.config import names_of
from headrace.server.config import DecoderTable, ServeConfig
from headrace.server.config_checks import CheckedDecoder, check_config
from headrace.server.decoder_settings import DecoderSettings
from headrace.server.keys import take_keys
from headrace.server.models import ServedModel, open_model
from headrace.server.owner_configs import restart_policy
from headrace.server.spans import SpanListener, open_spans


@dataclass(frozen=True)
class Prepared:
    """All that a server is made of. models: by the names that requests ask for."""

    models: dict[str, ServedModel]
    decoders: list[DecoderSettings]
    keys: tuple[str, ...]
    spans: SpanListener | None
    warnings: tuple[str, ...]

    @property
    def source_names(self) -> dict[str, tuple[str, ...]]:
        """Each decoder's sources, by their names."""
        return {each.name: names_of(each.owner.sources) for each in self.decoders}


def prepare(config: ServeConfig) -> Prepared:
    """Check a config, find its models, and settle each owner's settings.

    Raises:
        Refused, BackendUnavailable: naming what is missing or broken.
    """
    keys = take_keys(config.http)
    checked = check_config(config, keys)
    models: dict[str, ServedModel] = {}
    for each in checked.decoders:
        directory = resolve(each.table.model)
        for name in served_names(each.table):
            _add(models, name, directory, each.table.context)
    decoders = [_settings(each, config) for each in checked.decoders]
    spans = open_spans(config.telemetry)
    return Prepared(models, decoders, keys, spans, checked.warnings)


def served_names(table: DecoderTable) -> tuple[str, ...]:
    """The names under which requests ask for a decoder's model."""
    return table.served_as or (table.model,)


def _add(models: dict[str, ServedModel], name: str, directory: Path, context: int) -> None:
    """A model that several decoders serve has the shortest context of theirs."""
    known = models.get(name)
    if known is None or context < known.context:
        models[name] = open_model(name, directory, context)


def _settings(checked: CheckedDecoder, config: ServeConfig) -> DecoderSettings:
    table = checked.table
    return DecoderSettings(
        name=checked.name,
        models=served_names(table),
        owner=checked.start.config,
        interpreter=checked.start.interpreter,
        restart=restart_policy(config.restart),
        prefill_chunk=table.prefill_chunk,
        look_every_s=config.page.look_every_s,
        silence_s=table.progress_timeout_s + table.drain_timeout_s,
        start_s=2 * table.start_timeout_s,
        pair=checked.start.pair,
    )
