"""Environments of other libraries for rollouts: textarena, OpenEnv and verifiers (docs/conversations.md)."""
