"""From rows of a data set to prompts, in an order that a resumed run repeats."""
