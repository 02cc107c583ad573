"""How a stage talks to the one that started it.  `python -m pipeline.stages.NAME --spec spec.json`

spec.json     {"stage", "out", "inputs": {name: path}, "settings": {...}, "events": path; else beside the spec,
              "transient": names of settings that say where or how fast, and may change while the folder stays the same}
out/          begun.json      written first: the key of the configuration that this folder belongs to
              manifest.json   written last: digests of inputs, settings, code, result, artifacts, `complete`
events file   one JSON object a line: progress, metric, fact, artifact, warning, error, result, each with `t` (Unix s)

A stage that is killed and started again with the same spec continues where it was; with another configuration it is
refused, because a folder that mixes two configurations looks whole and is not. Standard library only: this ships.

Exit codes: 0 done · 1 failed · 3 refused (a sentence says why) · 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

FAILED, REFUSED, TERMINATED = 1, 3, 143
MANIFEST_SCHEMA = 1
PROGRESS_SECONDS = 1.0  # at most one progress line in this time: the reader is a person or a mirror over SSH


class Refused(Exception):
    """The stage will not go on, and the sentence says why. No traceback: nothing is broken in the program."""

    def __init__(self, id: str, text: str) -> None:
        super().__init__(text)
        self.id = id


class Terminated(BaseException):
    """SIGTERM. Not an Exception, so that a stage's own `except Exception` cannot swallow it."""


class Stage:
    """One run of a stage: where its inputs and its output folder are, and how it reports."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name: str = spec["stage"]
        self.out = Path(spec["out"])
        self.inputs = {name: Path(path) for name, path in spec.get("inputs", {}).items()}
        self.settings: dict[str, Any] = dict(spec.get("settings", {}))
        self.events = Path(spec["events"]) if spec.get("events") else None
        self.artifacts: dict[str, dict[str, Any]] = {}
        self.digests: dict[str, str] = {}  # of the inputs
        self._progress_at = 0.0
        self._ended_at: tuple[float, float] | None = None
        self._rate, self._effort = _Rate(), _Rate()

    def progress(
        self, done: float, total: float, unit: str, effort: tuple[float, float] | None = None, **extra: Any
    ) -> None:
        """Say how far we are. Cheap to call in a loop: it writes at most once a second, and always at the end.

        effort: (work done, work left) in units that are equally long, where `unit` is not: tokens of responses. The
        time left is told by it. Short responses end first, so counting responses promises an early end.
        """
        now = time.time()
        self._rate.note(now, done)
        if effort is not None:
            self._effort.note(now, effort[0])
        ended = done >= total and (done, total) != self._ended_at
        if now - self._progress_at < PROGRESS_SECONDS and not ended:
            return
        self._progress_at = now
        self._ended_at = (done, total) if done >= total else None
        rate = self._rate.per_second()
        eta = (total - done) / rate if rate else None
        if effort is not None:
            speed = self._effort.per_second()
            eta = effort[1] / speed if speed else None
        self._emit("progress", done=done, total=total, unit=unit, rate=rate, eta=eta, **extra)
        percent = 100.0 * done / total if total else 100.0
        words = [f"{percent:5.1f} %", f"{done:,.0f}/{total:,.0f} {unit}"]
        if rate:
            words.append(f"{rate:,.1f} {unit}/s")
        if eta is not None and done < total:
            words.append(f"ETA {eta:.0f} s")
        words += [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in extra.items()]
        log(f"{self.name}: " + "  ".join(words))

    def metric(self, name: str, value: float, **extra: Any) -> None:
        """One measured number, e.g. a loss at a step."""
        self._emit("metric", name=name, value=value, **extra)

    def fact(self, key: str, value: Any, unit: str | None = None) -> None:
        """A keyed value for the book, e.g. `target.layers`."""
        self._emit("fact", key=key, value=value, unit=unit)

    def warn(self, check: str, text: str) -> None:
        """Something that a person should look at; the stage goes on."""
        self._emit("warning", check=check, message=text)
        log(f"{self.name}: warning [{check}] {text}")

    def artifact(self, name: str, path: Path, digest: str | None = None, **meta: Any) -> None:
        """Name a file (or a folder of files) that this stage made; its digest goes into the manifest. `digest`: where
        it is known already, so that terabytes need not be read again."""
        digest, size = (digest, path.stat().st_size) if digest else digest_path(path)
        self.artifacts[name] = {"path": str(path), "sha256": digest, "bytes": size, **meta}
        self._emit("artifact", name=name, path=str(path), sha256=digest, bytes=size, **meta)

    def digest(self, name: str) -> str:
        """The digest of an input, as it goes into the manifest."""
        return self.digests.get(name) or digest_input(self.inputs[name])

    def refuse(self, id: str, text: str) -> NoReturn:
        raise Refused(id, text)

    def failed(self, id: str, text: str) -> None:
        """Say why the stage ends, where the one who finds out cannot raise (a watchdog)."""
        self._emit("error", id=id, message=text)
        log(f"{self.name}: [{id}] {text}")

    def _emit(self, kind: str, **fields: Any) -> None:
        if self.events is None:
            return
        line = json.dumps({"kind": kind, "t": time.time(), **clean(fields)}, ensure_ascii=False) + "\n"
        # One write call on an O_APPEND descriptor: a reader never sees half a line followed by another.
        fd = os.open(self.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


class _Rate:
    """Units a second over about the last half minute: recent speed, not the average since a resume."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def note(self, now: float, done: float) -> None:
        self.seen.append((now, done))
        while len(self.seen) > 2 and now - self.seen[0][0] > 30:
            self.seen.pop(0)

    def per_second(self) -> float | None:
        (t0, d0), (t1, d1) = self.seen[0], self.seen[-1]
        return (d1 - d0) / (t1 - t0) if t1 > t0 and d1 > d0 else None


