"""Secrets never get into the journal, the logs or an export: they are replaced by «redacted:rule:hmac6».

The mark holds six hex digits of an HMAC under a key of the project, so that one can see that two places held the
same secret, and no more. Order of work: ANSI codes off, values that are known to be secret, structure (flags, headers,
URLs, environment names, PEM blocks), then Kingfisher's rules for the looks of hundreds of vendors' tokens. Loading
those costs half a second (six seconds the first time on a machine), so text is handed to them only where something
in it could be one. If anything here fails, nothing is written (`redact.failed`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from state.errors import RigbookError

if TYPE_CHECKING:
    from kingfisher_sdk import Scanner

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-_])")

_MARK = "«redacted:"
# A value up to white space or its closing quote; a mark is left as it is.
_VALUE = r"""(?:"(?P<dq>(?:[^"\\\n]|\\.)*)"|'(?P<sq>[^'\n]*)'|(?P<bare>[^\s"',;)}\]]+))"""
_SECRET_WORD = r"(?:api[-_]?key|token|secret|passw(?:or)?d|passphrase|credentials?|auth[-_]?key|access[-_]?key)"

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_AUTHORIZATION = re.compile(
    r"""(?i)(?P<lead>\bauthorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token|digest)\s+)?)(?P<bare>[^\s"',]+)"""
)
_BEARER = re.compile(r"(?i)(?P<lead>\bbearer\s+)(?P<bare>(?=\S*\d|\S{20})[A-Za-z0-9._~+/=-]{8,})")
_USERINFO = re.compile(r"(?P<lead>\b[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@\"']*:)(?P<bare>[^/\s@\"']+)(?=@)")
_TOKEN_AS_USER = re.compile(r"(?P<lead>\bhttps?://)(?P<bare>[A-Za-z0-9_-]{16,})(?=@)")
_FLAG = re.compile(rf"(?P<lead>(?<![\w-])--?[\w-]*{_SECRET_WORD}(?:\s+|=))(?!-){_VALUE}", re.IGNORECASE)
_FLAG_NAME = re.compile(rf"--?[\w-]*{_SECRET_WORD}", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?P<lead>\b(?P<name>[A-Z][A-Z0-9_]+)[\"']?\s?[=:]\s?){_VALUE}")
_NAMED = re.compile(
    rf"""(?P<lead>["']?\b(?:[a-z]+[-_])*{_SECRET_WORD}["']?\s*[:=]\s*){_VALUE}""",
    re.IGNORECASE,
)
_HINTS = re.compile(
    r"key|token|secret|passw|passphrase|credential|bearer|authorization|://|PRIVATE|PASS", re.IGNORECASE
)

# Names with such a word in them hold secrets when they are environment variables or keys of a table …
_ENV_WORDS = frozenset(
    {"TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASS", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "APIKEY"}
)
_NAME = re.compile(rf"(?:[a-z0-9]+[-_])*{_SECRET_WORD}|authorization|private[-_]key", re.IGNORECASE)
# … unless the word means a token of a tokenizer, or the value only says where a secret lies.
_NOT_SECRET = re.compile(
    r"(?i)(?:^|[-_])(?:bos|eos|pad|unk|sep|cls|mask|stop|special|draft|num|per|image|next|last|first|end)[-_]tokens?$"
    r"|(?:file|path|dir|id|ids|name)$"
)
_HARMLESS = re.compile(r"(?i)-?\d+(?:\.\d+)?|true|false|none|null|yes|no|auto|tokens?|\*+|\.\.\.|<[^<>]*>|\$\{?\w+\}?")

# What a vendor's token could be: known beginnings, or a long run that mixes letters and digits and is not a hash.
# A false start costs half a second, and six where the compiled rules are not in the user's cache yet.
_VENDOR = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:sk|pk|rk)[-_]|hf_|gh[opsur]_|github_pat|glpat|AKIA|ASIA|AIza|ya29|xox[abprs]|eyJ|npm_"
    r"|pypi-|dop_v1|SG\.|AGE-)[A-Za-z0-9_-]{8}"
)
# The commonest of them, by their looks alone: the vendor rules want white space around a token, and a full stop behind
# it, at the end of a sentence, is enough for them to miss it.
_PREFIXED = re.compile(
    r"(?P<lead>(?<![A-Za-z0-9]))(?P<bare>hf_[A-Za-z0-9]{30,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}"
    r"|sk-[A-Za-z0-9_-]{20,}|glpat-[A-Za-z0-9_-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|AIza[A-Za-z0-9_-]{35})"
)
_RUN = re.compile(r"[A-Za-z0-9+/_=~.-]{16,}")
_SEGMENT = re.compile(r"[A-Za-z0-9+]{14,}")
_HEX = re.compile(r"(?:[0-9a-f]{8,}|[0-9A-F]{8,})")
_WATCHWORDS = re.compile(r"(?i)key|token|secret|wandb|passw|auth|cred|api")


