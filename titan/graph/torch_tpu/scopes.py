"""Where the instructions of TorchTPU's StableHLO come from: region and module, as JAX would name them."""

import re

MARK = "scope:"
"""The start of the file name that a scope's ops are called from: TorchTPU notes in what code an op was called."""

_DEFINITION = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_NAMED = re.compile(r'"([^"]*)"(?:\(.*\))?$')
_REFERENCE = re.compile(r"#loc\d+")


def name_scopes(text: str) -> str:
    """The module with each op's location as JAX would have it, "forward/layers.0.attention/mm", and no source lines."""
    bodies = dict(_DEFINITION.findall(text))
    scopes: dict[str, str] = {}

    def scope(label: str) -> str:
        if label not in scopes:
            marked = re.match(rf'"{MARK}([^"]*)":', bodies[label])
            inner = (scope(other) for other in _REFERENCE.findall(bodies[label]))
            scopes[label] = marked[1] if marked else next(filter(None, inner), "")
        return scopes[label]

    def renamed(match: re.Match) -> str:
        named = _NAMED.fullmatch(match[2])
        if not named:
            return f"{match[1]} = loc(unknown)"
        name = "/".join(filter(None, (scope(match[1]), named[1].rpartition("/")[2])))
        return f'{match[1]} = loc("{name}")'

    return _DEFINITION.sub(renamed, text)
