"""A field declared in one place is in help, refusals, described fields, page, docstring and identity."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from lockstep import GRPOConfig
from lockstep.cli import describe
from lockstep.cli import help as description
from lockstep.cli.main import main
from lockstep.config.documented import documented
from lockstep.config.option import Bookkeeping, Bounds, option
from lockstep.config.table import options_of
from lockstep.errors import InputError
from lockstep.run.files.identity import changed_fields, curve_settings

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from reference_pages import fields_page


@documented
@dataclass
class OwlConfig(GRPOConfig):
    """A method with fields of its own."""

    owls: int = option(3, "Number of owls. They sit.", group="server", common=True, bounds=Bounds(1, 9))
    owl_weight: float = option(1.0, "Weight of an owl.", group="method", bounds=Bounds(0, infinite=True))
    owl_patience: float = option(
        2.0, "Seconds that an owl waits.", group="logging", bookkeeping=Bookkeeping.WAITING
    )
    owl_songs: dict | str | None = option(None, "Songs by owl.", group="tools", mapping=True)
    owl_ages: list[int] = option([4], "Age of each owl.", group="tools", bounds=Bounds(1))
    blue_owls: bool = option(False, "Only one value.", only="owls are brown")
    owl_feed: int = option(0, "Has no effect.", no_effect="owls feed themselves")


@dataclass
class OtherOwlConfig(OwlConfig):
    """It declares a field of its base again."""

    owls: int = option(4, "Number of other owls.")


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """All fields, where the method `grpo` has the new ones, and the command line that reads them."""
    run, _ = describe.CLASSES["grpo"]
    monkeypatch.setitem(describe.CLASSES, "grpo", (run, f"{__name__}:OwlConfig"))
    found = describe.describe()
    file = tmp_path / "fields.json"
    file.write_text(describe.as_text(found))
    monkeypatch.setattr(description, "FIELDS_FILE", file)
    monkeypatch.setenv("COLUMNS", "110")
    return found


def config(kind: type = OwlConfig, **fields: Any) -> Any:
    return kind(output_dir="unused", use_cpu=True, report_to="none", **fields)


def test_its_entry_in_the_described_fields_says_what_was_declared(
    described: dict[str, dict[str, Any]],
) -> None:
    assert described["grpo"]["owls"] == {
        "type": "int", "default": "3", "group": "server", "common": True, "bounds": {"low": 1, "high": 9},
        "help": "Number of owls. They sit.",
    }  # fmt: skip
    assert described["grpo"]["blue_owls"]["only"] == (False, "owls are brown")
    assert described["grpo"]["owl_ages"]["default"] == "4"
    assert "owls" not in described["shared"] | described["rloo"]


@pytest.mark.usefixtures("described")
def test_help_shows_it_under_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    def under(heading: str, *words: str) -> str:
        assert main(["grpo", *words]) == 0
        return capsys.readouterr().out.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]

    assert "Number of owls [3]" in under("server", "--help")
    assert "--owl_weight" not in under("method", "--help")
    assert "Weight of an owl. [1.0]" in under("method", "--help-all")
    assert "--owl_songs" in under("tools", "--help-all")
    assert main(["grpo", "--help-all"]) == 0
    assert "--blue_owls" not in (shown := capsys.readouterr().out)
    assert "--owl_feed" not in shown


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--owls", "many"], "invalid int value: 'many'"),
        (["--owlz", "3"], "did you mean 'owls'?"),
        (["--blue_owls", "true"], "blue_owls=True is not supported, only False is: owls are brown"),
    ],
)
def test_the_command_line_refuses_what_it_cannot_be(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grpo", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", [OwlConfig, OtherOwlConfig])
def test_a_config_refuses_what_is_out_of_bounds_also_where_the_field_is_declared_again(kind: type) -> None:
    for fields, said in (
        ({"owls": 10}, "owls=10; it must be at least 1 and at most 9"),
        ({"owls": "many"}, "owls='many'; it must be a whole number"),
        ({"owl_ages": [3, 0]}, "owl_ages=0; it must be at least 1"),
        ({"owl_weight": float("nan")}, "owl_weight=nan; it must be a finite number"),
        ({"owl_patience": float("inf")}, "owl_patience=inf; it must be a finite number"),
        ({"owl_songs": "{"}, "owl_songs={ is not a mapping in JSON"),
        ({"blue_owls": True}, "blue_owls=True is not supported, only False is: owls are brown"),
    ):
        with pytest.raises(InputError) as caught:
            config(kind, **fields)
        assert said in str(caught.value)
    assert config(kind).owls == (3 if kind is OwlConfig else 4)


def test_a_config_takes_what_was_declared(capsys: pytest.CaptureFixture[str]) -> None:
    made = config(owl_weight=float("inf"), owl_songs='{"a": 1}', owl_feed=7)
    assert (made.owl_weight, made.owl_songs, made.owl_feed) == (float("inf"), {"a": 1}, 0)
    assert "owl_feed=7 has no effect here: owls feed themselves" in capsys.readouterr().err
    made.owl_ages.append(5)
    assert config().owl_ages == [4]


def test_the_page_of_fields_has_it_under_its_heading(described: dict[str, dict[str, Any]]) -> None:
    page = fields_page(described)
    rows = page.partition("## server\n")[2].partition("\n## ")[0]
    assert re.search(r"^- `owls` .*`3`.*Number of owls\. They sit\.", rows, re.M)
    assert "blue_owls" not in page


def test_the_docstring_of_its_config_has_it() -> None:
    assert "owls (int = 3): Number of owls. They sit." in str(OwlConfig.__doc__)
    assert "blue_owls" not in str(OwlConfig.__doc__)


def test_it_belongs_to_the_identity_of_a_run_unless_it_is_bookkeeping() -> None:
    kept = curve_settings(config())
    assert kept["owls"] == 3
    assert "owl_patience" not in kept
    assert changed_fields(kept, curve_settings(config(owls=4, owl_patience=9.0))) == ["owls"]
    # An older version may have stored it.
    assert changed_fields({**kept, "owl_patience": 1.0}, kept) == []


def test_the_parser_of_transformers_takes_the_config_as_it_is() -> None:
    (parsed,) = HfArgumentParser(OwlConfig).parse_args_into_dataclasses(  # type: ignore[arg-type]
        ["--output_dir", "unused", "--use_cpu", "true", "--owls", "5"]
    )
    assert parsed.owls == 5


def test_fields_come_in_the_order_of_their_declaration_and_those_of_transformers_last() -> None:
    names = list(options_of(OtherOwlConfig))
    assert names.index("owls") + 1 == names.index("owl_weight")
    inherited = ["inherited" in said for said in options_of(OtherOwlConfig).values()]
    assert inherited == sorted(inherited)
    # Lockstep declares this field of transformers again.
    assert "inherited" not in options_of(OtherOwlConfig)["learning_rate"]
