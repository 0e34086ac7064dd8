"""Private names of other packages stand in the `_compat.py` of each of titan's packages, and nowhere else."""

import importlib
import re

import pytest

from tools.repository import workspace

# Modules and names that begin with one underscore, of packages that titan does not own. `torch.utils._pytree` and
# `_python_dispatch` are what PyTorch documents for dispatch modes and trees; OpInfo is its database of ops.
_PRIVATE = re.compile(
    r"^\s*(?:from|import) (?:torch|jax|jaxlib|tokamax|orbax|transformers|diffusers)\b"
    r"(?!\.utils\._pytree|\.utils\._python_dispatch|\.testing\._internal import common_utils)"
    r"(?!\.testing\._internal\.opinfo)"
    r"(?:[\w.]*\._\w|[\w.]* import _\w)"
    r"|\b(?:torch\._C\._|torch\._functorch|torch\._inductor|torch\._subclasses|jax\._src|tokamax\._src)"
)


def test_private_names_stand_in_compat_alone():
    root = workspace.source_root()
    found = [
        f"{file}:{number}: {line.strip()}"
        for file in workspace.python_files(root)
        if file.startswith("titan/") and not workspace.is_test(file) and "_for_test" not in file
        for number, line in enumerate((root / file).read_text().splitlines(), 1)
        if _PRIVATE.search(line) and not file.endswith("_compat.py")
    ]
    assert found == []


@pytest.mark.parametrize("package", ["graph", "kernels", "parallel", "train"])
def test_all_of_them_are_there_in_the_versions_in_use(package):
    compat = importlib.import_module(f"titan.{package}._compat")
    for name in getattr(compat, "__all__", ()):
        assert getattr(compat, name) is not None


def test_the_libraries_of_kernels_have_what_titan_calls():
    from titan.kernels import _compat

    for library in (_compat.jax_splash(), _compat.tokamax_splash()):
        assert callable(library.kernel._splash_attention_forward) and callable(library.kernel._splash_attention_bwd)
        assert library.base.DEFAULT_MASK_VALUE < 0 and library.base.SegmentIds
        assert library.mask.CausalMask and library.mask.LocalMask and library.mask.FullMask
    assert callable(_compat.jax_splash().mask_info.process_mask_dkv)
    assert callable(_compat.tokamax_splash().mask_info._process_mask)
    for library in (_compat.megablox(), _compat.tokamax_gmm()):
        assert callable(library.gmm) and callable(library.tgmm)
