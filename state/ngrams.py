"""What drafting by looking up repeated n-grams would reach on tokens that were really generated, and how much they
repeat. A drafter that does not beat the lookup has learnt to repeat. Pure functions over token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def lookup_accept_length(
    outputs: Sequence[Sequence[int]],
    *,
    steps: int = 3,
    longest: int = 3,
    prompts: Sequence[Sequence[int]] | None = None,
) -> float | None:
    """Tokens emitted per verify step (accepted drafts + 1) of prompt-lookup drafting. None without a verify step.

    At each position the latest earlier occurrence of the last n tokens (n = longest … 1) proposes the `steps` tokens
    that followed it there; those that agree with the real output are accepted. `prompts`, one per output, may be
    looked into as well; without them only what was generated is.
    """
    emitted = verify_steps = 0
    for prompt, output in zip(prompts or [()] * len(outputs), outputs, strict=True):
        tokens = [*prompt, *output]
        # n-gram → position behind its latest occurrence, always one token behind the end, so that the n-gram at
        # the end never finds itself.
        seen: dict[tuple[int, ...], int] = {}
        indexed = 0
        at = len(prompt) + 1  # the first output token comes out of the prefill, not out of a verify step
        while at < len(tokens):
            for end in range(indexed + 1, at):
                for n in range(1, min(longest, end) + 1):
                    seen[tuple(tokens[end - n : end])] = end
            indexed = max(indexed, at - 1)
            accepted = 0
            for n in range(min(longest, at), 0, -1):
                start = seen.get(tuple(tokens[at - n : at]))
                if start is not None:
                    accepted = _agreeing(tokens[start : min(start + steps, at)], tokens[at:])
                    break
            step = min(accepted + 1, len(tokens) - at)
            emitted, verify_steps, at = emitted + step, verify_steps + 1, at + step
    return emitted / verify_steps if verify_steps else None


def repetition_rate(outputs: Iterable[Sequence[int]], n: int = 4) -> float | None:
    """Share of n-grams that the same output had before. None when no output is as long as n."""
    repeated = total = 0
    for output in outputs:
        grams = [tuple(output[i : i + n]) for i in range(len(output) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else None


def _agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
