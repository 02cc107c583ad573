"""GPUs as NVML tells of them, from one process that stays open. Standard library and Python 3.9 syntax only.

NVML is reached through NVIDIA's own `pynvml`, a single module, which is sent over as source by whoever asks and lives
in memory (`load`): the probe's Python sees no site-packages, and nothing is ever installed. A host without an NVIDIA
driver never gets it.

A value is a number, a text or a list; or {"na": WHY} where the driver does not tell it. Never a 0 that is no zero.
What NVML as a whole is, `state` says:

    ok          it answers
    none        nothing of NVIDIA is here            no-module    `load` first
    no-library  device files, but no libnvidia-ml    no-driver    the library, but no kernel module
    mismatch    library and kernel module differ     hung         a call has not returned
    failed      anything else; `reason` says what
"""

import base64
import os
import re
import sys
import threading
import time
import types
import zlib
from typing import Any, Callable, Dict, List, Optional, Tuple

PATIENCE = 5.0  # s; a wedged driver keeps a call for good, and must not keep the probe
SLOW_S = 10.0  # counters and modes that seldom change are read no oftener than this
NA = {
    3: "not supported",
    4: "no permission",
    6: "not found",
    13: "not in this driver",
    15: "the GPU is lost",
    16: "reset required",
    21: "no data",
    999: "unknown error",
}
LOST = {15: "lost", 16: "reset-required"}
INIT = {9: "no-driver", 12: "no-library", 18: "mismatch"}
# Bit of nvmlClocksEventReasons -> word. Idle, application clocks and display clocks are settings, not trouble.
THROTTLE = {0x04: "power cap", 0x08: "hw slowdown", 0x10: "sync boost", 0x20: "thermal", 0x40: "hw thermal"}
THROTTLE.update({0x80: "power brake", 0x200: "board limit", 0x01: "idle"})
UNKNOWN_LIMIT = 0xFFFFFFFF

_lock = threading.Lock()
_module: Any = None
_stuck: Optional[Tuple[threading.Thread, float]] = None
_open = False
_handles: Dict[int, Any] = {}
_fixed: Dict[int, Dict[str, Any]] = {}
_slow: Dict[int, Tuple[float, Dict[str, Any]]] = {}


def load(source: str) -> None:
    """Take pynvml: base64 of zlib-packed source."""
    global _module
    if _module is None:
        module = types.ModuleType("pynvml")
        sys.modules["pynvml"] = module  # its classes look themselves up there
        exec(compile(zlib.decompress(base64.b64decode(source)), "<pynvml>", "exec"), module.__dict__)
        _module = module


def nodes() -> List[str]:
    return sorted(name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))


def kernel_module() -> Optional[str]:
    """The version of the loaded kernel module."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            found = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read())
    except OSError:
        return None
    return found.group(1) if found else None


def listed(gpu: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The processes that NVML names for a GPU; none where it cannot tell."""
    found = gpu.get("processes")
    return found if isinstance(found, list) else []


def read() -> Dict[str, Any]:
    """{state, reason, driver, nvml, cuda, kernel_module, gpus, seconds}; see the top of this file."""
    global _stuck
    with _lock:
        began = time.monotonic()
        if _stuck is not None and _stuck[0].is_alive():
            return _none("hung", "a call into the driver has not returned for %d s" % (began - _stuck[1]))
        _stuck = None
        box: List[Dict[str, Any]] = []
        usual = threading.stack_size(8 << 20)  # NVIDIA's library is not ours to be frugal with
        worker = threading.Thread(target=lambda: box.append(_guarded()), daemon=True)
        worker.start()
        threading.stack_size(usual)
        worker.join(PATIENCE)
        if not box:
            _stuck = (worker, began)
            return _none("hung", "a call into the driver has not returned for %d s" % PATIENCE)
        box[0]["seconds"] = round(time.monotonic() - began, 6)
        return box[0]


def _none(state: str, reason: str) -> Dict[str, Any]:
    return {"state": state, "reason": reason, "kernel_module": kernel_module(), "gpus": []}


