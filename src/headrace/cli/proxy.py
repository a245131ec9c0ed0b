"""`headrace proxy`: one address in front of several vLLM decoders."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from cyclopts import Parameter

from headrace.cli.arguments import check_count, check_seconds
from headrace.cli.serve import in_flags
from headrace.errors import Refused
from headrace.messages import AskedRoute
from headrace.proxy.config import KEEP_ALIVE_S, Prefill, ProxyConfig, addresses_of
from headrace.server.config import HttpConfig
from headrace.server.keys import take_keys
from headrace.server.stopping import ToldToStop, stoppable

NEEDED: Final = ("starlette", "uvicorn", "httpx", "prometheus_client")
MAX_IN_FLIGHT: Final = 1 << 16
MAX_IDLE: Final = 512
"""Connections of clients that have no request just now."""

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


def proxy(
    *,
    decoder: Annotated[tuple[str, ...], Parameter(negative="")],
    host: str = "127.0.0.1",
    port: int = 8000,
    prefill: Prefill = "remote",
    route: AskedRoute | None = None,
    min_tokens: int = 0,
    max_in_flight: int = 512,
    max_body_bytes: int = 4 << 20,
    first_byte_timeout: float = 600.0,
    drain_timeout: float = 30.0,
    api_key_file: Path | None = None,
    allow_open: Annotated[bool, Parameter(negative="")] = False,
    log_level: LogLevel = "info",
) -> int:
    """Pass requests on to vLLM decoders that run headrace's connector, until SIGTERM.

    Each completion gets the `kv_transfer_params` that have the decoder's own source prefill it,
    unless the client sent its own. The request goes to the decoder first: sources hang under it.

    Parameters
    ----------
    decoder
        The address of a `vllm serve`, such as http://127.0.0.1:8001; may be given more than once.
    host
        The address to listen at.
    port
        The port; 0 takes a free one.
    prefill
        Where completions are prefilled: remote (a source), local (vLLM), or by-header: remote where
        the request has an x-prefiller-host-port.
    route
        whole, chunked, streamed or auto; by default the connector's own.
    min_tokens
        Prompts of fewer tokens are prefilled by vLLM; a text has about one for 4 bytes.
    max_in_flight
        Requests at once; more are answered 503.
    max_body_bytes
        Most bytes of a request's body.
    first_byte_timeout
        Seconds until a decoder's answer must begin; one that is no stream comes whole.
    drain_timeout
        Seconds that what runs may go on after SIGTERM.
    api_key_file
        A file with one key a line; whoever sends none of them is refused.
    allow_open
        Listen beyond this host although nobody is asked for a key.
    log_level
        debug, info, warning or error.
    """
    check_count("--port", port, least=0, limit=1 << 16)
    check_count("--min-tokens", min_tokens, least=0)
    check_count("--max-in-flight", max_in_flight, limit=MAX_IN_FLIGHT)
    check_count("--max-body-bytes", max_body_bytes, least=1024, limit=1 << 30)
    check_seconds("--first-byte-timeout", first_byte_timeout)
    check_seconds("--drain-timeout", drain_timeout)
    _check_installed()
    http = HttpConfig(
        host=host,
        port=port,
        api_key_file=None if api_key_file is None else str(api_key_file),
        allow_open=allow_open,
        max_body_bytes=max_body_bytes,
        max_connections=max_in_flight + MAX_IDLE,
        drain_timeout_s=drain_timeout,
        keep_alive_s=KEEP_ALIVE_S,
    )
    return _serve(
        http,
        decoders=addresses_of(decoder),
        prefill=prefill,
        route=route,
        min_tokens=min_tokens,
        max_in_flight=max_in_flight,
        first_byte_timeout_s=first_byte_timeout,
        log_level=log_level,
    )


def _check_installed() -> None:
    for name in NEEDED:
        if find_spec(name) is None:
            raise Refused(
                f"headrace proxy needs {name}, which is not installed; "
                "run: pip install 'headrace[proxy]'"
            )


def _serve(http: HttpConfig, **more: Any) -> int:
    from headrace.proxy import serving

    try:
        with stoppable():
            return serving.serve(ProxyConfig(http=http, keys=take_keys(http), **more), _tell)
    except ToldToStop:
        return 0
    except Refused as exc:
        raise Refused(in_flags(str(exc)), field=exc.field) from exc


def _tell(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)
