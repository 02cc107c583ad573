"""Hidden states as other trainers keep them: SpecForge's offline files and speculators'.

SpecForge     rows_<g>-<g + 2000>/data_<i>.ckpt, torch.save of {input_ids [T], loss_mask [T], hidden_state [1, T, H],
              aux_hidden_state [1, T, A*H]}; hidden_state is after the target's last norm, as ours
speculators   hs_<i>.safetensors with token_ids [T] and hidden_states [T, A + 1, H]; the last one is *before* the
              norm, and the loss mask is elsewhere

Neither says which layers it holds: whoever reads them must. Files are read with weights_only; one that is cut is a
ValueError that names it, never a row less (SpecForge itself takes a file for done if it exists).

Ours keep the final state after the norm only. Written for speculators it is divided by the norm's weight: their norm
then gives ours again, since it does not depend on a state's length; apart from eps (1e-5 of the square of a state of
length 1) and two roundings to bf16, half a percent at worst.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from pipeline.eagle3.shards import Row
from pipeline.eagle3.target import rms_norm
from pipeline.stages.protocol import write_bytes

GROUP = 2000  # rows of one SpecForge folder
NUMBER = re.compile(r"_(\d+)\.(?:ckpt|safetensors)$")


def numbered(directory: Path, pattern: str) -> list[tuple[int, Path]]:
    """Files with their row numbers, in order. Raises ValueError where there is none, or a number is missing: SpecForge
    leaves one out for a row whose states were not finite, and says so in a log only."""
    found = sorted((int(m[1]), path) for path in directory.glob(pattern) if (m := NUMBER.search(path.name)))
    if not found:
        raise ValueError(f"{directory} holds no {pattern}")
    if gaps := sorted(set(range(found[-1][0] + 1)) - {number for number, _ in found}):
        raise ValueError(f"{directory}: rows {gaps[:10]} are missing ({len(gaps)} in all)")
    return found


def read_specforge(directory: Path, layers: int) -> Iterator[Row]:
    """`layers`: how many captures each row must have."""
    for number, path in numbered(directory, "rows_*/data_*.ckpt"):
        try:
            got: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
            ids, mask = got["input_ids"].flatten(), got["loss_mask"].flatten().bool()
            last, aux = got["hidden_state"].squeeze(0), got["aux_hidden_state"].squeeze(0)
        except Exception as error:  # pickle, zip and torch each have errors of their own for a file that is cut
            raise ValueError(f"{path} is cut or not SpecForge's: {type(error).__name__}: {error}") from error
        yield row_of(path, f"row-{number}", layers, ids, mask, aux, last)


def write_specforge(rows: Sequence[Row], directory: Path, first: int) -> None:
    """Rows number `first` and on."""
    for number, row in enumerate(rows, first):
        group = number // GROUP * GROUP
        data = io.BytesIO()
        tensors = {
            "input_ids": row.tokens.clone(),
            "loss_mask": row.mask.long(),
            "hidden_state": row.last.clone()[None],
        }
        torch.save({**tensors, "aux_hidden_state": row.aux.clone()[None]}, data)
        write_bytes(directory / f"rows_{group}-{group + GROUP}" / f"data_{number}.ckpt", data.getvalue())


def read_speculators(
    directory: Path, layers: int, rows: Sequence[dict[str, Any]], norm: Tensor, eps: float
) -> Iterator[Row]:
    """`rows`: the tokenised rows that the files are of, by number, with their loss masks; `norm` [H]: the weight of the
    target's last norm."""
    for number, path in numbered(directory, "hs_*.safetensors"):
        try:
            got = load_file(path)
            ids, states = got["token_ids"].flatten().long(), got["hidden_states"]
        except (SafetensorError, OSError, KeyError) as error:
            raise ValueError(f"{path} is cut or not speculators': {error}") from error
        if number >= len(rows) or rows[number]["input_ids"] != ids.tolist():
            raise ValueError(f"{path} is not of row {number} of the tokenised rows: their tokens differ")
        mask = torch.tensor(rows[number]["loss_mask"], dtype=torch.bool)
        last = rms_norm(states[:, -1].float(), norm.float(), eps)
        yield row_of(path, rows[number]["id"], layers, ids, mask, states[:, :-1].flatten(1), last)


def write_speculators(rows: Sequence[Row], directory: Path, first: int, norm: Tensor) -> None:
    """Raises ValueError for a norm that has a zero: what it takes away cannot be given back."""
    if not norm.float().abs().min() > 0:
        raise ValueError("the weight of the target's last norm has a zero: states before it cannot be had from ours")
    for number, row in enumerate(rows, first):
        before = (row.last.float() / norm.float()).to(torch.bfloat16)
        captures = row.aux.reshape(len(row), -1, row.last.shape[-1])
        states = torch.cat([captures.to(torch.bfloat16), before.unsqueeze(1)], 1)
        write_bytes(
            directory / f"hs_{number}.safetensors", save({"token_ids": row.tokens.clone(), "hidden_states": states})
        )


def row_of(path: Path, id: str, layers: int, ids: Tensor, mask: Tensor, aux: Tensor, last: Tensor) -> Row:
    """A row whose parts fit together; ValueError otherwise."""
    T, width = last.shape[0], last.shape[-1]
    if not len(ids) == len(mask) == len(aux) == T or aux.shape[-1] != layers * width:
        raise ValueError(
            f"{path}: {len(ids)} tokens, {len(mask)} mask entries, captures {tuple(aux.shape)}, final states "
            f"{tuple(last.shape)} do not make a row of {layers} captures"
        )
    if not (aux.isfinite().all() and last.isfinite().all()):
        raise ValueError(f"{path}: states are not finite")
    mask = mask.clone()
    mask[0] = False  # nothing stands before the first token
    return Row(id, ids.long(), mask, aux.to(torch.bfloat16), last.to(torch.bfloat16))
