"""Text of trees: exact round trips, readable YAML, and errors that say where a file is wrong."""

import json
import re
import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from titan.core.config.serialize import from_json, save, to_json, to_text
from titan.core.config.trees_for_test import Inner, Other, Root, Section
from titan.core.config.validate import ConfigError

inners = st.builds(
    Inner,
    epsilon=st.floats(allow_nan=False, allow_infinity=False),
    tags=st.lists(st.text()).map(tuple),
    sizes=st.lists(st.integers()).map(tuple),
)
roots = st.builds(
    Root,
    name=st.text(),
    section=st.builds(
        Section,
        steps=st.integers(),
        kind=st.text(string.printable),
        enable=st.booleans(),
        inner=inners,
        either=st.none() | inners | st.builds(Other, st.integers()),
    ),
    second=inners,
)


@given(roots)
def test_json_round_trip(root):
    text = to_json(root)
    assert from_json(text, Root) == root
    assert to_json(from_json(text, Root)) == text


@given(roots)
def test_text_is_yaml_with_the_same_values(root):
    def without_types(value):
        if isinstance(value, dict):
            # The text leaves out optional nodes that are absent: they have no leaves.
            return {k: without_types(item) for k, item in value.items() if k != "_type" and item is not None}
        return value

    plain = without_types(json.loads(to_json(root)))
    # JSON writes a character beyond 16 bits as two escapes, which YAML keeps apart.
    assert json.dumps(yaml.safe_load(to_text(root))) == json.dumps(plain)


def test_text_is_stable():
    assert to_text(Root(section=Section(either=Other()), second=Inner(tags=("a", "b")))) == (
        'name: "run"\n'
        "section:  # Section\n"
        "  steps: 3\n"
        '  kind: "cosine"\n'
        "  enable: true\n"
        "  inner:  # Inner\n"
        "    epsilon: 1.0e-08\n"
        "    tags: []\n"
        "    sizes: [1, 2]\n"
        "  either:  # Other\n"
        "    depth: 2\n"
        "second:  # Inner\n"
        "  epsilon: 1.0e-08\n"
        '  tags: ["a", "b"]\n'
        "  sizes: [1, 2]\n"
    )


def test_missing_fields_keep_their_defaults_and_integers_become_floats():
    root = from_json('{"second": {"epsilon": 1}}', Root)
    assert root == Root(second=Inner(epsilon=1.0))
    assert type(root.second.epsilon) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "run.json is not JSON"),
        ("[]", "run.json: the root is []; give an object with the fields of Root"),
        ('{"sections": {}}', "run.json: there is no field 'sections'"),
        ('{"section": {"steps": "3"}}', 'run.json: section.steps is "3"; give a value of type int'),
        ('{"section": {"enable": 1}}', "run.json: section.enable is 1; give a value of type bool"),
        ('{"section": null}', "run.json: section is null; give an object"),
        ('{"second": {"sizes": [1.5]}}', "run.json: second.sizes is [1.5]; give a value of type tuple"),
        (
            '{"section": {"either": {"_type": "Root"}}}',
            "run.json: section.either is a 'Root'; give one of Inner, Other",
        ),
    ],
)
def test_errors_say_where_the_text_is_wrong(text, message):
    with pytest.raises(ConfigError, match="^--config_file: " + re.escape(message)) as caught:
        from_json(text, Root, source="run.json")
    assert "\n" not in str(caught.value)


def test_save_writes_both_forms(tmp_path):
    folder = tmp_path / "runs" / "one"
    save(Root(), str(folder))
    save(Root(name="two"), str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "config.txt"]
    assert from_json((folder / "config.json").read_text(), Root) == Root(name="two")
    assert (folder / "config.txt").read_text() == to_text(Root(name="two"))
