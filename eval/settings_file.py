"""YAML files that people write (campaign, workload, policy, suite), checked against a pydantic model.

A mistake comes back as one line that names the file, the line, the field and the fix: pydantic knows what is wrong,
PyYAML's node tree knows on which line, and this file joins the two.
"""

from pathlib import Path
from typing import TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tasks.yaml_file import Location, line_of, read_yaml_mapping, unknown_key

Settings = TypeVar("Settings", bound=BaseModel)


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
