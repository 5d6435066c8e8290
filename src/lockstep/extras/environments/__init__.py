"""Environments of other libraries for rollouts: textarena, OpenEnv and verifiers (docs/internals/conversations.md)."""
