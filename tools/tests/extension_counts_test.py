"""How many product files know a family, pass, kernel, recipe or optimizer: what docs/extending.md states, counted."""

import re

import pytest

from tools.repository import workspace


def _files_with(pattern: str, *own: str) -> set[str]:
    """Product files, but for those below `own` and recipes, with a line that matches."""
    root = workspace.source_root()
    return {
        file
        for file in workspace.python_files(root)
        if file.startswith("titan/") and not workspace.is_test(file) and "_for_test" not in file
        if not file.startswith((*own, "titan/train/recipes/", "titan/moved.py"))
        if re.search(pattern, (root / file).read_text())
    }


@pytest.mark.parametrize("family", ["qwen3", "muse_glimmer"])
def test_a_family_is_known_to_its_folder_and_the_registry(family):
    assert _files_with(rf"titan\.models\.{family}\b", f"titan/models/{family}/") == {"titan/models/registry.py"}


@pytest.mark.parametrize("name", ["no_ops", "common_subexpressions", "cross_entropy_backward"])
def test_a_pass_is_known_to_its_file_and_the_registry(name):
    assert _files_with(rf"titan\.graph\.passes\.{name}\b") == {"titan/graph/passes/registry.py"}


def test_an_optimizer_is_known_to_its_file_and_the_registry():
    assert _files_with(r"titan\.train\.optimizers\.adamw\b") == {"titan/train/optimizers/registry.py"}


def test_a_kernel_is_known_to_its_folder_its_section_and_its_swap():
    kernel = (
        r"titan\.kernels\.fused_linear_cross_entropy\b|FusedLinearCrossEntropyConfig|fused_linear_cross_entropy_rules"
    )
    assert _files_with(kernel, "titan/kernels/fused_linear_cross_entropy/") == {
        "titan/train/config/kernels.py",
        "titan/train/config/run.py",
        "titan/train/swaps/fused_linear_cross_entropy.py",
        "titan/train/swaps/registry.py",
    }


def test_what_the_example_adds_is_known_to_no_file_of_titan():
    assert _files_with(r"\bleaky\.\w") == set()