def _guarded() -> Dict[str, Any]:
    global _open
    try:
        return _read()
    except Exception as error:
        code = getattr(error, "value", None)
        _open = False
        _handles.clear()
        _slow.clear()
        state = INIT.get(code, "failed")  # type: ignore[arg-type]
        return _none(state, str(error) or type(error).__name__)


def _read() -> Dict[str, Any]:
    global _open
    if _module is None:
        return _none(*_without_module())
    if not _open:
        _fixed.clear()
        _module.nvmlInit()
        _open = True
    found: Dict[str, Any] = {"state": "ok", "reason": "", "kernel_module": kernel_module()}
    found["driver"] = _value(_module.nvmlSystemGetDriverVersion)
    found["nvml"] = _value(_module.nvmlSystemGetNVMLVersion)
    found["cuda"] = _value(lambda: "%d.%d" % divmod(_module.nvmlSystemGetCudaDriverVersion_v2() // 10, 100))
    found["gpus"] = [_gpu(index) for index in range(_module.nvmlDeviceGetCount())]
    return found


def _without_module() -> Tuple[str, str]:
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        if nodes() or kernel_module():
            return "no-library", "there are GPU devices but no usable libnvidia-ml.so.1: %s" % error
        return "none", "no libnvidia-ml.so.1 and no /dev/nvidia*"
    return "no-module", "pynvml was not sent yet"


def _value(call: Callable[..., Any], *args: Any) -> Any:
    """What a call gives, or why it gives nothing. A GPU that is gone is no missing value: that is raised."""
    try:
        value = call(*args)
    except _module.NVMLError as error:
        if error.value in LOST:
            raise
        return {"na": NA.get(error.value, str(error))}
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _gpu(index: int) -> Dict[str, Any]:
    known = _fixed.get(index, {})
    try:
        handle = _handles.get(index)
        if handle is None:
            handle = _module.nvmlDeviceGetHandleByIndex(index)
            _handles[index] = handle
            known = _fixed[index] = _once(index, handle)
        found = dict(known, state="ok")
        found.update(_often(handle))
        at, slow = _slow.get(index, (-SLOW_S, {}))
        if time.monotonic() - at >= SLOW_S:
            slow = _seldom(handle)
            _slow[index] = (time.monotonic(), slow)
        found.update(slow)
        return found
    except _module.NVMLError as error:
        _handles.pop(index, None)  # ask for it anew, should it come back
        _slow.pop(index, None)
        state = LOST.get(error.value, "failed")
        return dict(known, index=index, state=state, reason=str(error))


def address(bus_id: str) -> str:
    """One spelling: NVML's domain has eight digits, sysfs and Proxmox have four."""
    domain, _, rest = bus_id.lower().partition(":")
    if ":" not in rest:
        return "0000:" + bus_id.lower()
    return "%04x:%s" % (int(domain, 16), rest)


def _once(index: int, handle: Any) -> Dict[str, Any]:
    bus = _value(lambda: _module.nvmlDeviceGetPciInfo(handle).busId)
    return {
        "index": index,
        "uuid": _value(_module.nvmlDeviceGetUUID, handle),
        "name": _value(_module.nvmlDeviceGetName, handle),
        "pci": address(bus) if isinstance(bus, str) else bus,
        "minor": _value(_module.nvmlDeviceGetMinorNumber, handle),
    }


def _often(handle: Any) -> Dict[str, Any]:
    n = _module
    load = _value(n.nvmlDeviceGetUtilizationRates, handle)
    milliwatt = _value(n.nvmlDeviceGetPowerUsage, handle)
    return {
        "memory": _memory(handle),
        "load": load if isinstance(load, dict) else load.gpu,
        "memory_load": load if isinstance(load, dict) else load.memory,
        "power": milliwatt if isinstance(milliwatt, dict) else milliwatt / 1000,
        "temperature": _value(n.nvmlDeviceGetTemperature, handle, n.NVML_TEMPERATURE_GPU),
        "clock": _value(n.nvmlDeviceGetClockInfo, handle, n.NVML_CLOCK_SM),
        "memory_clock": _value(n.nvmlDeviceGetClockInfo, handle, n.NVML_CLOCK_MEM),
        "throttle": _throttle(handle),
        "processes": _processes(handle),
    }


def _memory(handle: Any) -> Dict[str, Any]:
    """Bytes. total = reserved + used + free. Before v2 `used` had the reserve in it, and `reserved` is not told."""
    n = _module
    memory = _value(n.nvmlDeviceGetMemoryInfo, handle, n.nvmlMemory_v2)
    if isinstance(memory, dict):
        old = _value(n.nvmlDeviceGetMemoryInfo, handle)
        if isinstance(old, dict):
            return {key: memory for key in ("total", "reserved", "used", "free")}
        return {"total": old.total, "reserved": memory, "used": old.used, "free": old.free}
    return {"total": memory.total, "reserved": memory.reserved, "used": memory.used, "free": memory.free}


def _throttle(handle: Any) -> Any:
    bits = _value(_module.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if isinstance(bits, dict):
        return bits
    return [word for bit, word in sorted(THROTTLE.items()) if bits & bit]


def _processes(handle: Any) -> Any:
    """[{pid, kind: C | G | M, used: bytes or na, gi, ci}], in the caller's pid namespace with drivers since 535.113."""
    n = _module
    found: Dict[Tuple[int, Any], Dict[str, Any]] = {}
    for kind, name in (("C", "Compute"), ("G", "Graphics"), ("M", "MPSCompute")):
        listed = _value(getattr(n, "nvmlDeviceGet%sRunningProcesses_v3" % name), handle)
        if listed == {"na": NA[13]}:
            listed = _value(getattr(n, "nvmlDeviceGet%sRunningProcesses_v2" % name), handle)  # drivers before 510
        if isinstance(listed, dict):
            if kind == "C":
                return listed
            continue
        for entry in listed:
            used = entry.usedGpuMemory
            instance = getattr(entry, "gpuInstanceId", None)
            record = {"pid": entry.pid, "kind": kind, "used": {"na": "not told"} if used is None else used}
            if instance not in (None, UNKNOWN_LIMIT):
                record["gi"] = instance
            # A process with both a compute and a graphics context is listed twice with the same sum.
            found.setdefault((entry.pid, record.get("gi")), record)
    return list(found.values())


def _seldom(handle: Any) -> Dict[str, Any]:
    n = _module
    limit = _value(n.nvmlDeviceGetEnforcedPowerLimit, handle)
    rows = _value(n.nvmlDeviceGetRemappedRows, handle)
    mig = _value(n.nvmlDeviceGetMigMode, handle)
    names = ("correctable", "uncorrectable", "pending", "failed")
    found = {
        "power_limit": limit if isinstance(limit, dict) else limit / 1000,
        "temperature_limit": _value(n.nvmlDeviceGetTemperatureThreshold, handle, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        "clock_max": _value(n.nvmlDeviceGetMaxClockInfo, handle, n.NVML_CLOCK_SM),
        "ecc_volatile": _value(
            n.nvmlDeviceGetTotalEccErrors, handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
        ),
        "ecc_aggregate": _value(
            n.nvmlDeviceGetTotalEccErrors, handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_AGGREGATE_ECC
        ),
        "remapped": rows if isinstance(rows, dict) else {name: rows[at] for at, name in enumerate(names)},
        "link_gen": _value(n.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "link_gen_max": _value(n.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "link_width": _value(n.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "link_width_max": _value(n.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "persistence": _value(n.nvmlDeviceGetPersistenceMode, handle),
        "mig": mig if isinstance(mig, dict) else bool(mig[0]),
        "instances": [],
    }
    if found["mig"] is True:
        found["instances"] = _instances(handle)
    return found


def _instances(handle: Any) -> List[Dict[str, Any]]:
    """The MIG instances. Load and per-process figures of the whole GPU are not supported while MIG is on."""
    n = _module
    found = []
    count = _value(n.nvmlDeviceGetMaxMigDeviceCount, handle)
    for at in range(count if isinstance(count, int) else 0):
        instance = _value(n.nvmlDeviceGetMigDeviceHandleByIndex, handle, at)
        if isinstance(instance, dict):
            continue  # the slot is empty
        found.append(
            {
                "uuid": _value(n.nvmlDeviceGetUUID, instance),
                "gi": _value(n.nvmlDeviceGetGpuInstanceId, instance),
                "memory": _memory(instance),
            }
        )
    return found
