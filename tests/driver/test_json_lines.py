"""Files of JSON lines that are appended to."""

import json

import pytest
from specens.files.json_lines import JsonLines, write_whole


def test_a_torn_line_is_cut_off_by_the_next_one(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"number": 1}\n{"number": 2')
    with JsonLines(path) as lines:
        assert lines.kept == [{"number": 1}]
        lines.append({"number": 3})
    assert path.read_bytes() == b'{"number": 1}\n{"number": 3}\n'


def test_a_file_is_written_by_one_process_at_a_time(tmp_path):
    with JsonLines(tmp_path / "lines.jsonl") as lines:
        lines.append({"number": 1})
        with pytest.raises(ValueError, match="no other process writes"):
            JsonLines(tmp_path / "lines.jsonl")
    with JsonLines(tmp_path / "lines.jsonl") as lines:
        assert lines.kept == [{"number": 1}]


def test_the_lines_are_those_that_were_appended_and_not_cleared(tmp_path):
    path = tmp_path / "lines.jsonl"
    with JsonLines(path, durable=True) as lines:
        assert lines.is_new
        lines.append({"text": "ä\n"})
        lines.append({"number": 2})
    assert path.read_text() == '{"text": "ä\\n"}\n{"number": 2}\n'
    with JsonLines(path) as lines:
        assert not lines.is_new
        assert lines.kept == [{"text": "ä\n"}, {"number": 2}]
        lines.clear()
        lines.append({"number": 3})
    assert path.read_text() == '{"number": 3}\n'


def test_an_object_replaces_a_whole_file(tmp_path):
    path = tmp_path / "settings.json"
    for values in ({"seed": 1, "name": "ä"}, {"seed": 2}):
        write_whole(path, values)
        assert json.loads(path.read_text()) == values
    assert list(tmp_path.iterdir()) == [path]
