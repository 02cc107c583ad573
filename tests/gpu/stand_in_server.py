"""Plays an SGLang server where there is no GPU: three processes with its names, a port, /health and /generate.

stand_in_server.py PORT MIB
"""

import ctypes
import http.server
import multiprocessing
import os
import signal
import sys
import time


def child(name: str, mib: int, ready: object) -> None:
    ctypes.CDLL(None).prctl(15, name.encode()[:15])
    held = os.open("/dev/nvidia0", os.O_RDWR)
    ready.put(os.getpid())  # type: ignore[attr-defined]
    while held:
        time.sleep(3600)


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        alive = all(each.is_alive() for each in children)
        self.send_response(200 if alive else 503)
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    port, mib = int(sys.argv[1]), int(sys.argv[2])
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    children = []
    for name, share in (("sglang::scheduler", mib), ("sglang::detokenizer", 0)):
        os.environ["FAKE_VRAM"] = f"0:{share << 20}"
        children.append(context.Process(target=child, args=(name, share, ready), daemon=True))
        children[-1].start()
        ready.get()

    def end(*_: object) -> None:
        for each in children:
            each.kill()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)

    def watch(*_: object) -> None:
        # As the real one does: when a child has gone, the rest goes too, a little later.
        if not all(each.is_alive() for each in children):
            time.sleep(1)
            end()

    signal.signal(signal.SIGCHLD, watch)
    print("The server is fired up and ready to roll!", flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
