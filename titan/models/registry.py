"""The model families by the name of their configuration class, titan's own and those of plugins. Imports no family."""

from titan.core.registry import Registry

FAMILIES: Registry[type] = Registry("model family")
"""Configuration class by its name, which is how a run's config.json says what its section `model` is."""


def register_family(config_class: str) -> None:
    """Adds a family: the section `model` of a configuration may then be an instance of its configuration class.

    Args:
      config_class: "package.module:ClassName" of a frozen dataclass that derives from
        `titan.models.family.ModelConfig`. It is imported when it is first used, and its module should import neither
        torch nor JAX.

    Raises:
      RegistryError: another family has a class of that name.
    """
    FAMILIES.register(config_class.rpartition(":")[2], config_class)


register_family("titan.models.llama3.config:Llama3Config")
register_family("titan.models.qwen3.config:Qwen3Config")
register_family("titan.models.qwen3.config:Qwen3MoeConfig")
register_family("titan.models.muse_glimmer.config:MuseGlimmerConfig")
register_family("titan.models.flux.config:FluxConfig")
