"""A run directory that was damaged: the same command ends in one clear line, or continues to the same weights."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Row, in_time, rows
from safetensors.torch import load_file, save_file
from training_words import words

from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.run.files.checkpoints import check_checkpoint, checkpoint_step, last_checkpoint

Damage = Callable[[Path], Any]
LAST, FIRST = "checkpoint-2", "checkpoint-1"
SAME = "the same weights"


REWARD = """
SCALE = 1

def unused():
    pass

def scaled(n):
    return n

def score(completion_ids, **_):
    return [float(SCALE * scaled(sum(i) % 7)) for i in completion_ids]
"""


@pytest.fixture(scope="module")
def whole(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps."""
    home = tmp_path_factory.mktemp("whole")
    (home / "r.py").write_text(REWARD)
    assert main(command(home, untied_dir)) == 0
    return home


def command(home: Path, model: str) -> list[str]:
    changes = {"max_steps": "3", "save_strategy": "steps", "save_steps": "1", "learning_rate": "1e-3"}
    return words(home, model, reward_funcs=f"{home / 'r.py'}:score", eval_size="2", **changes)


@pytest.fixture
def interrupted(whole: Path, tmp_path: Path) -> Path:
    """The directory as it was after a kill in the third step."""
    run = tmp_path / "home" / "run"
    shutil.copytree(whole, run.parent)
    shutil.rmtree(run / "checkpoint-3")
    for name in ("summary.json", "report.html", "after.json"):
        (run / name).unlink()
    return run