def main(run: Callable[[Stage], dict[str, Any]]) -> NoReturn:
    """Entry point of every stage module: reads the spec, runs, writes the manifest, exits."""
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--spec", type=Path, required=True, help="the stage's spec.json")
    path: Path = parser.parse_args().spec.absolute()
    spec = json.loads(path.read_text())
    spec.setdefault("events", str(path.parent / "events.jsonl"))  # beside the spec: in the job's folder
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(execute(spec, run))


def follow(run: Callable[[Stage], dict[str, Any]]) -> NoReturn:
    """Entry point of the other processes of a stage that runs as several: the first one keeps the folder (`main`)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True)
    path: Path = parser.parse_args().spec.absolute()
    spec = json.loads(path.read_text())
    spec.setdefault("events", str(path.parent / "events.jsonl"))
    signal.signal(signal.SIGTERM, _terminate)

    stage = Stage(spec)
    try:
        done = read_json(stage.out / "manifest.json")
        if done is None or not done.get("complete"):
            run(stage)
    except Refused as refusal:
        stage.failed(refusal.id, str(refusal))
        sys.exit(REFUSED)
    except Terminated:
        # Also how the rest of a group is ended when one fails: that one has said why, and is to have the last word.
        sys.exit(TERMINATED)
    sys.exit(0)


def execute(spec: dict[str, Any], run: Callable[[Stage], dict[str, Any]]) -> int:
    """Run a stage from its spec in this process. Returns the exit code."""
    stage = Stage(spec)
    try:
        try:
            result = _run_once(stage, spec, run)
        except OSError as error:
            # ENOSPC and its kin are facts about the machine, not faults of the stage.
            if error.errno not in {28, 30, 122, 13}:
                raise
            raise Refused("stage.disk", f"cannot write: {error.strerror}: {error.filename or stage.out}") from error
    except Refused as refusal:
        stage._emit("error", id=refusal.id, message=str(refusal))
        log(f"{stage.name}: refused [{refusal.id}] {refusal}")
        return REFUSED
    except Terminated:
        stage._emit("error", id="stage.terminated", message="ended by SIGTERM; start it again to continue")
        log(f"{stage.name}: ended by SIGTERM")
        return TERMINATED
    except Exception as error:
        stage._emit("error", id="stage.failed", message=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return FAILED
    stage._emit("result", result=result)
    return 0


def _run_once(stage: Stage, spec: dict[str, Any], run: Callable[[Stage], dict[str, Any]]) -> dict[str, Any]:
    stage.out.mkdir(parents=True, exist_ok=True)
    for name, path in stage.inputs.items():
        if not path.exists():
            raise Refused("stage.input-missing", f"input {name!r} is not there: {path}")
    inputs = {name: {"path": str(path), "sha256": digest_input(path)} for name, path in stage.inputs.items()}
    stage.digests = {name: str(value["sha256"]) for name, value in inputs.items()}
    identity = {
        "stage": stage.name,
        "inputs": {name: value["sha256"] for name, value in inputs.items()},
        "settings": lasting(spec),
    }
    key = digest_json(identity)
    begun = read_json(stage.out / "begun.json")
    if begun is not None and begun.get("key") != key:
        changed = changes(begun.get("identity", {}), identity) or "the configuration"
        raise Refused(
            "stage.changed",
            f"{stage.out} belongs to another configuration ({changed} changed); move it away or choose another workdir",
        )
    done = read_json(stage.out / "manifest.json")
    if done is not None and done.get("complete") and begun is not None:
        log(f"{stage.name}: already done, nothing to do")
        result: dict[str, Any] = done["result"]
        return result
    if begun is None:
        write_json(stage.out / "begun.json", {"key": key, "identity": identity, "started": time.time()})
    started = time.time()
    result = clean(run(stage))
    _check_rows(stage, result.get("rows"))
    write_json(
        stage.out / "manifest.json",
        {
            "schema": MANIFEST_SCHEMA,
            "stage": stage.name,
            "key": key,
            "inputs": inputs,
            "settings": stage.settings,
            "transient": sorted(spec.get("transient", ())),
            "code": code_digest(),
            "result": result,
            "artifacts": stage.artifacts,
            "started": started,
            "ended": time.time(),
            "complete": True,
        },
    )
    return result


def lasting(spec: dict[str, Any]) -> dict[str, Any]:
    """The settings of a spec or a manifest that decide what comes out: all but those listed as transient."""
    transient = set(spec.get("transient", ()))
    return {name: value for name, value in spec.get("settings", {}).items() if name not in transient}


def _check_rows(stage: Stage, rows: dict[str, int] | None) -> None:
    if rows is not None and rows["in"] != rows["out"] + rows["errors"] + rows["skipped"]:
        raise RuntimeError(f"{stage.name} lost rows: {rows}; in must equal out + errors + skipped")


def _terminate(signum: int, frame: Any) -> NoReturn:
    raise Terminated


def log(text: str) -> None:
    """One line of talk, flushed: the log is followed from another machine."""
    print(text, flush=True)


# --- digests -------------------------------------------------------------------------------------------------------


def digest_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _digest_stream(file)


def _digest_stream(file: Any) -> str:
    sha = hashlib.sha256()
    while block := file.read(1 << 20):
        sha.update(block)
    return sha.hexdigest()


def digest_path(path: Path) -> tuple[str, int]:
    """(sha256, bytes) of a file, or of a folder: the digest of its files' relative names and digests."""
    if path.is_file():
        return digest_file(path), path.stat().st_size
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return (
        digest_json([[str(p.relative_to(path)), digest_file(p)] for p in files]),
        sum(p.stat().st_size for p in files),
    )


