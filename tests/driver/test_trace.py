"""A trace says what happened in each round, adds up to the statistics, and becomes a page that stands alone."""

import itertools
import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest
from driver.tiny_models import PROMPT, relative_of, save_pair, tiny_llama, tiny_tokenizer
from specens import SpeculativeEnsemble
from specens.analysis.html_bars import Bar, bars
from specens.analysis.model_names import short_names
from specens.analysis.trace_page import render_page
from specens.analysis.trace_reader import add_up, read_trace
from specens.cli.main import app
from specens.files.trace_file import traced
from typer.testing import CliRunner

SCHEDULES = {
    "standard": {},
    "fixed": {"draft_lens": 3},
    "alternate": {"draft_lens": 1},
    "alternate, long chains": {"draft_lens": (3, 1)},
    "tree": {"tree": (2, 2)},
}
RUN = {"models": ["some/first", "other/second"], "draft_lens": [1, 1], "ensemble": "Mixture"}


@pytest.fixture(scope="module")
def members():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.3)]


def traced_text(members, name, path, **settings):
    """A generation, and its trace as it is read back."""
    ensemble = SpeculativeEnsemble(members, tiny_tokenizer(), schedule=name.split(",")[0], **SCHEDULES[name])
    with traced(path, RUN | {"schedule": name}) as (on_round, on_text):
        generation = ensemble.generate(PROMPT, max_new_tokens=40, seed=3, on_round=on_round, **settings)
        on_text(generation)
    return generation, read_trace(path)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rounds_add_up_to_the_statistics_and_to_the_text(members, tmp_path, name):
    generation, trace = traced_text(members, name, tmp_path / "trace.jsonl")
    (text,) = trace.texts
    assert [event for one in text.rounds for event in one["events"]] == [e.to_dict() for e in generation.events]
    assert [one["number"] for one in text.rounds] == list(range(len(text.rounds)))
    assert "".join(event["text"] for one in text.rounds for event in one["events"]) == generation.text
    totals, statistics = add_up(text.rounds, 2), generation.statistics
    assert totals.num_tokens == statistics.emitted == 40
    assert (totals.tested, totals.accepted) == (statistics.tested, statistics.accepted)
    assert (totals.kinds["recovered"], totals.kinds["bonus"]) == (statistics.recovered, statistics.bonus)
    assert totals.forwards == statistics.forwards
    assert totals.forward_seconds == pytest.approx(statistics.forward_seconds)
    phases = {name: getattr(statistics, f"{name}_seconds") for name in totals.phases}
    assert totals.phases == pytest.approx(phases, abs=1e-3)
    assert text.end["statistics"] == statistics.to_dict()
    assert (text.end["seed"], text.end["finish_reason"]) == (3, "length")


@pytest.mark.parametrize("name", ["fixed", "alternate", "alternate, long chains"])
def test_a_round_says_which_drafts_were_accepted_and_what_came_behind(members, tmp_path, name):
    _, trace = traced_text(members, name, tmp_path / "trace.jsonl")
    position = 0
    for one in trace.rounds:
        drafts, events, num_accepted = one["drafts"], one["events"], one["num_accepted"]
        assert one["position"] == position
        position += len(events)
        assert [draft["token"] for draft in drafts[:num_accepted]] == [e["token"] for e in events[:num_accepted]]
        assert [draft["proposer"] for draft in drafts[:num_accepted]] == [e["proposer"] for e in events[:num_accepted]]
        assert [draft["text"] for draft in drafts] == [f"w{draft['token']}" for draft in drafts]
        assert {event["kind"] for event in events[num_accepted:]} <= {"recovered", "bonus"}
        assert (num_accepted < len(drafts)) == (events[-1]["kind"] == "recovered")
    chains = [len(one["drafts"]) for one in trace.rounds]
    assert max(chains) == max(SCHEDULES[name]["draft_lens"] if "long" in name else [SCHEDULES[name]["draft_lens"]])


def test_places_in_a_chain_have_acceptances_of_their_own(members, tmp_path):
    _, trace = traced_text(members, "fixed", tmp_path / "trace.jsonl")
    by_position = add_up(trace.rounds, 2).by_position
    assert len(by_position) == 3
    for (tested, accepted), (later, _) in itertools.pairwise(by_position):
        assert tested >= accepted >= later
    assert by_position[0][0] == len([one for one in trace.rounds if one["drafts"]])


def test_requests_of_a_batch_are_traced_each_for_itself(members):
    rounds = []
    ensemble = SpeculativeEnsemble(members, tiny_tokenizer())
    texts = list(
        ensemble.generate_many(
            [PROMPT, [1, 2]], samples=2, batch_size=3, max_new_tokens=15, seed=1, on_round=rounds.append
        )
    )
    for text in texts:
        own = [one for one in rounds if (one.index, one.sample) == (text.index, text.sample)]
        assert [event for one in own for event in one.events] == text.events
        assert [sum(counts) for counts in zip(*(one.forwards for one in own), strict=True)] == text.statistics.forwards


