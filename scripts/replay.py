"""Recompute a recorded step of a run from the checkpoint before it, and say whether the record is what comes out.

    python scripts/replay.py runs/grpo --step 812

It runs the script again from the newest whole checkpoint before the step (or from the start) to that step, with the
flags, ranks and threads of the run, in a folder of its own: OUTPUT_DIR/RUN-step_812. There it leaves what any run
leaves, a checkpoint of the step included; the recorded run stays as it is. On a CPU metrics and samples agree bit for
bit; the keys of the clock and of memory (time/, perf/) are not compared. Exit code 0 if all agrees, 1 if anything
differs, 2 for bad input.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from plumbing import command_line, flags
from plumbing.run import checkpoints, files, resume
from utils import ROOT, fail

CLOCK = ("time/", "perf/")  # metrics of the clock and of memory


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """Folder of the run."""
    step: flags.PositiveInt
    """Step to recompute; all steps from the checkpoint to it are compared."""
    output_dir: str = "replays"
    """Folder that will hold the recomputed run's folder."""
    log_samples: flags.NonNegativeInt = 0
    """Samples of each step that it writes, to see more of them than the run did; 0: as many."""


def read_facts(folder: str) -> dict:
    """Return the args.json of a run: flags, script, ranks, threads, versions, commit, history of its flags."""
    path = os.path.join(folder, "args.json")
    try:
        with open(path) as file:
            facts = json.load(file)
        names = ("args", "script", "ranks", "threads", "versions", "git_commit", "history")
        return {name: facts[name] for name in names}
    except (OSError, ValueError, TypeError, KeyError) as error:
        fail(f"{path}: is not what a run leaves ({error})")


def flags_of_step(facts: dict, step: int) -> dict:
    """Return the flags with which a step was taken: those of args.json, without what was changed after it."""
    values = dict(facts["args"])
    for entry in reversed(facts["history"]):
        if entry["after_step"] >= step:
            values |= {name: before for name, (before, _) in entry["changes"].items()}
    return values


def newest_checkpoint(folder: str, before: int) -> tuple[int, str | None]:
    """Return the step and the path of the newest whole checkpoint before a step; (0, None) if there is none."""
    for path in reversed(checkpoints.checkpoint_folders(folder)):
        step = int(path.rsplit("_", 1)[1])
        if step < before and not files.damage(path):
            return step, path
    return 0, None


def make_folder(folder: str, values: dict, facts: dict, recorded: dict[str, list], checkpoint: str, start: int) -> None:
    """Make the folder of a run that was killed right after step `start`."""
    os.makedirs(os.path.join(folder, "checkpoints"))
    link = os.path.join(folder, "checkpoints", os.path.basename(checkpoint))
    os.symlink(os.path.abspath(checkpoint), link)  # it is read only: --keep_checkpoints 0 removes none
    for name, rows in recorded.items():
        files.append(os.path.join(folder, name), [row for row in rows if row["step"] <= start])
    files.replace_file(os.path.join(folder, "args.json"), json.dumps({**facts, "args": values, "history": []}))


def run_script(facts: dict, config: str) -> int:
    """Run the script of a run with the flags of a file, over as many ranks and threads, and return its exit code."""
    ranks = facts["ranks"]
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*launch, os.path.join(ROOT, facts["script"]), "--config", config]
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))  # of a fork in another folder
    # Over another number of threads, sums would be rounded otherwise.
    environment = {**os.environ, "OMP_NUM_THREADS": str(facts["threads"]), "PYTHONPATH": path}
    return subprocess.run(command, env=environment).returncode


def differences(recorded: dict, now: dict) -> list[str]:
    """Return a line for each value of a recorded row that is another one now."""
    found = []
    for key, before in recorded.items():
        after = now.get(key)
        if key.startswith(CLOCK) or before == after:
            continue
        if isinstance(before, str) and isinstance(after, str):
            at = len(os.path.commonprefix([before, after]))
            found.append(f"{key} from character {at}: {before[at : at + 40]!r} recorded, {after[at : at + 40]!r} now")
        elif isinstance(before, dict) and isinstance(after, dict):  # the tokens of a sample
            found += [f"{key}: {line}" for line in differences(before, after)]
        elif isinstance(before, list) and isinstance(after, list):
            shorter = min(len(before), len(after))
            at = next((i for i in range(shorter) if before[i] != after[i]), shorter)
            found.append(f"{key} from entry {at}: {before[at : at + 4]} recorded, {after[at : at + 4]} now")
        else:
            found.append(f"{key}: {before} recorded, {after} now")
    return found


def compare(step: int, recorded: dict[str, list], now: dict[str, list]) -> list[str]:
    """Return a line for each difference in a step's metrics and samples."""
    found = []
    for name, rows in recorded.items():
        before, after = ([row for row in each if row["step"] == step] for each in (rows, now[name]))
        for number, row in enumerate(before, 1):
            place = f"{name}, sample {number}" if name == "samples.jsonl" else name
            match = after[number - 1] if number <= len(after) else {}
            found += [f"{place}: {line}" for line in differences(row, match)]
    return found


def main(args: Args) -> None:
    facts = read_facts(args.run)
    recorded = {name: resume.read_log(args.run, name) for name in ("metrics.jsonl", "samples.jsonl")}
    last = max((row["step"] for row in recorded["metrics.jsonl"]), default=0)
    if args.step > last:
        fail(f"--step {args.step}: {args.run} has recorded {last} steps")
    start, checkpoint = newest_checkpoint(args.run, args.step)
    name = f"{os.path.basename(os.path.abspath(args.run))}-step_{args.step}"
    folder = os.path.join(args.output_dir, name)
    if os.path.exists(folder):
        fail(f"--output_dir {args.output_dir}: {folder} exists; remove it, or take another --output_dir")
    values = flags_of_step(facts, args.step)
    values |= dict(run_name=name, output_dir=args.output_dir, resume=True, stop_after_step=args.step)
    values |= dict(save_every=0, keep_checkpoints=0, report=False, track="")
    values |= dict(log_samples=args.log_samples or values["log_samples"])
    values |= dict(push_to_hub=False, hub_model_id="", hub_private_repo=False)
    print(f"{args.run}: step {args.step} again, from {checkpoint or 'the start'}", flush=True)
    if checkpoint:
        make_folder(folder, values, facts, recorded, checkpoint, start)
    os.makedirs(args.output_dir, exist_ok=True)
    config = f"{folder}.json"
    files.replace_file(config, json.dumps(values))
    code = run_script(facts, config)
    os.remove(config)
    now = {name: resume.read_log(folder, name) for name in recorded}
    if not any(row["step"] == args.step for row in now["metrics.jsonl"]):
        print(f"{facts['script']} ended with exit code {code} before step {args.step}", file=sys.stderr)
        sys.exit(code or 1)

    before = {**facts["versions"], "commit": facts["git_commit"]}
    for name, version in {**resume.versions(), "commit": resume.git_commit()}.items():
        if version != before.get(name):
            print(f"{name}: {before.get(name, 'none')} recorded, {version} now")
    for step in range(start + 1, args.step + 1):
        found = compare(step, recorded, now)
        if found:
            print(f"step {step} is the first that differs:", *found, sep="\n  ")
            sys.exit(1)
    steps = f"step {args.step}" if start + 1 == args.step else f"steps {start + 1} to {args.step}"
    print(f"{steps}: metrics and samples agree bit for bit")


if __name__ == "__main__":
    main(command_line.parse_ungrouped(Args, description=__doc__))
