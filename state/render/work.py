"""Sections about work: what ran, what came of it, what failed, what it cost."""

from __future__ import annotations

from state.book import Book, Discovery, Plan, Run
from state.outline import STAGES
from state.render import bench
from state.render.facts import fact_table
from state.render.people import item
from state.render.text import code, duration, escape, host, number, results, size, table, when

_BAD = ("failed", "lost", "stopped")


def last_run(book: Book, name: str, what: str = "stage") -> Run | None:
    """The latest run of a stage, by when it started; one that was skipped because it was done counts as the run
    that did it."""
    runs = [run for run in book.runs.values() if run.what == what and run.name == name]
    worked = [run for run in runs if run.status != "skipped"]
    return worked[-1] if worked else runs[-1] if runs else None


def _stages(book: Book) -> tuple[str, ...]:
    """The stages to report on: those of the pipeline, and the making of the target where rigbook made it."""
    made = ("target",) if last_run(book, "target") else ()
    planned = book.project.has_pipeline or any(last_run(book, stage) for stage in STAGES)
    return (*made, *STAGES) if planned else made


def run_source(book: Book, run: Run) -> str:
    """Where the figures of a run come from."""
    at = when(run.ended or run.started)
    return f"run {code(run.run)} on {host(book, run.host)}, {at}"


def _place(book: Book, run: Run) -> str:
    return f"{host(book, run.host)}, {when(run.ended or run.started)}"


def glance(book: Book) -> list[str]:
    said = []
    for server in book.servers.values():
        if server.state in ("ready", "loading", "starting"):
            said.append(f"Server **{escape(server.profile)}** is {server.state} (as of {when(server.at)}).")
    running = [run for run in book.runs.values() if run.status == "running" and run.what != "server"]
    said += [f"Running: {escape(run.name)} on {host(book, run.host)} since {when(run.started)}." for run in running]
    if stages := _stages(book):
        done = [s for s in stages if (run := last_run(book, s)) and run.status in ("done", "skipped")]
        said.append(f"Pipeline: {len(done)} of {len(stages)} stages done.")
    said += [f"**{escape(name)}** did not answer: {escape(f.reason)}." for name, f in sorted(book.failures.items())]
    bad = [run for run in book.runs.values() if run.status in ("failed", "lost")]
    if bad:
        count = "1 run" if len(bad) == 1 else f"{len(bad)} runs"
        said.append(f"{count} failed or got lost: see *What did not work* under Discoveries.")
    return said


def discoveries(book: Book) -> list[str]:
    lines: list[str] = []
    for entry in book.discoveries:
        if entry.status == "holds":
            lines += _discovery(entry, entry.title)
    failed = _did_not_work(book)
    if failed:
        lines += ["", "### What did not work", "", *failed]
    if book.warnings:
        rows = [[escape(w.where), code(w.check), escape(w.message), str(w.times), when(w.at)] for w in book.warnings]
        lines += ["", "### Warnings", "", *table(["where", "check", "what", "times", "last"], rows, right=[3])]
    return lines


def _discovery(entry: Discovery, title: str) -> list[str]:
    stop = "" if title.rstrip().endswith((".", "!", "?")) else "."
    lines = item(entry, f"**{title}{stop}** {entry.text}")
    if entry.evidence:
        listed = entry.evidence if isinstance(entry.evidence, list) else [entry.evidence]
        lines.append(f"  - evidence: {', '.join(code(one) for one in listed)}")
    if entry.guard:
        lines.append(f"  - enforced from now on: {code(str(entry.guard))}")
    return lines


def _did_not_work(book: Book) -> list[str]:
    lines: list[str] = []
    for entry in book.discoveries:
        if entry.status == "refuted":
            lines += _discovery(entry, f"Refuted: {entry.title}")
    for one in bench.latest(book):
        verdict = bench.verdict_of(one.bench)
        if verdict.kind != "better":
            kind = bench.KINDS.get(one.bench.dataset.kind, one.bench.dataset.kind)
            at = f"{host(book, one.bench.host)}, {when(one.at)}"
            margin = bench.break_even_margin(one.bench) if verdict.kind == "worse" else ""
            because = f" Break-even accept length: {margin}." if margin else ""
            lines.append(f"- {escape(one.bench.name)} on {kind}: {escape(verdict.text)} ({at}).{because}")
    rows = []
    for run in book.runs.values():
        if run.status in _BAD and not (run.what == "server" and run.status == "stopped"):
            why = run.result.get("reason") or run.result.get("error") or run.result.get("message")
            told = escape(str(why)) if why else results(run.result) or "no reason was recorded"
            code_text = "unknown" if run.exit is None else str(run.exit)
            later = _worked_later(book, run)
            rows.append(
                [
                    f"{escape(run.what)} {escape(run.name)}",
                    run.status,
                    code_text,
                    told + (f"; a later run ({code(later.run)}) worked" if later else ""),
                    f"{host(book, run.host)}, {when(run.ended or run.started)}, {code(run.run)}",
                ]
            )
    if rows:
        lines += ["", *table(["run", "ended as", "exit code", "why", "source"], rows, right=[2])]
    lines += [
        f"- Looking at {escape(what)} on {host(book, where)} failed, {when(failed.at)}: {escape(failed.reason)}"
        for (where, what), failed in book.failed_looks.items()
    ]
    unproved = [plan for plan in book.plans.values() if plan.verified is False]
    for plan in unproved:
        outcome = results(plan.outcome)
        lines.append(f"- Plan {code(plan.plan)} ({escape(plan.action)}) was applied, but not verified: {outcome}")
    return lines


