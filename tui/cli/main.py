"""The `rigbook` command. A table says where each sub-command lives, so that `--help` imports none of them.

Global flags (`-C DIR`, `--json`, `--yes`, `--dry-run`) work before and after the sub-command; everything behind
a `--` belongs to the command that is sent to a machine. A flag that a command has no use for is a usage error:
a `--dry-run` that is silently ignored would do what the user asked not to.
"""

from __future__ import annotations

import os
import sys
from errno import EIO, ENOSPC
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from state.errors import FAILED, USAGE, RigbookError
from tui.cli.common import ctx, emit, say


class Command(NamedTuple):
    module: str  # imported only when the command runs
    attr: str  # a function, or a typer.Typer that holds sub-commands
    help: str
    flags: str = "json"  # which of json, yes, dry-run it knows


COMMANDS: dict[str, Command] = {
    "demo": Command("tui.cli.demo", "demo", "The whole pipeline on this machine: no GPU, real numbers.", "json yes"),
    "status": Command("tui.cli.status", "status", "Look at the rig once, bring the book up to date, print it."),
    "doctor": Command("tui.cli.doctor", "doctor", "Check what is needed and say what is wrong."),
    "explain": Command("tui.cli.status", "explain", "What an error id or check id means and what to do."),
    "config": Command("tui.cli.config", "app", "Check, explain or print the schema of rigbook.toml."),
    "hosts": Command("tui.cli.hosts", "app", "The hosts of this rig, whether they answer; trust a host's key."),
    "probe": Command("tui.cli.rig", "probe", "Look at hosts and write what they are into the book."),
    "exec": Command("tui.cli.exec", "exec_", "Run a command or a script on hosts."),
    "shell": Command("tui.cli.rig", "shell", "A shell on a host.", ""),
    "put": Command("tui.cli.copy", "put", "Copy a file or a directory to a host.", "json yes"),
    "get": Command("tui.cli.copy", "get", "Copy a file or a directory from a host.", "json yes"),
    "do": Command("tui.cli.actions", "do", "Run one of the project's own [actions].", "json yes dry-run"),
    "guests": Command("tui.cli.guests", "app", "Containers and VMs: list, start, stop.", "json yes dry-run"),
    "jobs": Command("tui.cli.jobs", "app", "Detached jobs: list, start, show, logs, wait, stop.", "json yes"),
    "gpus": Command("tui.cli.gpus", "gpus", "Every GPU: what it does and who holds it."),
    "clean": Command("tui.cli.clean", "clean", "What dead work still holds: plan, then give back.", "json yes dry-run"),
    "run": Command("tui.cli.work", "run", "Run pipeline stages: rigbook run all.", "json yes dry-run"),
    "runs": Command("tui.cli.runs", "app", "Runs of anything: list, show, compare."),
    "serve": Command("tui.cli.work", "serve", "Servers: plan, start, status, wait, logs, stop.", "json yes dry-run"),
    "bench": Command("tui.cli.work", "bench", "Benchmarks: run, list.", "json yes dry-run"),
    "book": Command("tui.cli.book", "app", "The project-state document: show, log, diff, blame, search…", "json yes"),
    "note": Command("tui.cli.people", "note", "Write a note into the book."),
    "decide": Command("tui.cli.people", "decide", "Record a decision, its alternatives and reasons."),
    "discover": Command("tui.cli.people", "discover", "Record a discovery, including what did not work."),
    "assume": Command("tui.cli.people", "assume", "Record what is taken for granted."),
    "instruct": Command("tui.cli.people", "instruct", "Add a standing instruction."),
    "next": Command("tui.cli.people", "next_", "Add a next step."),
    "done": Command("tui.cli.people", "done", "Mark a next step as done."),
}

APP_FLAGS = {"--write", "--no-mouse", "--ascii"}

EPILOG = """With no command, `rigbook` opens the app on the project in this directory, read-only: `--write` unlocks it,
`--no-mouse` leaves the mouse to the terminal, `--ascii` draws with letters only.

Example:  rigbook demo --dir demo-rig && rigbook -C demo-rig book show

Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 refused by a safety rule, 4 host unreachable or
state unknown, 5 done but not verified, 6 done with findings."""


def main() -> NoReturn:
    """Entry point: runs the command, turns errors into sentences and exit codes."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line. Returns the exit code; prints errors as sentences, never as a traceback."""
    # Closed by who started us (`>&-`): Python then has None there, which nobody can write to.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        words, flags = take_global_flags(argv)
        return dispatch(words, flags)
    except RigbookError as error:
        where = f" (on {error.host})" if error.host else ""
        say(f"error[{error.id}]: {error.message}{where}")
        if error.hint:
            say(f"  {error.hint}")
        if ctx.json:
            told = {"id": error.id, "message": error.message, "host": error.host, "hint": error.hint}
            emit({"error": {**told, "exit_code": error.exit_code}})
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; what runs on the rig goes on")
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone: not an error, and nothing more can be written.
        sys.stdout = None
        return 0
    except OSError as error:
        # Our own output has no file name: what was asked may be done, but the answer did not arrive.
        if error.errno not in {ENOSPC, EIO} or error.filename is not None:
            return report_bug(error)
        sys.stdout = None
        say(f"error[output.failed]: the output could not be written: {error.strerror}")
        return FAILED
    except Exception as error:
        return report_bug(error)


