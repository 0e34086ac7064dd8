"""Limits of leaves, order of checks, paths, and the wording of errors."""

import os
import pickle

import pytest

from titan.core.config.tree import replace_leaves
from titan.core.config.trees_for_test import Root
from titan.core.config.validate import ConfigError, check_exists, check_writable_folder, validate


def test_error_is_one_line_and_can_be_pickled():
    error = ConfigError("data.path", "there is\nno file", "correct it")
    assert str(error) == "--data.path: there is no file; correct it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(ConfigError("", "'x' is not a flag", "write flags")) == "'x' is not a flag; write flags"


def test_defaults_are_valid():
    validate(Root())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("section.steps", 0, "--section.steps: 0 is not admitted; give an integer of at least 1"),
        ("section.steps", True, "--section.steps: True is not admitted; give an integer of at least 1"),
        ("section.steps", 1.0, "--section.steps: 1.0 is not admitted; give an integer of at least 1"),
        ("section.enable", 1, "--section.enable: 1 is not admitted; give true or false"),
        ("section.kind", "step", "--section.kind: 'step' is not admitted; give one of '', cosine, linear"),
        ("second.epsilon", float("nan"), "--second.epsilon: nan is not admitted; give a finite number from 0 to 1"),
        ("second.epsilon", 2, "--second.epsilon: 2 is not admitted; give a finite number from 0 to 1"),
        ("second.tags", "ab", "--second.tags: 'ab' is not admitted; give a comma-separated list of strings"),
        (
            "second.sizes",
            (3, 0),
            "--second.sizes: (3, 0) is not admitted; give a comma-separated list of integers of at least 1",
        ),
        ("section.steps", 13, "--section.steps: 13 brings bad luck; give 14"),
    ],
)
def test_violations_name_flag_and_cure(path, value, message):
    with pytest.raises(ConfigError) as caught:
        validate(replace_leaves(Root(), {path: value}))
    assert str(caught.value) == message


def test_sections_are_checked_before_the_whole():
    wrong = replace_leaves(Root(), {"section.inner.tags": ("a",), "second.tags": ("b",)})
    with pytest.raises(ConfigError, match="section.inner.tags is set too"):
        validate(wrong)
    with pytest.raises(ConfigError, match="bad luck"):
        validate(replace_leaves(wrong, {"section.steps": 13}))


def test_check_exists(tmp_path):
    check_exists("data.path", str(tmp_path))
    with pytest.raises(ConfigError, match="^--data.path: there is no file or folder '.*missing'; correct the path$"):
        check_exists("data.path", str(tmp_path / "missing"))


def test_check_writable_folder(tmp_path):
    check_writable_folder("checkpoint.folder", str(tmp_path / "new" / "run"))
    assert not (tmp_path / "new").exists()
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match="cannot be a folder, since '.*file' is a file"):
            check_writable_folder("checkpoint.folder", str(path))


def test_check_writable_folder_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write everywhere
    with pytest.raises(ConfigError, match="the folder .* is not writable"):
        check_writable_folder("checkpoint.folder", str(tmp_path / "run"))
