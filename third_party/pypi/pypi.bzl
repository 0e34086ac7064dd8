"""The locked third-party Python packages as the repository @pypi.

`@pypi//:<package>` is a py_library for each locked package. All of them carry
the environment's site-packages folder as one directory, a single link in a
runfiles tree rather than tens of thousands, and a stamp file that makes
dependents run again when the lock or the interpreter changes.

The installing is done by install.py. Environment variables:
  TITAN_PYTHON: the interpreter to use, Python 3.11 or newer. It chooses the lock too:
    third_party/pypi for Python 3.11, third_party/pypi_312 with a newer JAX for later ones.
  TITAN_USE_ENVIRONMENT=1: install nothing; use that interpreter's packages as
    they are (a TPU or CUDA machine that is set up already).
"""

_MINIMUM = (3, 11)
_NEWER = (3, 12)

_BUILD = """\
load("@rules_python//python:defs.bzl", "py_library", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "py3_runtime",
    interpreter_path = {interpreter},
    python_version = "PY3",
    stub_shebang = "#!/usr/bin/env python3",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":py3_runtime",
)

# The tag is what a wheel's metadata requires, see //tools/build_defs:wheel.bzl.
[
    py_library(
        name = name,
        data = ["environment.txt", "site-packages"],
        imports = ["site-packages"],
        tags = ["titan-requirement=" + requirement],
    )
    for name, requirement in {packages}.items()
]
"""

def _find_python(rctx):
    wanted = rctx.os.environ.get("TITAN_PYTHON", "")
    names = [wanted] if wanted else rctx.attr.interpreters
    tried = []
    for name in names:
        path = rctx.path(name) if name.startswith("/") else rctx.which(name)
        if not path or not path.exists:
            continue
        result = rctx.execute([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        if result.return_code:
            continue
        version = result.stdout.strip()
        tried.append("%s is %s" % (path, version))
        numbers = tuple([int(part) for part in version.split(".")])
        if numbers >= _MINIMUM:
            return struct(path = path, is_newer = numbers >= _NEWER)
    fail("no Python %d.%d or newer: looked for %s, found %s; install one or set TITAN_PYTHON to its path" % (
        _MINIMUM[0],
        _MINIMUM[1],
        ", ".join(names),
        ", ".join(tried) or "none",
    ))

# Packages of which titan uses private names, kept in the `_compat.py` of each package: no other version will do.
_EXACT = ("jax", "jaxlib", "libtpu", "tokamax", "torch")

def _locked_packages(text):
    """Maps each target name in a lock to the requirement a wheel states for it."""
    packages = {}
    for line in text.splitlines():
        if line[:1].isalnum():
            name, _, rest = line.partition("==")
            name = name.partition("[")[0].strip()
            version = rest.partition(" ")[0].partition(";")[0]
            target = name.lower().replace("-", "_").replace(".", "_")
            packages[target] = "%s%s%s" % (name, "==" if target in _EXACT else ">=", version)
    return packages

def _pypi_environment_impl(rctx):
    python = _find_python(rctx)
    lock = rctx.path(rctx.attr.newer_requirements if python.is_newer else rctx.attr.requirements)
    cuda_lock = rctx.path(rctx.attr.newer_cuda_requirements if python.is_newer else rctx.attr.cuda_requirements)
    command = [python.path, rctx.path(rctx.attr._install), "--lock", lock, "--cuda-lock", cuda_lock]
    if not python.is_newer:
        command += ["--cpu-lock", rctx.path(rctx.attr.cpu_requirements)]
    command += ["--fallback", rctx.path("environment"), "--result", rctx.path("result.txt")]
    if rctx.os.environ.get("TITAN_USE_ENVIRONMENT", "") == "1":
        command.append("--as-is")
    rctx.report_progress("installing the locked Python packages (minutes, the first time)")
    installed = rctx.execute(command, timeout = rctx.attr.timeout_seconds, quiet = False)
    if installed.return_code:
        fail("the locked Python packages could not be installed: %s" %
             ((installed.stderr.strip() or installed.stdout.strip()).split("\n")[-1]))
    interpreter, site_packages, version = rctx.read("result.txt").strip().split("\n")
    rctx.symlink(site_packages, "site-packages")
    text = rctx.read(lock)
    rctx.file("environment.txt", "%s\n%s\n%s" % (interpreter, version, text))
    if rctx.attr.safe_path:
        rctx.file("python", "#!/bin/sh\nexec '%s' -P \"$@\"\n" % interpreter, executable = True)
        interpreter = str(rctx.path("python"))
    rctx.file("WORKSPACE", "")
    rctx.file("BUILD.bazel", _BUILD.format(
        interpreter = repr(interpreter),
        packages = repr(_locked_packages(text)),
    ))

pypi_environment = repository_rule(
    implementation = _pypi_environment_impl,
    attrs = {
        "requirements": attr.label(
            allow_single_file = True,
            default = "//third_party/pypi:requirements_lock.txt",
        ),
        "cpu_requirements": attr.label(
            allow_single_file = True,
            default = "//third_party/pypi:requirements_cpu_lock.txt",
            doc = "The CPU build of torch, installed first where pip finds it.",
        ),
        "cuda_requirements": attr.label(
            allow_single_file = True,
            default = "//third_party/pypi:requirements_cuda_lock.txt",
            doc = "Installed as well where pip offers only the CUDA build of torch.",
        ),
        "newer_requirements": attr.label(
            allow_single_file = True,
            default = "//third_party/pypi_312:requirements_lock.txt",
            doc = "The lock for Python 3.12 and later.",
        ),
        "newer_cuda_requirements": attr.label(
            allow_single_file = True,
            default = "//third_party/pypi_312:requirements_cuda_lock.txt",
        ),
        "interpreters": attr.string_list(default = [
            "python3.11",
            "python3.12",
            "python3.13",
            "python3",
        ]),
        "safe_path": attr.bool(
            doc = "Run Python with -P: the native rules of Bazel 4 leave the main " +
                  "script's folder on sys.path, where a types.py would shadow the " +
                  "standard library's. rules_python sees to that itself.",
        ),
        "timeout_seconds": attr.int(default = 3600),
        "_install": attr.label(default = "//third_party/pypi:install.py", allow_single_file = True),
    },
    environ = ["TITAN_PYTHON", "TITAN_USE_ENVIRONMENT"],
)
