"""`scripts/trl_tests.py` measures the installed TRL, and counts apart what cannot be compared.

The program itself needs a checkout of TRL. Here are its parts that decide what is counted; the whole of it runs by
hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from trl_stand_ins.private import insides, models
from trl_tests import TRAINERS, Outcome, copy_tests, show

GRPO = TRAINERS["GRPO"]


def test_tests_run_where_no_trl_of_the_checkout_is_beside_them(tmp_path):
    checkout = tmp_path / "trl"
    for folder in ("tests", "trl"):
        (checkout / folder).mkdir(parents=True)
        (checkout / folder / "__init__.py").touch()
    (checkout / "pyproject.toml").touch()
    copy_tests(checkout, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["pyproject.toml", "tests"]


class WithInsides:
    @patch("transformers.generation.utils.GenerationMixin.generate")
    def patches_a_method(self, mock):
        pass

    def patches_a_model(self, trainer):
        with patch.object(trainer.model, "generate", side_effect=None):
            trainer.train()

    def reads_the_logs(self, trainer):
        assert trainer._logs

    def calls_the_class(self, GRPOTrainer, trainer):
        GRPOTrainer._generate(trainer)

    def calls_a_part_of_the_loss(self, GRPOTrainer):
        GRPOTrainer.get_off_policy_mask()


class Public:
    def trains(self, trainer):
        trainer.train()
        assert trainer.state.log_history[-1]["train_loss"] is not None

    def appends_a_metric_as_users_do(self, trainer):
        trainer._metrics["train"]["own"].append(1.0)

    def patches_the_environment(self, trainer, os):
        with patch.dict(os.environ, {"A": "generate"}):
            trainer.train()


def methods_of(kind):
    return [method for name, method in vars(kind).items() if not name.startswith("_")]


@pytest.mark.parametrize("test", methods_of(WithInsides))
def test_insides_are_found(test):
    assert insides(test)


@pytest.mark.parametrize("test", methods_of(Public))
def test_what_users_do_is_compared(test):
    assert not insides(test)


def of_one_model():
    return "trl-internal-testing/tiny-Gemma3ForConditionalGeneration"


def test_a_test_per_model_is_of_the_model_in_its_name():
    assert models(of_one_model, "of_one_model") == "tiny-Gemma3ForConditionalGeneration"
    assert models(of_one_model, "of_one_model[trl-internal-testing/tiny-Qwen2VL]") == "tiny-Qwen2VL"


def counts(capsys, trl, ours):
    failed = show("GRPO", GRPO, trl, ours)
    return failed, capsys.readouterr().out


def test_the_denominator_is_what_trl_passes_less_what_is_named(capsys):
    trl = {
        f"{GRPO}::A::test_train[Qwen3]": Outcome("passed"),
        f"{GRPO}::A::test_tools": Outcome("passed", private="it patches generate"),
        f"{GRPO}::A::test_trust_remote_code": Outcome("passed"),
        f"{GRPO}::A::test_train_vlm": Outcome("passed", models="tiny-Gemma3ForConditionalGeneration"),
        f"{GRPO}::A::test_of_a_later_trl": Outcome("failed", "AttributeError"),
    }
    failed, said = counts(capsys, trl, dict.fromkeys(trl, Outcome("passed")))
    assert not failed
    assert "TRL passes 4 of 5" in said
    assert "Of the other 1, ours pass 1" in said
    for name in ("test_tools: it patches generate", "test_trust_remote_code: ", "test_train_vlm: its"):
        assert name in said


@pytest.mark.parametrize("ours", [{}, {f"{GRPO}::A::test_train": Outcome("failed", "InputError: no")}])
def test_a_test_that_ours_does_not_pass_is_named(capsys, ours):
    failed, said = counts(capsys, {f"{GRPO}::A::test_train": Outcome("passed")}, ours)
    assert failed
    assert "Of the other 1, ours pass 0" in said
