"""States that a patched SGLang writes against those of our own decoder on the GPU, row by row and layer by layer.

    python tests/gpu/hidden_sglang.py --model DIR --url http://127.0.0.1:30000 --folder /dev/shm/states --out DIR

Needs a server patched by `pipeline.sglang_patches.manage apply` and started like this, on this machine:

    RIGBOOK_HIDDEN_DIR=/dev/shm/states RIGBOOK_HIDDEN_LAYERS=1,14,26 python -m sglang.launch_server --model-path DIR \\
        --disable-radix-cache --chunked-prefill-size -1 --disable-cuda-graph --mem-fraction-static 0.6 …

Both sides run as the pipeline's own `hidden` stage over the same rows: real text lengths, random tokens of the target's
vocabulary. Prints a table and writes hidden_sglang.json: cosine and relative difference of every captured layer and of
the final state, the closest of *all* layers for each (a shift by one shows as another name), tokens a second of both.
Exit code 1 where a cosine is not above 0.999 or another layer fits better.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import torch  # noqa: E402

from pipeline.eagle3.config import text_config  # noqa: E402
from pipeline.eagle3.devices import DTYPES  # noqa: E402
from pipeline.eagle3.shards import read_index, read_shards  # noqa: E402
from pipeline.eagle3.target import Target  # noqa: E402
from pipeline.stages import hidden, match, protocol  # noqa: E402

ENOUGH = 0.999


def rows_for(model: Path, count: int, longest: int) -> list[dict[str, Any]]:
    vocab = int(text_config(json.loads((model / "config.json").read_text()))["vocab_size"])
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        length = int(torch.randint(32, longest, (1,), generator=generator))
        ids = torch.randint(3, vocab, (length,), generator=generator).tolist()
        rows.append({"id": f"r{i}", "input_ids": ids, "loss_mask": [0] * 8 + [1] * (length - 8)})
    return rows


def states(out: Path, inputs: dict[str, str], settings: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Runs the stage; returns its result and the seconds it took."""
    shutil.rmtree(out, ignore_errors=True)
    spec = {"stage": "hidden", "out": str(out), "inputs": inputs, "settings": settings, "events": f"{out}.events.jsonl"}
    begun = time.monotonic()
    result = protocol._run_once(protocol.Stage(spec), spec, hidden.run)
    return result, time.monotonic() - begun


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="of our own decoder")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    layers = json.loads((args.folder / "capture.json").read_text())["layers"]
    protocol.write_jsonl(args.out / "rows.jsonl", rows_for(args.model, args.rows, args.longest))
    inputs = {"rows": str(args.out / "rows.jsonl"), "model": str(args.model)}
    common = {"layers": layers, "dtype": args.dtype}
    served, served_s = states(
        args.out / "sglang", inputs, {**common, "how": "sglang", "base_url": args.url, "folder": str(args.folder)}
    )
    own, own_s = states(args.out / "torch", inputs, {**common, "how": "torch", "device": args.device})

    theirs, ours = read_shards(args.out / "sglang"), read_shards(args.out / "torch")
    width, names = read_index(args.out / "torch").hidden_size, [*map(str, layers), match.LAST]
    target = Target.load(args.model, DTYPES[args.dtype], match.POSITIONS, torch.device(args.device))
    every = match.state_names(target.config.layers)
    longest = max(range(len(ours)), key=lambda i: len(ours[i]))
    fits = match.compare(
        match.slices(theirs[longest], width), match.every_state(target, ours[longest])
    )  # [A + 1, L + 2, 3]
    pairs = [
        (match.slices(a, width).float(), match.slices(b, width).float()) for a, b in zip(theirs, ours, strict=True)
    ]
    table = []
    for i, name in enumerate(names):
        near = torch.cat([torch.nn.functional.cosine_similarity(a[i], b[i], dim=-1) for a, b in pairs])
        apart = torch.cat([(a[i] - b[i]).norm(dim=-1) / b[i].norm(dim=-1) for a, b in pairs])
        closest = every[int(fits[i, :, 0].argmin())]
        table.append({
            "layer": name, "cosine_mean": float(near.mean()), "cosine_least": float(near.min()),
            "difference_mean": float(apart.mean()), "closest_layer": closest,
            "differences_of_all": dict(zip(every, fits[i, :, 0].tolist(), strict=True)),
            "holds": float(near.mean()) > ENOUGH and closest == name,
        })  # fmt: skip
    print(f"{'layer':>6} {'cosine':>9} {'least':>9} {'apart':>8}  closest")
    for line in table:
        print(
            f"{line['layer']:>6} {line['cosine_mean']:9.6f} {line['cosine_least']:9.6f} {line['difference_mean']:8.4f}"
            f"  {line['closest_layer']}{'' if line['holds'] else '   <-- WRONG'}"
        )
    report = {
        "tokens": own["tokens"], "rows": len(ours), "layers": layers, "source": read_index(args.out / "sglang").source,
        "target": read_index(args.out / "sglang").target, "table": table,
        "worst_spot_difference": {"sglang": served["worst_spot_difference"], "torch": own["worst_spot_difference"]},
        "tokens_per_second": {"sglang": own["tokens"] / served_s, "torch": own["tokens"] / own_s},
    }  # fmt: skip
    (args.out / "hidden_sglang.json").write_text(json.dumps(report, indent=1) + "\n")
    print(
        json.dumps({name: report[name] for name in ("source", "tokens", "tokens_per_second", "worst_spot_difference")})
    )
    return 0 if all(line["holds"] for line in table) else 1


if __name__ == "__main__":
    sys.exit(main())
