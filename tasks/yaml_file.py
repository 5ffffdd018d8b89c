"""A YAML file that a person wrote, read as one mapping; what is wrong in it is said in one line, with its line number.

Every settings file of the house (campaign, recipe, workload, policy, suite) comes through here. PyYAML raises more than
its own exceptions: a date that is none is a ValueError, `!!bool abc` a KeyError, nesting without end a RecursionError.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

Location = Sequence[str | int]

MOST_NESTED = 50
"""Deeper nesting than any settings file has; it also catches an alias that contains itself."""

REFUSALS = (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What PyYAML raises on a file that it does not understand."""


def read_yaml_mapping(path: Path, error: type[Exception]) -> tuple[yaml.Node, dict[str, Any]]:
    """A YAML file that holds one mapping: its node tree, for line numbers, and its content."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        for place, problem in _unreadable(tree) if tree is not None else ():
            raise error(f"{path}:{place.start_mark.line + 1}: {problem}")
        content = yaml.safe_load(text)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except REFUSALS as cause:
        mark = getattr(cause, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise error(f"{path}{line}: not valid YAML ({_why(cause)})") from None
    if tree is None or not isinstance(content, dict):
        raise error(
            f"{path}: expected `key: value` lines, found {'nothing' if tree is None else type(content).__name__}"
        )
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


def key_lines(node: yaml.Node) -> Iterator[tuple[str, int]]:
    """Every key in the node tree with its 1-based line, in the order of the file."""
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        if isinstance(node, yaml.MappingNode):
            yield str(child[0].value), child[0].start_mark.line + 1
            child = child[1]
        yield from key_lines(child)


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Why `key` is wrong and what was probably meant."""
    close = difflib.get_close_matches(key.rpartition(".")[2], known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _why(cause: BaseException) -> str:
    if isinstance(cause, RecursionError):
        return "nested too deeply"
    return str(getattr(cause, "problem", None) or str(cause).partition("\n")[0] or type(cause).__name__)


def _unreadable(node: yaml.Node, depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[yaml.Node, str]]:
    """Places that are YAML and yet no settings: keys that stand twice, text that no file name or message can hold."""
    seen = set() if seen is None else seen
    if depth > MOST_NESTED:
        yield node, "nested too deeply, or an alias that contains itself; write it out flat"
        return
    if isinstance(node, yaml.ScalarNode):
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
            yield node, f"{node.value!r} holds a character that is no text; remove it"
        return
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in keys:
                yield key, f"the key {key.value!r} stands twice; keep one"
            keys.add(str(key.value))
    children = [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else node.value
    for child in children:
        # An alias leads to a node that was looked at already, or to one that is still open and so contains itself.
        if id(child) not in seen:
            yield from _unreadable(child, depth + 1, seen)
            seen.add(id(child))
