"""The main file that titan_binary generates: it runs a module in the caller's folder."""

# It imports nothing of titan's: a workspace that depends on this one may well have
# a `tools` package of its own.
_MAIN = '''\
"""Runs {module} as `python -m` does.

`bazel run` starts a program in its runfiles folder and names the folder that the
user called from in BUILD_WORKING_DIRECTORY; started in any other way, the current
folder stays.
"""

import os
import runpy

if __name__ == "__main__":
    if os.environ.get("BUILD_WORKING_DIRECTORY"):
        os.chdir(os.environ["BUILD_WORKING_DIRECTORY"])
    runpy.run_module("{module}", run_name="__main__", alter_sys=True)
'''

def _launcher_impl(ctx):
    main = ctx.actions.declare_file(ctx.label.name + ".py")
    ctx.actions.write(main, _MAIN.format(module = ctx.attr.module))
    return [DefaultInfo(files = depset([main]))]

launcher = rule(
    implementation = _launcher_impl,
    doc = "Writes `<name>.py`, which runs a module by its dotted name.",
    attrs = {"module": attr.string(mandatory = True)},
)
