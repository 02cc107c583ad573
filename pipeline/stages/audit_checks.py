"""What the audit of a drafter looks for: id -> (title, why it matters, what to do). Plain data: it ships with the stage
and is explained on the controller. The reports behind each are public issues of the trainers and engines named."""

from __future__ import annotations

AUDIT: dict[str, tuple[str, str, str]] = {
    "audit.readable": (
        "A drafter's directory cannot be read whole",
        "A cut file, a shard that is missing, a header that lies, or pickled code in place of weights.",
        "Download or export it again; a directory that cannot be read whole loads half.",
    ),
    "audit.algorithm": (
        "The drafter and the algorithm do not belong together",
        "An EAGLE-3 drafter that is run as EAGLE gets no captures: it answers, and the accept length is exactly 1.0 "
        "(sglang #21272, #25673).",
        "Serve it with the algorithm that it was trained for: EAGLE3 needs captures, EAGLE has none.",
    ),
    "audit.names": (
        "Tensors that the engine skips",
        "Engines look a name up and go on without it where they do not know it, with no message (SGLang up to 0.5.6 "
        "drops "
        "layers.0.*, TorchSpec #63).",
        "Export it for the engine and version that will load it (rigbook run export).",
    ),
    "audit.missing": (
        "Tensors that the engine leaves at random values",
        "A head that is not in the file is filled with noise; the server answers with HTTP 200 and accepts nothing "
        "(sglang #27908, #27829).",
        "Export it again from the trainer's checkpoint, and never serve it so.",
    ),
    "audit.config": (
        "The drafter's config.json lacks what engines need",
        "Sizes that are not said are guessed, each engine in its own way.",
        "Mend config.json by what the trainer was told.",
    ),
    "audit.shapes": (
        "Weights and config.json are of two drafters",
        "A layer of another size crashes at load, or is cut to fit.",
        "Find the pair that belongs together.",
    ),
    "audit.captures": (
        "The drafter reads other hidden states than it will get",
        "The width of fc must be the number of captures times the target's hidden size (vllm #43671, #46788; sglang "
        "#32334).",
        "Compare eagle_aux_hidden_state_layer_ids and target_hidden_size with what it was trained on.",
    ),
    "audit.values": (
        "Weights that cannot be right",
        "Not finite, all zero, or of a type that engines cast.",
        "Export it again; if the checkpoint has them too, training went wrong.",
    ),
    "audit.vocabulary": (
        "The map from draft to target vocabulary is wrong",
        "d2t holds offsets (target id minus draft id). Left out, stale, or stored as ids, every guess is another token "
        "(vllm #18909, SpecForge #76).",
        "Export d2t (offsets) and t2d (a mask over the target's vocabulary) together.",
    ),
    "audit.embeddings": (
        "Embeddings in the file that are not the target's",
        "Some engines take them in place of the target's; exported at random they ruin every guess (TorchSpec #38, "
        "#39).",
        "Drop them from the file, so that the engine takes the target's, or store the target's rows.",
    ),
    "audit.head": (
        "The draft head is far from the target's",
        "Most trainers start it from the target's rows, and many freeze it; rows in another order than d2t look like "
        "this.",
        "It is right only if the head was trained; otherwise export the target's rows in the order of d2t.",
    ),
    "audit.tied": (
        "tie_word_embeddings is not false",
        "Tied, the head is taken from the embeddings, which have another vocabulary (SpecForge #140).",
        'Set "tie_word_embeddings": false.',
    ),
    "audit.context": (
        "The drafter knows fewer positions than are served",
        "Beyond them acceptance collapses or the engine crashes (SpecForge #249, #271; sglang #3574).",
        "Raise max_position_embeddings (and the rope scaling) to what is served; measure long prompts.",
    ),
    "audit.rope": (
        "The drafter's rotary embedding differs from what it was trained with",
        "theta or scaling is lost between the two schemas of config.json (SpecForge #265, #702; vllm #51092).",
        "Write the rope that it was trained with under rope_theta/rope_scaling and under rope_parameters.",
    ),
    "audit.layers": (
        "Layer ids by an unclear convention",
        "SGLang counts explicit ids as outputs for some targets and inputs for others; one off costs acceptance in "
        "silence "
        "(sglang #25454).",
        "Make sure that the engine counts as the trainer did.",
    ),
    "audit.norms": (
        "Norms that the engine does not apply",
        "fc_norm, norm_before_fc and norm_output are read from a certain version on, and ignored before (vllm #38111, "
        "speculators #610).",
        "Use an engine version that reads the flag, or train without it.",
    ),
}  # fmt: skip
