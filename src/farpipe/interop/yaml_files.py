"""YAML of other programs, read without building objects; PyYAML is optional."""

from typing import Any

from farpipe.core.errors import InputError


def yaml_documents(text: str, source: str) -> list[Any]:
    """Documents of a YAML file; a tag of a Python class stands for the table behind it, and nothing is built."""
    try:
        import yaml
    except ImportError:
        raise InputError(f"{source}: reading YAML needs the package PyYAML: pip install 'farpipe[interop]'") from None

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """A table; InputError for a key that is there twice, of which PyYAML would take the last one."""
            seen: dict[str, int] = {}
            for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]:
                line = key.start_mark.line + 1
                if key.value in seen:
                    raise InputError(f"{source}: {key.value} is there twice, on lines {seen[key.value]} and {line}")
                seen[key.value] = line
            return dict(super().construct_mapping(node, deep))

    def plain(loader: Any, _suffix: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        return loader.construct_sequence(node) if isinstance(node, yaml.SequenceNode) else node.value

    Loader.add_multi_constructor("", plain)
    try:
        return [*yaml.load_all(text, Loader)]
    except yaml.YAMLError as error:
        raise InputError(f"{source}: not YAML: {error}") from None
