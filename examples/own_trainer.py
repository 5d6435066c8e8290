"""A trainer of your own on a running server: sample, learn, update, prove. (docs/guides/own-trainer.md)

    lockstep serve smollm2-135m-instruct --max_model_len 256 &        # prints a line when it is ready
    python examples/own_trainer.py http://127.0.0.1:8000              # two minutes on two CPU cores

The loop is REINFORCE in its simplest form. The task is to answer with the word "yes". Lockstep adds four calls:
`connect`, `update_weights`, `generate` and `verify`.
"""

from __future__ import annotations

import sys

import torch

from lockstep.engines import connect
from lockstep.engines.protocol import GenerationRequest, RequestKey, Sampling, request_seed
from lockstep.models.policy import load_policy
from lockstep.models.resolve import resolve_model
from lockstep.tokens.chat import load_tokenizer

STEPS, SAMPLES = 8, 16


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    path = resolve_model(sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m-instruct")
    model, tokenizer = load_policy(path, None), load_tokenizer(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    prompt = tuple(tokenizer("Question: Is water wet? Answer yes or no.\nAnswer:")["input_ids"])
    servers = connect(url)
    try:
        for step in range(STEPS):
            # Both ends digest every byte, and every module of the engine is probed. Any difference raises an error.
            servers.update_weights(model, version=step)
            keys = [RequestKey("wet", sample) for sample in range(SAMPLES)]
            answers = servers.generate(
                [
                    GenerationRequest(key, prompt, Sampling(max_tokens=4), request_seed(0, step, key))
                    for key in keys
                ]
            )
            rewards = torch.tensor(
                [float("yes" in tokenizer.decode(answers[k].token_ids).lower()) for k in keys]
            )
            gaps = []
            for key, advantage in zip(keys, rewards - rewards.mean(), strict=True):
                logps = own_logps(model, prompt, answers[key].token_ids)
                gaps.append((logps.detach() - torch.tensor(answers[key].logprobs)).abs().max().item())
                (-(advantage * logps).sum() / SAMPLES).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: reward {rewards.mean():.2f}, largest gap {max(gaps):.1e}", flush=True)
        servers.update_weights(model, version=STEPS)
        probed, gap = servers.verify()
        name, error = probed.worst
        print(
            f"proved at the end: {probed.modules} modules, worst {name} by {error:.1e}; gap {gap.mean_abs:.1e}"
        )
        print({name: round(sum(scores), 2) for name, scores in servers.score({"prompt": prompt}).items()})
    finally:
        servers.close()


def own_logps(model: torch.nn.Module, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    """(tokens,) log-probs of a completion by the model that learns."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)[torch.arange(len(completion)), torch.tensor(completion)]


if __name__ == "__main__":
    main()
