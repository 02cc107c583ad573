"""Decoding with a target alone, or with a drafter that guesses ahead: the same tokens either way.

Both ways are one loop over rows that start and end at different times (continuous batching). A row's cache holds every
token but the last: the last one has been chosen, and not yet read by the target.

Plain: the target reads each row's last token and chooses the next one.

Speculative (a chain, topk 1). Say a row has L read tokens and token L chosen:
    draft    the drafter reads the slots that the last verify made known (it fuses the target's captures), guesses
             token L+1, and goes on from its own output: d1 … dK
    verify   the target reads token L, d1 … dK at once and chooses a0 … aK, a_i being what follows d_i
    accept   d1 … dn, while d_{i+1} = a_i; then a_n, which is the target's own (the bonus token)
so a verify step emits n + 1 tokens, and every one of them is the token that plain decoding chooses. With a temperature
this holds too: `choose` draws a_i from the target's distribution with a random number that depends on the request's
seed and the token's place alone, and accepting d when it equals the draw is rejection sampling for a drafter that
proposes one token with certainty. (In bf16 the result of a matrix product depends on the number of rows in it, so
near-ties may fall the other way; in fp32 they practically do not.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.draft import DraftCache, Drafter
from pipeline.eagle3.target import Target

PREFILL_TOKENS = 2048  # padded prompt tokens read at once: bounds memory and the pause of the rows that decode


@dataclass(eq=False)
class Request:
    """What to decode, and what came of it."""

    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0
    output: list[int] = field(default_factory=list)
    finish: str | None = None  # stop | length | abort
    # One verify step each: how many of its drafts were accepted and emitted. Empty where nothing was drafted.
    accepted: list[int] = field(default_factory=list)
    draft_from: int = 0  # first slot that the drafter has not read with the target's captures


def positions_needed(prompt: int, max_tokens: int, steps: int) -> int:
    """Cache positions of one request: the last verify may read `steps` drafts beyond the last token."""
    return prompt + max_tokens + steps


class Decoder:
    """Rows 0 … len(active)-1 of the caches belong to `active`, in order."""

    def __init__(
        self, target: Target, rows: int, positions: int, drafter: Drafter | None = None, steps: int = 3
    ) -> None:
        """`positions`: see `positions_needed`. `steps`: drafts per verify step."""
        self.target, self.drafter = target, drafter
        self.steps = steps if drafter is not None else 0
        self.cache = target.new_cache(rows, positions)
        self.draft_cache = drafter.new_cache(rows, positions) if drafter is not None else None
        self.layers = drafter.config.aux_layers if drafter is not None else ()
        self.active: list[Request] = []
        self.free_rows = rows
        # What the last forward of each row made known and the drafter has not read yet: captures [n, 3H].
        self.unread: list[Tensor] = []

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> None:
        """Read the prompts and choose each one's first token. Raises ValueError where there are too few rows."""
        if len(requests) > self.free_rows:
            raise ValueError(f"{len(requests)} requests for {self.free_rows} free rows")
        for group in _groups(requests):
            first = len(self.active)
            lengths = [len(r.prompt) for r in group]
            tokens = torch.zeros(len(group), max(lengths), dtype=torch.long)
            for row, request in enumerate(group):
                tokens[row, : lengths[row]] = torch.tensor(request.prompt)
            hidden = self.target.forward(tokens, self.cache, first, self.layers)
            last = hidden.final[torch.arange(len(group)), torch.tensor(lengths) - 1]  # [B, H]
            chosen = choose(self.target.logits(last), group, [0] * len(group)).tolist()
            for row, request in enumerate(group):
                self.cache.lengths[first + row] = lengths[row]
                self.active.append(request)
                self.free_rows -= 1
                _emit(request, [chosen[row]])
            if hidden.captures is not None:
                self._draft_prompts(group, first, hidden.captures)

    def _draft_prompts(self, group: Sequence[Request], first: int, captures: Tensor) -> None:
        """The drafter reads the new rows' prompts at once; the last slot stays unread, as after any verify."""
        assert self.drafter is not None and self.draft_cache is not None
        rows, widest = captures.shape[:2]
        following = torch.zeros(rows, widest, dtype=torch.long)
        for row, request in enumerate(group):
            n = len(request.prompt)
            following[row, :n] = torch.tensor(_tail(request, n))
            request.draft_from = n - 1
            self.unread.append(captures[row, n - 1 : n])
        cache = DraftCache(self.draft_cache.keys[first : first + rows], self.draft_cache.values[first : first + rows])
        self.drafter(following, self.drafter.fuse(captures), torch.arange(widest).expand(rows, -1), cache)

    def retire(self) -> list[Request]:
        """Take the finished requests out; the rows that stay are moved together. Returns those taken out."""
        gone = []
        for row in range(len(self.active) - 1, -1, -1):
            if self.active[row].finish is None:
                continue
            gone.append(self.active[row])
            last = len(self.active) - 1
            if row != last:
                self.cache.move(last, row)
                self.active[row] = self.active[last]
                if self.draft_cache is not None:
                    n = self.active[row].draft_from
                    self.draft_cache.keys[row, :, :n] = self.draft_cache.keys[last, :, :n]
                    self.draft_cache.values[row, :, :n] = self.draft_cache.values[last, :, :n]
                    self.unread[row] = self.unread[last]
            self.cache.lengths[last] = 0
            self.active.pop()
            if self.draft_cache is not None:
                self.unread.pop()
            self.free_rows += 1
        return gone

    @torch.inference_mode()
    def step(self) -> None:
        """One forward of the target for every active row: each gets one token, or n + 1 when it speculates.
        Finished rows must have been retired."""
        if self.drafter is None:
            self._plain()
        else:
            self._speculate()

    def _plain(self) -> None:
        tokens = torch.tensor([[_last(r)] for r in self.active])  # [B, 1]
        hidden = self.target.forward(tokens, self.cache)
        chosen = choose(self.target.logits(hidden.final[:, 0]), self.active, [len(r.output) for r in self.active])
        for row, token in enumerate(chosen.tolist()):
            self.cache.lengths[row] += 1
            _emit(self.active[row], [token])

    def _speculate(self) -> None:
        rows, width = len(self.active), self.steps + 1
        lasts = torch.tensor([[_last(r)] for r in self.active])
        tokens = torch.cat((lasts, self._draft(lasts)), 1)  # [B, K + 1]
        hidden = self.target.forward(tokens, self.cache, captures=self.layers)
        assert hidden.captures is not None
        places = [len(r.output) + i for r in self.active for i in range(width)]
        owners = [r for r in self.active for _ in range(width)]
        chosen = choose(self.target.logits(hidden.final).view(rows * width, -1), owners, places).view(rows, width)
        guessed, said = tokens.tolist(), chosen.tolist()
        for row, request in enumerate(self.active):
            n = 0
            while n < self.steps and guessed[row][n + 1] == said[row][n]:
                n += 1
            emitted = _emit(request, said[row][: n + 1])
            # A draft that came after the end was never part of the text: it does not count.
            request.accepted.append(min(n, emitted))
            self.cache.lengths[row] += n + 1
            self.unread[row] = hidden.captures[row, : n + 1]

    def _draft(self, lasts: Tensor) -> Tensor:
        """The drafter's K guesses for every row [B, K]; `lasts` [B, 1] is each row's last token."""
        assert self.drafter is not None and self.draft_cache is not None
        rows = len(self.active)
        cache = DraftCache(self.draft_cache.keys[:rows], self.draft_cache.values[:rows])
        counts = [len(captures) for captures in self.unread]
        widest = max(counts)
        starts = [r.draft_from for r in self.active]
        if rows == 1:
            captures = self.unread[0].unsqueeze(0)  # [1, T, 3H]
        else:
            captures = torch.nn.utils.rnn.pad_sequence(self.unread, batch_first=True)  # [B, T, 3H]
        # Slot t takes the token after it. Padding takes the slots after the real ones: written again before they count.
        following = torch.zeros(rows, widest, dtype=torch.long)
        for row, request in enumerate(self.active):
            following[row, : counts[row]] = torch.tensor(_tail(request, counts[row]))
            request.draft_from += counts[row]
        positions = torch.tensor(starts).unsqueeze(1) + torch.arange(widest)  # [B, T]
        out = self.drafter(following, self.drafter.fuse(captures), positions, cache)  # [B, T, H]
        slots = torch.tensor(starts).unsqueeze(1) + torch.tensor(counts).unsqueeze(1) - 1  # [B, 1] each row's last
        hidden = out[torch.arange(rows), torch.tensor(counts) - 1].unsqueeze(1)  # [B, 1, H]
        guesses = []
        for i in range(self.steps):
            guesses.append(self.drafter.to_target(likeliest(self.drafter.logits(hidden))))  # [B, 1]
            if i + 1 < self.steps:
                slots = slots + 1
                hidden = self.drafter(guesses[-1], hidden, slots, cache)
        return torch.cat(guesses, 1)


