"""The environment of the processes that Lockstep starts, without what they must not know.

The key of `lockstep serve` opens weights and caches of a server. A process inherits the environment of the process that starts it,
and `tests/server/test_child_environment.py` checks that every start in the source chooses one of these functions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# `lockstep serve`, the guard inside the server and the trainers read the server's key from this variable.
KEY_VARIABLE = "LOCKSTEP_SERVER_KEY"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def for_users_code(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of agents, environments and other code of the user's: all of this process's without the server's key.

    Tokens of other services stay, because this code may need them.
    """
    return {name: value for name, value in (os.environ if given is None else given).items() if name != KEY_VARIABLE}


def for_helpers(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of Lockstep's own small helpers: without any variable whose name says that it is secret."""
    return {name: value for name, value in for_users_code(given).items() if not _SECRET.search(name)}
