"""The document: all sections in order, each number with its source, unbroken by what machines and people say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from state import events as e
from state.benchmarks import judge
from state.render import json as as_json
from state.render import markdown
from state.render.markdown import SECTIONS, render, render_section
from state.render.text import code, duration, escape, quantity, results, size, table
from tests.lab.records import book, stamp
from tests.lab.rig_journal import PROJECT, bench, everything, fact, stage

MARKDOWN = MarkdownIt("commonmark").enable("table")
TITLES = [title for _, title, _, _ in SECTIONS]


def whole() -> str:
    return render(book(*everything(), toml=PROJECT))


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0].split("\n---\n", 1)[0]


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a document as a Markdown parser sees it: rows of cells of plain text."""
    found: list[list[list[str]]] = []
    inside = False
    for token in MARKDOWN.parse(text):
        if token.type == "table_open":
            found.append([])
            inside = True
        elif token.type == "table_close":
            inside = False
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and inside:
            found[-1][-1].append(plain(token))
    return found


def plain(token: Any) -> str:
    parts = []
    for child in token.children:
        parts.append("\n" if child.type in ("softbreak", "hardbreak") or child.content == "<br>" else child.content)
    return "".join(parts)


def test_sections_stand_in_the_order_readers_need_them() -> None:
    text = whole()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == ["At a glance", *TITLES]
    assert TITLES[:4] == ["Goal", "Instructions", "Hosts and access", "Hardware"]
    assert TITLES[-2:] == ["Next steps", "Open conflicts"]


def test_the_headline_comes_first_and_tells_the_two_kinds_apart() -> None:
    glance = section(whole(), "At a glance")
    (header, own, people), *_ = tables(glance)
    assert header[:3] == ["measured on", "plain tok/s", "speculative tok/s"]
    assert own[0] == "prompts the model wrote" and people[0] == "prompts people wrote"
    assert own[1:3] == ["41.2", "55.3"] and own[3].startswith("better: +34.2 %")
    assert people[3].startswith("worse: -10.2 %")
    assert "run b1" in own[-1] and "llm (played)" in own[-1]


def test_equal_books_give_equal_bytes() -> None:
    assert whole() == whole()


def test_an_empty_book_has_every_section_and_says_so() -> None:
    text = render(book())
    for title in TITLES:
        assert section(text, title).strip().startswith("_"), title
    assert "0 events" in text and "Nothing is recorded yet" in text


def test_each_table_of_the_document_is_whole() -> None:
    found = tables(whole())
    assert len(found) > 25
    for rows in found:
        assert {len(row) for row in rows} == {len(rows[0])}


def test_every_fact_stands_with_host_command_and_time() -> None:
    text = section(whole(), "Hardware").split("### llm (played)")[1].split("\n###")[0]
    rows = {row[0]: row for row in tables(text)[0]}
    assert rows["cpu model"][:3] == ["cpu model", "Intel(R) Xeon(R) Platinum 8488C", "probe system"]
    assert rows["gpus"][2] == "probe gpus"
    assert f"{rows['cpu model'][3]}. llm (played), 2026-05-01" in text
    assert f"{rows['cpu threads'][3]}. set by lena, 2026-05-01" in text


def test_what_all_rows_share_is_said_once() -> None:
    text = section(whole(), "Software").split("### Environment work")[1]
    assert tables(text)[0][0] == ["what", "value"]
    assert "Source: llm (played), `probe env`, 2026-05-01" in text


