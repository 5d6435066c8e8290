"""Calls for completions that one rank makes without the others.

The ranks of TRL's trainer leave its tool loop after different numbers of calls, and then wait for each other in a collective of
TRL's. A call of the tool loop that needed all ranks would wait for ever. So each rank asks the servers itself. Weights are pushed
only where all ranks meet; here the weight versions that come with the answers must be the version of the last push.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.contract.inbox import check_answers
from lockstep.contract.protocol import Completion, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.http.following import FollowingServer
from lockstep.engines.http.vllm_server import VLLMServer
from lockstep.errors import EngineLost, LockstepError
from lockstep.extras.trl.proven_engine import check_draws, requests_for
from lockstep.extras.trl.trl_inputs import Shown


class LoneCalls:
    """Completions for one rank.

    Args:
        rank: this rank.
        connect: makes the client. It is called at the first call.
        sampling: the sampling distribution.
        seed: seed of the run, from which every request's own seed is derived.
    """

    def __init__(self, rank: int, connect: Callable[[], VLLMServer], sampling: Sampling, seed: int) -> None:
        self._rank, self._connect, self._sampling, self._seed = rank, connect, sampling, seed
        self._engine: VLLMServer | None = None
        self._since: tuple[int, int] = (0, 0)

    def generate(self, prompts: Sequence[Shown], version: int, calls: int) -> list[Completion]:
        """One completion per prompt, in order.

        Args:
            prompts: the ids of each, with its pictures.
            version: the weight version of the last push.
            calls: the number of calls that all ranks have made together. It is part of the requests' keys.

        Raises:
            InputError: a prompt is empty or fills the context, or the servers do not accept this rank.
            ProofError: an answer does not match its request, or was sampled by weights of another version.
            LockstepError: there was no push yet, or a server was lost. Only all ranks together can push again.
        """
        self._since = (calls, self._since[1] + 1 if self._since[0] == calls else 1)
        if not prompts:
            return []
        if version < 1:
            raise LockstepError("num_generations=1 before the first push: call sync_weights on every rank first")
        keys = [
            RequestKey(f"call{calls}/rank{self._rank}/alone{self._since[1]}/row{row}", 0) for row in range(len(prompts))
        ]
        asked = dict(zip(keys, prompts, strict=True))
        try:
            engine = self._client(version)
            requests = requests_for(asked, self._sampling, version, self._seed, engine.settings().max_model_len)
            answers = check_answers(requests, engine.generate(requests).values(), [version])
        except EngineLost as lost:
            raise LockstepError(
                f"rank {self._rank} lost a server in a call that it made alone (a call of a tool loop): {lost}. Only all ranks "
                "together can push the weights again; resume from the last checkpoint"
            ) from lost
        check_draws(answers.values())
        return [answers[key] for key in keys]

    def close(self) -> None:
        """Disconnect a client that follows another process's."""
        if isinstance(self._engine, FollowingServer):
            self._engine.close()
        self._engine = None

    def _client(self, version: int) -> VLLMServer:
        if self._engine is None:
            self._engine = self._connect()
        if isinstance(self._engine, FollowingServer):
            self._engine.follow(version)
        return self._engine
