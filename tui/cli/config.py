"""`rigbook config`: what rigbook.toml may say, and whether this one says it right."""

from __future__ import annotations

import typer

from tui.cli.common import emit, root

app = typer.Typer(no_args_is_help=True, help="Check, explain or print the schema of rigbook.toml.")


@app.command()
def schema() -> None:
    """The JSON schema of rigbook.toml, for editors.

    Example:  rigbook config schema > rigbook.schema.json
    """
    from state.config_help import schema as whole

    emit(whole())


@app.command()
def explain(
    key: str = typer.Argument("", help="A key or table, e.g. pipeline.train or profiles.eagle3.args. Default: all."),
) -> None:
    """What a key means, its type and its default.

    Example:  rigbook config explain pipeline.train
    """
    from state.config_help import explain as entries

    found = entries(key)
    lines = []
    for entry in found:
        given = f", default {_toml(entry['default'])}" if entry.get("default") is not None else ""
        given = given or ("" if "default" in entry or "table" in entry["type"] else ", required")
        lines.append(f"{entry['key']}  ({entry['type']}{given})\n    {entry['text']}")
    emit(found, "\n".join(lines))


def _toml(value: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


@app.command()
def check() -> None:
    """Read rigbook.toml strictly and say what is wrong with it, all at once. Exit code 2 when anything is.

    Example:  rigbook -C demo-rig config check
    """
    from state.project import load

    project = load(root())
    counts = {
        "hosts": len(project.hosts),
        "envs": len(project.envs),
        "profiles": len(project.profiles),
        "actions": len(project.actions),
        "rules": len(project.rules),
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    emit({"ok": True, "project": project.project.name, **counts}, f"{project.project.name}: no problems; {told}")
