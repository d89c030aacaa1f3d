"""YAML of other programs, read without building objects; PyYAML is optional."""

from typing import Any

from farpipe.errors import InputError


def yaml_documents(text: str, source: str) -> list[Any]:
    """Documents of a YAML file; a tag of a Python class stands for the table behind it, and nothing is built."""
    try:
        import yaml
    except ImportError:
        raise InputError(f"{source}: reading YAML needs the package PyYAML: pip install 'farpipe[interop]'") from None

    class Loader(yaml.SafeLoader):
        pass

    def plain(loader: Any, _suffix: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        return loader.construct_sequence(node) if isinstance(node, yaml.SequenceNode) else node.value

    Loader.add_multi_constructor("", plain)
    try:
        return [*yaml.load_all(text, Loader)]
    except yaml.YAMLError as error:
        raise InputError(f"{source}: not YAML: {error}") from None
