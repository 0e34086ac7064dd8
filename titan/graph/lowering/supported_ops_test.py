"""The page of supported ops is what the table makes."""

import pathlib

from titan.graph.lowering.ops import TABLE
from titan.graph.lowering.supported_ops import main, render

_PAGE = pathlib.Path(__file__).parents[3] / "docs" / "supported_ops.md"


def test_page_is_up_to_date() -> None:
    assert _PAGE.read_text(encoding="utf-8") == render(TABLE), "run //titan/graph/lowering:write_supported_ops"


def test_page_names_each_overload_once(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "ops.md"
    assert main([str(page)]) == 0
    listed = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("- `"):
            op, overloads = line.removeprefix("- `").split("`: ")
            listed += [f"{op}.{overload}" for overload in overloads.split(", ")]
    assert sorted(listed) == sorted(TABLE)
    assert main([]) == 2
