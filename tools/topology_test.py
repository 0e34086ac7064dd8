"""The tool's flags and output."""

from xml.etree import ElementTree

from tools.topology import main


def test_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "pictures" / "rings.svg"
    assert main(["--hardware=4*tpu7x-2x2x1", "--mesh=dp_replicate=4,dp_shard=8", f"--svg={picture}"]) == 0
    printed = capsys.readouterr().out
    assert "4 slices of 2x2x1 chips, 32 devices" in printed
    assert "dp_shard=8      2x2x1 chips x the 2 devices of a chip" in printed
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_without_a_mesh_shards_over_each_slice(capsys):
    assert main(["--hardware=2*v6e-2x4"]) == 0
    printed = capsys.readouterr().out
    assert "dp_replicate=2  2 slices" in printed and "dp_shard=8      2x4 chips" in printed


def test_mistakes_are_one_line(capsys):
    for argv, problem in (
        (["--hardware=v9-2x2"], "--hardware: "),
        (["--hardware=v6e-2x4", "--mesh=dp_shard"], "--mesh: 'dp_shard' gives no sizes"),
        (["--hardware=v6e-2x4", "--mesh=a=2,a=4"], "--mesh: 'a=2,a=4' gives no sizes"),
        (["--hardware=v6e-2x4", "--mesh=dp_shard=4"], "--mesh: a mesh of 4 devices for 8; give axes that make 8"),
    ):
        assert main(argv) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(problem) and printed.count("\n") == 1