def curve(run: Path) -> list[dict[str, Any]]:
    """The metrics without the seconds."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            k: v
            for k, v in line.items()
            if not k.startswith(("time/", "push/", "checked/")) and k != "step_time"
        }
        for line in lines
    ]


def pipe(name: str) -> Damage:
    return lambda run: ((run / name).unlink(missing_ok=True), os.mkfifo(run / name))


def gone(name: str) -> Damage:
    return lambda run: shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


def filled(name: str, content: bytes | str = b"") -> Damage:
    return lambda run: (run / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(name: str, share: float = 0.5) -> Damage:
    def damage(run: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: int(len(content) * share)])

    return damage


def folder(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return damage


def lines(name: str, change: Callable[[list[str]], list[str]]) -> Damage:
    def damage(run: Path) -> None:
        found = (run / name).read_text().splitlines()
        (run / name).write_text("".join(f"{line}\n" for line in change(found)))

    return damage


def flipped(name: str) -> Damage:
    """One byte in the middle of the first line is no text any more."""

    def damage(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[content.index(b"\n") // 2] = 0xFF
        (run / name).write_bytes(content)

    return damage


def evaluation(part: str, key: Any, value: Any) -> Damage:
    def damage(run: Path) -> None:
        found = json.loads((run / "before.json").read_text())
        found[part][key] = value
        (run / "before.json").write_text(json.dumps(found, indent=1) + "\n")

    return damage


def state(**changes: Any) -> Damage:
    def damage(run: Path) -> None:
        path = run / LAST / "trainer_state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(run: Path) -> None:
        path = run / LAST / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path, {"format": "pt"})

    return damage


def pickled(name: str, what: Any = print) -> Damage:
    return lambda run: (run / name).write_bytes(pickle.dumps(what))


def without(name: str) -> Callable[[dict], Any]:
    return lambda found: found.pop(name)


DEEP = "[" * 100_000
GARBAGE = b"\x80\x04\x95\xff\xfe\x00garbage"
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def from_first(name: str) -> Damage:
    return lambda run: shutil.copy(run / FIRST / name, run / LAST / name)


def reward(old: str, new: str) -> Damage:
    path = Path("r.py")
    return lambda run: (run.parent / path).write_text((run.parent / path).read_text().replace(old, new))


def data_row(run: Path) -> None:
    path = run.parent / "good.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first.replace("a", "e"), *others]) + "\n")


def last(name: str) -> str:
    return f"{LAST}/{name}"


def both(damage: Callable[[str], Damage], name: str) -> Damage:
    """A file of the run, and its copy in the last checkpoint."""

    def damages(run: Path) -> None:
        damage(name)(run)
        damage(last(name))(run)

    return damages


FILES = [
    # The settings.
    Row("run.json gone", gone("run.json"), SAME, 0),
    Row("run.json empty", filled("run.json"), SAME, 0),
    Row("run.json cut", cut("run.json"), SAME, 0),
    Row("run.json binary", filled("run.json", GARBAGE), SAME, 0),
    Row("run.json a list", filled("run.json", "[]"), SAME, 0),
    Row("run.json and its copy gone", both(gone, "run.json"), "checkpoints of something else"),
    Row(
        "run.json and its copy cut",
        both(cut, "run.json"),
        "run.json cannot be read.*nor can its copy in checkpoint-2",
    ),
    Row("run.json a folder", folder("run.json"), "run.json is a directory"),
    Row("run.json a pipe", pipe("run.json"), "run.json is neither a file nor a directory"),
    Row("run.json nested deeply", filled("run.json", DEEP), SAME, 0),
    Row(
        "run.json and its copy nested deeply",
        both(lambda name: filled(name, DEEP), "run.json"),
        "run.json cannot be read.*nested too deeply.*nor can its copy in checkpoint-2",
    ),
    Row("run.json of another run", filled("run.json", '{"seed": 7}'), "other settings"),
    # The receipt.
    Row("receipt gone", gone("receipt.jsonl"), "receipt.jsonl.* cannot be read"),
    Row("receipt empty", filled("receipt.jsonl"), "receipt.jsonl.* is empty"),
    Row("receipt binary", filled("receipt.jsonl", GARBAGE), "does not reach checkpoint-2"),
    Row(
        "receipt with a byte that is no text",
        flipped("receipt.jsonl"),
        "does not fit the chain|does not reach",
    ),
    Row("receipt a folder", folder("receipt.jsonl"), "receipt.jsonl.* cannot be read"),
    Row("receipt a pipe", pipe("receipt.jsonl"), "receipt.jsonl.* cannot be read"),
    Row(
        "receipt of a line nested deeply", filled("receipt.jsonl", f"{DEEP}\n"), "does not reach|not an entry"
    ),
    Row(
        "receipt without its last lines",
        lines("receipt.jsonl", lambda found: found[:2]),
        "does not reach checkpoint-2",
    ),
    Row(
        "receipt without its first line",
        lines("receipt.jsonl", lambda found: found[1:]),
        "does not fit the chain",
    ),
    Row(
        "receipt with an edited line",
        lines("receipt.jsonl", lambda found: [found[0], found[1].replace("0.", "1.", 1), *found[2:]]),
        "does not fit the chain",
    ),
    Row(
        "receipt with lines exchanged",
        lines("receipt.jsonl", lambda found: [found[0], found[2], found[1], *found[3:]]),
        "does not fit the chain",
    ),
    Row(
        "receipt with a line twice",
        lines("receipt.jsonl", lambda found: [found[0], found[1], found[1], *found[2:]]),
        "does not fit the chain",
    ),
    Row("receipt cut within its first half", cut("receipt.jsonl", 0.4), "does not reach"),
    Row("receipt cut within its last line", cut("receipt.jsonl", 0.98), SAME, 0),
    Row("receipt of other lines", filled("receipt.jsonl", "hello\n"), "does not reach|not an entry"),
    Row("receipt of a list", filled("receipt.jsonl", "[1]\n"), "does not reach"),
    Row("digests gone", gone(last("digests.json")), "digests.json of checkpoint-2 cannot be read"),
    Row("digests empty", filled(last("digests.json")), "digests.json of checkpoint-2 was changed"),
    Row(
        "digests of another checkpoint",
        from_first("digests.json"),
        "digests.json of checkpoint-2 was changed",
    ),
    Row(
        "digests binary", filled(last("digests.json"), GARBAGE), "digests.json of checkpoint-2 cannot be read"
    ),
    # The logs.
    Row("metrics gone", gone("metrics.jsonl"), SAME, 0),
    Row("metrics empty", filled("metrics.jsonl"), SAME, 0),
    Row("metrics binary", filled("metrics.jsonl", GARBAGE), SAME, 0),
    Row("metrics cut", cut("metrics.jsonl"), SAME, 0),
    Row("metrics cut within the last line", cut("metrics.jsonl", 0.98), SAME, 0),
    Row("metrics of a list", filled("metrics.jsonl", "[1]\n"), SAME, 0),
    Row("metrics a folder", folder("metrics.jsonl"), SAME, 0),
    Row("metrics with a byte that is no text", flipped("metrics.jsonl"), SAME, 0),
    Row(
        "metrics with another loss",
        lines(
            "metrics.jsonl", lambda found: [found[0].replace('"loss": ', '"loss": 3, "was": '), *found[1:]]
        ),
        SAME,
        0,
    ),
    Row("metrics with a line twice", lines("metrics.jsonl", lambda found: [found[0], *found]), SAME, 0),
    Row("metrics with lines exchanged", lines("metrics.jsonl", lambda found: found[::-1]), SAME, 0),
    Row("shown rollouts with a byte that is no text", flipped("shown_rollouts.jsonl"), SAME, 0),
    Row("shown rollouts a folder", folder("shown_rollouts.jsonl"), SAME, 0),
    Row("about a folder", folder("about.json"), SAME, 0),
    Row("the report a folder", folder("report.html"), SAME, 0),
    Row("the end a folder", folder("end.json"), SAME, 0),
    Row("the libraries' log gone", gone("libraries.log"), SAME, 0),
    # The evaluations and the end.
    Row("first evaluation gone", gone("before.json"), SAME, 0),
    Row("first evaluation empty", filled("before.json"), SAME, 0),
    Row("first evaluation cut", cut("before.json"), SAME, 0),
    Row("first evaluation of a list", filled("before.json", "[]"), SAME, 0),
    Row("first evaluation a folder", folder("before.json"), SAME, 0),
    Row("first evaluation with another reward", evaluation("metrics", "eval_reward", -50.0), SAME, 0),
    Row("first evaluation with other completions", evaluation("rollouts", 0, {}), SAME, 0),
    Row("summary empty", filled("summary.json"), SAME, 0),
    Row("summary binary", filled("summary.json", GARBAGE), SAME, 0),
    Row("summary a list", filled("summary.json", "[]"), SAME, 0),
    Row("summary a folder", folder("summary.json"), "summary.json cannot be read"),
    Row("summary a pipe", pipe("summary.json"), "summary.json cannot be read"),
    Row("summary nested deeply", filled("summary.json", DEEP), SAME, 0),
    Row("report of an earlier end", filled("report.html", "old"), SAME, 0),
    Row("last evaluation empty", filled("after.json"), SAME, 0),
    # The trainer's state.
    Row("state gone", gone(last("trainer_state.json")), SAME, 0),
    Row("state empty", filled(last("trainer_state.json")), SAME, 0),
    Row("state cut", cut(last("trainer_state.json")), SAME, 0),
    Row("state binary", filled(last("trainer_state.json"), GARBAGE), SAME, 0),
    Row("state a list", filled(last("trainer_state.json"), "[]"), SAME, 0),
    Row("state of another step", state(global_step=99), SAME, 0),
    Row("state without a step", state(global_step=None), SAME, 0),
    Row(
        "every state empty",
        lambda run: [filled(f"{name}/trainer_state.json")(run) for name in (FIRST, LAST)],
        "no checkpoint in .* can be read",
    ),
    Row("state with other rewards", state(log_history=[]), "trainer_state.json of checkpoint-2 was changed"),
    Row(
        "state of another batch size",
        state(train_batch_size=99),
        "trainer_state.json of checkpoint-2 was changed",
    ),
    # Everything else in a checkpoint.
    *(
        row
        for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json")
        for row in (
            Row(f"{name} gone", gone(last(name)), f"checkpoint-2 has no {name}"),
            Row(f"{name} empty", filled(last(name)), f"{name} of checkpoint-2 was changed"),
            Row(f"{name} cut", cut(last(name)), f"{name} of checkpoint-2 was changed"),
            Row(f"{name} a folder", folder(last(name)), f"checkpoint-2 has no {name}"),
        )
    ),
    *(
        Row(f"{name} of another checkpoint", from_first(name), f"{name} of checkpoint-2 was changed")
        for name in ("model.safetensors", "optimizer.pt", "scheduler.pt")
    ),
    Row(
        "weights without a tensor", tensors(without(WEIGHT)), "model.safetensors of checkpoint-2 was changed"
    ),
    Row("weights × 1.01", tensors(lambda found: found[WEIGHT].mul_(1.01)), rf"\(tensor {WEIGHT}\)"),
    Row(
        "weights in another format",
        filled(last("pytorch_model.bin"), "x"),
        "pytorch_model.bin in checkpoint-2 does not belong to",
    ),
    Row("optimizer a pickle", pickled(last("optimizer.pt")), "optimizer.pt of checkpoint-2 was changed"),
    Row("arguments gone", gone(last("training_args.bin")), "checkpoint-2 has no training_args.bin"),
    Row("the tokenizer gone", gone(last("tokenizer.json")), "checkpoint-2 has no tokenizer.json"),
    Row("notes of the user's", filled(last("notes.txt"), "good run"), SAME, 0),
    # The inputs.
    Row("a row of the data changed", data_row, "these have changed since: train data"),
    Row("the reward changed", reward("sum(i) % 7", "sum(i) % 5"), "these have changed since: reward score"),
    Row(
        "a function that the reward calls changed",
        reward("return n", "return n + 1"),
        "have changed since: reward score",
    ),
    Row(
        "a number that the reward uses changed",
        reward("SCALE = 1", "SCALE = 2"),
        "have changed since: reward score",
    ),
    Row(
        "another function in the reward's file",
        reward("def unused", "def renamed"),
        "have changed since: your file r.py",
    ),
    # What lies beside it.
    Row("last checkpoint empty", lambda run: (shutil.rmtree(run / LAST), (run / LAST).mkdir()), SAME, 0),
    Row("last checkpoint gone", gone(LAST), SAME, 0),
    Row("first checkpoint gone", gone(FIRST), SAME, 0),
    Row("every checkpoint gone", lambda run: [shutil.rmtree(run / name) for name in (FIRST, LAST)], SAME, 0),
    Row("a file named as a checkpoint", filled("checkpoint-9", "x"), SAME, 0),
    Row("a checkpoint without a number", lambda run: (run / "checkpoint-best").mkdir(), SAME, 0),
    Row("a link to nowhere", lambda run: (run / "checkpoint-8").symlink_to("/nowhere/at/all"), SAME, 0),
    Row("the lock a folder", folder(".lock"), "cannot be used"),
    Row("everything gone", lambda run: shutil.rmtree(run), SAME, 0),
    Row(
        "a file in the place of the directory",
        lambda run: (shutil.rmtree(run), run.write_text("x")),
        "cannot be used|Not a directory",
    ),
]


def holds_for_now(path: Path, text: str, request: pytest.FixtureRequest) -> None:
    """Give a file another content until the end of the test."""
    before = path.read_text(encoding="utf-8")
    if text != before:
        path.write_text(text, encoding="utf-8")
        request.addfinalizer(lambda: path.write_text(before, encoding="utf-8"))


# Rows whose damage takes the path of another row, and which train to the end.
REPEATED = frozenset({
    "metrics empty", "metrics binary", "metrics of a list", "metrics with lines exchanged", "first evaluation cut",
    "first evaluation of a list", "first evaluation a folder", "summary binary", "summary a list", "state empty",
    "state binary",
    "state a list", "the end a folder", "about a folder", "shown rollouts a folder", "state without a step",
    "metrics with a byte that is no text", "a checkpoint without a number", "run.json empty", "run.json binary",
    "run.json a list", "run.json nested deeply", "summary nested deeply",
})  # fmt: skip


@rows(*FILES, release=REPEATED)
def test_a_damaged_run_is_one_line_or_the_same_run(
    row: Row,
    whole: Path,
    interrupted: Path,
    untied_dir: str,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    row.given(interrupted)
    before = {str(path) for path in interrupted.rglob("*")}
    capfd.readouterr()
    # The files of the data and the rewards keep their names, which are settings of the run. Their content may change.
    for name in ("r.py", "good.jsonl"):
        holds_for_now(whole / name, (interrupted.parent / name).read_text(), request)
    command_line = [
        word.replace(str(interrupted.parent / "r.py"), str(whole / "r.py"))
        for word in command(interrupted.parent, untied_dir)
    ]
    data = str(interrupted.parent / "good.jsonl")
    command_line = [word.replace(data, str(whole / "good.jsonl")) for word in command_line]
    with in_time():
        code = main(command_line)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    assert code == row.code, (code, err)
    if row.code:
        said = [line for line in err.splitlines() if line.startswith("lockstep: ")]
        assert len(said) == 1, err
        assert re.search(row.says, said[0]), said[0]
        assert before <= {str(path) for path in interrupted.rglob("*")}, "something was removed"
        return
    ends = [load_file(run / "checkpoint-3" / "model.safetensors") for run in (whole / "run", interrupted)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert curve(interrupted) == curve(whole / "run")
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole / "run", interrupted)]
    assert summaries[0]["eval_reward_before"] == summaries[1]["eval_reward_before"]
    assert not (interrupted.parent / "run-2").exists(), "it started over beside the run"


def named_command(said: str) -> list[str]:
    """The shell command at the end of a message."""
    found = re.search(r"\b((?:mv|cp) .*)$", said)
    assert found, said
    return shlex.split(found[1])


@pytest.mark.parametrize(
    ("damage", "verb"),
    [
        (filled(last("model.safetensors")), "mv"),
        (gone(last("digests.json")), "mv"),
        (gone(last("optimizer.pt")), "mv"),
        (gone("receipt.jsonl"), "cp"),
        (flipped("receipt.jsonl"), "cp"),
        (lines("receipt.jsonl", lambda found: found[:2]), "cp"),
    ],
    ids=["weights", "digests", "optimizer", "no receipt", "a byte of the receipt", "a cut receipt"],
)
def test_the_remedy_that_a_refusal_names_works(
    interrupted: Path, damage: Damage, verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(interrupted)
    step, receipt = checkpoint_step(interrupted / LAST), interrupted / "receipt.jsonl"
    with pytest.raises(InputError, match="Nothing was changed") as found:
        check_checkpoint(interrupted / LAST, step, receipt)
    command = named_command(str(found.value))
    assert command[0] == verb
    subprocess.run(command, check=True)
    good = last_checkpoint(interrupted)
    assert good == interrupted / (FIRST if verb == "mv" else LAST)
    check_checkpoint(good, checkpoint_step(good), receipt)


def test_a_refusal_names_no_remedy_that_does_not_work(interrupted: Path) -> None:
    for name in (FIRST, LAST):
        filled(f"{name}/model.safetensors")(interrupted)
    with pytest.raises(InputError, match="No earlier checkpoint is whole") as found:
        check_checkpoint(interrupted / LAST, 2, interrupted / "receipt.jsonl")
    assert not re.search(r"\b(mv|cp) ", str(found.value))