def digest_input(path: Path) -> str:
    """The digest of an input, from the manifest beside it where a finished stage made it: it need not be read again."""
    for folder in (path, path.parent):
        manifest = read_json(folder / "manifest.json")
        if manifest is None or not manifest.get("complete"):
            continue
        for artifact in manifest["artifacts"].values():
            if Path(artifact["path"]).name == path.name and _same_size(path, artifact["bytes"]):
                digest: str = artifact["sha256"]
                return digest
        if folder == path:
            return digest_json({name: a["sha256"] for name, a in sorted(manifest["artifacts"].items())})
    return digest_path(path)[0]


def _same_size(path: Path, size: int) -> bool:
    # The manifest's word counts only while the file is as long as it says.
    if path.is_file():
        return path.stat().st_size == size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) == size


def code_digest() -> dict[str, str]:
    """Digests of the pipeline sources that this process has loaded: what really ran."""
    out = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith("pipeline") and file and Path(file).is_file():
            out[name] = digest_file(Path(file))
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    if main_file and Path(main_file).is_file():
        out["__main__"] = digest_file(Path(main_file))
    return out


def changed_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of what differs between two nested dictionaries."""
    out: list[str] = []
    for name in sorted(set(old) | set(new)):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            out += changed_fields(a, b, f"{prefix}{name}.")
        elif a != b:
            out.append(f"{prefix}{name}")
    return out


def changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs, with both values of settings; an input is told by its name, because a digest says nothing."""
    words = []
    for name in changed_fields(old, new):
        values = [_shown(_at(side, name)) for side in (old, new)]
        words.append(name if name.startswith("inputs.") else f"{name} from {values[0]} to {values[1]}")
    return ", ".join(words)