def test_gpus_and_disks_are_a_row_each() -> None:
    gpus = [
        fact(f"hosts.llm.hw.gpu.GPU-{uuid}.{name}", value, unit, command="nvidia-smi")
        for uuid in ("a", "b")
        for name, value, unit in (("name", "NVIDIA H200", None), ("memory", 150_000_000_000, "bytes"))
    ]
    text = render(book(*gpus, fact("hosts.llm.hw.gpu.GPU-c.name", "NVIDIA H200", command="nvidia-smi")))
    assert tables(section(text, "Hardware"))[0] == [
        ["gpu", "memory", "name"],
        ["GPU-a", "139.7 GiB", "NVIDIA H200"],
        ["GPU-b", "139.7 GiB", "NVIDIA H200"],
        ["GPU-c", "unknown", "NVIDIA H200"],
    ]
    assert "Source: llm, `nvidia-smi`, 2026-05-01 08:00 to 08:04 UTC." in text


def test_two_looks_at_different_times_stay_apart() -> None:
    early = fact("hosts.llm.hw.a", 1, observed_at="2026-04-01T10:00:00Z")
    late = fact("hosts.llm.hw.b", 2, observed_at="2026-04-02T10:00:00Z")
    text = section(render(book(early, late)), "Hardware")
    assert "1. llm, `probe system`, 2026-04-01 10:00 UTC" in text
    assert "2. llm, `probe system`, 2026-04-02 10:00 UTC" in text


def test_many_packages_are_one_paragraph() -> None:
    text = render(book(*[fact(f"envs.work.packages.p{i}", f"1.{i}") for i in range(30)]))
    assert "30 packages: p0 1.0, p1 1.1" in text


def test_what_is_played_is_said_to_be_played() -> None:
    text = whole()
    assert "> **llm**, **pve**, **vm** are *played*" in text
    real = render(book(*everything(), toml=PROJECT.replace("played = true", "")))
    assert "played" not in real


def test_what_did_not_work_is_shown() -> None:
    text = section(whole(), "Discoveries")
    failed = text.split("### What did not work", 1)[1]
    assert "**Refuted: EAGLE is enough.**" in failed
    assert "prompts people wrote: worse: -10.2 %" in failed and "speculation is slower here" in failed
    (row,) = [row for rows in tables(failed) for row in rows if row[0] == "stage generate"]
    assert row[1:3] == ["failed", "3"] and "the server went away after 211 rows; a later run (r4) worked" in row[3]


def test_a_lost_run_has_no_exit_code() -> None:
    text = render(book(*stage("train", "r1", {}, 3.0, status="lost")))
    (row,) = [row for rows in tables(section(text, "Discoveries")) for row in rows if row[0] == "stage train"]
    assert row[1:4] == ["lost", "unknown", "no reason was recorded"]


def test_acceptance_is_told_by_position() -> None:
    text = section(whole(), "Benchmarks")
    rows = next(rows for rows in tables(text) if rows[0][0] == "position")
    assert rows[1] == ["1", "1,470", "70.0 %", "70.0 %"]
    assert rows[3] == ["3", "720", "34.3 %", "70.6 %"]
    assert "Break-even accept length on this machine: 1.88; reached 2.53" in text
    assert "N-gram lookup on the same output would reach 1.21. The drafter beats it." in text
    assert "No: 16 of 16 greedy outputs are token-identical" in text


def test_a_drafter_that_only_repeats_is_called_that() -> None:
    one = bench("self", [40, 41, 42], [50, 51, 52], [10, 5, 5, 20], 3.4)
    assert "**The drafter does not beat it.**" in render(book(e.BenchmarkRecorded(bench=one)))


def test_output_that_changed_is_called_that() -> None:
    one = bench("self", [40, 41, 42], [50, 51, 52], [10, 5, 5, 20], 1.4)
    one.lossless = {"checked": 16, "identical": 15}
    assert "**Yes**: 15 of 16" in render(book(e.BenchmarkRecorded(bench=one)))


def test_a_separate_check_of_the_output_is_told_with_its_source() -> None:
    one = bench("self", [40, 41, 42], [50, 51, 52], [10, 5, 5, 20], 1.4)
    one.lossless = None
    check = stage(
        "lossless", "r9", {"rows": {"in": 8, "out": 8}, "checked": 8, "identical": 8, "dtype": "float32"}, 9.0
    )
    text = render(book(*check, e.BenchmarkRecorded(bench=one)))
    assert "No: 8 of 8 greedy outputs are token-identical (dtype float32) (llm, 2026-05-01 08:01 UTC, run `r9`)" in text
    assert "| stage lossless | done | 9.0 s |" in section(text, "Done / In progress / Not started")


