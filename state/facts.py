"""Facts: keyed values, who owns them, where they come from, and how far they may still be trusted.

- A person's value wins over a machine's for as long as the person keeps it; when a machine sees something else, that
  is a conflict, and both are shown.
- A failed look replaces nothing: the last good value stays and says that looking failed since.
- A value ages, and it is invalidated by cause: a new boot, driver, environment lock, patch set or model revision
  makes what was measured before it questionable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

WHOLE_HOST = ("system", "access")  # a probe of these that failed has seen nothing of the host
DAY = 86_400.0  # seconds

# Key pattern → days until a value counts as aging, and as stale. The first match holds.
AGES: tuple[tuple[str, float, float], ...] = (
    ("hosts.*.access.*", 1, 7),
    ("hosts.*.hw.*", 30, 180),
    ("hosts.*.sw.*", 7, 30),
    ("envs.*", 7, 30),
    ("files.*", 7, 30),
    ("costs.*", 30, 365),
    ("*", 30, 180),
)

# Facts matching the first pattern are invalidated when a fact matching one of the others changes after they were
# last seen. `{1}` is the second part of the key, e.g. the host.
CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("hosts.*.access.*", ("hosts.{1}.sw.boot_id", "hosts.{1}.sw.boot-id")),
    ("hosts.*.sw.*", ("hosts.{1}.sw.boot_id", "hosts.{1}.sw.boot-id")),
    ("profiles.*", ("hosts.*.sw.driver*", "envs.*.lock*", "patches.set*", "target.sha256", "target.revision")),
    ("drafters.*", ("target.sha256", "target.revision")),
)


@dataclass(eq=False)
class Source:
    """Where a value comes from; all empty for a bare claim."""

    host: str | None = None
    command: str | None = None
    run: str | None = None
    note: str | None = None


@dataclass(eq=False)
class Observation:
    """One saying of a value, by a machine or a person."""

    value: Any  # None: looked for, and not known
    unit: str | None
    confidence: str  # measured, derived, claimed, assumed
    owner: str  # machine or person
    source: Source
    observed_at: str  # RFC 3339
    event: str  # id of the event
    seq: int
    actor: str


@dataclass(eq=False)
class Fact:
    """A key with what is believed of it, and what speaks against that."""

    key: str
    now: Observation
    machine: Observation | None = None  # the latest of each owner
    person: Observation | None = None
    changed_at: str = ""  # when the value last became another one
    previous: Any = None  # the value before that
    changes: int = 0
    failed_at: str = ""  # the last look that failed, after the last one that did not
    failure: str = ""
    state: str = "fresh"  # fresh, aging, stale, invalidated, conflict
    because: str = ""  # why it is in that state
    notes: list[str] = field(default_factory=list)

    @property
    def value(self) -> Any:
        return self.now.value

    @property
    def unit(self) -> str | None:
        return self.now.unit

    @property
    def confidence(self) -> str:
        """A value without host, command or run is a claim, whatever it calls itself."""
        bare = not (self.now.source.host or self.now.source.command or self.now.source.run)
        return "claimed" if bare and self.now.confidence in ("measured", "derived") else self.now.confidence

    @property
    def owner(self) -> str:
        return self.now.owner

    @property
    def source(self) -> Source:
        return self.now.source

    @property
    def observed_at(self) -> str:
        return self.now.observed_at

    @property
    def contrary(self) -> Observation | None:
        """What a machine saw that is not what a person said."""
        if self.person and self.machine and not same(self.person, self.machine):
            return self.machine
        return None


def observation_of(body: dict[str, Any], event: str = "", seq: int = 0, ts: str = "", actor: str = "") -> Observation:
    """From the body of a `fact.observed` event."""
    return Observation(
        value=body["value"],
        unit=body["unit"],
        confidence=body["confidence"],
        owner=body["owner"],
        source=Source(**body["source"]),
        observed_at=body["observed_at"] or ts,
        event=event,
        seq=seq,
        actor=actor,
    )


def same(a: Observation, b: Observation) -> bool:
    """Equal values; NaN equals NaN, 1 equals 1.0, and true is not 1."""
    left, right = a.value, b.value
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    return (left == right or repr(left) == repr(right)) and a.unit == b.unit


def observe(facts: dict[str, Fact], key: str, seen: Observation) -> None:
    """Take one observation in. Observations must come in the order in which they were recorded."""
    fact = facts.get(key)
    if fact is None:
        fact = facts[key] = Fact(key=key, now=seen, changed_at=seen.observed_at)
    latest = fact.person if seen.owner == "person" else fact.machine
    if latest and seconds_of(seen.observed_at) < seconds_of(latest.observed_at):
        return  # an old observation that arrived late
    if seen.owner == "person":
        fact.person = seen
    else:
        fact.machine = seen
        if seen.value is not None or fact.failed_at <= seen.observed_at:
            fact.failed_at = fact.failure = ""
    believed = fact.person or fact.machine or seen
    if not same(believed, fact.now):
        fact.previous, fact.changed_at = fact.now.value, believed.observed_at
        fact.changes += 1
    fact.now = believed


def confirm(facts: dict[str, Fact], key: str, event: str, at: str) -> None:
    """The value that `event` brought was seen again at `at`. Says nothing when another value has come since."""
    fact = facts.get(key)
    if fact and fact.machine and fact.machine.event == event and seconds_of(at) >= seconds_of(fact.observed_at):
        fact.machine.observed_at = at
        fact.failed_at = fact.failure = ""


def look_failed(facts: dict[str, Fact], host: str, what: str, reason: str, at: str, env_hosts: dict[str, str]) -> None:
    """A probe of `host` failed: what it would have refreshed says so, and keeps its value."""
    envs = [env for env, on in env_hosts.items() if on == host]
    for fact in facts.values():
        if concerns(fact.key, host, what, envs):
            fact.failed_at, fact.failure = at, reason


def concerns(key: str, host: str, what: str, envs: list[str]) -> bool:
    """Whether a probe of `what` on `host` refreshes the fact `key`: "system" is all of the host, "gpus" what has gpu
    in its name, a dotted name a branch of keys."""
    if "." in what:
        return key.startswith(what)
    parts = key.split(".")
    here = parts[:2] == ["hosts", host] or (parts[0] == "envs" and len(parts) > 1 and parts[1] in envs)
    return here and (what in WHOLE_HOST or any(part.startswith(what.rstrip("s")) for part in parts[2:]))


def settle(facts: dict[str, Fact], now: str) -> None:
    """Work out the state of every fact as of `now`."""
    moment = seconds_of(now)
    for fact in facts.values():
        fact.state, fact.because = _state(fact, facts, moment)


def _state(fact: Fact, facts: dict[str, Fact], now: float) -> tuple[str, str]:
    if contrary := fact.contrary:
        where = f" on {contrary.source.host}" if contrary.source.host else ""
        return "conflict", f"a machine saw something else{where}"
    if cause := _invalidating(fact, facts):
        return "invalidated", f"{cause.key} changed after this was seen"
    age = now - seconds_of(fact.observed_at)
    aging, stale = next((a * DAY, s * DAY) for pattern, a, s in AGES if fnmatchcase(fact.key, pattern))
    if fact.owner == "person" or age < aging:
        return "fresh", ""
    days = f"last seen {age / DAY:.0f} days ago"
    return ("stale", days) if age >= stale else ("aging", days)


def _invalidating(fact: Fact, facts: dict[str, Fact]) -> Fact | None:
    parts = fact.key.split(".")
    for pattern, causes in CAUSES:
        if not fnmatchcase(fact.key, pattern):
            continue
        for cause in causes:
            wanted = cause.replace("{1}", parts[1] if len(parts) > 1 else "")
            for other in _matching(facts, wanted):
                if other is not fact and other.changes and seconds_of(other.changed_at) > seconds_of(fact.observed_at):
                    return other
    return None


def _matching(facts: dict[str, Fact], pattern: str) -> list[Fact]:
    if "*" not in pattern:
        return [facts[pattern]] if pattern in facts else []
    return [fact for key, fact in facts.items() if fnmatchcase(key, pattern)]


def seconds_of(ts: str) -> float:
    """Seconds since the epoch of an RFC 3339 time; 0 when it is none."""
    try:
        return datetime.fromisoformat(ts).timestamp()
    except ValueError:
        return 0.0
