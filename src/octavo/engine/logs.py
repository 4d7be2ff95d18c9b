"""How both processes log: to standard error, a text or a JSON object a line. Knows no requests."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

# What every record has; anything else was given as ``extra``.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_QUIET = ("uvicorn", "httpx", "asyncio")
_encode = msgspec.json.Encoder(enc_hook=repr).encode


class JSONFormatter(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, and the record's
    ``extra`` fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= extra_of(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _encode(fields).decode()


class TextFormatter(logging.Formatter):
    """``LEVEL logger: message key=value ...``."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(f"{prefix}%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        extra = "".join([f" {key}={value}" for key, value in extra_of(record).items()])
        return super().formatMessage(record) + extra


def extra_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that a logging call gave as ``extra``."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def configure_logs(log_format: str, level: str, prefix: str = "") -> None:
    """Replace the root logger's handlers. Libraries speak from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter(prefix))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