def test_a_long_result_says_where_the_rest_is() -> None:
    result = {
        "rows": {"in": 9, "out": 9},
        **{f"n{i}": i for i in range(12)},
        "histogram": {str(i): i for i in range(9)},
    }
    text = section(render(book(*stage("mix", "r1", result, 1.0))), "Done / In progress / Not started")
    assert "rows: 9 in, 9 out; n0 0; n1 1; n2 2; 10 more: `rigbook runs show r1`" in text


def test_counts_are_grouped_and_ids_are_not() -> None:
    result = {"tokens": 71112, "bytes": 423000000, "sources": {"self": 45400, "seed": 60}, "seed": 123456}
    assert results(result) == "tokens 71,112; bytes 403.4 MiB; sources: self 45,400, seed 60; seed 123456"
    assert results({"special_tokens": {"<|im_end|>": 163586}}) == "special tokens: &lt;\\|im_end\\|> 163586"


def test_a_badge_cannot_be_lost() -> None:
    one = bench("self", [40, 41, 42], [50, 51, 52], [10, 5, 5, 20], 1.4)
    one.badges = ["synthetic acceptance"]
    text = render(book(e.BenchmarkRecorded(bench=one)))
    assert "[synthetic acceptance]" in section(text, "At a glance")
    assert "[synthetic acceptance]" in section(text, "Benchmarks")


def test_excluded_rounds_are_counted_and_their_reason_told() -> None:
    one = bench("self", [40, 41, 42, 4], [50, 51, 52, 53], [10, 5, 5, 20], 1.4)
    one.arms[0].rounds[3].excluded = "throttled"
    one.arms[0].excluded = ["launch 9: port taken"]
    one.verdict = judge(one)
    text = section(render(book(e.BenchmarkRecorded(bench=one))), "Benchmarks")
    assert "3 (+2 excluded)" in text
    assert "launch 9: port taken; round 6: throttled" in text
    assert "3 vs 4 rounds" in text


def test_an_invalid_benchmark_is_shown_as_such() -> None:
    one = bench("self", [40, 41, 42], [50, 51, 52], [10, 5, 5, 20], 1.4)
    one.arms[1].rounds[0].errors = 3
    one.verdict = judge(one)
    assert "**INVALID: eagle3: 3 requests failed**" in render(book(e.BenchmarkRecorded(bench=one)))


def test_prediction_stands_beside_what_was_reached() -> None:
    text = section(whole(), "Drafters and training")
    rows = next(rows for rows in tables(text) if rows[0][0] == "accept length on")
    assert rows[1:] == [["prompts the model wrote", "2.21", "2.53"], ["prompts people wrote", "1.52", "1.54"]]


def test_progress_tells_every_stage() -> None:
    events = [*stage("target", "r1", {}, 1.0), e.RunStarted(run="r2", what="stage", name="prompts", host="llm")]
    rows = tables(section(render(book(*events, toml=PROJECT)), "Done / In progress / Not started"))[0]
    states = {row[0]: row[1] for row in rows[1:]}
    assert (states["target"], states["prompts"], states["train"]) == ("done", "in progress", "not started")


def test_the_book_and_the_recipe_mean_the_same_stages() -> None:
    from pipeline.recipe import STAGES as RECIPE
    from state.outline import STAGES

    assert tuple(stage.name for stage in RECIPE) == STAGES


