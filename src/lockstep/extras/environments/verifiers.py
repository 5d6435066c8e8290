"""Environments of verifiers as agents: verifiers runs its own rollouts, with the gateway as its model server.

Its rubric gives the reward, and its data set gives the rows. verifiers needs other versions of some packages than vLLM
does. Therefore it runs in one separate process, with a Python that has it (`own_process/verifiers_rollouts.py`). All
rollouts of a generation run concurrently there.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from datasets import Dataset

from lockstep.errors import InputError, LockstepError
from lockstep.processes import for_users_code, kill_group, of_users_code
from lockstep.progress import waiting

_PROGRAM = Path(__file__).with_name("own_process") / "verifiers_rollouts.py"
# Seconds in which the process must have loaded the environment, or given its rows.
_TIMEOUT = 600.0
# The column with the whole row of verifiers, as text because `info` may have different fields in each row.
COLUMN = "verifiers_row"


class VerifiersAgent:
    """An agent that runs the rollouts of one environment of verifiers. `environment` makes it."""

    def __init__(self, name: str, python: str, arguments: dict[str, Any]) -> None:
        self.__name__ = name
        self._command = [python, "-u", str(_PROGRAM), name, json.dumps(arguments)]
        self._process: subprocess.Popen[str] | None = None
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, base_url: str, api_key: str, row: dict[str, Any]) -> float:
        """Run one rollout. The environment can read the rollout's seed in `state["input"]["seed"]`.

        Args:
            base_url: address of the gateway for this rollout. It contains the key, so `api_key` is not used.
            row: a row of `rows`.

        Returns:
            The reward of the rubric.

        Raises:
            InputError: the row is not from `rows`, or the environment cannot be loaded.
            LockstepError: the rollout failed.
        """
        if COLUMN not in row:
            advice = "make the data set with rows() of this environment"
            raise InputError(f"a row has no column {COLUMN!r}; {advice}")
        rollout_input = {**json.loads(row[COLUMN]), "seed": row["seed"]}
        return self._request({"rollout": {"base_url": base_url, "row": rollout_input}}).result()

    def rows(self, size: int = -1, *, seed: int | None = None, evaluation: bool = False) -> Dataset:
        """The environment's own data set.

        Args:
            size: number of rows; -1: all.
            seed: seed that shuffles the rows; None: they keep their order.
            evaluation: whether to give the rows for evaluation instead of those for training.

        Returns:
            Rows with the columns `prompt` (messages), `answer` (text) and `verifiers_row`. For the command line,
            write them to a file with `to_json`.

        Raises:
            InputError: the environment cannot be loaded, or has no such rows.
        """
        who, asked = f"verifiers environment {self.__name__}", {"size": size, "seed": seed}
        try:
            with waiting(f"the rows of {who}", _TIMEOUT):
                rows = self._request({"rows": {**asked, "evaluation": evaluation}}).result(_TIMEOUT)
        except LockstepError as error:
            raise InputError(f"{who}: {error}") from error
        except TimeoutError as error:
            raise InputError(f"{who} gave no rows within {_TIMEOUT:g} s") from error
        columns = {"prompt": [row["prompt"] for row in rows]}
        columns |= {"answer": [str(row.get("answer", "")) for row in rows]}
        return Dataset.from_dict({**columns, COLUMN: [json.dumps(row) for row in rows]})

    def close(self) -> None:
        """End the process of verifiers, and all that it started. Otherwise they end with the trainer's process."""
        with self._lock:
            if self._process is not None:
                kill_group(self._process.pid)

    def _request(self, request: dict[str, Any]) -> Future[Any]:
        with self._lock:
            if self._process is None:
                self._process = self._start_process()
            number, answer = next(self._numbers), Future[Any]()
            self._pending[number] = answer
            stdin = self._process.stdin
            assert stdin is not None
            # If the process has just ended, `_read` fails this request with the others.
            with suppress(OSError):
                stdin.write(json.dumps({"number": number, **request}) + "\n")
                stdin.flush()
        return answer

    def _start_process(self) -> subprocess.Popen[str]:
        killer = of_users_code()
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env=for_users_code(),
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"{self._command[0]} cannot be started: {error.strerror}") from error
        killer.add(process.pid)
        timer = threading.Timer(_TIMEOUT, kill_group, [process.pid])
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        with waiting(f"verifiers environment {self.__name__} to begin", _TIMEOUT):
            line = process.stdout.readline() or '{"error": "its process ended"}'
        timer.cancel()
        try:
            reply = json.loads(line)
        except ValueError:
            reply = {"error": f"its process printed {line!r:.80} in place of an answer"}
        if "error" in reply:
            kill_group(process.pid)
            process.wait()
            of_users_code().remove(process.pid)
            raise InputError(f"verifiers environment {self.__name__} cannot be loaded: {reply['error']}")
        threading.Thread(target=self._read, args=(process,), name="lockstep-verifiers", daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                # The process was killed while it wrote.
                break
            reply = json.loads(line)
            answer = self._pending.pop(reply["number"])
            if "error" in reply:
                answer.set_exception(LockstepError(reply["error"]))
            else:
                answer.set_result(reply["result"])
        code = process.wait()
        # What it started may live on.
        kill_group(process.pid)
        of_users_code().remove(process.pid)
        with self._lock:
            unanswered, self._pending = self._pending, {}
            # The next request starts another process.
            self._process = None
        for answer in unanswered.values():
            answer.set_exception(LockstepError(f"the process of verifiers ended with code {code}"))


def environment(name: str, *, python: str | None = None, **arguments: Any) -> VerifiersAgent:
    """An environment of verifiers as an agent: `GRPOTrainer(..., agent=found, train_dataset=found.rows())`.

    Args:
        name: the environment's name, as `verifiers.load_environment` takes it; or `path/to/file.py:function` of a
            function that returns an environment.
        python: path of a Python that has verifiers (0.1.12 to 0.1.14) and the environment's package; None: the
            trainer's Python.
        arguments: passed to `load_environment`, as JSON types.
    """
    return VerifiersAgent(name, python or sys.executable, arguments)
