"""Logging of the processes: to stderr, as text or as one JSON object a line."""

from __future__ import annotations

import logging

import msgspec


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure(level: str, *, as_json: bool = False) -> None:
    """Send records of at least `level` to stderr."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s[%(process)d] %(message)s")
    handler.setFormatter(_JsonFormatter() if as_json else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
