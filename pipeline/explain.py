"""What the pipeline's error and check ids mean, for `rigbook explain ID`."""

EXPLAIN: dict[str, str] = {
    "estimate.assume": "--assume NAME=NUMBER says what no run has measured yet: tokens (of all training rows, prompts "
    "included), price (of the machine, an hour), or a stage's tokens a second.",
    "estimate.config": "The target's config.json, from which sizes are computed, cannot be read.",
    "audit.env": "`run audit --draft` needs a Python with torch and safetensors on the host where the drafter is: an "
    "env of rigbook.toml.",
    "run.audit": "`rigbook run audit --draft DIR` looks at any drafter's directory; --against OTHER compares it with "
    "another.",
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
    "run.disk": "The stages still to do will write more than the workdir's disk has. `rigbook run all --dry-run` has "
    "each stage's part and what it rests on. --yes does not override this; --disk-anyway REASON does, and the book has "
    "it as a decision.",
    "run.preview": "`rigbook run preview [N]`: N is how many of the tokenised rows to show.",
    "run.no-samples": "`rigbook run preview` shows rows that the stage `tokenize` has put aside to look at: run it "
    "first.",
    "pipeline.none": "rigbook.toml has no [pipeline] table: rigbook does not know where stages run.",
    "pipeline.no-target": "rigbook.toml has no [target] table: there is no model to draft for.",
    "stage.unknown": "There is no such stage; `rigbook run` lists them.",
    "stage.failed": "The stage ended with an exception; its log has the traceback.",
    "stage.terminated": "The stage was told to end and did. Start it again: it continues.",
    "run.refused": "A stage refused to go on; its message says why. Nothing is broken.",
    "run.failed": "A job ended with an error; `rigbook jobs logs RUN` shows its log.",
    "run.lost": "A job ended without leaving a record: it was killed, or its host restarted. Start it again.",
    "run.stopped": "Somebody stopped the job. Start it again: it continues.",
    "run.not-ended": "The job still runs, or its host could not be asked.",
    "run.unknown": "No run, or more than one, begins with these letters; `rigbook runs list` shows them.",
    "rules.form": "A rule's `forbid` is a dotted key of a profile, an equals sign, and a pattern: args.dtype=fp8*.",
    "serve.changed": "The profile's server runs with a configuration that rigbook.toml no longer has. Stop it first.",
    "serve.port-taken": "Somebody listens on the profile's port already. If it is dead work of ours, `rigbook clean`.",
    "serve.failed": "The server ended before it was ready; its log says why.",
    "serve.stuck": "The server said nothing new for minutes and does not answer. It was not killed: look at its log.",
    "serve.not-freed": "The server was stopped, but something still holds its port. `rigbook clean` shows what.",
    "serve.not-running": "The profile has no running server.",
    "server.engine": "rigbook cannot start this engine yet.",
    "hidden.vocab": "The draft vocabulary was made for another target.",
    "bench.running": "A benchmark of this project runs in another terminal. Two at once would stop each other's "
    "servers and measure each other's load.",
    "demo.running": "The demo in this folder is at work in another terminal, or in the background after `--tui`. "
    "`rigbook -C DIR` shows it.",
    "pipeline.key-elsewhere": "A key is read on the host where the stage runs and never travels. Put it there, and "
    "say so under [secrets].",
    "pipeline.no-hidden-dir": "The profile that is to write hidden states does not say where, or which layers: set "
    "RIGBOOK_HIDDEN_DIR and RIGBOOK_HIDDEN_LAYERS in its vars.",
    "pipeline.no-profile": "Prompts that the target writes itself are sampled from raw text, which an endpoint of "
    "others does not offer: a server of our own has to be there.",
}