def test_a_skipped_stage_keeps_the_numbers_of_the_run_that_did_it() -> None:
    events = [*stage("mix", "r1", {"rows": {"in": 9, "out": 9}}, 1.0), *stage("mix", "r2", {}, 0.0, status="skipped")]
    rows = tables(section(render(book(*events)), "Done / In progress / Not started"))[0]
    (row,) = [row for row in rows if row[0] == "mix"]
    assert row[1] == "done" and "rows: 9 in, 9 out" in row[3] and "r1" in row[4]


def test_next_steps_come_in_the_order_in_which_they_can_be_done() -> None:
    text = render(
        book(
            e.NextAdded(title="first of all", priority=3),
            e.NextAdded(title="urgent but waits", priority=1, depends_on=["aaaaaa.1"], otherwise="give up"),
            e.NextAdded(title="urgent", priority=1),
            e.NextAdded(title="was done", priority=1),
            e.NextDone(next="aaaaaa.4", text="works"),
        )
    )
    steps = section(text, "Next steps")
    order = [steps.index(f"**{title}**") for title in ("urgent", "first of all", "urgent but waits")]
    assert order == sorted(order)
    assert "waits for “first of all”" in steps and "- otherwise: give up" in steps
    assert "- was done: works" in steps
    assert "Next: urgent (and 2 more)" in text


def test_a_circle_of_dependencies_hides_no_step() -> None:
    text = render(
        book(
            e.NextAdded(title="hen", depends_on=["aaaaaa.2"]),
            e.NextAdded(title="egg", depends_on=["aaaaaa.1"]),
        )
    )
    assert "**hen**" in text and "**egg**" in text


def test_a_superseded_decision_stays_and_says_so() -> None:
    text = render(book(e.DecisionMade(title="Use A"), e.DecisionMade(title="Use B", supersedes="aaaaaa.1")))
    assert "### ~~Use A~~ (superseded by `aaaaaa.2`)" in text


def test_a_host_out_of_reach_is_told_once_a_table() -> None:
    text = section(whole(), "Hardware")
    assert text.count("**Not seen since**") == 1
    assert "connection refused" in section(whole(), "At a glance")


def test_a_conflict_shows_both_sides() -> None:
    (rows,) = tables(section(whole(), "Open conflicts"))
    assert rows[1][0] == "hosts.llm.hw.cpu.threads"
    assert (rows[1][1], rows[1][3]) == ("4", "2") and "we bought 4" in rows[1][2]


def test_facts_of_no_section_are_not_dropped() -> None:
    text = render(book(fact("weather.today", "rain"), fact("hosts.llm.mood", "fine")))
    assert "weather today | rain" in text and "hosts llm mood | fine" in text


def test_stale_values_are_marked() -> None:
    text = render(book(fact("hosts.llm.sw.driver", "590"), now=stamp(60 * 24 * 60)))
    assert "590 (**stale**: last seen 60 days ago)" in text
    assert "Stale or invalidated, and marked so: 1 of 1 values." in text


def test_one_section_alone() -> None:
    told = book(*everything(), toml=PROJECT)
    assert render_section(told, "benchmarks").startswith("## Benchmarks\n")
    assert markdown.headline(told).startswith("| measured on |")
    assert markdown.headline(book()) == ""


# ── what people and machines say cannot break it ─────────────────────────────────────────────────────────────────

NASTY = "a | b\n# c <think> `d` *e* [f](g) \\ _h_ <|im_end|> </td>"


def test_nasty_text_stays_inside_its_place() -> None:
    events = [
        fact("hosts.llm.hw.name", NASTY, command=NASTY),
        e.Warned(where=NASTY, check="x", message=NASTY),
        e.NextAdded(title=NASTY, done_when=NASTY),
        e.DiscoveryMade(title=NASTY, text=NASTY, evidence=[NASTY]),
        e.NoteAdded(text=NASTY, section="hardware"),
        *stage("mix", "r1", {"error": NASTY}, 1.0, status="failed"),
    ]
    text = render(book(*events))
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == ["At a glance", *TITLES]
    assert not [line for line in text.splitlines() if line.startswith("# ")][1:]
    html = MARKDOWN.render(text)
    assert "<think>" not in html and "</td> " not in html