class Redactor:
    """Replaces secrets in text and in JSON values. `count` says how many it replaced. Not for several threads."""

    def __init__(self, key: str, known: Mapping[str, str] | None = None) -> None:
        """`key` makes the marks of one project comparable. `known` are name → secret value; by default those of this
        process's own environment."""
        self._key = key.encode()
        self.count = 0
        values = _environment_secrets() if known is None else list(known.values())
        self._known = _spellings(values)

    def text(self, text: str) -> str:
        """The text with ANSI codes and secrets taken out. Raises RigbookError `redact.failed`."""
        try:
            return self._text(text)
        except RigbookError:
            raise
        except Exception as error:
            raise RigbookError(
                "redact.failed", f"secrets could not be looked for ({type(error).__name__}); nothing was written"
            ) from error

    def value(self, value: Any, name: str = "") -> Any:
        """A JSON value with every text in it redacted; tables and argument lists are understood as such."""
        if isinstance(value, str):
            if name and is_secret_name(name) and not _is_harmless(value) and not _says_token_only(name, value):
                return self._mark("named", value)
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return self._arguments(list(value), name)
        return value

    def _arguments(self, items: list[Any], name: str) -> list[Any]:
        cleaned: list[Any] = []
        after_flag = False
        for item in items:
            if after_flag and isinstance(item, str) and not item.startswith("-") and not _is_harmless(item):
                cleaned.append(self._mark("flag", item))
            else:
                cleaned.append(self.value(item, name if isinstance(item, str) else ""))
            after_flag = isinstance(item, str) and bool(_FLAG_NAME.fullmatch(item)) and not _NOT_SECRET.search(item)
        return cleaned

    def _text(self, text: str) -> str:
        if "\x1b" in text:
            text = ANSI.sub("", text)
        for secret in self._known:
            if secret in text:
                text = text.replace(secret, self._mark("known", secret))
        if _HINTS.search(text):
            text = self._structure(text)
        if could_hold_token(text):
            text = self._tokens(text)
        return text

    def _structure(self, text: str) -> str:
        text = _PEM.sub(lambda match: self._mark("pem", match.group()), text)
        for rule, pattern in (("url", _USERINFO), ("url", _TOKEN_AS_USER), ("auth", _AUTHORIZATION), ("auth", _BEARER)):
            text = pattern.sub(self._replace(rule), text)
        text = _FLAG.sub(self._replace("flag", named=True), text)
        text = _ASSIGNED.sub(self._replace("env", named=True), text)
        return _NAMED.sub(self._replace("named", named=True), text)

    def _replace(self, rule: str, named: bool = False) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            groups = match.groupdict()
            lead = groups["lead"]
            secret = next(value for value in (groups.get("dq"), groups.get("sq"), groups["bare"]) if value is not None)
            if not secret or secret.startswith(_MARK) or (rule != "url" and _is_harmless(secret)):
                return match.group()
            if named:
                name = groups.get("name") or lead.strip(" \t\n=:\"'")
                if rule == "named" and _says_token_only(name, secret):
                    return match.group()
                if _NOT_SECRET.search(name) or (rule == "env" and not is_secret_name(name)):
                    return match.group()
            start = match.group().index(secret, len(lead))
            return match.group()[:start] + self._mark(rule, secret) + match.group()[start + len(secret) :]

        return replace

    def _tokens(self, text: str) -> str:
        text = _PREFIXED.sub(self._replace("token"), text)
        for finding in _scan(text):
            if (secret := finding.secret) and secret in text and _MARK not in secret:
                text = text.replace(secret, self._mark(finding.rule_id.removeprefix("kingfisher."), secret))
        return text

    def _mark(self, rule: str, secret: str) -> str:
        if secret.startswith(_MARK):
            return secret
        self.count += 1
        digest = hmac.new(self._key, secret.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:6]
        return f"{_MARK}{rule}:{digest}»"


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name is taken to hold a secret."""
    if _NOT_SECRET.search(name):
        return False
    if name.isupper():
        glued = ("PASSWORD", "PASSWD", "SECRET", "APIKEY")  # as in PGPASSWORD
        return not _ENV_WORDS.isdisjoint(name.split("_")) or name.endswith(glued)
    return bool(_NAME.fullmatch(name))


def _says_token_only(name: str, value: str) -> bool:
    """`token: chas` is about a tokenizer's token in our field, unless the value looks like a credential."""
    return name.lower() == "token" and (len(value) < 16 or " " in value)


def could_hold_token(text: str) -> bool:
    """Whether a vendor's token could stand in this text. Says no to hashes, paths, versions and prose."""
    if len(text) < 16:
        return False
    if _VENDOR.search(text):
        return True
    watched = bool(_WATCHWORDS.search(text))
    for run in _RUN.finditer(text):
        if _is_digest(text, run.start()):
            continue
        for segment in _SEGMENT.findall(run.group()):
            if _HEX.fullmatch(segment):
                if watched and len(segment) >= 32:
                    return True
            elif sum(c.isdigit() for c in segment) >= 2 and any(c.isalpha() for c in segment):
                return True
    return False


def _is_digest(text: str, at: int) -> bool:
    return text[max(0, at - 8) : at].lower().rstrip(" :=\"'").endswith(("sha256", "sha1", "md5", "sha512", "commit"))


def _is_harmless(value: str) -> bool:
    return not value or value.startswith(_MARK) or bool(_HARMLESS.fullmatch(value))


_scanner_lock = threading.Lock()


@cache
def _scanner() -> Scanner:
    from kingfisher_sdk import DetectionPolicy, Rules, Scanner

    # "kingfisher:ignore" in a log line must not switch us off.
    return Scanner(Rules(confidence="medium"), policy=DetectionPolicy(inline_ignores=False))


def _scan(text: str) -> list[Any]:
    with _scanner_lock:
        return list(_scanner().scan(text.encode("utf-8", "replace")))


@cache
def _environment_secrets() -> list[str]:
    return [
        value
        for name, value in os.environ.items()
        if is_secret_name(name) and len(value) >= 8 and not _is_harmless(value) and "/" not in value[:1]
    ]


def _spellings(values: list[str]) -> list[str]:
    """The values as they stand and as they look inside a URL or base64, longest first."""
    if not values:
        return []
    from base64 import b64encode
    from urllib.parse import quote

    found = set()
    for value in values:
        found |= {
            value,
            quote(value, safe=""),
            b64encode(value.encode("utf-8", "surrogateescape")).decode().rstrip("="),
        }
    return sorted(found, key=len, reverse=True)
