"""Servers that join or leave a run between two generations.

Comes from: the file that `vllm_server_url_file` names, read before every push, or the URLs of the config. Goes to: the
engine's set of servers, and the receipt. This happens before and after each push, on the rank that holds the engine.

A server that joins is at first an engine of its own. It passes what servers pass at the start: the checks of its settings, a push
of all weights, a probe of every module, and the canary. It gets the weights that the others have just got. Therefore the next push
can send all servers what changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lockstep.contract.protocol import Engine
from lockstep.engines.http.vllm_server import VLLMServer
from lockstep.errors import EngineLost, InputError, LockstepError
from lockstep.homes import expanded
from lockstep.report.busy import busy
from lockstep.run.engine import connect_servers
from lockstep.shards.passes import BrokenPass
from lockstep.training.config.online_config import OnlineConfig
from lockstep.watch.engine import Proofs

_logger = logging.getLogger(__name__)


def server_changes(
    engine: Engine, config: OnlineConfig, check: Callable[[Engine], None], proofs: Proofs
) -> ServerChanges | None:
    """The servers of an engine; None if it is no server. The arguments are those of `ServerChanges`."""
    return ServerChanges(engine, config, check, proofs) if isinstance(engine, VLLMServer) else None


class ServerChanges:
    """The servers that a run has, beside those that it should have.

    Args:
        engine: the engine of the run.
        check: compares the settings of an engine with those that training assumes.
        proofs: prove a server that joins, and write the receipt.
    """

    def __init__(
        self, engine: VLLMServer, config: OnlineConfig, check: Callable[[Engine], None], proofs: Proofs
    ) -> None:
        self._engine, self._config, self._check, self._proofs = engine, config, check, proofs
        self._file = expanded(config.vllm_server_url_file) if config.vllm_server_url_file else None
        self._wanted: Sequence[str] = engine.members
        self._written = self._written_at()
        # Servers that failed on their way in. They are tried again when the file has been written again.
        self._refused: set[str] = set()
        self._joined: list[str] = []
        self._refusals: dict[str, str] = {}
        self._told: set[str] = set()
        engine.is_wanted = lambda url: url in self._read()

    @property
    def count(self) -> int:
        """Number of servers that the engine has."""
        return len(self._engine.members)

    def before_push(self) -> None:
        """Let servers leave that the file does not name any more."""
        self._leave(self._read())

    def after_push(self, version: int) -> None:
        """Let servers join that answer and that the run should have, and write down what has changed.

        Args:
            version: of the weights that the engine's servers have just got.

        Raises:
            EngineLost: one of the engine's own servers was lost meanwhile.
        """
        wanted = self._read()
        absent = [url for url in wanted if url not in self._engine.members and url not in self._refused]
        if absent:
            healthy = self._engine.healthy(absent)
            for url in healthy:
                self._try(url, wanted, version)
            for url in set(absent) - set(healthy):
                self._tell(f"the server at {url} does not answer; it joins the run when it does", _logger.info)
            # What had to stay until another server has joined.
            self._leave(wanted)
        left, self._engine.servers.left = self._engine.servers.left, {}
        if left or self._joined or self._refusals:
            changes = {"joined": self._joined, "left": left, "refused": self._refusals}
            self._proofs.note_servers(version, {**changes, "servers": list(self._engine.members)})
            self._joined, self._refusals = [], {}

    def _leave(self, wanted: Sequence[str]) -> None:
        gone = [url for url in self._engine.members if url not in wanted]
        if gone and len(gone) == len(self._engine.members):
            self._tell(
                f"{self._file} names none of the servers of the run; they stay until another server has joined",
                _logger.warning,
            )
        elif gone:
            self._engine.leave(gone, f"{self._file} does not name it any more")

    def _try(self, url: str, wanted: Sequence[str], version: int) -> None:
        """Let one server join, or refuse it."""
        engine, joining = self._engine, None
        try:
            with busy(f"proving the server at {url}"):
                joining = connect_servers(self._config, [url])
                joining.name_versions_as(engine)
                self._check(joining)
                self._proofs.prove_joining(joining, version)
                engine.take(joining, [*wanted, *(own for own in engine.members if own not in wanted)])
            self._joined.append(url)
        except BrokenPass:
            raise
        except LockstepError as error:
            if isinstance(error, EngineLost) and error.recover == engine.recover:
                raise
            self._refused.add(url)
            self._refusals[url] = str(error)
            when = "in the next run" if self._file is None else f"when {self._file} has been written again"
            _logger.warning(
                f"the server at {url} is refused, and the run goes on without it: {error}\n  it is tried again {when}"
            )
        finally:
            if joining is not None:
                joining.close()

    def _read(self) -> Sequence[str]:
        """The URLs of the servers that the run should have. If the file cannot be used, they stay what they were."""
        if self._file is None:
            return self._wanted
        try:
            written = self._written_at()
            self._wanted = self._config.server_urls
        except InputError as error:
            self._tell(f"the servers of the run stay as they are: {error}", _logger.warning)
            return self._wanted
        if written != self._written:
            self._written = written
            self._refused.clear()
            self._told.clear()
        return self._wanted

    def _written_at(self) -> int:
        """When the file was written last, in nanoseconds; 0: there is none."""
        try:
            return self._file.stat().st_mtime_ns if self._file is not None else 0
        except OSError:
            return 0

    def _tell(self, said: str, log: Callable[[str], None]) -> None:
        """Say something once, until the file has been written again."""
        if said not in self._told:
            self._told.add(said)
            log(said)
