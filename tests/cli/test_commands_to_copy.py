"""A command that Lockstep prints can be copied into a shell, whatever the folders are called."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.models.resolve import resolve_model

ODD = 'it\'s $HOME "x"'


def test_init_prints_commands_that_name_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", ODD]) == 0
    config = f"{ODD}/config.yaml"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  lockstep")]
    assert len(lines) == 3
    assert all(f"--config {shlex.quote(config)} " in line for line in lines)
    assert f"lockstep grpo --config {shlex.quote(config)}" in (tmp_path / config).read_text()


def test_an_adapter_in_place_of_a_model_says_how_to_merge_it(tmp_path: Path) -> None:
    (tmp_path / ODD).mkdir()
    (tmp_path / ODD / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError) as found:
        resolve_model(str(tmp_path / ODD))
    assert f"lockstep merge {shlex.quote(str(tmp_path / ODD))} FOLDER" in str(found.value)
