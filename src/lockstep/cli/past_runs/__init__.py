"""Commands that read the directories of runs: `compare` and `rollouts`."""