def take_global_flags(argv: list[str]) -> tuple[list[str], set[str]]:
    """Split off the flags that work everywhere, filling `ctx`; returns the other words and which flags were given."""
    words: list[str] = []
    given: set[str] = set()
    rest = iter(argv)
    for word in rest:
        if word == "--":
            words += [word, *rest]
            break
        if word in {"-C", "--project"}:
            value = next(rest, None)
            if value is None:
                raise RigbookError("usage", f"{word} needs a directory", exit_code=USAGE)
            ctx.directory = Path(value)
        elif word.startswith("--project="):
            ctx.directory = Path(word.partition("=")[2])
        elif word.startswith("-C"):  # -CDIR: never left to be ignored, or the command acts on another project
            ctx.directory = Path(word[2:].removeprefix("="))
        elif word == "--json":
            ctx.json = True
            given.add("json")
        elif word in {"--yes", "-y"}:
            ctx.yes = True
            given.add("yes")
        elif word == "--dry-run":
            ctx.dry_run = True
            given.add("dry-run")
        else:
            words.append(word)
    return words, given


def dispatch(words: list[str], flags: set[str]) -> int:
    name = next((w for w in words if not w.startswith("-")), None)
    if name is None and not (set(words) - APP_FLAGS) and not flags and sys.stdout.isatty():
        from tui.app import open_app

        return open_app(write="--write" in words, mouse="--no-mouse" not in words, ascii_only="--ascii" in words)
    if name is None and APP_FLAGS & set(words) and not sys.stdout.isatty():
        raise RigbookError(
            "usage",
            "the app needs a terminal",
            hint="Without one: `rigbook status`, `rigbook --help`.",
            exit_code=USAGE,
        )
    if name is not None and name not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean `rigbook {near[0]}`?" if near else "`rigbook --help` lists the commands."
        raise RigbookError("usage", f"there is no command {name!r}", hint=hint, exit_code=USAGE)
    if name is not None:
        unknown = sorted(flags - set(COMMANDS[name].flags.split()))
        if unknown and "--help" not in words:
            raise RigbookError("usage", f"`rigbook {name}` has no --{unknown[0]}", exit_code=USAGE)
    if words[:2] == ["book", "show"]:
        from tui.cli.show import quickly

        if quickly(words[2:]):
            return 0
    if name == "exec" and "--" in words:
        at = words.index("--")
        if words[0] == "exec" and not any(word.startswith("-") for word in words[1:at]):
            return without_parser(COMMANDS[name], words=words[1:])
        words.insert(at, "--")  # the parser swallows one, and `exec` must see where the command begins
    result = build(name)(args=words or ["--help"], prog_name="rigbook", standalone_mode=True)
    return int(result or 0)


def without_parser(command: Command, **given: Any) -> int:
    """Call a command whose words need no parsing: typer's parser costs more than a command on a warm connection."""
    from inspect import signature

    import typer

    function = getattr(import_module(command.module), command.attr)
    defaults = {key: parameter.default.default for key, parameter in signature(function).parameters.items()}
    try:
        function(**defaults | given)
    except typer.Exit as end:
        return end.exit_code
    return 0


def build(name: str | None) -> Any:
    """The typer application with only `name` loaded; the others are there by name and help text."""
    import typer  # here, because the cheapest command does without it

    app = typer.Typer(
        help="A deck for one speculative-decoding rig.",
        epilog=EPILOG if name is None else None,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )

    @app.callback(epilog=EPILOG)
    def globals_(
        version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
        directory: str = typer.Option("", "-C", metavar="DIR", help="The project's directory. Works everywhere."),
        json: bool = typer.Option(False, "--json", help="One JSON document on stdout. Works everywhere."),
        yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Stop after the plan."),
    ) -> None:
        pass  # taken off the command line before typer sees it; declared for --help

    for key, command in COMMANDS.items():
        if key != name:
            app.command(key, help=command.help)(_elsewhere)
            continue
        loaded = getattr(import_module(command.module), command.attr)
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=key, help=command.help)
        else:
            app.command(key, help=loaded.__doc__ or command.help)(loaded)
    return typer.main.get_command(app)


def _elsewhere() -> None:
    raise AssertionError("a command that was not loaded cannot run")


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        import typer

        typer.echo(f"rigbook {version('rigbook')}")
        raise typer.Exit


def report_bug(error: Exception) -> int:
    """An unexpected exception is our fault: keep the traceback in a file, say one sentence."""
    import traceback
    from time import strftime

    from platformdirs import user_state_path

    folder = user_state_path("rigbook") / "bugs"
    text = "".join(traceback.format_exception(error))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / strftime("%Y%m%d-%H%M%S.txt")
        file.write_text(f"{sys.argv!r}\n{text}")
        where = f"the traceback is in {file}"
    except OSError:
        where = text
    say(f"error[bug]: {type(error).__name__}: {error}; this is a fault in rigbook, {where}")
    return FAILED


if __name__ == "__main__":
    main()