def _at(value: Any, dotted: str) -> Any:
    """The value under a dotted name; keys may have dots of their own."""
    while dotted:
        if not isinstance(value, dict):
            return None
        key = next((k for k in value if dotted == k or dotted.startswith(f"{k}.")), None)
        if key is None:
            return None
        value, dotted = value[key], dotted[len(key) + 1 :]
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- files ---------------------------------------------------------------------------------------------------------


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file so that a reader, or a machine that loses power, sees the old one or the new one, whole."""
    write_blocks(path, (data,))


def write_blocks(path: Path, blocks: Iterable[bytes]) -> None:
    """The same for what is too long to be held at once. What making the blocks raises leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(clean(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """The parsed file, or None where there is none."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object of ours. We write such files whole, so a broken one was damaged by somebody else: it is refused."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise _damaged(where, str(error)) from None
    if not isinstance(value, dict):
        raise _damaged(where, "it holds no JSON object")
    return value


def _damaged(where: str, why: str) -> Refused:
    return Refused("stage.damaged", f"{where} is damaged ({why}); move its folder away and it is made anew")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as they come, and all of them or none. Returns how many."""
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        for row in rows:
            count += 1
            yield (json.dumps(clean(row), ensure_ascii=False) + "\n").encode()

    write_blocks(path, lines())
    return count


class JsonlAppender:
    """Rows appended one by one, durable when `append` returns, with a torn last line cut off on opening.

    `done` holds the ids found: a resumed stage asks it what need not be done again.
    """

    def __init__(self, path: Path, id_field: str = "id") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.id_field = path, id_field
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            # Killed in the middle of a write: that row was never acknowledged, it will be made again.
            os.truncate(path, len(whole))
        lines = enumerate(whole.split(b"\n"), 1)
        self.rows = [parse_object(line, f"line {number} of {path}") for number, line in lines if line.strip()]
        if any(id_field not in row for row in self.rows):
            raise _damaged(str(path), f"a row has no {id_field!r}")
        self.done = {row[id_field] for row in self.rows}
        if len(self.done) != len(self.rows):
            raise _damaged(str(path), "a row is there twice")
        self._file = path.open("ab")

    def append(self, *rows: dict[str, Any]) -> None:
        for row in rows:
            self._file.write((json.dumps(clean(row), ensure_ascii=False) + "\n").encode())
            self.rows.append(row)
            self.done.add(row[self.id_field])
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def clean(value: Any) -> Any:
    """JSON has no NaN or infinity: they become {"special": "nan"} and so on, never a number and never null."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"special": str(value)}
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value
