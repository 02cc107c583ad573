"""What to do about a host without a Python that our programs run on, told in the host's own terms.

The report is made by /bin/sh alone: it runs where there is nothing else.
"""

from __future__ import annotations

import re

from state.errors import RigbookError

MARK = "rigbook-no-python"
# Lines `python PATH VERSION`, `os ID LIKE`, `can PROGRAM`, on stderr.
REPORT = (
    f"{{ echo {MARK};"
    "for p in /usr/bin/python[0-9]* /usr/local/bin/python[0-9]* /usr/libexec/platform-python /opt/*/bin/python3 "
    '$(command -v python3 python);do [ -x "$p" ]&&case $p in *config*);;*)'
    'echo "python $p $("$p" -V 2>&1|head -n 1)";;esac;done;'
    '[ -r /etc/os-release ]&&(. /etc/os-release;echo "os ${ID:-unknown} ${VERSION_ID:-} ${ID_LIKE:-}");'
    'for p in apt-get dnf yum zypper apk pacman opkg;do command -v "$p" >/dev/null 2>&1&&echo "can $p";done; } >&2;'
)
# Package manager -> what gives Python >= 3.9 there. The old enterprise systems have a newer one beside their own.
INSTALL = {
    "apt-get": "apt-get install python3",
    "dnf": "dnf install python3.11",
    "yum": "yum install python39",
    "zypper": "zypper install python311",
    "apk": "apk add python3",
    "pacman": "pacman -S python",
    "opkg": "opkg install python3-light python3-codecs",
}
# Systems whose own python3 is older than 3.9, and what they have beside it.
_OLD = {("ubuntu", "20.04"): "python3.9", ("ubuntu", "18.04"): "", ("debian", "9"): "", ("debian", "10"): ""}


def missing(report: str, host: str) -> RigbookError:
    """The error for a host, from what REPORT printed there."""
    found: dict[str, str] = {}
    for path, version in re.findall(r"^python (\S+) (.*)$", report, re.MULTILINE):
        found.setdefault(version.strip() or "no version", path)
    system = re.search(r"^os (\S+) (\S*) ?(.*)$", report, re.MULTILINE)
    manager = re.search(r"^can (\S+)$", report, re.MULTILINE)
    have = ", ".join(f"{path} is {version}" for version, path in sorted(found.items()))
    said = "there is no Python 3.9 or newer" + (f" ({have})" if have else " (none at all)")
    old = _OLD.get((system[1], system[2])) if system else None
    if system and old == "":
        hint = f"{system[1]} {system[2]} has no Python 3.9: unpack one under ~/.local (`uv python install 3.12`)."
    elif old:
        hint = f"On the host: apt-get install {old}"
    elif manager:
        hint = f"On the host: {INSTALL[manager[1]]}"
    else:
        hint = "Put a Python 3.9 or newer at /usr/local/bin/python3 or ~/.local/bin/python3; its library is enough."
    return RigbookError("host.no-python", said, host=host, hint=hint)
