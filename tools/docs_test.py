"""The generated sections of the documents are those that the code makes, and every page named in one is there."""

import re

from tools import docs
from tools.repository import workspace

_LINK = re.compile(r"\]\(([^)#]+?\.md)[)#]")


def test_generated_sections_are_up_to_date():
    stale = [path.name for path, text in docs.renewed(workspace.source_root()).items() if path.read_text() != text]
    assert stale == [], "./bazelw run //tools:docs rewrites them"


def test_every_flag_is_in_the_table():
    page = (workspace.source_root() / "docs" / "flags.md").read_text()
    for flag in ("--training.steps", "--splash_attention_kernel.enable", "--model.num_experts", "--data.trial_images"):
        assert f"| `{flag}` |" in page


def test_pages_that_are_linked_are_there():
    root = workspace.source_root()
    for page in (root / "README.md", root / "CONTRIBUTING.md", root / "AGENTS.md", *(root / "docs").glob("*.md")):
        for target in _LINK.findall(page.read_text()):
            assert "://" in target or (page.parent / target).is_file(), f"{page.name}: {target}"
