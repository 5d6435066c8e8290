"""The seal of a rollout: digests of what was sampled, and of the text and the row that its rewards belong to.

The seal is made when the engine's last answer is in, and stays with the rollout through other ranks and reward
functions. The digests are made again from the scored groups and from the tensors of the loss, and compared.
"""

from __future__ import annotations

import json

import numpy as np

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.rollouts.group import Prompt, Rollout, Seal
from lockstep.tokens.arrays import joined
from lockstep.tokens.digest import digest_of


def seal_of(rollout: Rollout, prompt: Prompt) -> Seal:
    """The seal of a rollout as it is now."""
    tokens = {str(c.key): tokens_of(c) for c in rollout.branches if len(c.sampled_places)}
    return Seal(words_of(rollout.key, rollout.text, row_of(prompt)), tokens)


def row_of(prompt: Prompt) -> str:
    """Digest of a row: its prompt id, its token ids, and all of its columns. A value that is no JSON type counts with its type."""
    columns = json.dumps(
        [prompt.source, dict(prompt.columns)], default=lambda value: type(value).__qualname__, sort_keys=True
    )
    return digest_of(prompt.prompt_id, prompt.ids, columns)


def words_of(key: RequestKey, text: str, row: str) -> str:
    """Digest of the text of a rollout and of its row.

    Args:
        row: the digest of `row_of`.
    """
    return digest_of(str(key), text, row)


def tokens_of(completion: Completion) -> tuple[str, str]:
    """Digests of one branch: of all ids and positions that its log-probs depend on, and of the engine's log-probs.

    A model reads the ids up to the one that predicts the last sampled token. Each sampled token is predicted at a position.
    """
    places, before = completion.sampled_places, len(completion.prompt_ids)
    path = joined([completion.prompt_ids, completion.token_ids[: places[-1]]])
    name, targets = str(completion.key), completion.token_ids[places]
    ids = digest_of(name, path, np.arange(len(path), dtype=np.int64), before - 1 + places, targets)
    return ids, digest_of(name, completion.sampled_logprobs)
