"""The command line: values, sources, and the one line that each mistake gives."""

import re

import pytest

from titan.core.config.flags import one_line_errors, parse
from titan.core.config.serialize import from_json, save, to_text
from titan.core.config.trees_for_test import Inner, Other, Root, Section
from titan.core.config.validate import ConfigError


def run(*arguments, default=None):
    return parse(["program", *arguments], default or Root())


def test_no_flags_give_the_default_and_nothing_is_remembered():
    default = Root(name="recipe")
    assert run("--section.steps=5", default=default).section.steps == 5
    assert run(default=default) is default


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--name=a"], Root(name="a")),
        (["--name="], Root(name="")),
        (["--section.steps=5", "--section.steps=7"], Root(section=Section(steps=7))),
        (["--section.steps", "5"], Root(section=Section(steps=5))),
        (["--section.enable=false"], Root(section=Section(enable=False))),
        (["--nosection.enable"], Root(section=Section(enable=False))),
        (["--section.enable=False", "--section.enable"], Root()),
        (["--section.enable=False", "--section"], Root()),
        (["--nosection"], Root(section=Section(enable=False))),
        (["--section.kind="], Root(section=Section(kind=""))),
        (["--section.inner.epsilon=1"], Root(section=Section(inner=Inner(epsilon=1.0)))),
        (["--second.tags=a, b"], Root(second=Inner(tags=("a", "b")))),
        (["--second.tags=a", "--second.tags=b/c"], Root(second=Inner(tags=("a", "b/c")))),
        (["--second.sizes=5,6"], Root(second=Inner(sizes=(5, 6)))),
        (["--second.sizes="], Root(second=Inner(sizes=()))),
    ],
)
def test_values(arguments, expected):
    assert run(*arguments) == expected


