"""What a WORKSPACE file (Bazel 4 to 6) needs to build titan or to build against it."""

load("//third_party/pypi:pypi.bzl", "pypi_environment")
load("//tools/build_defs:shims.bzl", "coverage_shim", "native_shim")

def titan_dependencies(requirements = None):
    """Declares @pypi, its Python toolchain and the stand-ins for downloaded rule sets.

    A repository that the caller has already declared under one of these names is kept.

    Args:
      requirements: label of a lock to install instead of titan's, for a workspace
        that needs more packages; it has to cover what it uses of titan.
    """
    for name in ["rules_cc", "rules_java", "rules_python"]:
        if not native.existing_rule(name):
            native_shim(name = name, shims = name)
    if not native.existing_rule("remote_coverage_tools"):
        coverage_shim(name = "remote_coverage_tools")
    if not native.existing_rule("pypi"):
        pypi_environment(
            name = "pypi",
            requirements = requirements or Label("//third_party/pypi:requirements_lock.txt"),
            safe_path = True,
        )
    native.register_toolchains(str(Label("//third_party/pypi:toolchain")))
