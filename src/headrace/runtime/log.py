"""Logging of the processes: to stderr, as text or as one JSON object a line."""

from __future__ import annotations

import logging

import msgspec

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F)} | {
    code: f"\\u{code:04x}" for code in (*range(0x80, 0xA0), 0x2028, 0x2029)
}


class _TextFormatter(logging.Formatter):
    """One line a record: what others wrote into it makes no lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = record.message.translate(_ESCAPED)
        return super().formatMessage(record)


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
    text = _TextFormatter("%(asctime)s %(levelname)s %(name)s[%(process)d] %(message)s")
    handler.setFormatter(_JsonFormatter() if as_json else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