active = st.text(alphabet="|\\`*_<>[]()!#&;~ab1.:/-+='\"", max_size=12)
cell_text = active | st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20)


@settings(deadline=None)
@given(st.lists(st.lists(cell_text, min_size=3, max_size=3), min_size=1, max_size=4))
@example(rows=[["__0__", "a_b", "_"]])
def test_cells_come_back_as_they_went(rows: list[list[str]]) -> None:
    text = "\n".join(table(["a", "b", "c"], [[escape(cell) for cell in row] for row in rows]))
    (found,) = tables(text)
    squeezed = [[" ".join(cell.split()) for cell in row] for row in found[1:]]
    assert squeezed == [[" ".join(cell.split()) for cell in row] for row in rows]


def test_an_entity_in_a_value_is_shown_as_written() -> None:
    (found,) = tables("\n".join(table(["a"], [[escape("&lt; ~~x~~ &#60; a&b")]])))
    assert found[1] == ["&lt; ~~x~~ &#60; a&b"]


@given(cell_text)
def test_code_cells_come_back_as_they_went(text: str) -> None:
    if not text.strip():
        assert code(text) == ""
        return
    (found,) = tables("\n".join(table(["a", "b"], [[code(text), "x"]])))
    assert found[1][0].strip() == text.strip()
    assert found[1][1] == "x"


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (None, "GiB", "unknown"),
        (0, None, "0"),
        (True, None, "yes"),
        (False, None, "no"),
        (163586, None, "163586"),
        (134_515_008, None, "134,515,008"),
        (97_887, "MiB", "97,887 MiB"),
        (25_282_232_320, "B", "23.5 GiB"),
        (512, "bytes", "512 B"),
        (0.99713, None, "0.9971"),
        (41.2, "tok/s", "41.2 tok/s"),
        (1e-3, None, "0.001"),
        (0.0000123, None, "1.23e-05"),
        (12345.678, None, "12,346"),
        (float("nan"), "tok/s", "NaN tok/s"),
        (float("inf"), None, "infinity"),
        ([1, 2], None, "1, 2"),
        ([], None, "none"),
        ({"a": 1}, None, "a: 1"),
        (150, "s", "2 min 30 s"),
        ("590.48", None, "590.48"),
    ],
)
def test_values_in_words(value: Any, unit: str | None, shown: str) -> None:
    assert quantity(value, unit) == shown


def test_times_and_sizes_in_words() -> None:
    assert [duration(s) for s in (None, 1.25, 99.94, 100, 3725, 90_061)] == [
        "unknown",
        "1.2 s",
        "99.9 s",
        "1 min 40 s",
        "1 h 02 min",
        "1 d 1 h",
    ]
    assert [size(n) for n in (0, 1023, 1024, 1024**4)] == ["0 B", "1023 B", "1.0 KiB", "1.0 TiB"]


@settings(deadline=None)
@given(st.integers() | st.floats(), st.sampled_from([None, "B", "s", "%", "tok/s"]))
def test_any_number_can_be_shown(value: float, unit: str | None) -> None:
    assert quantity(value, unit)


def test_the_json_form_is_json_and_whole() -> None:
    told = book(*everything(), fact("a.b", float("nan")), toml=PROJECT)
    document = json.loads(json.dumps(as_json.render(told), allow_nan=False))
    assert document["seq"] == len(everything()) + 1
    assert document["facts"]["a.b"]["value"] == {"special": "NaN"}
    assert document["facts"]["hosts.llm.hw.cpu.threads"]["contrary"]["value"] == 2
    assert document["benchmarks"][0]["bench"]["verdict"]["kind"] == "better"
    assert document["runs"]["r3"]["status"] == "failed"
    assert document["conflicts"] == ["hosts.llm.hw.cpu.threads"]
