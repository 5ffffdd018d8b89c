"""YAML files that people write (campaign, workload, policy, suite), checked against a pydantic model.

A mistake comes back as one line that names the file, the line, the field and the fix: pydantic knows what is wrong,
PyYAML's node tree knows on which line, and this file joins the two.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Settings = TypeVar("Settings", bound=BaseModel)
Location = Sequence[str | int]


def read_settings(path: Path, model: type[Settings], error: type[Exception]) -> Settings:
    """The settings in a YAML file.

    Args:
        path: the file.
        model: the pydantic model that describes it; `extra="forbid"` makes unknown keys errors.
        error: what to raise, with one line.
    """
    tree, content = read_yaml_mapping(path, error)
    try:
        return model.model_validate(content)
    except ValidationError as cause:
        # An unknown key explains the missing one that it was meant to be, so it is told first.
        details = sorted(cause.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        raise error(_one_line(path, tree, model, details[0])) from None


def read_yaml_mapping(path: Path, error: type[Exception]) -> tuple[yaml.Node, dict[str, Any]]:
    """A YAML file that holds one mapping: its node tree, for line numbers, and its content."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except (yaml.YAMLError, ValueError) as cause:
        mark = getattr(cause, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        why = getattr(cause, "problem", None) or str(cause).splitlines()[0]
        raise error(f"{path}{line}: not valid YAML ({why})") from None
    if tree is None or not isinstance(content, dict):
        raise error(
            f"{path}: expected `key: value` lines, found {'nothing' if tree is None else type(content).__name__}"
        )
    for key in _repeated_keys(tree):
        raise error(f"{path}:{key.start_mark.line + 1}: the key {key.value!r} stands twice; keep one")
    return tree, content


def line_of(node: yaml.Node, location: Location) -> int:
    """The 1-based line of the deepest part of `location` that the node tree holds."""
    line = node.start_mark.line + 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if found is None:
                continue
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Why `key` is wrong and what was probably meant."""
    close = difflib.get_close_matches(key.rpartition(".")[2], known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _one_line(path: Path, tree: yaml.Node, model: type[BaseModel], detail: ErrorDetails) -> str:
    location = detail["loc"]
    where = f"{path}:{line_of(tree, location)}"
    field = ".".join(str(part) for part in location) or "file"
    if detail["type"] == "extra_forbidden":
        return f"{where}: {unknown_key(field, _known_keys(model, location[:-1]))}"
    if detail["type"] == "missing":
        return f"{where}: the key {field!r} is missing; add it"
    message = detail["msg"].removeprefix("Value error, ")
    given = detail["input"]
    said = f", got {given!r}" if isinstance(given, str | int | float) and repr(given) not in message else ""
    return f"{where}: {field}: {message[0].lower()}{message[1:]}{said}"


def _repeated_keys(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                yield key
            seen.add(str(key.value))
            yield from _repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item)


def _known_keys(model: type[BaseModel], location: Location) -> list[str]:
    """The keys that the model allows at `location`, found by walking its fields' annotations."""
    current: object = model
    for part in location:
        here = _model_within(current)
        if here is None:
            return []
        field = here.model_fields.get(str(part))
        # A part that is no field is the key of a dict, the index of a list or the tag of a union on the way.
        current = field.annotation if field is not None else here
    found = _model_within(current)
    return list(found.model_fields) if found is not None else []


def _model_within(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _model_within(argument))), None)
