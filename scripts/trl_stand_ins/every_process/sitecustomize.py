"""Python imports this in every process of a column of `scripts/trl_tests.py`, also in a data loader's workers."""

from trl_stand_ins.vision import load_torchvision

load_torchvision()
