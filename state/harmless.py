"""Text of others that a terminal or a reader would obey: colour codes, and marks that turn the reading direction."""

from __future__ import annotations

import re

# C0 without tab and newline, DEL and C1 (0x9b opens a colour code by itself), and the Unicode marks for direction.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """The same text with each such character shown as U+FFFD."""
    return _OBEYED.sub("\ufffd", text)
