"""One training step of speculators' EAGLE-3 drafter, timed in its own environment: run by `train_speed.py`.

The model class of the library, of the same sizes, in fp32 as its trainer has it on a processor, on one packed row of
512 tokens; its own loss; AdamW (its default, Muon, costs more). Prints the seconds of a step, the median of several;
with --busy, seconds of the processor on one thread.
"""

import statistics
import sys
import time

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

TOKENS, HIDDEN, VOCAB, DRAFT_VOCAB, GUESSES = 512, 576, 49152, 8192, 3
ROWS = (172, 174, 166)


def build() -> torch.nn.Module:
    layer = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
    )
    layer._attn_implementation = "eager"  # its flex attention has no backward on a processor
    proposal = GreedyTokenProposalConfig(speculative_tokens=GUESSES)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=[2, 15, 27],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    torch.manual_seed(0)
    return Eagle3DraftModel(config)


def main() -> None:
    busy = "--busy" in sys.argv
    clock = time.process_time if busy else time.perf_counter
    if busy:
        torch.set_num_threads(1)
    model = build()
    for parameter in model.parameters():
        if not parameter.isfinite().all():
            torch.nn.init.normal_(parameter, std=0.02)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    documents = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS)).unsqueeze(0)
    batch = {
        "hidden_states": torch.randn(1, TOKENS, 3 * HIDDEN),
        "input_ids": torch.randint(VOCAB, (1, TOKENS)),
        "document_ids": documents,
        "loss_mask": torch.ones(1, TOKENS, dtype=torch.bool),
        "position_ids": torch.cat([torch.arange(n) for n in ROWS]).unsqueeze(0),
        "verifier_last_hidden_states": torch.randn(1, TOKENS, HIDDEN),
    }
    loss = resolve_loss_config("kl_div", "eager")  # its fused one needs Triton
    seconds = []
    for _ in range(8):
        began = clock()
        optimizer.zero_grad()
        _, value, _ = model(**batch, ttt_steps=GUESSES, loss_config=loss)
        value.backward()
        optimizer.step()
        seconds.append(clock() - began)
    print(statistics.median(seconds[2:]))


if __name__ == "__main__":
    main()
