"""Processes that hold GPU memory in the ways that go wrong. Run by run_all.py; never a part of the product.

    workload.py pool MIB N     a launcher with N workers of a `spawn` pool, each with MIB on GPU 0
    workload.py deaf MIB       a launcher whose child, in a session of its own, ignores SIGTERM and holds MIB
    workload.py forked MIB     opens a context, forks a child that does nothing, and waits (its files are inherited)

Prints `ready PID…`, the pids that hold. With STAND_IN set there is no CUDA: the device node is opened instead, and
the test's NVML library reads FAKE_VRAM from the environment.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

NODE = "/dev/nvidia0"


def hold(mib: int) -> object:
    """Take memory and keep it."""
    if os.environ.get("STAND_IN"):
        return os.open(NODE, os.O_RDWR)
    import torch

    held = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return held


def worker(mib: int, ready: object) -> None:
    held = hold(mib)
    ready.put(os.getpid())  # type: ignore[attr-defined]
    while held is not None:
        time.sleep(3600)


def pool(mib: int, count: int) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()  # starts multiprocessing's own helper, which holds nothing
    os.environ["FAKE_VRAM"] = f"0:{mib << 20}"
    workers = [context.Process(target=worker, args=(mib, ready)) for _ in range(count)]
    for each in workers:
        each.start()
    print("ready", *sorted(ready.get() for _ in workers), flush=True)
    time.sleep(3600)


def deaf(mib: int) -> None:
    env = {**os.environ, "FAKE_VRAM": f"0:{mib << 20}"}
    subprocess.Popen([sys.executable, __file__, "deaf-child", str(mib)], start_new_session=True, env=env)
    time.sleep(3600)


def deaf_child(mib: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = hold(mib)
    print("ready", os.getpid(), flush=True)
    while held is not None:
        time.sleep(3600)


def forked(mib: int) -> None:
    held = hold(mib)
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(3600)
    print("ready", os.getpid(), child, flush=True)
    while held is not None:
        time.sleep(3600)


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    {"pool": pool, "deaf": deaf, "deaf-child": deaf_child, "forked": forked}[what](*map(int, numbers))
