"""Which models keep a state from token to token, and what follows for engines that cache or pad prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from model_families import FAMILIES

from lockstep.cli.main import main
from lockstep.engines.vllm import arguments as refused
from lockstep.engines.vllm.arguments import cpu_cache_bytes, engine_arguments
from lockstep.errors import InputError
from lockstep.models.policy import keeps_state
from lockstep.run import engine
from lockstep.server.command import ServeOptions, command_line

KEEPS_STATE = {
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "recurrent_gemma",
    "minimax",
    "mamba",
    "xlstm",
    "zamba2",
}
LONGER_LISTS = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2},
    "jamba": {"num_hidden_layers": 2},
    "qwen3_5": {},
}


def saved(model_type: str, folder: Path, **fields: object) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **fields}), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_a_state_or_attends_to_everything(family: str) -> None:
    kind, fields = FAMILIES[family]
    assert keeps_state(getattr(transformers, kind)(**fields)) == (family in KEEPS_STATE)


@pytest.mark.parametrize("family", LONGER_LISTS)
def test_vllm_caches_no_prefix_of_a_model_with_a_state(family: str, tmp_path: Path) -> None:
    """With cached prefixes vLLM asks for split prompts, which no seed of a request survives on a CPU."""
    arguments = engine_arguments(saved(family, tmp_path, **LONGER_LISTS[family]), torch.float32, 128, 4)
    assert arguments["enable_prefix_caching"] is False
    assert arguments["enable_chunked_prefill"] is torch.cuda.is_available()


def test_vllm_caches_the_prefixes_of_all_other_models(tmp_path: Path) -> None:
    assert engine_arguments(saved("qwen2", tmp_path), torch.float32, 128, 4)["enable_prefix_caching"] is True


def test_a_model_without_attention_has_a_cache_of_the_smallest_size(tmp_path: Path) -> None:
    assert cpu_cache_bytes(saved("mamba2", tmp_path), torch.float32, 1 << 20, 64) == 64 << 20


class TestRefusedOnVLLM:
    @pytest.mark.parametrize("family", sorted(refused.ALWAYS.keys() | refused.ON_CPU.keys()))
    def test_in_training_before_the_model_is_loaded(
        self, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The directory has no weights: whatever loads them gives another error."""
        if family not in refused.ALWAYS and torch.cuda.is_available():
            pytest.skip("vLLM's CPU build alone runs this family in another way")
        monkeypatch.setattr(engine, "vllm_installed", lambda: True)
        words = ["--recipe", "arithmetic", "--model_name_or_path", saved(family, tmp_path)]
        assert main(["grpo", *words, "--output_dir", str(tmp_path / "run")]) == 2
        shown = capsys.readouterr().err
        assert f"of the family {family}, which vLLM 0.32 does not run as transformers does: " in shown
        assert "set use_vllm to false" in shown

    def test_on_a_server(self, tmp_path: Path) -> None:
        options = ServeOptions(saved("apertus", tmp_path), "127.0.0.1", 8000, torch.float32, 128, 4, 1, 0.3)
        with pytest.raises(InputError, match="of the family apertus"):
            command_line(options)

    def test_a_missing_kernel_of_this_machine_does_not_count_for_a_server_on_another(
        self, tmp_path: Path
    ) -> None:
        refused.refuse_family(saved("jamba", tmp_path), elsewhere=True)
        with pytest.raises(InputError, match="of the family apertus"):
            refused.refuse_family(saved("apertus", tmp_path), elsewhere=True)

    def test_no_other_family_and_no_directory_that_cannot_be_read(self, tmp_path: Path) -> None:
        refused.refuse_family(saved("qwen3_next", tmp_path))
        refused.refuse_family(saved("granitemoehybrid", tmp_path, num_local_experts=0))
        refused.refuse_family(str(tmp_path / "none"))
