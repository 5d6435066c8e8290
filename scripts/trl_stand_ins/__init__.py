"""What `scripts/trl_tests.py` puts in the place of a hub and of TRL's trainers."""
