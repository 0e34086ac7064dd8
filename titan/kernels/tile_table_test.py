"""Tuned tiles as files: which folder wins, what a miss says, and what a damaged table says."""

import logging

import pytest

from titan.kernels import tile_table


def _table(folder, monkeypatch, text):
    (folder / tile_table.file_name("row_sum", "v6e")).write_text(text)
    monkeypatch.setenv(tile_table.FOLDER_VARIABLE, str(folder))
    tile_table.read_table.cache_clear()


def test_a_written_table_is_read_back(tmp_path, monkeypatch):
    path = tmp_path / tile_table.file_name("row_sum", "v6e")
    tile_table.write_table(path, {"T4096": {"rows": 256}})
    monkeypatch.setenv(tile_table.FOLDER_VARIABLE, str(tmp_path))
    assert tile_table.lookup("row_sum", "v6e", "T4096") == {"rows": 256}
    tile_table.write_table(path, {"T4096": {"rows": 512}})
    assert tile_table.lookup("row_sum", "v6e", "T4096") == {"rows": 512}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_miss_is_logged_once_and_only_for_a_tpu(tmp_path, monkeypatch, caplog):
    _table(tmp_path, monkeypatch, "{}")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert tile_table.lookup("row_sum", "v6e", "T1") is None
            assert tile_table.lookup("row_sum", "", "T1") is None
    assert caplog.messages == ["row_sum: no tuned tiles for T1 on v6e; the defaults are used"]


@pytest.mark.parametrize("text", ["{", "[]", '{"T1": 3}', '{"T1": {"rows": "many"}}'])
def test_a_damaged_table_is_named(tmp_path, monkeypatch, text):
    _table(tmp_path, monkeypatch, text)
    with pytest.raises(
        ValueError, match=r"row_sum\.v6e\.json is no tile table.*write it anew with //tools:tune_kernel"
    ):
        tile_table.lookup("row_sum", "v6e", "T1")