def decode(
    target: Target, requests: Sequence[Request], drafter: Drafter | None = None, steps: int = 3, rows: int = 1
) -> Iterator[Request]:
    """Decode the requests, `rows` at a time, and yield each as it ends."""
    longest = max(positions_needed(len(r.prompt), r.max_tokens, steps) for r in requests)
    decoder = Decoder(target, rows, longest, drafter, steps)
    waiting = list(requests)
    while waiting or decoder.active:
        new = [waiting.pop(0) for _ in range(min(decoder.free_rows, len(waiting)))]
        decoder.admit(new)
        yield from decoder.retire()
        if decoder.active:
            decoder.step()
            yield from decoder.retire()


def choose(logits: Tensor, requests: Sequence[Request], places: Sequence[int]) -> Tensor:
    """The next token of each row of logits [R, V]: the likeliest, or a draw where the request has a temperature.

    `places[r]`: the token's index in the request's output, which its random number depends on.
    """
    drawn = [row for row, request in enumerate(requests) if request.temperature > 0]
    if not drawn:
        return likeliest(logits)
    temperature = torch.tensor([[requests[row].temperature] for row in drawn])
    mine = logits if len(drawn) == len(requests) else logits[drawn]
    p = mine.to(torch.float32, copy=True)  # [r, V]; in place from here: it is 12 MB for 64 rows
    p.div_(temperature).sub_(p.amax(-1, keepdim=True)).exp_()  # up to a factor, which inverse_cumulative does not mind
    for i, row in enumerate(drawn):
        if requests[row].top_p < 1:
            p[i] = nucleus(p[i], requests[row].top_p)
    u = torch.tensor([[uniform(requests[row].seed, places[row])] for row in drawn])  # [r, 1]
    draw = inverse_cumulative(p, u)
    if len(drawn) == len(requests):
        return draw
    chosen = likeliest(logits)
    chosen[drawn] = draw
    return chosen


