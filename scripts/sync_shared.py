"""Keep equal what the algorithm scripts share: each holds its own copy, so that it can be read
alone.

    python scripts/sync_shared.py grpo.py                   copy from grpo.py into the other scripts
    python scripts/sync_shared.py grpo.py my_fork.py        print what differs in a fork, which stays as it is
    python scripts/sync_shared.py grpo.py my_fork.py --only generate collect     copy these parts into a fork

Shared are top-level functions and classes of the same name, and fields of `Args` of the same name
(type and docstring; the default is the script's own). Names that a file lacks after that are found
by `ruff check --select F821`; tests/test_drift.py fails where two scripts differ.
"""

import ast
import itertools
import re
from pathlib import Path

import repository  # noqa: F401
import tyro

from plumbing.run.command import report_errors
from utils import as_user_error

SCRIPTS = ("grpo.py", "rloo.py", "ppo.py", "reward_model.py", "distill.py")
MAY_DIFFER = (  # what has one name and may differ
    "Args",  # each algorithm has its own flags; fields are compared one by one
    "main",  # the algorithm itself
    # rloo.py adds ReMax's greedy responses, ppo.py statistics of scores, distill.py responses of
    # the rows.
    "collect",
    "final_scores",  # ppo.py normalizes and clips scores
    # Supervised rows of grpo.py and ppo.py have a temperature of 1, distill.py's student a teacher.
    "Policy",
    "Args.clip_low",  # its default depends on grpo's --loss
    "Args.clip_high",  # its default depends on grpo's --loss
    "Args.system_prompt",  # grpo.py, rloo.py and ppo.py: by default that of the source of --reward
    "Args.ref_refresh_every",  # distill.py refreshes its teacher
    "Args.turn_rewards",  # grpo.py makes advantages of them, rloo.py and ppo.py rewards of tokens
    "Args.loss_aggregation",  # its default depends on grpo's --loss and on rloo's --ratio
)


def parts(source: str) -> dict[str, tuple[list[str], str]]:
    """Return what a script may share, {name: (what has to be equal, its lines)}: functions,
    classes, fields of Args.

    Layout, comments and the default of a field need not be equal.
    """
    nodes = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = [*node.decorator_list, node]
            for field, text in itertools.pairwise(node.body) if node.name == "Args" else ():
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    nodes[f"Args.{field.target.id}"] = [field, text]
    lines = source.splitlines(keepends=True)
    return {
        name: (
            [ast.dump(getattr(node, "annotation", node)) for node in part],
            "".join(lines[part[0].lineno - 1 : part[-1].end_lineno]),
        )
        for name, part in nodes.items()
        if name not in MAY_DIFFER
    }


def with_default(ours: str, theirs: str) -> str:
    """Return the lines of a field with the default that stands in those of another one."""
    default = r'(?s) = .*?(?=\n    """)'
    return ours.replace(re.search(default, ours)[0], re.search(default, theirs)[0], 1)


def main(source: Path, targets: tuple[Path, ...] = (), /, only: tuple[str, ...] = ()) -> None:
    """Copy what is shared from a script into others, and print what was copied, or differs.

    Args:
        source: script to copy from.
        targets: files to copy into; default: the other scripts.
        only: copy these parts and no others. Without it, only the scripts beside the source change.
    """
    scripts = [source.resolve().with_name(name) for name in SCRIPTS if name != source.name]
    for path in targets or scripts:
        copies = only or path.resolve() in scripts
        with as_user_error(f"{source} and {path}"):
            shared = parts(source.read_text())
            text = path.read_text()
            found = parts(text)
        for name, (equal, theirs) in found.items():
            if name in shared and name in (only or shared) and shared[name][0] != equal:
                print(f"{path.name}: {name} {'copied' if copies else 'differs'} from {source.name}")
                ours = shared[name][1]
                if name.startswith("Args."):
                    ours = with_default(ours, theirs)
                text = text.replace(theirs, ours)
        if copies:
            path.write_text(text)


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main, description=__doc__)
