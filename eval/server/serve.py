"""Runs the server until it is told to stop; SIGTERM and Ctrl-C let running requests finish first."""

import signal
import socket
from collections.abc import Callable

import uvicorn

from eval.engine import Engine, EvalError
from eval.server.app import ServerConfig, create_app


def serve(
    engine: Engine, config: ServerConfig, host: str, port: int, drain_seconds: int, ready: Callable[[str], None]
) -> None:
    """Serves until a signal; then new connections are refused, and what runs has `drain_seconds` to end. `ready` gets
    the address (port 0 takes any that is free) once connections to it are held for the server. Raises EvalError for an
    address that cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except (OSError, OverflowError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise EvalError(f"{host}:{port} cannot be served on ({reason}): choose another --host or --port") from None
    settings = uvicorn.Config(
        create_app(engine, config),
        log_level="warning",
        timeout_graceful_shutdown=drain_seconds,
        lifespan="on",
    )
    ready(f"http://{host}:{listener.getsockname()[1]}")
    # The server handles these itself, and when it has ended raises them again for the handlers that were there before:
    # a server that was told to stop, and stopped, has not failed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with listener:
        uvicorn.Server(settings).run(sockets=[listener])
