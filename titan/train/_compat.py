"""The private names of PyTorch that this package uses. Checked with torch 2.13.0, which its wheel requires."""


def has_cpp_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler for programs of the CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True
