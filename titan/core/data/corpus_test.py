"""The corpus: which documents each kind of file gives, its fingerprint, and the messages about bad input."""

import dataclasses
import json
import os
import shutil

import pyarrow
import pyarrow.parquet
import pytest

from titan.core.config.validate import ConfigError
from titan.core.data import file_stamp
from titan.core.data.config import DataConfig
from titan.core.data.corpus import Corpus


@pytest.fixture
def data(tmp_path) -> DataConfig:
    """Settings whose path is the folder `tmp_path / "files"`, made."""
    (tmp_path / "files").mkdir()
    return DataConfig(path=str(tmp_path / "files"), cache_folder=str(tmp_path / "cache"))


def read(data: DataConfig, **changes) -> list[str]:
    return list(Corpus(dataclasses.replace(data, **changes)).documents())


def test_default_is_the_standard_library_without_tests_and_packages(tmp_path):
    corpus = Corpus(DataConfig(cache_folder=str(tmp_path)))
    names = {file.name for file in corpus.files}
    assert {"os.py", "decoder.py", "base_events.py"} <= names
    assert len(corpus.files) > 200
    assert not {"test", "tests", "site-packages", "dist-packages", "__pycache__"} & {
        part for file in corpus.files for part in file.parts
    }
    assert os.__file__ in map(str, corpus.files)
    with open(os.__file__, encoding="utf-8") as file:
        assert file.read() in list(corpus.documents())


def test_folder_is_read_in_order_of_paths_and_other_files_are_left_out(data, tmp_path):
    root = tmp_path / "files"
    for name, content in {
        "b.txt": "b",
        "a/z.md": "a/z",
        "a.jsonl": '{"text": "a1"}\n\n{"text": "a2", "other": 1}\n{"text": ""}\n',
        ".hidden.txt": "no",
        ".git/c.txt": "no",
        "image.png": "no",
        "empty.txt": "",
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["p1", None, "p2"], "id": [1, 2, 3]}), root / "c.parquet")
    assert read(data) == ["a/z", "a1", "a2", "b", "p1", "p2"]
    assert read(data, max_documents=3) == ["a/z", "a1", "a2"]


def test_text_file_is_cut_at_blank_lines_and_nothing_is_lost(data, tmp_path):
    file = tmp_path / "book.txt"
    paragraphs = [f"Paragraph {i}.\r\n" + "All work and no play.\n" * 40 + "\n" for i in range(100)]
    text = "".join(paragraphs) + "no blank line\n" * 20_000
    file.write_bytes(text.encode())
    documents = read(data, path=str(file))
    assert "".join(documents) == text
    assert documents[0].endswith("\n\n")
    assert documents[1].startswith("Paragraph")
    assert all(16_000 < len(document) < 70_000 for document in documents[:-1])


def test_invalid_unicode_becomes_replacement_characters(data, tmp_path):
    (tmp_path / "files/a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "files/b.jsonl").write_bytes(b'{"text": "half \\ud800 pair"}')
    assert read(data) == ["caf\ufffd", "half ? pair"]


def test_fingerprint_follows_the_text_and_not_the_place_or_time(data, tmp_path, monkeypatch):
    monkeypatch.setattr(file_stamp, "_CLOCK_TICK_NANOSECONDS", 0)
    file = tmp_path / "files/a.txt"
    file.write_text("one")
    (tmp_path / "files/b.txt").write_text("two")
    original = Corpus(data).fingerprint
    assert Corpus(data).fingerprint == original
    os.utime(file)
    assert Corpus(data).fingerprint == original
    shutil.copytree(tmp_path / "files", tmp_path / "copy")
    assert Corpus(dataclasses.replace(data, path=str(tmp_path / "copy"))).fingerprint == original
    assert Corpus(dataclasses.replace(data, max_documents=1)).fingerprint != original

    # An edit that keeps size, inode and modification time.
    before = file.stat()
    with file.open("r+") as opened:
        opened.write("One")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert Corpus(data).fingerprint != original


def test_fingerprint_reads_unchanged_files_once(data, tmp_path, monkeypatch):
    (tmp_path / "files/a.txt").write_text("one")
    monkeypatch.setattr(file_stamp, "_CLOCK_TICK_NANOSECONDS", 10**18)
    young = Corpus(data).fingerprint
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(file_stamp, "_CLOCK_TICK_NANOSECONDS", 0)
    assert Corpus(data).fingerprint == young
    monkeypatch.setattr(Corpus, "documents", lambda self: pytest.fail("read again"))
    assert Corpus(data).fingerprint == young


def parquet_bytes(**columns) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": }\n', "--data.path: {file}:2: not JSON (Expecting value: line 1 "
         "column 10 (char 9)); correct or remove the line"),
        ("a.jsonl", b"[1]", "--data.path: {file}:1: not a JSON object; give one object a line"),
        ("a.jsonl", b'{"body": "x", "id": 1}', "--data.text_field: {file}:1: no field 'text'; choose among its "
         "fields: body, id"),
        ("a.jsonl", b'{"text": 3}', "--data.text_field: {file}:1: field 'text' is not a string; name a field of text"),
        ("a.parquet", parquet_bytes(body=["x"], id=[1]), "--data.text_field: {file}: no column 'text'; choose among "
         "its columns: body, id"),
        ("a.parquet", parquet_bytes(text=[1]), "--data.text_field: {file}: column 'text' holds int64; name a column "
         "of strings"),
        ("a.txt", b"", "--data.path: {folder} holds no text; give files with text in them"),
        ("a.png", b"", "--data.path: the folder '{folder}' has no file that ends in .md, .py, .rst, .text, .txt, "
         ".jsonl, .ndjson, .parquet; give another"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_says_where(data, tmp_path, name, content, message):
    file = tmp_path / "files" / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        _ = Corpus(data).fingerprint
    assert str(caught.value) == message.format(file=file, folder=tmp_path / "files")


def test_damaged_parquet_and_missing_path(data, tmp_path):
    file = tmp_path / "files/a.parquet"
    file.write_bytes(parquet_bytes(text=["x" * 100])[:-20])
    with pytest.raises(ConfigError, match=r"a\.parquet: not a sound Parquet file \(.+\); write it again"):
        read(data)
    with pytest.raises(ConfigError, match="there is no file or folder '/no/such'; correct the path"):
        Corpus(dataclasses.replace(data, path="/no/such"))


def test_json_documents_keep_their_text(data, tmp_path):
    texts = ['tab\tquote" newline\n', "日本語 🙂", "\r\n"]
    (tmp_path / "files/a.ndjson").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert read(data) == texts
