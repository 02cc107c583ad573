"""Prompts from files: JSON lines, Parquet, Hugging Face folders, ShareGPT, OpenAI messages, plain text.

A source is read as a stream: a file of many gigabytes is never in memory, only the rows chosen from it are. What a row
is, is decided by its keys, not by its file's name:

    input_ids + loss_mask           tokenized: it skips *generate* and *tokenize*
    messages + response             answered: it skips *generate* (`response` is the target's own answer)
    messages | conversations        a conversation (OpenAI's or ShareGPT's words); the last answer is asked for anew,
                                    unless the source says that its answers are the target's own
    prompt | instruction (+ input) | question | text     one user turn

A row that is none of these, or is broken, is set aside with its file, its number and the reason; it never stops the
others.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from pipeline.stages.protocol import Refused

Kind = Literal["prompt", "ready", "tokenized"]
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
SINGLE = ("prompt", "instruction", "question", "text")
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".arrow": "arrow",
}


class Bad(Exception):
    """A row that cannot be used; the text is the reason."""


@dataclass(frozen=True)
class Item:
    """A usable row: what it is, and its fields without id and source."""

    kind: Kind
    fields: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a row stands."""

    file: str
    number: int  # from 1


def items(path: Path, form: str, own_answers: bool, vocab_size: int) -> Iterator[tuple[Place, Item | Bad]]:
    """Every row of a source, usable or not, in order. `form`: auto, jsonl, json, parquet, dataset, text, paragraphs.

    Raises Refused `prompts.source` where the source is not there or its form cannot be told.
    """
    for file in files_of(path, form):
        number = 0
        rows = raw_rows(file, form)
        while True:
            number += 1
            place = Place(str(file), number)
            try:
                raw = next(rows)
                found: Item | Bad = understand(raw, own_answers, vocab_size)
            except StopIteration:
                break
            except Bad as bad:
                found = bad
            yield place, found