def _worked_later(book: Book, bad: Run) -> Run | None:
    served = {server.run for server in book.servers.values() if any(state == "ready" for _, state in server.history)}
    later = [
        run
        for run in book.runs.values()
        if (run.what, run.name) == (bad.what, bad.name)
        and run.seq > bad.seq
        and (run.status == "done" or run.run in served)
    ]
    return later[-1] if later else None


def drafters(book: Book) -> list[str]:
    lines: list[str] = []
    names = list(dict.fromkeys(fact.key.split(".")[1] for fact in book.facts_under("drafters.")))
    for name in names:
        prefix = f"drafters.{name}."
        lines += [f"### {escape(name)}", "", *fact_table(book, book.facts_under(prefix), prefix)]
    for stage in ("train", "export", "audit", "predict"):
        runs = [run for run in book.runs.values() if run.what == "stage" and run.name == stage]
        rows = [
            [code(run.run), run.status, results(run.settings), results(run.result), _place(book, run)]
            for run in runs
            if run.status not in ("skipped",)
        ]
        if rows:
            lines += [f"### {stage.capitalize()}", ""]
            lines += table(["run", "status", "settings", "result", "source"], rows)
    forecast = last_run(book, "predict")
    if forecast and forecast.status == "done":
        lines += bench.predicted(book, forecast.result, run_source(book, forecast))
    return lines


def progress(book: Book) -> list[str]:
    rows = []
    words = {"running": "**in progress**", "done": "done", "skipped": "done"}
    for stage in _stages(book):
        run = last_run(book, stage)
        if run is None:
            rows.append([stage, "not started", "", "", ""])
            continue
        took = duration(run.seconds) if run.seconds is not None else ""
        told = results(run.result, 4, code(f"rigbook runs show {run.run}"))
        state = words.get(run.status, f"**{run.status}**")
        rows.append([stage, state, took, told, f"{_place(book, run)}, {code(run.run)}"])
    lines = table(["stage", "state", "took", "result", "source"], rows, right=[2])
    lines += _other_runs(book)
    servers = [
        [
            escape(server.profile),
            f"**{server.state}**" if server.state == "vanished" else server.state,
            " → ".join(state for _, state in server.history),
            f"{host(book, server.host)}, {when(server.at)}, {code(server.run)}",
        ]
        for server in book.servers.values()
    ]
    if servers:
        lines += ["### Servers", "", *table(["profile", "state", "went through", "source"], servers)]
    plans = [
        [code(plan.plan), escape(plan.action), host(book, plan.host), str(len(plan.items)), *_applied(plan)]
        for plan in book.plans.values()
    ]
    if plans:
        lines += ["### Plans", ""]
        lines += table(["plan", "action", "host", "items", "applied", "outcome"], plans, right=[3])
    return lines


def _other_runs(book: Book) -> list[str]:
    """Runs that are neither stages of the pipeline nor servers. The rounds of a benchmark stand with it."""
    rounds = {round_.run for one in book.benchmarks for arm in one.bench.arms for round_ in arm.rounds}
    rows = [
        [
            f"{escape(run.what)} {escape(run.name)}",
            "**in progress**" if run.status == "running" else run.status,
            duration(run.seconds) if run.seconds is not None else "",
            results(run.result, 4, code(f"rigbook runs show {run.run}")),
            f"{_place(book, run)}, {code(run.run)}",
        ]
        for run in book.runs.values()
        if not (run.what == "stage" and run.name in _stages(book)) and run.what != "server" and run.run not in rounds
    ]
    return ["### Other runs", "", *table(["run", "state", "took", "result", "source"], rows, right=[2])] if rows else []


def _applied(plan: Plan) -> tuple[str, str]:
    if plan.verified is None:
        return "not applied", ""
    word = "verified" if plan.verified else "**not verified**"
    return f"{when(plan.applied_at)}, {word}", results(plan.outcome)


def files(book: Book) -> list[str]:
    rows = [
        [
            escape(made.name),
            code(made.path),
            host(book, made.host),
            size(made.bytes) if made.bytes is not None else "unknown",
            code(made.sha256[:12]) if made.sha256 else "",
            when(made.at) + (f", run {code(made.run)}" if made.run else ""),
        ]
        for made in sorted(book.artifacts, key=lambda made: (made.host or "", made.path))
    ]
    lines = table(["name", "path", "host", "size", "sha256", "made"], rows, right=[3])
    return [*lines, *fact_table(book, book.facts_under("files."), "files.")]


def costs(book: Book) -> list[str]:
    lines = fact_table(book, book.facts_under("costs."), "costs.")
    spent: dict[tuple[str, str], tuple[int, float]] = {}
    for run in book.runs.values():
        if run.seconds is not None and run.status != "skipped" and run.what != "demo":
            count, total = spent.get((run.what, run.name), (0, 0.0))
            spent[run.what, run.name] = (count + 1, total + run.seconds)
    rows = [[f"{escape(what)} {escape(name)}", str(n), duration(total)] for (what, name), (n, total) in spent.items()]
    if rows:
        total = sum(total for (what, _), (_, total) in spent.items() if what != "server")
        lines += ["Machine time, from the runs listed in this book:", ""]
        lines += table(["work", "runs", "time"], rows, right=[1, 2])
        lines += [f"In all, without servers: {duration(total)} ({number(total / 3600, 3)} h).", ""]
    return lines
