"""Markdown as terminal lines: whatever a machine printed into a table cell, the document is shown."""

import pytest

from tui.look import UNICODE
from tui.markdown import render, wrap_parts

# What `df -h` prints: runs of spaces wider than the column that it is given.
DF = "Filesystem               Size  Used Avail<br>tmpfs                     24G     0   24G   0% /dev/shm"


@pytest.mark.parametrize("width", [1, 3, 8, 20, 40, 80, 120])
def test_runs_of_spaces_wrap_like_words(width: int) -> None:
    lines = ["".join(text for text, _ in parts) for parts in wrap_parts([(DF, "")], width)]
    assert all(len(each) <= width for each in lines)
    assert "".join("".join(lines).split()) == "".join(DF.split())  # nothing is lost
    assert all(each == each.strip() for each in lines if width > 8)


def test_words_on_both_sides_of_a_wide_gap_are_not_glued() -> None:
    assert [[text for text, _ in parts] for parts in wrap_parts([("abcdefg" + " " * 9 + "hi", "")], 10)] == [
        ["abcdefg"],
        ["hi"],
    ]


@pytest.mark.parametrize("width", [30, 74, 114])
def test_a_table_cell_with_several_lines_keeps_them_apart(width: int) -> None:
    table = f"| run | result |\n| --- | --- |\n| action disk | stdout {DF} |\n"
    text = "\n".join(each.text for each in render(table, width, UNICODE).lines)
    assert "<br>" not in text and "Filesystem" in text and "tmpfs" in text