def files_of(path: Path, form: str) -> list[Path]:
    """The files of a source, in the order of their names. A folder's are those of the one kind that it holds."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise Refused("prompts.source", f"the source {path} is not there")
    for suffix in (".arrow", ".parquet", ".jsonl", ".jsonl.gz", ".json", ".txt"):
        found = sorted(p for p in path.rglob(f"*{suffix}") if not p.name.startswith(("dataset_info", "state", ".")))
        found = [p for p in found if "cache-" not in p.name]  # datasets' own leftovers
        if found:
            return found
    raise Refused("prompts.source", f"the folder {path} holds no .arrow, .parquet, .jsonl, .json or .txt file")


def form_of(file: Path, form: str) -> str:
    if form not in ("auto", "dataset"):
        return form
    name = file.name.removesuffix(".gz")
    suffix = Path(name).suffix
    if suffix not in SUFFIXES:
        raise Refused(
            "prompts.source", f"{file}: what is in it cannot be told from its name; say `format` in the source"
        )
    return SUFFIXES[suffix]


def raw_rows(file: Path, form: str) -> Iterator[Any]:
    """Parsed rows. A line that cannot be parsed raises Bad, and the next call goes on after it."""
    kind = form_of(file, form)
    if kind == "jsonl":
        return _Lines(file)
    if kind == "json":
        return iter(_json_list(file))
    if kind in ("text", "paragraphs"):
        return ({"text": text} for text in _texts(file, by_paragraph=kind == "paragraphs"))
    if kind in ("parquet", "arrow"):
        return _columns(file, kind)
    raise Refused("prompts.source", f"unknown format {form!r}: auto, jsonl, json, parquet, dataset, text or paragraphs")


def _open(file: Path) -> IO[bytes]:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")  # type: ignore[return-value]


class _Lines:
    """An iterator that goes on after a line that is no JSON (a generator would be finished by its own exception)."""

    def __init__(self, file: Path) -> None:
        self.file = _open(file)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> Any:
        while True:
            line = self.file.readline()
            if not line:
                self.file.close()
                raise StopIteration
            if line.strip():
                try:
                    return json.loads(line)
                except ValueError as error:  # also UnicodeDecodeError
                    raise Bad(f"no JSON: {error}") from None


def _json_list(file: Path) -> list[Any]:
    """A whole JSON file, as ShareGPT comes: this one form is read at once."""
    try:
        with _open(file) as opened:
            value = json.load(opened)
    except ValueError as error:
        raise Refused("prompts.source", f"{file} is no JSON: {error}") from None
    if not isinstance(value, list):
        raise Refused("prompts.source", f"{file} holds no list of rows")
    return value


def _texts(file: Path, *, by_paragraph: bool) -> Iterator[str]:
    block: list[str] = []
    with _open(file) as opened:
        for line in opened:
            text = line.decode("utf-8", "replace").rstrip("\n\r")
            if not by_paragraph:
                if text.strip():
                    yield text.strip()
            elif text.strip():
                block.append(text)
            elif block:
                yield "\n".join(block)
                block = []
    if block:
        yield "\n".join(block)


def _columns(file: Path, kind: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Refused(
            "prompts.pyarrow", f"{file} needs pyarrow, which the env of the pipeline lacks: pip install pyarrow"
        ) from None
    try:
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches(1024):
                    yield from batch.to_pylist()
        else:
            with pyarrow.memory_map(str(file)) as mapped:
                try:
                    for batch in pyarrow.ipc.open_stream(mapped):  # what `save_to_disk` writes
                        yield from batch.to_pylist()
                except pyarrow.ArrowInvalid:
                    reader = pyarrow.ipc.open_file(mapped)
                    for i in range(reader.num_record_batches):
                        yield from reader.get_batch(i).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise Refused("prompts.source", f"{file} cannot be read: {error}") from None


# --- what a row is -------------------------------------------------------------------------------------------------


def understand(raw: Any, own_answers: bool, vocab_size: int) -> Item:
    """The row in our words. Raises Bad with the reason."""
    if not isinstance(raw, dict):
        raise Bad("the row is no object")
    row = {key: value for key, value in raw.items() if value is not None}  # columns that other rows have
    if "input_ids" in row:
        return Item("tokenized", _tokenized(row, vocab_size))
    if row.get("tools") or row.get("functions"):
        raise Bad("it has tool definitions, which the chat template would have to be told; they are not supported")
    if isinstance(row.get("messages", row.get("conversations")), list):
        messages = _messages(row.get("messages", row.get("conversations")))
        answer = None
        while messages and messages[-1]["role"] == "assistant":
            answer = messages.pop()["content"]
        if not messages or messages[-1]["role"] != "user":
            raise Bad("no user turn to answer")
        if isinstance(row.get("response"), str):
            return _answered(messages, row["response"], row)
        if own_answers and answer is not None:
            return _answered(messages, answer, row)
        return Item("prompt", {"messages": messages})
    for key in SINGLE:
        if isinstance(row.get(key), str):
            text = row[key].strip()
            more = row.get("input") if key == "instruction" else None
            if isinstance(more, str) and more.strip():
                text = f"{text}\n\n{more.strip()}"  # Alpaca's second half: dropped, half of the task would be missing
            if not text:
                raise Bad(f"{key} is empty")
            messages = [{"role": "user", "content": text}]
            if isinstance(row.get("system"), str) and row["system"].strip():
                messages.insert(0, {"role": "system", "content": row["system"].strip()})
            return (
                _answered(messages, row["response"], row)
                if isinstance(row.get("response"), str)
                else Item("prompt", {"messages": messages})
            )
    raise Bad(f"no known key (it has {', '.join(sorted(map(str, row))[:6]) or 'none'})")


def _answered(messages: list[dict[str, str]], response: str, row: dict[str, Any]) -> Item:
    if not response.strip() and not row.get("output_ids"):
        raise Bad("the response is empty")
    more: dict[str, Any] = {
        key: row[key] for key in ("reasoning", "output_ids", "prompt_ids", "finish_reason") if key in row
    }
    return Item("ready", {"messages": messages, "response": response, **more})


def _messages(turns: Any) -> list[dict[str, str]]:
    made = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Bad("a turn is no object")
        if turn.get("tool_calls") or turn.get("function_call"):
            raise Bad("it has tool calls, which are not supported")
        name = turn.get("role", turn.get("from"))
        role = ROLES.get(str(name).lower())
        if role is None:
            raise Bad(f"unknown role {name!r}")
        made.append({"role": role, "content": _content(turn.get("content", turn.get("value")))})
    if any(not turn["content"].strip() for turn in made):
        raise Bad("a turn is empty")
    return made


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    raise Bad("a turn's content is no text (images and sounds are not supported)")


def _tokenized(row: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise Bad("input_ids needs a loss_mask, and both have to be lists")
    if len(ids) != len(mask):
        raise Bad(f"{len(ids)} input_ids, {len(mask)} entries in loss_mask")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
        raise Bad(f"an id is outside of the target's vocabulary of {vocab_size}")
    flags = [int(bool(flag)) for flag in mask]
    if sum(flags) < 2:
        raise Bad("its loss mask is empty: nothing to learn from")
    return {"input_ids": ids, "loss_mask": flags}


# --- which of them -------------------------------------------------------------------------------------------------


def choose(rows: Iterable[tuple[int, Any]], limit: int, seed: str) -> list[tuple[int, Any]]:
    """At most `limit` (number, row), the same for the same seed whatever the order of reading; 0: all. In the order of
    their numbers. Holds no more than `limit` rows: those with the smallest digests of (seed, number)."""
    if not limit:
        return list(rows)
    heap: list[tuple[int, int, Any]] = []
    for number, row in rows:
        rank = int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:8], "big")
        entry = (-rank, number, row)
        if len(heap) < limit:
            heapq.heappush(heap, entry)
        elif entry[0] > heap[0][0]:
            heapq.heapreplace(heap, entry)
    return sorted(((number, row) for _, number, row in heap), key=lambda pair: pair[0])
