"""The generation object by itself: its answers, what it refuses, and an engine that is lost in the middle of a call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from conftest import start
from recording import Recording, plain_logps
from tiny import save
from transformers import AutoModelForCausalLM, Cohere2Config

from lockstep.contract.sampling import Sampling
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import EngineLost, InputError, LockstepError
from lockstep.extras.trl.trl_inputs import urls_of
from lockstep.extras.trl.vllm_generation import LockstepGeneration
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.plain_forward import completion_logps

PROMPTS = [[5, 6, 7], [5, 6, 7], [40, 41], [40, 41]]


class Setting:
    """The arguments of every generation object in this file."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.engine: Any = start("transformers", folder)
        self.common = {"model": self.model, "processing_class": load_tokenizer(folder)}
        self.common |= {"accelerator": Accelerator(cpu=True), "max_completion_length": 6}

    def make(self, **kwargs: Any) -> LockstepGeneration:
        return Recording(**{**self.common, "engine": self.engine, "generation_kwargs": {"seed": 3}, **kwargs})


def probed(generation: LockstepGeneration) -> float:
    """The share of the engine's modules that the last push was probed at."""
    assert generation.proof is not None
    return generation.proof.probe.modules / generation.proof.probe.of_modules


@pytest.fixture
def setting(untied_dir: str) -> Setting:
    return Setting(untied_dir)


def test_rows_come_back_in_order_with_ids_and_log_probs_of_what_was_sampled(setting: Setting) -> None:
    generation = setting.make()
    generation.sync_weights()
    assert probed(generation) == 1.0
    prompt_ids, completion_ids, _, token_ids = generation.generate(PROMPTS, None, 2)
    assert prompt_ids == PROMPTS
    assert token_ids == [[[token] for token in ids] for ids in completion_ids]
    assert len({tuple(ids) for ids in completion_ids}) == 4
    assert generation.calls[0].worst < 1e-4  # type: ignore[attr-defined]
    # Another call gives another draw, and the next push gives another version.
    assert generation.generate(PROMPTS, [None] * 4, 2)[1] != completion_ids
    generation.sync_weights()
    assert generation.version == 2
    assert probed(generation) < 1.0
    # The same run again gives the same tokens.
    assert setting.make().generate(PROMPTS, None, 1)[1] == completion_ids


