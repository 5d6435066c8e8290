"""Commands that read the directories of runs: `compare`, `rollouts` and `merge`."""
