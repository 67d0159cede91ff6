"""Flags from a file: the values of --config, as the words of a command line that they stand for. Imports utils only."""

import dataclasses
import difflib
import json

from utils import fail, first_line


def config_words(path: str, cls: type) -> list[str]:
    """Return what a configuration file says as words of a command line, ["--seed=5", "--reward", "math", "format"].

    So its values are read and checked as those of flags are.

    Args:
        path: a .json or .yaml file of {flag: value}, or the args.json of a run.
        cls: the dataclass whose fields are the flags.
    """
    fields, words = {field.name: field for field in dataclasses.fields(cls)}, []
    for name, value in read_config(path).items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, 1)
            fail(f"--config {path}: there is no flag {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        default = fields[name].default
        if value is None and default is not None:
            fail(f"--config {path}: {name} has no value")
        if isinstance(default, bool):
            if not isinstance(value, bool):
                fail(f"--config {path}: {name} takes true or false, not {value!r}")
            words.append(f"--{'' if value else 'no-'}{name}")
        elif value is not None:
            several = isinstance(value, list) and isinstance(default, tuple)
            for part in value if several else [value]:
                if part is None or isinstance(part, (bool, list, dict)) or not is_text(str(part)):
                    fail(f"--config {path}: {name} takes text or numbers, not {part!r}")
            words += [f"--{name}", *map(str, value)] if several else [f"--{name}={value}"]
    return words


def is_text(word: str) -> bool:
    """Return whether a word can be a name of a file, or be written to one: it has neither NUL nor half a character."""
    return not any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in word)


def read_config(path: str) -> dict:
    """Return {flag: value} of a configuration file, or of a run's args.json."""
    try:
        with open(path) as file:
            if path.endswith(".json"):
                content = json.load(file)
            else:
                import yaml

                content = yaml.safe_load(file)
    except OSError as error:
        fail(f"--config {path}: could not be read ({first_line(error)})")
    except Exception as error:  # not JSON, not YAML, not text
        fail(f"--config {path}: is no valid file of its kind ({first_line(error)})")
    if isinstance(content, dict) and isinstance(content.get("args"), dict):  # what a run leaves
        content = content["args"]
    if not isinstance(content, dict):
        fail(f"--config {path}: has to hold flags and their values, {{flag: value}}")
    return content
