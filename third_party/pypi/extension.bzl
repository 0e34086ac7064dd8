"""The bzlmod side of pypi.bzl: the same environment as a module extension."""

load(":pypi.bzl", "pypi_environment")

def _pypi_impl(_module_ctx):
    pypi_environment(name = "pypi")

pypi = module_extension(implementation = _pypi_impl)
