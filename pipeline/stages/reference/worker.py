"""The worker: the process that holds the port and the model. Started by the launcher, in a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import traceback

from aiohttp import web

from pipeline.stages.reference.arguments import USAGE, Arguments, parse
from pipeline.stages.reference.counters import stamped
from pipeline.stages.reference.http import Server
from pipeline.stages.reference.model_thread import Model, ModelThread

FAILED = 1
READY = "The server is fired up and ready to roll!"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, taken before the model loads: nobody should wait for a load to learn that the port is held."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, port))
    held.listen(256)
    return held


async def serve(arguments: Arguments, held: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT, or until the model thread fails. Returns the exit code."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = Server(arguments)
    # A client that hangs up must free its row: handlers are cancelled.
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.SockSite(runner, held).start()  # answers 503 until the model is there
    thread: ModelThread | None = None
    try:
        loading: asyncio.Future[Model] = loop.run_in_executor(None, Model, arguments)
        stop: asyncio.Future[bool] = loop.create_task(stopping.wait())
        await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            stamped("Stopped while loading.")
            os._exit(0)  # the loading thread cannot be interrupted
        model = await loading
        model.counters.load_seconds = time.time() - server.started
        thread = ModelThread(model, server.deliver)
        server.model, server.thread = model, thread
        thread.start()
        ended: asyncio.Future[bool] = loop.run_in_executor(None, thread.ended.wait)
        stamped(READY)
        await asyncio.wait((ended, stop), return_when=asyncio.FIRST_COMPLETED)
        if thread.failure is not None:
            stamped("Scheduler hit an exception: " + "".join(traceback.format_exception(thread.failure)))
            return FAILED
        stamped("Stopping: SIGTERM received.")
        return 0
    except (ValueError, OSError) as error:
        print(f"reference engine: {error}", file=sys.stderr, flush=True)
        return FAILED
    finally:
        if thread is not None:
            thread.stop()
            thread.ended.wait(10)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(runner.cleanup(), 5)


def main() -> int:
    arguments = parse()
    try:
        held = listen(arguments.host, arguments.port)
    except OSError as error:
        print(f"reference engine: port {arguments.port} is not free: {error.strerror}", file=sys.stderr, flush=True)
        return USAGE
    return asyncio.run(serve(arguments, held))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's threads have nothing to tidy up, and interpreter shutdown can wait on them for seconds
