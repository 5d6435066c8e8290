"""Bad config files: each is refused in one line."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_input import Row, check, refused, rows

from lockstep import progress as waits
from lockstep.cli import training as loading
from lockstep.cli.fields import build, read
from lockstep.cli.help import read_file
from lockstep.cli.main import main
from lockstep.errors import InputError

DEEP = b"a: " + b"[" * 5000 + b"]" * 5000
LAUGHS = b"\n".join(
    [b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [b"a%d: &a%d [%s]" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9)]
)
FILES = [
    Row("binary", b"\x80\x04\x95\x00\xff\xfe\x00\x01", "not UTF-8 text"),
    Row("random bytes", bytes(range(256)), "not UTF-8 text"),
    Row("latin-1", "output_dir: läufe\n".encode("latin-1"), "not UTF-8 text"),
    Row("utf-16", "seed: 1\n".encode("utf-16"), "not UTF-8 text"),
    Row("a NUL", b"seed: 1\0\n", "is not YAML"),
    Row("control characters", b"seed: \x07\n", "is not YAML"),
    Row("a pickle", b"\x80\x04K\x01.", "not UTF-8 text"),
    Row("a gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "not UTF-8 text"),
    Row("nested 5,000 levels deep", DEEP, "nested too deeply"),
    Row("mappings nested deep", b"a: " + b"{a: " * 5000 + b"1" + b"}" * 5000, "nested too deeply"),
    Row("a billion laughs", LAUGHS, "aliases"),
    Row("an alias of itself", b"a: &x [*x]\n", "aliases"),
    Row("empty", b"", "must hold fields"),
    Row("a comment", b"# nothing\n", "must hold fields"),
    Row("a list", b"- seed\n- 1\n", "must hold fields"),
    Row("a word", b"seed\n", "must hold fields"),
    Row("a number", b"3\n", "must hold fields"),
    Row("several documents", b"seed: 1\n---\nseed: 2\n", "is not YAML"),
    Row("an open bracket", b"seed: [1\n", "is not YAML"),
    Row("an open quote", b"output_dir: 'runs\n", "is not YAML"),
    Row("a tab", b"seed:\t1\n\tbeta: 2\n", "is not YAML"),
    Row("bad indentation", b"seed: 1\n  beta: 2\n", "is not YAML"),
    Row("a key twice", b"seed: 1\nbeta: 0.1\nseed: 2\n", "'seed' is there twice"),
    Row("an inner key twice", b"model_init_kwargs: {a: 1, a: 2}\n", "'a' is there twice"),
    Row("a key that is a number", b"1: 2\n", "1 is not the name of a field"),
    Row("a key that is nothing", b"null: 2\n", "None is not the name of a field"),
    Row("a key that is a list", b"? [a]\n: 2\n", "is not YAML|no name"),
    Row("an unknown key", b"learning_rat: 1\n", "did you mean 'learning_rate'"),
    Row("a dashed key with a value that is none", b"seed: x\n", "seed"),
    Row("a python object", b"seed: !!python/object/apply:os.system ['true']\n", "is not YAML"),
    Row("an unknown tag", b"seed: !env SEED\n", "is not YAML"),
    Row("a list of lists", b"stop_strings: [[a]]\n", "stop_strings must be"),
    Row("a list of mappings", b"reward_funcs: [{a: 1}]\n", "reward_funcs must be"),
    Row("a list with nothing in it", b"reward_funcs: [a, ~]\n", "reward_funcs must be"),
    Row("a mapping for a number", b"seed: {a: 1}\n", "seed"),
    Row("a list for a number", b"seed: [1, 2]\n", "seed takes one value"),
    Row("text for a number", b"learning_rate: fast\n", "learning_rate"),
    Row("a number without a dot and sign", b"learning_rate: -1\n", "learning_rate"),
    Row("NaN", b"learning_rate: .nan\n", "learning_rate"),
    Row("infinity", b"temperature: .inf\n", "temperature"),
    Row("a date", b"seed: 2026-11-23\n", "seed"),
    Row("an impossible date", b"seed: 2026-13-45\n", "is not YAML|seed"),
    Row("a switch that is neither", b"bf16: 7\n", "bf16"),
    Row("too large", b"# " + b"x" * (2 << 20), "more than 1 MiB"),
    Row("JSON that is cut", b'{"seed": 1', "is not YAML"),
    Row("a value that looks like a field", b"max_steps: --seed\n", "invalid int value: '--seed'"),
    Row("a surrogate", b'output_dir: "\\ud800"\n', "not text"),
]


@rows(*FILES)
def test_a_bad_config_file_is_one_line(row: Row, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(row.given)
    check(["grpo", "--config", str(path), "--dry_run"], row, capfd)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfseed: 1\n",
        b"seed: 1\r\n",
        b'{"seed": 1}',
        b"seed: 1\n...\n",
        b"seed: '1'\n",
        b"seed: 0x1\n",
    ],
)
def test_other_ways_to_write_a_good_file_are_taken(
    content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_bytes(content)
    assert main(["grpo", "--config", str(tmp_path / "c.yaml"), "--dry_run"]) == 0
    assert "seed: 1\n" in capfd.readouterr().out


def test_what_is_written_is_what_a_field_gets(tmp_path: Path) -> None:
    """YAML 1.1 reads 010 as 8, 1:30 as 90, and a date as a date."""
    written = {
        "output_dir": "010",
        "seed": "010",
        "run_name": "2026-11-28 10:00",
        "learning_rate": ".5",
        "project": "TRUE",
    }
    (tmp_path / "c.yaml").write_text(
        "".join(f"{name}: {text}\n" for name, text in written.items())
        + "stop_strings: [1:30, on, 007, 1e3]\n"
        + "chat_template_kwargs: {a: 010, b: 1:30, c: on, d: 2026-11-28, e: 0x1F, f: yes, g: true, h: .inf, i: ~}\n"
        + "max_steps: 0x1F\nepsilon_high: .inf\n"
    )
    found = read(["--config", str(tmp_path / "c.yaml")], "grpo").values
    assert {name: str(found[name]) for name in written} == written | {"seed": "10", "learning_rate": "0.5"}
    assert found["stop_strings"] == ["1:30", "on", "007", "1e3"]
    assert json.loads(found["chat_template_kwargs"]) == {
        "a": 10, "b": "1:30", "c": "on", "d": "2026-11-28", "e": 31, "f": "yes", "g": True, "h": math.inf, "i": None,
    }  # fmt: skip
    assert (found["max_steps"], found["epsilon_high"]) == (31, math.inf)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("seed: [1, 2]\n", "seed=.* is a list, and seed takes one value"),
        ("seed: []\n", "seed=.* is a list"),
        ("run_name: {a: 1}\n", "run_name=.* is a mapping, and run_name takes one value"),
        ("stop_strings: {a: 1}\n", "stop_strings=.* is a mapping, and stop_strings takes a list of values"),
        ("seed: 1:30\n", "seed: invalid int value: '1:30'"),
        ("seed: 0b11\n", "seed: invalid int value: '0b11'"),
        ("run_name: !!binary aGk=\n", "run_name must be a value"),
        ("chat_template_kwargs: {a: !!set {b}}\n", "chat_template_kwargs must be a value"),
    ],
)
def test_a_value_of_another_form_is_refused_by_the_fields_name(
    content: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(content)
    refused(lambda: read(["--config", str(tmp_path / "c.yaml")], "grpo"), says, InputError)


def test_a_number_with_an_exponent_is_a_number_in_the_mapping_of_a_field(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "lr_scheduler_kwargs: {min_lr: 1e-7, more: [1E+3, -.5e2, {x: 2.e1}], text: '1e-7', word: e5, version: 1e5a}\n"
        "revision: 12e45\n"
        "learning_rate: 1e-6\n"
    )
    read = read_file(str(tmp_path / "c.yaml"))
    assert read["lr_scheduler_kwargs"] == {
        "min_lr": 1e-7,
        "more": [1000.0, -50.0, {"x": 20.0}],
        "text": "1e-7",
        "word": "e5",
        "version": "1e5a",
    }
    # A field knows its own type: this one is the text that was written.
    assert (read["revision"], read["learning_rate"]) == ("12e45", "1e-6")


def test_the_output_of_a_dry_run_is_yaml_alone_also_where_loading_takes_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def slow(*given: Any) -> Any:
        time.sleep(1.5)
        return build(*given)

    monkeypatch.setattr(loading, "build", slow)
    monkeypatch.setattr(waits, "FIRST", 0.1)
    assert main(["grpo", "--seed", "3", "--dry_run"]) == 0
    said = capfd.readouterr()
    assert yaml.safe_load(said.out)["seed"] == 3
    assert "loading PyTorch and transformers" not in said.out
    assert "loading PyTorch and transformers" in said.err
