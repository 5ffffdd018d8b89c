"""YAML files that people write (campaign, workload, policy, suite), checked against a pydantic model.

A mistake comes back as one line that names the file, the line, the field and the fix: pydantic knows what is wrong,
PyYAML's node tree knows on which line, and this file joins the two.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(path: Path, model: type[Settings], error: type[Exception]) -> Settings:
    """The settings in a YAML file.

    Args:
        path: the file.
        model: the pydantic model that describes it; `extra="forbid"` makes unknown keys errors.
        error: what to raise, with one line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror}); check the path") from cause
    except UnicodeDecodeError as cause:
        raise error(f"{path}: not UTF-8 text; save it as UTF-8") from cause
    except yaml.YAMLError as cause:
        mark = getattr(cause, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise error(f"{path}{line}: not valid YAML ({getattr(cause, 'problem', None) or cause})") from cause
    if not isinstance(content, dict):
        raise error(f"{path}: expected `key: value` lines, found {type(content).__name__}")
    try:
        return model.model_validate(content)
    except ValidationError as cause:
        raise error(_one_line(path, tree, model, cause.errors()[0])) from cause


def _one_line(path: Path, tree: yaml.Node, model: type[BaseModel], detail: ErrorDetails) -> str:
    location = detail["loc"]
    where = f"{path}:{_line_of(tree, location)}"
    field = ".".join(str(part) for part in location) or "file"
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(location[-1]), _known_keys(model, location[:-1]), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(_known_keys(model, location[:-1]))}"
        return f"{where}: unknown key {field!r}{hint}"
    if detail["type"] == "missing":
        return f"{where}: the key {field!r} is missing; add it"
    message = detail["msg"].removeprefix("Value error, ")
    given = "" if isinstance(detail["input"], dict) else f", got {detail['input']!r}"
    return f"{where}: {field}: {message[0].lower()}{message[1:]}{given}"


def _line_of(node: yaml.Node, location: Iterable[str | int]) -> int:
    """The 1-based line of the deepest part of `location` that exists in the file."""
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


def _known_keys(model: type[BaseModel], location: Iterable[str | int]) -> list[str]:
    """The keys that the model allows at `location`, found by walking its fields' annotations."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None:
            break
        field = current.model_fields.get(str(part))
        if field is not None:
            current = _model_within(field.annotation)
    return sorted(current.model_fields) if current is not None else []


def _model_within(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_within(argument)
        if found is not None:
            return found
    return None