def test_the_last_beginning_of_a_text_counts_and_a_torn_line_is_said(members, tmp_path):
    path = tmp_path / "trace.jsonl"
    generation, trace = traced_text(members, "alternate", path)
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*whole[:9], *whole[1:], '{"line": "rou']))
    again = read_trace(path)
    assert again.torn
    assert again.rounds == trace.rounds
    assert "cut off" in render_page(again)
    path.write_text("".join(whole[:9]))
    unfinished = read_trace(path)
    assert len(unfinished.rounds) == 8
    assert "(not finished)" in render_page(unfinished)
    assert generation.text.startswith("".join(e["text"] for one in unfinished.rounds for e in one["events"]))


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects their names, attributes and the visible text."""

    VOID = ("meta", "input", "line", "rect")

    def __init__(self, html):
        super().__init__()
        self.open, self.names, self.attributes, self.text = [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


class Sinister:
    """A tokenizer whose tokens are HTML."""

    WORDS = ("<script>alert(1)</script>", '" onmouseover="x', "</span>&amp;", "'\n", "plain")

    def get_vocab(self):
        return {"last": 60}

    def decode(self, tokens, **_):
        return "".join(self.WORDS[token % len(self.WORDS)] for token in tokens)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_page_stands_alone_and_shows_tokens_as_they_are(members, tmp_path, name):
    path = tmp_path / "trace.jsonl"
    ensemble = SpeculativeEnsemble(members, Sinister(), schedule=name.split(",")[0], **SCHEDULES[name])
    run = RUN | {"schedule": name, "models": ["a/<b>first</b>", 'second" x="']}
    with traced(path, run) as (on_round, on_text):
        generation = ensemble.generate(PROMPT, max_new_tokens=40, seed=3, on_round=on_round)
        on_text(generation)
    html = render_page(read_trace(path))
    page = Page(html)
    assert "".join(Sinister.WORDS[token % 5] for token in generation.tokens)[:60] == generation.text[:60]
    assert not {"script", "b", "img", "link", "iframe"} & set(page.names)
    assert {"html", "style", "table", "main"} <= set(page.names)
    assert not [attribute for attribute, _ in page.attributes if attribute.startswith("on") or attribute == "x="]
    assert not re.search(r"https?://|url\(|@import|src=", html)
    assert "prefers-color-scheme: dark" in html
    shown = "".join(page.text)
    assert Sinister.WORDS[0] in shown
    assert f"40 tokens in {generation.statistics.rounds if name != 'standard' else 40} rounds" in shown


def test_a_page_marks_who_proposed_each_token(members, tmp_path):
    generation, trace = traced_text(members, "alternate, long chains", tmp_path / "trace.jsonl")
    html = render_page(trace)
    main = html[html.index("<main>") :]
    for style, events in {
        "p0": [event for event in generation.events if event.proposer == 0],
        "p1": [event for event in generation.events if event.proposer == 1],
        "recovered": [event for event in generation.events if event.kind == "recovered"],
    }.items():
        assert len(events) > 0
        assert main.count(f'<span class="{style}">') == len(events)
    assert main.count('<span class="round"') == len(trace.rounds)
    assert main.count("<del>") == sum(one["num_accepted"] < len(one["drafts"]) for one in trace.rounds)
    tested, accepted = generation.statistics.tested[0], generation.statistics.accepted[0]
    assert f"<td>{tested}</td><td>{accepted}</td><td>{accepted / tested:.2f}</td>" in html


def test_bars_are_as_long_as_their_values():
    rows = [Bar("1", 0.5, "half"), Bar("2", 1.0, "all"), Bar("<", 3.0, "&"), Bar("none", 0.0, "0")]
    assert re.findall(r"width:([\d.]+%)", bars(rows, "title", 1.0)) == ["50.0%", "100.0%", "100.0%", "0.0%"]
    assert re.findall(r"width:([\d.]+%)", bars(rows, "title")) == ["16.7%", "33.3%", "100.0%", "0.0%"]
    assert "&lt;" in bars(rows, "title")
    assert "&amp;" in bars(rows, "title")
    assert bars([], "title").count("<tr") == 0


def test_rejected_branches_of_a_tree_are_shown_with_all_their_nodes(members, tmp_path):
    _, trace = traced_text(members, "tree", tmp_path / "trace.jsonl")
    html = render_page(trace)
    rejected = [unescape(text) for text in re.findall("<del>(.*?)</del>", html)]
    expected, hints = [], []
    for one in trace.rounds:
        drafts, accepted = one["drafts"], [draft for draft in one["drafts"] if draft["accepted"]]
        assert [draft["token"] for draft in accepted][: one["num_accepted"]] == [
            event["token"] for event in one["events"][: one["num_accepted"]]
        ]
        parents = {draft["parent"] for draft in drafts if not draft["accepted"]}
        branches = []
        for index, draft in enumerate(drafts):
            if not draft["accepted"] and index not in parents:
                above = drafts[draft["parent"]] if draft["parent"] >= 0 else None
                branches.append((above["text"] if above and not above["accepted"] else "") + draft["text"])
        expected += [f" [{' | '.join(branches)}] "] if branches else []
        hints.append(sum(not draft["accepted"] for draft in drafts))
    assert rejected == expected
    assert len(expected) > 5
    assert html.count(": not accepted") == sum(hints)


def test_names_are_as_long_as_it_takes_to_tell_them_apart():
    assert short_names(["a/model-7b-instruct-v1", "b/model-7b-instruct-v2"]) == [
        "model-7b-instruct-v1",
        "model-7b-instruct-v2",
    ]
    assert short_names(["/x/a/model/", "/x/b/model"]) == ["a/model", "b/model"]
    assert short_names(["m/base", "m/base+m/expert"]) == ["base", "base+expert"]
    assert short_names(["m", "m"]) == ["m (member 0)", "m (member 1)"]
    assert short_names([]) == []


def test_names_and_numbers_of_members_are_whole_and_have_colours_of_their_own(members, tmp_path):
    _, trace = traced_text(members, "fixed", tmp_path / "trace.jsonl")
    trace.run["models"] = [f"hub/a-name-that-is-much-longer-than-any-label-{index}" for index in range(9)]
    for one in trace.rounds:
        one["forwards"], one["forward_seconds"] = [1] * 9, [0.1] * 9
    html = render_page(trace)
    for index in range(9):
        assert html.count(f"any-label-{index}<") >= 3  # legend, table, time
    colours = re.findall(r"^\.p\d \{ background: (.*?);", html, re.MULTILINE)
    assert len(set(colours)) == 9
    assert "…" not in html


def test_the_command_traces_and_shows(tmp_path):
    models = save_pair(tmp_path)
    trace, texts = tmp_path / "trace.jsonl", tmp_path / "texts.jsonl"
    job = ["generate", *models, "--prompt", "w5 w3", "--max-new-tokens", "12", "--dtype", "fp32", "--seed", "1"]
    for files, count in (([], 1), (["--samples", "3", "--output", str(texts)], 3)):
        result = CliRunner().invoke(app, [*job, *files, "--trace", str(trace)])
        assert result.exit_code == 0, result.stderr
        written = read_trace(trace)
        assert len(written.texts) == count
        assert written.run["models"] == models
        assert all(add_up(text.rounds, 2).num_tokens == 12 for text in written.texts)
        assert all(text.end["finish_reason"] == "length" for text in written.texts)
    result = CliRunner().invoke(app, ["show", str(trace)])
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "trace.html").read_text()
    assert "first" in "".join(Page(page).text)
    for record in map(json.loads, texts.read_text().splitlines()):
        assert f"text {record['index']}" in page
        assert f"seed {record['seed']}" in page


@pytest.mark.parametrize(
    "content", ["", '{"line": "round"}\n', '{"prompt": "w1"}\n', "no json\n", '{"format": "specens trace 2"}\n']
)
def test_a_file_that_is_no_trace_is_one_clear_line(tmp_path, content):
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    result = CliRunner().invoke(app, ["show", str(path)])
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert "expected" in result.stderr
    assert not (tmp_path / "other.html").exists()


def test_drafts_of_no_member_have_a_name_of_their_own(members, tmp_path):
    _, trace = traced_text(members, "fixed", tmp_path / "trace.jsonl")
    for one in trace.rounds:
        for part in (*one["drafts"], *one["events"]):
            part["proposer"] = None
    totals = add_up(trace.rounds, 2)
    assert totals.tested[:2] == [0, 0]
    assert totals.tested[2] > totals.accepted[2] > 0
    assert "draft of a drafter that is no member" in render_page(trace)


def test_tracing_changes_nothing(members, tmp_path):
    generation, _ = traced_text(members, "alternate", tmp_path / "trace.jsonl")
    ensemble = SpeculativeEnsemble(members, tiny_tokenizer())
    plain = ensemble.generate(PROMPT, max_new_tokens=40, seed=3)
    assert plain.tokens == generation.tokens
    assert plain.statistics.forwards == generation.statistics.forwards
