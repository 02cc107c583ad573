"""`rigbook book show` and `export` without typer: the one command that is run all the time has to be cheap."""

from __future__ import annotations

from pathlib import Path

from state.errors import RigbookError
from tui.cli.common import ctx, emit, root, say


def quickly(words: list[str]) -> bool:
    """Run `book show` when its arguments are the plain ones; False leaves the command line to typer."""
    at: int | None = None
    section = ""
    rest = iter(words)
    for word in rest:
        name, joined, value = word.partition("=")
        if name not in ("--at", "--section"):
            return False
        value = value if joined else next(rest, "")
        if name == "--section" and value:
            section = value
        elif name == "--at" and value.isdecimal():
            at = int(value)
        else:
            return False
    show(at, section)
    return True


def show(at: int | None = None, section: str = "") -> None:
    """Print the book, or one section of it, as Markdown or JSON."""
    from state.book import open_book

    book = open_book(root(), at)
    if ctx.json:
        from state.render.json import render as as_json

        emit(as_json(book))
        return
    from state.render import markdown

    emit(None, markdown.render_section(book, section) if section else markdown.render(book))


def export(file: str | None, at: int | None = None) -> None:
    """Write the book to a file, whole or not at all. `-` is standard output."""
    from state.book import open_book
    from state.render import markdown

    if file == "-":
        show(at)
        return
    book = open_book(root(), at)
    path = Path(file) if file else root() / "STATE.md"
    as_json = ctx.json or path.suffix == ".json"
    if as_json:
        import json

        from state.render.json import render as to_json

        text = json.dumps(to_json(book), indent=2, ensure_ascii=False) + "\n"
    else:
        text = markdown.render(book)
    write_whole(path, text)
    if ctx.json:
        emit({"path": str(path), "seq": book.seq, "head": book.head})
    else:
        say(f"version {book.seq} is in {path}")


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old text or the new one, never half of either."""
    import os
    import tempfile

    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise RigbookError("export.failed", f"could not write {path}: {error.strerror}") from None