def likeliest(logits: Tensor) -> Tensor:
    """argmax over the last dimension, the first where several are equal. `Tensor.argmax` is 15 times slower in bf16."""
    return logits.max(-1).indices


def inverse_cumulative(p: Tensor, u: Tensor, block: int = 256) -> Tensor:
    """The first index at which the cumulative sum of p [R, V] exceeds u [R, 1] times its total. -> [R]

    In two levels, sums of blocks and then within one block: a running sum over the whole vocabulary takes 8 ms for 64
    rows, this takes 1.
    """
    if p.shape[-1] % block:
        p = F.pad(p, (0, -p.shape[-1] % block))
    p = p.view(p.shape[0], -1, block)  # [R, V / block, block]
    sums = p.sum(-1).cumsum(-1)  # [R, V / block]
    wanted = u * sums[:, -1:]
    # A block, or a token, of no probability is never chosen: rounding must not step past the last that has some.
    at = torch.searchsorted(sums, wanted, right=True).clamp_(max=sums.shape[-1] - 1)  # [R, 1]
    before = torch.where(at > 0, sums.gather(1, (at - 1).clamp_(min=0)), 0.0)
    inside = p.gather(1, at.unsqueeze(-1).expand(-1, 1, block)).squeeze(1)  # [R, block]
    place = torch.searchsorted(inside.cumsum(-1), wanted - before, right=True)
    last = block - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return (at * block + torch.minimum(place, last)).squeeze(1)


def nucleus(p: Tensor, top_p: float) -> Tensor:
    """Probabilities [V] (up to a factor) outside of the smallest set that holds `top_p` of them become zero."""
    ordered, index = p.sort(descending=True)
    cumulative = ordered.cumsum(0)
    outside = cumulative - ordered >= top_p * cumulative[-1]
    kept = p.clone()
    kept[index[outside]] = 0
    return kept


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on nothing but these two (splitmix64)."""
    mask = (1 << 64) - 1
    x = (seed * 0xD1342543DE82EF95 + (place + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return ((x ^ x >> 31) >> 11) / (1 << 53)


def _groups(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Prompts to read together: of like length, so that little is padding."""
    group: list[Request] = []
    for request in sorted(requests, key=lambda r: len(r.prompt)):
        if group and len(request.prompt) * (len(group) + 1) > PREFILL_TOKENS:
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _last(request: Request) -> int:
    return request.output[-1] if request.output else request.prompt[-1]


def _tail(request: Request, count: int) -> list[int]:
    """The request's last `count` tokens, prompt and output as one."""
    return (request.prompt[-count:] + request.output)[-count:]


def _emit(request: Request, tokens: list[int]) -> int:
    """Append tokens up to the end of the text. Returns how many were taken."""
    for taken, token in enumerate(tokens, 1):
        request.output.append(token)
        if token in request.stop_ids:
            request.finish = "stop"
        elif len(request.output) >= request.max_tokens:
            request.finish = "length"
        if request.finish is not None:
            return taken
    return len(tokens)
