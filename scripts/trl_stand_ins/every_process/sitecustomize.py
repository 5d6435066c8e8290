"""Python imports this in every process of a column of `scripts/trl_tests.py`, also in the workers that a data loader
starts.
"""

from trl_stand_ins.vision import load_torchvision

load_torchvision()
