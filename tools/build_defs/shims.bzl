"""Offline stand-ins for the rule sets that an old Bazel would otherwise download.

Bazel 4 (Debian's bazel-bootstrap) still has its Python, C++ and Java rules built
in; its toolchain resolution nevertheless loads these repositories. Each shim
re-exports the native rules, so nothing is fetched. Under bzlmod none is used.
"""

_NATIVE = {
    "rules_cc": ("cc", [
        "cc_binary",
        "cc_import",
        "cc_library",
        "cc_proto_library",
        "cc_test",
        "cc_toolchain",
        "cc_toolchain_suite",
        "objc_library",
    ]),
    "rules_java": ("java", [
        "java_binary",
        "java_import",
        "java_library",
        "java_runtime",
        "java_toolchain",
    ]),
    "rules_python": ("python", [
        "py_binary",
        "py_library",
        "py_runtime",
        "py_test",
    ]),
}

def _native_shim_impl(rctx):
    package, rules = _NATIVE[rctx.attr.shims]
    lines = ["%s = native.%s" % (rule, rule) for rule in rules]
    build = 'package(default_visibility = ["//visibility:public"])\n'
    if package == "python":
        lines.insert(0, 'load("@bazel_tools//tools/python:toolchain.bzl", _pair = "py_runtime_pair")')
        lines.append("py_runtime_pair = _pair")
        build += 'alias(name = "toolchain_type", actual = "@bazel_tools//tools/python:toolchain_type")\n'
    rctx.file("WORKSPACE", "")
    rctx.file("BUILD.bazel", "")
    rctx.file(package + "/BUILD.bazel", build)
    rctx.file(package + "/defs.bzl", "\n".join(lines) + "\n")

native_shim = repository_rule(
    implementation = _native_shim_impl,
    attrs = {"shims": attr.string(mandatory = True, values = _NATIVE.keys())},
)

def _coverage_shim_impl(rctx):
    rctx.file("WORKSPACE", "")
    rctx.file("BUILD.bazel", """\
package(default_visibility = ["//visibility:public"])
filegroup(name = "coverage_report_generator")
filegroup(name = "lcov_merger")
""")

coverage_shim = repository_rule(implementation = _coverage_shim_impl)
