"""Builds a wheel from the libraries of one titan package.

An aspect walks the deps and notes each file and each dependency that crosses the
package's boundary, so the wheel's requirements are those that the BUILD files declare:
a titan package is known by the tag that titan_package puts on it, a third-party package by
the tag that @pypi puts on it.
"""

_REQUIREMENT = "titan-requirement="
_DISTRIBUTION = "titan-distribution="

_SourcesInfo = provider(
    doc = "What a Python target and its deps are made of.",
    fields = {
        "distributions": "depset of (package, 'name==version'): the titan packages reached",
        "edges": "depset of (package, package or requirement): direct dependencies",
        "files": "depset of File: sources and data",
        "requirement": "the third-party requirement that this target stands for, or None",
    },
)

def _tagged(tags, prefix):
    for tag in tags:
        if tag.startswith(prefix):
            return tag[len(prefix):]
    return None

def _sources_aspect_impl(target, ctx):
    tags = getattr(ctx.rule.attr, "tags", [])
    requirement = _tagged(tags, _REQUIREMENT)
    if requirement:
        return [_SourcesInfo(
            distributions = depset(),
            edges = depset(),
            files = depset(),
            requirement = requirement,
        )]
    package = target.label.package
    deps = [dep for dep in getattr(ctx.rule.attr, "deps", []) if _SourcesInfo in dep]
    distribution = _tagged(tags, _DISTRIBUTION)
    return [_SourcesInfo(
        distributions = depset(
            [(package, distribution)] if distribution else [],
            transitive = [dep[_SourcesInfo].distributions for dep in deps],
        ),
        edges = depset(
            [(package, dep[_SourcesInfo].requirement or dep.label.package) for dep in deps],
            transitive = [dep[_SourcesInfo].edges for dep in deps],
        ),
        files = depset(
            getattr(ctx.rule.files, "srcs", []) + getattr(ctx.rule.files, "data", []),
            transitive = [dep[_SourcesInfo].files for dep in deps],
        ),
        requirement = None,
    )]

_sources_aspect = aspect(
    implementation = _sources_aspect_impl,
    attr_aspects = ["deps"],
)

def _is_within(package, room):
    return package == room or package.startswith(room + "/")

def _path_in_repository(file):
    if file.short_path.startswith("../"):
        return "/".join(file.short_path.split("/")[2:])
    return file.short_path

def _wheel_impl(ctx):
    room = ctx.label.package
    rooms = {}
    requirements = {}
    files = {}
    for dep in ctx.attr.deps:
        info = dep[_SourcesInfo]
        for package, distribution in info.distributions.to_list():
            rooms[package] = distribution
        for package, used in info.edges.to_list():
            if not _is_within(package, room) or _is_within(used, room):
                continue
            if "=" in used:
                requirements[used] = None
                continue
            owners = [other for other in rooms if _is_within(used, other)]
            if not owners:
                fail("%s depends on //%s, which is in no titan_package" % (package, used))

            # "titan" is the parent of every titan package: the longest name owns the package.
            owner = sorted(owners, key = len)[-1]
            requirements[rooms[owner].replace("==", "~=")] = None
        for file in info.files.to_list():
            if file.owner and _is_within(file.owner.package, room) and not file.is_directory:
                files[file] = None

    wheel = ctx.actions.declare_file("%s-%s-py3-none-any.whl" % (
        ctx.attr.distribution.replace("-", "_"),
        ctx.attr.version,
    ))
    args = ctx.actions.args()
    args.add("--distribution", ctx.attr.distribution)
    args.add("--version", ctx.attr.version)
    args.add("--output", wheel)
    args.add("--summary", ctx.attr.summary)
    args.add("--license", ctx.file._license)
    args.add_all(sorted(requirements.keys()), before_each = "--requires")
    args.add_all(["%s = %s" % item for item in ctx.attr.scripts.items()], before_each = "--script")
    for file in files:
        args.add("--file")
        args.add(_path_in_repository(file))
        args.add(file)
    ctx.actions.run(
        executable = ctx.executable._writer,
        arguments = [args],
        inputs = files.keys() + [ctx.file._license],
        outputs = [wheel],
        mnemonic = "PyWheel",
        progress_message = "Writing wheel %s" % wheel.short_path,
    )
    return [DefaultInfo(files = depset([wheel]), runfiles = ctx.runfiles(files = [wheel]))]

wheel = rule(
    implementation = _wheel_impl,
    doc = "A wheel of the files that the deps have below this package.",
    attrs = {
        "deps": attr.label_list(mandatory = True, aspects = [_sources_aspect]),
        "distribution": attr.string(mandatory = True, doc = "The name that pip knows the wheel by."),
        "scripts": attr.string_dict(doc = "Console scripts: name to package.module:function."),
        "summary": attr.string(mandatory = True, doc = "One line on what it is."),
        "version": attr.string(mandatory = True),
        "_license": attr.label(
            allow_single_file = True,
            default = "//:LICENSE",
        ),
        "_writer": attr.label(
            default = "//tools/python:write_wheel",
            executable = True,
            cfg = "exec",
        ),
    },
)
