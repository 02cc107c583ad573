"""The probe's modules as what travels: source for a Python that reads it from stdin, or an archive that it runs.

Of the probe only what answers at all is sent first; a module travels ahead of the first call that needs it.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from functools import cache
from importlib import resources

FIRST = ("procs", "program")
LATER = ("jobdir", "host", "sampling", "tail", "nvml", "holders", "classes", "whose", "reclaim", "pve", "gpulook")
SUPERVISOR = ("procs", "jobdir", "cgroup", "unit", "caps", "ending", "supervisor")
MODULES = tuple(dict.fromkeys((*FIRST, *LATER, *SUPERVISOR)))

# Sent as argv, so it is short and says nothing. argv[1] is the length of what follows on stdin.
BOOT = "import sys,zlib;r=sys.stdin.buffer;n=int(sys.argv[1]);exec(zlib.decompress(r.read(n)))"

# An importer of what was sent. Compiled only when imported; without docstrings, which would be a tenth of the memory.
_LOADER = """
import sys, types
sent = {}
class Sent:
    def find_spec(self, name, path=None, target=None):
        if name in sent: return type(sys.__spec__)(name, self)
    def create_module(self, spec): return None
    def exec_module(self, module):
        name = module.__name__
        exec(compile(sent.pop(name), "<rigbook %s>" % name, "exec", optimize=2), module.__dict__)
sys.meta_path.insert(0, Sent())
for name in ("remote", "remote.probe"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules["remote"].probe = sys.modules["remote.probe"]
sys.modules["remote"].SENT = sent
"""


def source(module: str) -> str:
    return resources.files("remote.probe").joinpath(f"{module}.py").read_text("utf-8")


@cache
def needs(module: str) -> frozenset[str]:
    """The module and all of the probe's that it imports."""
    found = {module}
    for line in re.findall(r"^\s*from remote\.probe import (.+)$", source(module), re.MULTILINE):
        for name in re.split(r",\s*", line.partition("#")[0].strip()):
            found |= needs(name)
    return frozenset(found)


@cache
def payload() -> bytes:
    """zlib-packed source that starts the probe with the arguments after the length."""
    sent = "".join(f"sent['remote.probe.{name}'] = {source(name)!r}\n" for name in FIRST)
    text = f"{_LOADER}{sent}import remote.probe.program\nsys.modules['remote.probe.program'].main(sys.argv[2:])\n"
    return zlib.compress(text.encode(), 9)


@cache
def packed(module: str) -> bytes:
    return zlib.compress(source(module).encode(), 9)


@cache
def pynvml() -> str:
    """NVIDIA's own module, for hosts with a GPU: base64 of zlib-packed source. It is read, never imported here."""
    import base64
    from importlib.util import find_spec

    spec = find_spec("pynvml")
    assert spec is not None and spec.origin is not None, "nvidia-ml-py is one of our dependencies"
    with open(spec.origin, "rb") as file:
        return base64.b64encode(zlib.compress(file.read(), 9)).decode()


@cache
def archive() -> bytes:
    """supervisor.pyz: the same bytes for the same source, so that equal jobs have equal directories."""
    buffer = io.BytesIO()
    files = {f"remote/probe/{name}.py": source(name) for name in SUPERVISOR}
    files["remote/__init__.py"] = files["remote/probe/__init__.py"] = ""
    files["__main__.py"] = "import sys\nfrom remote.probe.supervisor import main\nsys.exit(main(sys.argv[1:]))\n"
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in sorted(files):
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name])
    return buffer.getvalue()
