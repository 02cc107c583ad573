"""Stand-in for Proxmox's `pvesh`: the few paths of its API that concern guests and devices.

JSON as pve-common's CLIFormatter.pm prints it: canonical, UTF-8, one line and a line end, or `json-pretty`.

usage: pvesh_stand_in.py STATE get|create PATH [OPTIONS]
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import node_stand_in as node

USAGE = "pvesh get <api_path> [OPTIONS] [FORMAT_OPTIONS]"


def guest(kind: str, vmid: int, one: node.Guest) -> dict[str, Any]:
    pid = node.pid(one)
    told: dict[str, Any] = {
        "name": one["name"] or f"{'CT' if kind == 'lxc' else 'VM '}{vmid}",
        "status": "running" if pid else "stopped",
        # A container's number comes as a string, a VM's as a number.
        "vmid": str(vmid) if kind == "lxc" else vmid,
        "maxmem": one["memory"],
        "maxdisk": one["disk"],
        "cpus": 2,
        "uptime": 0,
    }
    if kind == "lxc":
        told["type"] = "lxc"
    if pid:
        told["pid"] = pid
    if one["lock"]:
        told["lock"] = one["lock"]
    return told


def get(state: node.Node, path: str) -> object:
    if path == "/nodes":
        return [{"node": state.name, "status": "online", "type": "node", "id": f"node/{state.name}"}]
    if path == "/version":
        return {"release": "8.4", "repoid": "stand-in", "version": "8.4.1"}
    if path == "/cluster/resources":
        found = []
        for kind in ("lxc", "qemu"):
            for vmid, one in state.of(kind):
                found.append(guest(kind, vmid, one) | {"type": kind, "id": f"{kind}/{vmid}", "node": state.name})
        return found
    match = re.fullmatch(r"/nodes/([^/]+)/(lxc|qemu)(?:/(\d+)/(status/current|config))?", path)
    if match and match[1] not in (state.name, "localhost"):
        node.die(f"hostname lookup '{match[1]}' failed - failed to get address info for: {match[1]}")
    if match and not match[3]:
        return [guest(match[2], vmid, one) for vmid, one in state.of(match[2])]
    if match:
        one = state.guest(match[2], match[3])
        return one["config"] if match[4] == "config" else guest(match[2], int(match[3]), one)
    if re.fullmatch(r"/nodes/[^/]+/hardware/pci", path):
        return state.all.get("pci", [])
    node.die(f"No '{'get'}' handler defined for '{path}'")


def create(state: node.Node, path: str) -> None:
    match = re.fullmatch(r"/nodes/[^/]+/(lxc|qemu)/(\d+)/status/(start|stop|shutdown)", path)
    if not match:
        node.die(f"No 'create' handler defined for '{path}'")
    program = "pct" if match[1] == "lxc" else "qm"
    os.execv(os.path.join(os.path.dirname(sys.argv[1]), "bin", program), [program, match[3], match[2]])


def main() -> None:
    os.environ["PATH"] = "/sbin:/bin:/usr/sbin:/usr/bin"
    state = node.Node(sys.argv[1])
    words, given = node.options(sys.argv[2:], {"output-format": str, "noborder": bool, "full": bool}, USAGE)
    if len(words) != 2:
        node.die(f"400 not enough arguments\n{USAGE}")
    if words[0] == "create":
        create(state, words[1])
    data = get(state, "/" + words[1].strip("/"))
    form = given.get("output-format", "text")
    if form not in ("json", "json-pretty"):
        node.die("this stand-in prints JSON only: --output-format json")
    node.write(node.to_json(data, pretty=form == "json-pretty") + ("" if form == "json-pretty" else "\n"))


if __name__ == "__main__":
    main()
