"""The probe's modules as what travels: source for a Python that reads it from stdin, or an archive that it runs."""

from __future__ import annotations

import io
import zipfile
import zlib
from functools import cache
from importlib import resources

MODULES = ("procs", "jobdir", "supervisor", "host", "reclaim", "program")

# Sent as argv, so it is short and says nothing. argv[1] is the length of what follows on stdin.
BOOT = "import sys,zlib;r=sys.stdin.buffer;n=int(sys.argv[1]);exec(zlib.decompress(r.read(n)))"

_LOADER = """
import sys, types
def _load(name, source):
    module = types.ModuleType(name)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    exec(compile(source, "<rigbook %s>" % name, "exec"), module.__dict__)
_load("remote", "")
_load("remote.probe", "")
"""


def source(module: str) -> str:
    return resources.files("remote.probe").joinpath(f"{module}.py").read_text("utf-8")


@cache
def payload() -> bytes:
    """zlib-packed source that loads every module and runs the probe with the arguments after the length."""
    loads = "".join(f"_load('remote.probe.{name}', {source(name)!r})\n" for name in MODULES)
    text = f"{_LOADER}{loads}sys.modules['remote.probe.program'].main(sys.argv[2:])\n"
    return zlib.compress(text.encode(), 9)


@cache
def archive() -> bytes:
    """supervisor.pyz: the same bytes for the same source, so that equal jobs have equal directories."""
    buffer = io.BytesIO()
    files = {f"remote/probe/{name}.py": source(name) for name in ("procs", "jobdir", "supervisor")}
    files["remote/__init__.py"] = files["remote/probe/__init__.py"] = ""
    files["__main__.py"] = "import sys\nfrom remote.probe.supervisor import main\nsys.exit(main(sys.argv[1:]))\n"
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in sorted(files):
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name])
    return buffer.getvalue()
