"""`rigbook run preview`: tokenised rows in the terminal, with what counts for the loss marked."""

from __future__ import annotations

import json
import sys
from typing import Any

from state.errors import USAGE, RigbookError
from tui.cli.common import ctx, emit, project, root, wait_for

PREVIEW = 3  # rows
MASKED, SPECIAL, PLAIN = "\x1b[30;42m", "\x1b[2;36m", "\x1b[0m"


def preview(words: list[str]) -> None:
    """Print some tokenised rows with what counts for the loss marked."""
    count = PREVIEW
    if words:
        if len(words) > 1 or not words[0].isdigit() or int(words[0]) < 1:
            raise RigbookError("run.preview", "rigbook run preview [N]: how many rows", exit_code=USAGE)
        count = int(words[0])
    rows = wait_for(_samples(project()))[:count]
    colour = sys.stdout.isatty() and not ctx.json
    if colour:
        # The text is a machine's: it is made harmless piece by piece, the colours are ours.
        sys.stdout.write("\n\n".join(sample_text(row, colour=True) for row in rows) + "\n")
        return
    emit(rows, "\n\n".join(sample_text(row, colour=False) for row in rows))


async def _samples(loaded: Any) -> list[dict[str, Any]]:
    from pipeline import recipe
    from pipeline.runs import open_work

    folder = recipe.folder(loaded, "tokenize")
    async with open_work(root()) as work:
        link = await work.rig.link(recipe.pipeline_of(loaded).host)
        try:
            data = await link.read(f"{folder}/samples.jsonl")
        except RigbookError as error:
            if error.id != "file.not-found":
                raise
            raise RigbookError(
                "run.no-samples",
                f"{folder} has no samples.jsonl",
                host=link.name,
                hint="rigbook run tokenize",
                exit_code=USAGE,
            ) from None
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def sample_text(row: dict[str, Any], *, colour: bool) -> str:
    """A sample {"id", "source", "tokens": [[text, mask], …]}: tokens that count for the loss coloured, or between ⟦ and
    ⟧; special tokens dimmed."""
    from state.harmless import harmless

    out, inside = [], False
    for text, mask in row["tokens"]:
        shown = harmless(text)
        special = len(shown) > 2 and shown[0] in "<[" and shown[-1] in ">]"
        if not colour:
            out.append(("⟦" if mask and not inside else "⟧" if inside and not mask else "") + shown)
            inside = bool(mask)
        elif mask:
            # Each line its own colours: a terminal would paint to its edge otherwise.
            out.append(MASKED + shown.replace("\n", f"{PLAIN}\n{MASKED}") + PLAIN)
        else:
            out.append(SPECIAL + shown + PLAIN if special else shown)
    text = "".join(out) + ("⟧" if inside else "")
    share = sum(mask for _, mask in row["tokens"]) / max(1, len(row["tokens"]))
    return f"--- {harmless(str(row['id']))} ({harmless(str(row['source']))}), {share:.0%} of the tokens count\n{text}"