def test_flags_exist_for_the_optional_node_that_is_there():
    default = Root(section=Section(either=Other()))
    assert run("--section.either.depth=9", default=default).section.either == Other(depth=9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--section.steps=five"], "--section.steps: 'five' is not admitted; give an integer of at least 1"),
        (["--section.steps=0"], "--section.steps: 0 is not admitted; give an integer of at least 1"),
        (["--section.enable=maybe"], "--section.enable: 'maybe' is not admitted; give true or false"),
        (["--section.kind=step"], "--section.kind: 'step' is not admitted; give one of '', cosine, linear"),
        (["--second.epsilon=inf"], "--second.epsilon: inf is not admitted; give a finite number from 0 to 1"),
        (["--second.sizes=1,x"],
         "--second.sizes: '1,x' is not admitted; give a comma-separated list of integers of at least 1"),
        (["--section.stpes=1"],
         "--section.stpes: there is no such flag; did you mean --section.steps? --helpfull lists all flags"),
        (["--steps=1"], "--steps: there is no such flag; did you mean --section.steps? --helpfull lists all flags"),
        (["--nosection.enabel"],
         "--nosection.enabel: there is no such flag; did you mean --section.enable? --helpfull lists all flags"),
        (["--section.inner=1"],
         "--section.inner: there is no such flag; did you mean --section.inner.epsilon or --section.inner.tags? "
         "--helpfull lists all flags"),
        (["--qqqq=1"], "--qqqq: there is no such flag; --helpfull lists all flags"),
        (["--section=1"], "--section: a section takes no value; set its fields, e.g. --section.steps"),
        (["--section.steps"],
         "--section.steps: Missing value for flag --section.steps; write flags as --section.field=value"),
        (["--section.enable", "false"], "'false' is not a flag; write flags as --section.field=value"),
        (["--section.steps=13"], "--section.steps: 13 brings bad luck; give 14"),
        (["--config_file=/missing"],
         "--config_file: '/missing' cannot be read (No such file or directory); give the config.json of a run"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_, one_line_errors():
        run(*arguments)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == message + "\n"


def test_config_file_is_the_base_and_flags_override_it(tmp_path):
    saved = Root(name="saved", section=Section(steps=8, kind="linear"))
    save(saved, str(tmp_path))
    config = run(f"--config_file={tmp_path / 'config.json'}", "--section.steps=9", "--section.kind=cosine")
    assert config == Root(name="saved", section=Section(steps=9))


def test_config_file_is_validated(tmp_path):
    (tmp_path / "config.json").write_text('{"section": {"steps": 0}}')
    with pytest.raises(ConfigError, match="--section.steps: 0 is not admitted"):
        run(f"--config_file={tmp_path / 'config.json'}")
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        run(f"--config_file={tmp_path / 'config.json'}")


def test_flag_for_a_node_that_the_config_file_lacks_is_refused(tmp_path):
    save(Root(), str(tmp_path))
    with pytest.raises(
        ConfigError, match="--section.either.depth: the configuration in --config_file has no such field"
    ):
        run(
            f"--config_file={tmp_path}/config.json",
            "--section.either.depth=1",
            default=Root(section=Section(either=Other())),
        )


_VARIANTS = {"small": Root(name="r", section=Section(steps=7)), "large": Root(name="r", section=Section(steps=9))}


def of_variant(*arguments):
    return parse(["program", *arguments], Root(name="r"), variants=_VARIANTS, variant_flag="section.kind")


def test_variant_is_the_base_and_flags_override_it(capsys):
    assert of_variant("--variant=small") == _VARIANTS["small"]
    assert of_variant("--variant=small", "--section.steps=8").section.steps == 8
    assert of_variant() == of_variant("--variant=none") == Root(name="r")
    assert capsys.readouterr().err == ""


def test_variant_is_chosen_by_its_flag_and_a_line_says_so(capsys, tmp_path):
    variants = {"linear": _VARIANTS["small"]}

    def chosen(*arguments):
        config = parse(["program", "--section.kind=linear", *arguments], Root(), variants=variants, variant_flag=flag)
        return config.section.steps, capsys.readouterr().err

    flag = "section.kind"
    line = "--section.kind=linear: the variant of that name is the base; --variant=none leaves it out\n"
    assert chosen() == (7, line)
    assert chosen("--variant=none") == (3, "")
    save(Root(section=Section(steps=8)), str(tmp_path))
    assert chosen(f"--config_file={tmp_path}/config.json") == (8, "")  # a whole configuration
    flag = "section.steps"
    assert chosen() == (3, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant=smal"],
         "--variant: 'smal' is no variant of this recipe; give one of small, large, or none"),
        (["--variant=small", "--section.kind=linear"],
         "--variant: 'small' and --section.kind=linear disagree; give --variant=none, or give --section.kind=small"),
        (["--variant=small", "--config_file=x"],
         "--variant: --config_file is a whole configuration; leave out one of the two"),
    ],
)  # fmt: skip
def test_mistakes_of_variants_are_one_line(arguments, message):
    with pytest.raises(ConfigError) as error:
        of_variant(*arguments)
    assert str(error.value) == message
    with pytest.raises(ConfigError, match="--variant: 'x' is no variant of this recipe; leave it out"):
        run("--variant=x")


def obeyed(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_print_config_prints_the_resolved_tree(capsys):
    assert obeyed(capsys, "--print_config", "--section.steps=4") == to_text(Root(section=Section(steps=4)))


def test_print_config_refuses_an_invalid_one():
    with pytest.raises(ConfigError, match="bad luck"):
        run("--print_config", "--section.steps=13")


def test_help_lists_sections_and_helpfull_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    overview = obeyed(capsys, "--help")
    assert re.search(r"^--section\.\* +What the run does\.$", overview, re.MULTILINE)
    assert "--section.steps" not in overview
    full = obeyed(capsys, "--helpfull")
    assert "  --section.steps: an integer of at least 1; default 3\n      Steps of the run.\n" in full
    assert "  --[no]section.enable: true or false; default true\n" in full
    assert "  --section.kind: one of '', cosine, linear; default 'cosine'\n" in full
    assert "  --second.sizes: a comma-separated list of integers of at least 1; default '1,2'\n" in full
    assert "--config_file" in full


def test_round_trip_through_print_config_and_json(tmp_path):
    config = run("--section.steps=4", "--second.tags=x")
    save(config, str(tmp_path))
    assert (
        from_json((tmp_path / "config.json").read_text(), Root)
        == run(f"--config_file={tmp_path}/config.json")
        == config
    )