def test_a_model_that_scales_its_logits_is_scored_as_it_computes(tmp_path: Path) -> None:
    """Cohere2: the canary of a push once blamed the engine for a factor that only the engine knew of."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Cohere2Config(
        **shape, vocab_size=384, num_key_value_heads=1, head_dim=32, logit_scale=0.25, initializer_range=0.3
    )
    setting = Setting(str(save(AutoModelForCausalLM.from_config(config), tmp_path)))
    generation = setting.make()
    generation.sync_weights()
    assert generation.proof is not None
    assert generation.proof.canary.max_abs < 1e-4


def test_a_call_without_prompts_and_without_log_probs(setting: Setting) -> None:
    assert setting.make().generate([], None, 4) == ([], [], [], [])
    plain = LockstepGeneration(**setting.common, engine=setting.engine, logprobs=None)
    _, completion_ids, logprobs, token_ids = plain.generate(PROMPTS, None, 2)
    assert len(completion_ids) == 4
    assert logprobs is token_ids is None


def test_truncated_sampling_is_exact_and_its_meaning_for_trl_is_said(setting: Setting) -> None:
    with pytest.warns(UserWarning, match=r"top_p, frequency_penalty.*6789"):
        generation = LockstepGeneration(
            **setting.common,
            engine=setting.engine,
            temperature=0.7,
            top_p=0.5,
            generation_kwargs={"top_p": 0.8, "frequency_penalty": 0.5},
        )
    prompt_ids, completion_ids, logprobs, _ = generation.generate(PROMPTS, None, 2)
    assert logprobs is not None
    sampling = Sampling(max_tokens=6, temperature=0.7, top_p=0.8, frequency_penalty=0.5)
    for prompt, ids, found in zip(prompt_ids, completion_ids, logprobs, strict=True):
        expected = completion_logps(setting.model, prompt, ids, sampling)
        assert torch.allclose(torch.tensor(found)[:, 0], expected, atol=1e-4)


def test_a_regular_expression_is_followed_and_its_meaning_for_trl_is_said(setting: Setting) -> None:
    with pytest.warns(UserWarning, match=r"grammar.*6789"):
        generation = LockstepGeneration(
            **setting.common, engine=setting.engine, structured_outputs_regex="[0-9]{2} [a-c]"
        )
    _, completion_ids, _, _ = generation.generate(PROMPTS, None, 2)
    texts = [
        setting.common["processing_class"].decode(ids, skip_special_tokens=True) for ids in completion_ids
    ]
    assert all(re.fullmatch("[0-9]{0,2}|[0-9]{2} [a-c]?", text) for text in texts), texts


def test_a_prompt_that_nearly_fills_the_context_gets_what_is_left_of_it(setting: Setting) -> None:
    generation = setting.make()
    context = generation.llm.llm_engine.model_config.max_model_len
    _, (short,), _, _ = generation.generate([[7] * (context - 2)], None, 1)
    assert len(short) <= 2
    with pytest.raises(InputError, match="does not fit the engine's context"):
        generation.generate([[7] * context], None, 1)


REFUSED = [
    # The error names the kind of grammar.
    ("structured_outputs_regex", "[0-9"),
    ("tensor_parallel_size", 2),
    ("enable_sleep_mode", True),
    ("model_impl", "terratorch"),
    ("trust_remote_code", True),
    ("logprobs", 5),
    ("mode", "elsewhere"),
    ("engine_dtype", "float16"),
    ("max_completion_length", 0),
    ("temperature", 0.0),
    ("processing_class", object()),
    ("model", torch.nn.Linear(2, 2)),
    ("generation_kwargs", {"bad_words": ["x"]}),
    ("generation_kwargs", {"n": 2}),
    ("engine_kwargs", {"seed": 1}),
]


def test_an_adapter_that_cannot_be_merged_is_refused(setting: Setting) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        setting.model, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    )
    with pytest.raises(InputError, match="LoRA"):
        setting.make(model=adapted)


def test_longrope_is_refused_where_sequences_may_cross_its_border(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second engine is refused before it starts.
    monkeypatch.setattr(f"{LockstepGeneration.__module__}.start_here", None)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [3.0] * 16}
    setting.model.config.rope_parameters = {**rope, "original_max_position_embeddings": 64}
    for given in ({}, {"engine": None, "max_model_length": 65}):
        with pytest.raises(InputError, match="more than 64 tokens"):
            setting.make(**given)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_no_engine_here_does_is_refused_by_name(setting: Setting, name: str, value: object) -> None:
    said = next(iter(value)) if name == "generation_kwargs" else name.removeprefix("structured_outputs_")  # type: ignore[call-overload]
    with pytest.raises(InputError, match=said):
        setting.make(**{name: value})


def test_ways_of_training_that_cut_the_model_up_are_refused(setting: Setting) -> None:
    setting.model.lm_head.to(torch.bfloat16)
    with pytest.raises(InputError, match="several dtypes"):
        setting.make()


@pytest.mark.parametrize(
    ("prompts", "images", "said"),
    [
        (["text"], None, "prompt 0 is not a list"),
        ([[1], [2]], [None, ["image"]], "shown no images"),
        ([[]], None, "no tokens"),
    ],
)
def test_prompts_that_cannot_be_sampled_from(setting: Setting, prompts: Any, images: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        setting.make().generate(prompts, images, 1)


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ({"server_base_url": None, "server_host": "0.0.0.0", "server_port": 8000}, ["http://127.0.0.1:8000"]),
        ({"server_base_url": None, "server_host": "node7", "server_port": 81}, ["http://node7:81"]),
        (
            {"server_base_url": "http://a:1/, http://b:2", "server_host": "c", "server_port": 3},
            ["http://a:1", "http://b:2"],
        ),
    ],
)
def test_where_the_servers_are(given: dict[str, Any], urls: list[str]) -> None:
    assert urls_of(given) == urls


class Dying(TransformersEngine):
    """An engine that is lost at its first generation and comes back without weights."""

    deaths = 1

    def generate(self, requests: Any) -> Any:
        if self.deaths:
            self.deaths -= 1
            raise EngineLost("the engine is gone", self.recover)
        return super().generate(requests)

    def recover(self) -> None:
        self._version = None
        torch.nn.init.zeros_(self.model.model.embed_tokens.weight)


def test_an_engine_that_was_lost_gets_the_weights_again_and_gives_the_same_tokens(setting: Setting) -> None:
    undisturbed = setting.make().generate(PROMPTS, None, 2)
    setting.engine.__class__ = Dying
    generation = setting.make()
    generation.sync_weights()
    assert generation.generate(PROMPTS, None, 2) == undisturbed
    assert generation.version == 2
    assert probed(generation) == 1.0
    setting.engine.deaths = 9
    with pytest.raises(LockstepError, match="lost 4 times"):
        generation.generate(PROMPTS, None, 2)


def test_the_plain_forward_of_these_tests_is_another_than_the_engines(setting: Setting) -> None:
    assert plain_logps(setting.model, [5, 6], [7]) != plain_logps(setting.model, [6, 5], [7])
