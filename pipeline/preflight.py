"""What is refused before a server starts: the project's own rules, and what is known to fail without a word."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from msgspec import to_builtins

from state.errors import REFUSED, USAGE, RigbookError
from state.project import Profile, Project


def check(project: Project, name: str) -> None:
    """Raises RigbookError (exit code 3) for the first reason not to start the profile."""
    profile = project.profile(name)
    check_rules(project, name, profile)
    check_speculation(name, profile)


def check_rules(project: Project, name: str, profile: Profile) -> None:
    """A [[rules]] entry forbids `dotted.key=pattern`: `*` and `?` match as in a shell, - and _ are the same in keys."""
    values = flat(to_builtins(profile))
    for rule in project.rules:
        key, separator, pattern = rule.forbid.partition("=")
        if not separator:
            raise RigbookError("rules.form", f"rule {rule.forbid!r} is not of the form key=pattern", exit_code=USAGE)
        value = values.get(key.strip().replace("-", "_"))
        if value is not None and fnmatchcase(str(value).lower(), pattern.strip().lower()):
            raise RigbookError(
                "rules.forbidden",
                f"profile {name!r} has {key.strip()} = {value}, which the project forbids: {rule.because}",
                hint="the rule stands in rigbook.toml under [[rules]]",
                exit_code=REFUSED,
            )


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys, with underscores."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix + str(key).replace("-", "_")
        out |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return out


def check_speculation(name: str, profile: Profile) -> None:
    """Speculative settings that an engine would change, or fall over, after the model is loaded."""
    speculative = profile.speculative
    if speculative is None:
        return
    if profile.draft is None:
        # SGLang loads the target a second time as its own drafter and crashes late (sglang #36528).
        raise RigbookError("serve.no-draft", f"profile {name!r} speculates but names no draft model", exit_code=REFUSED)
    if speculative.algorithm == "EAGLE":
        # Auxiliary states are not captured, and the accept length is exactly 1.00 with HTTP 200 (sglang #21272).
        raise RigbookError(
            "serve.eagle-flag",
            f"profile {name!r} serves an EAGLE-3 drafter with the algorithm EAGLE; it has to be EAGLE3",
            exit_code=REFUSED,
        )
    if speculative.topk == 1 and speculative.draft_tokens != speculative.steps + 1:
        # SGLang rewrites the number silently (speculative_hook.py); a benchmark must not carry one that never ran.
        raise RigbookError(
            "serve.draft-tokens",
            f"profile {name!r}: a chain of {speculative.steps} steps verifies {speculative.steps + 1} tokens, "
            f"not {speculative.draft_tokens}",
            exit_code=REFUSED,
        )
